"""The same requests without offloading: the expected tokens and logits."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from functools import lru_cache

import numpy as np

from kvtier.engine import Engine, EngineConfig, ModelConfig, RequestResult
from tests.e2e.violation import require

__all__ = ["Answered", "check_answers"]


@dataclass(slots=True)
class Answered:
    """A request of a life, and its answer."""

    prompt: list[int]
    weights: list[tuple[int, int]]
    """(number of answer tokens at a change of weights, seed of the weights after it)."""
    result: RequestResult | None = None


@dataclass(slots=True)
class _Piece:
    """A part of an answer that was computed with one set of weights."""

    prompt: list[int]
    token_ids: list[int]
    logits: list[bytes]
    request_id: str = field(default="")


def check_answers(model: ModelConfig, answers: Iterable[Answered]) -> int:
    """Raise `Violation` unless tokens and logits equal those of a run without offloading, bit by
    bit.

    Returns how many tokens were compared.
    """
    pieces: dict[int, list[_Piece]] = defaultdict(list)
    for answer in answers:
        assert answer.result is not None
        assert answer.result.logits is not None
        tokens = answer.result.token_ids
        ends = [start for start, _ in answer.weights[1:]] + [len(tokens)]
        for (start, seed), end in zip(answer.weights, ends, strict=True):
            if end > start:
                pieces[seed].append(
                    _Piece(
                        prompt=answer.prompt + tokens[:start],
                        token_ids=tokens[start:end],
                        logits=[row.tobytes() for row in answer.result.logits[start:end]],
                        request_id=answer.result.request_id,
                    )
                )
    return sum(_check(replace(model, seed=seed), of_seed) for seed, of_seed in pieces.items())


def _check(model: ModelConfig, pieces: list[_Piece]) -> int:
    engine = _plain_engine(model)
    engine.drop_device_cache()
    expected: dict[str, RequestResult] = {}
    wanted = {
        engine.add_request(piece.prompt, len(piece.token_ids), keep_logits=True): piece
        for piece in pieces
    }
    while engine.has_requests:
        expected |= {result.request_id: result for result in engine.step()}
    for request_id, piece in wanted.items():
        right = expected[request_id]
        assert right.logits is not None
        require(
            right.token_ids == piece.token_ids,
            f"{piece.request_id} got the tokens {piece.token_ids}, not {right.token_ids}",
        )
        for place, (got, logits) in enumerate(zip(piece.logits, right.logits, strict=True)):
            require(
                got == logits.tobytes(),
                f"{piece.request_id}: the logits of token {place} are off by up to "
                f"{np.abs(np.frombuffer(got, np.float32) - logits).max()}",
            )
    return sum(len(piece.token_ids) for piece in pieces)


@lru_cache(maxsize=32)
def _plain_engine(model: ModelConfig) -> Engine:
    """An engine without connector, with room for everything, and with a block size that no life
    has."""
    num_groups = len(model.groups)
    config = EngineConfig(
        block_tokens=(16,) * num_groups,
        num_blocks=(400,) * num_groups,
        token_budget=1024,
        max_running=64,
    )
    return Engine(model, config)
