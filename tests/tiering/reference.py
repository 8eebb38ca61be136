"""The reference engine over tiers: it serves prompts, and every answer must be that of an engine
without offloading."""

from __future__ import annotations

import time
import uuid
from collections.abc import Mapping, Sequence
from functools import lru_cache
from random import Random
from types import TracebackType
from typing import Any, Self, TypeAlias

import numpy as np

from kvtier.base import OffloadingStats
from kvtier.engine import Engine, EngineConfig, ModelConfig, make_connector, offloading_config
from kvtier.engine.cache import array_page_bytes
from kvtier.tiering.spec import TieringOffloadingSpec

__all__ = ["BLOCKS_PER_PROMPT", "BLOCK_BYTES", "Prompt", "ReferenceEngine", "prompts"]

_MODEL = ModelConfig(num_layers=2, hidden=64, num_heads=4, mlp_hidden=128)
_ENGINE = EngineConfig(num_blocks=(512,))
_NEW_TOKENS = 4
BLOCKS_PER_PROMPT = 8
BLOCK_BYTES = sum(array_page_bytes(_MODEL, _ENGINE))
PATIENCE_S = 60.0

Prompt: TypeAlias = tuple[int, ...]


def prompts(count: int, start: int = 0) -> list[Prompt]:
    """Prompts without a common prefix. Equal arguments give equal prompts."""
    length = BLOCKS_PER_PROMPT * _ENGINE.block_tokens[0] + 1
    return [
        tuple(Random(number).choices(range(256), k=length))
        for number in range(start, start + count)
    ]


@lru_cache(maxsize=256)
def _right_answer(prompt: Prompt) -> tuple[tuple[int, ...], bytes]:
    return _answer(_plain_engine(), prompt)[:2]


@lru_cache(maxsize=1)
def _plain_engine() -> Engine:
    return Engine(_MODEL, _ENGINE)


def _answer(engine: Engine, prompt: Prompt) -> tuple[tuple[int, ...], bytes, int, float]:
    """Tokens and logits, the number of tokens loaded, and the seconds to the first token."""
    engine.drop_device_cache()
    deadline = time.monotonic() + PATIENCE_S
    engine.add_request(prompt, _NEW_TOKENS, keep_logits=True)
    while not (results := engine.step()):
        assert time.monotonic() < deadline, "a request is kept waiting for ever"
    (result,) = results
    assert result.logits is not None
    assert result.time_to_first_token_s is not None
    logits = np.stack(result.logits).tobytes()
    seconds = result.time_to_first_token_s
    return tuple(result.token_ids), logits, result.num_loaded_tokens, seconds


class ReferenceEngine:
    """An engine with these tiers. A context manager. Every request finds the device cache empty."""

    def __init__(
        self, *tiers: Mapping[str, Any], namespace: str = "", num_slots: int = 256, **options: Any
    ) -> None:
        """`options`: the keys beside `secondary_tiers`."""
        keys = {
            "cpu_bytes_to_use": num_slots * BLOCK_BYTES,
            "secondary_tiers": tiers,
            "reset_scope": "primary",
            "prefill_tokens_per_s": 0,  # always load what a tier has
            **({"cache_namespace": namespace} if namespace else {}),
            **options,
        }
        config = offloading_config(
            _MODEL, _ENGINE, keys, uuid.uuid4().hex, enable_kv_cache_events=True
        )
        self.metric_definitions = TieringOffloadingSpec.build_metric_definitions(keys)
        self._connector = make_connector(config)
        self._engine = Engine(_MODEL, _ENGINE, self._connector)
        self.slowest_s = 0.0
        """The longest time to a first token so far."""
        self._figures: dict[str, float] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._engine.shutdown()

    def serve(self, some: Sequence[Prompt]) -> int:
        """Serve prompts, one after the other. Every answer must be right. Returns the number of
        tokens that were loaded."""
        num_loaded = 0
        for prompt in some:
            *answer, loaded, seconds = _answer(self._engine, prompt)
            assert tuple(answer) == _right_answer(prompt), "a wrong answer"
            self.slowest_s = max(seconds, self.slowest_s)
            num_loaded += loaded
        return num_loaded

    def serve_from_tiers(self, some: Sequence[Prompt]) -> int:
        """The same, and nothing is in host memory."""
        self.forget()
        return self.serve(some)

    def forget(self) -> None:
        """Empty host memory, and leave the tiers as they are."""
        self._engine.reset_cache()

    def settle(self) -> None:
        """Step until no transfer is left."""
        assert self._engine.drain(PATIENCE_S), "work is still pending"

    def figures(self) -> dict[str, float]:
        """Gauges, and counters since the start."""
        stats = self.take_stats()
        for name, value in stats.counters.items():
            self._figures[name] = self._figures.get(name, 0.0) + value
        self._figures.update(stats.gauges)
        return self._figures

    def take_stats(self) -> OffloadingStats:
        """What the manager has counted since the last call of this method or of `figures`."""
        stats: OffloadingStats = self._connector.scheduler.get_stats()  # type: ignore[attr-defined]
        return stats

    def events(self) -> list[Any]:
        return self._engine.take_events()
