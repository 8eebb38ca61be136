"""Does a prompt that comes back from host memory give what it gives without kvtier?

Two engines run the same prompts, one after the other. The plain one computes each prompt, then
takes it from its own device cache. The offloading one computes each prompt, forgets the device
cache, and takes it from host memory.

Tokens must be the same everywhere. Logprobs must be the same to the last bit where the same
number of tokens was computed: a sum over 2,000 tokens and one over 8 tokens and a cache are
rounded differently, with or without kvtier.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from kvtier.integrations.vllm.in_process import BLOCK_TOKENS, Answer, InProcessEngine
from kvtier.integrations.vllm.tiny_model import VOCABULARY

_TAIL_TOKENS = 8


def random_prompts(
    count: int, tokens: int, seed: object, blocks_per_chunk: int = 1
) -> list[list[int]]:
    """Prompts without a common prefix, of `tokens` tokens or a few more.

    Each ends a few tokens after the end of an offloaded block. So the device cache and host
    memory serve the same part of it, and the rest is computed in the same way.
    """
    chunk = BLOCK_TOKENS * blocks_per_chunk
    length = -(-tokens // chunk) * chunk + _TAIL_TOKENS
    # A text, because the numbers 1 and -1 would give the same prompts.
    source = random.Random(f"prompts {seed}")
    return [[source.randrange(3, VOCABULARY) for _ in range(length)] for _ in range(count)]


WARM_UP_TOKENS = 5 * BLOCK_TOKENS
"""More than a prompt that only warms up the engine has."""


@dataclass(frozen=True, slots=True)
class PlainAnswers:
    """What stock vLLM alone makes of the prompts."""

    cold: list[Answer]
    device: list[Answer]
    """From its device cache."""


@dataclass(frozen=True, slots=True)
class OffloadedAnswers:
    """What vLLM with kvtier makes of them."""

    cold: list[Answer]
    warm: list[Answer]
    """With an empty device cache: from host memory, as far as it is there."""


@dataclass(frozen=True, slots=True)
class Comparison:
    """What two engines made of the same prompts."""

    tokens_identical: bool
    logprobs_identical: bool
    prompt_tokens: int
    """Of all prompts together."""
    host_tokens: int
    """Of these, served from host memory."""
    prompts_from_host: int
    seconds_cold: float
    """Median time to first token of the offloading engine, everything computed."""
    seconds_device: float
    """The same of the plain engine, from its device cache."""
    seconds_warm: float
    """The same of the offloading engine, from host memory; infinite if nothing came from there."""

    @property
    def good(self) -> bool:
        """Nothing differs, and host memory was used."""
        return self.tokens_identical and self.logprobs_identical and self.host_tokens > 0


def run_plain(model: Path, prompts: Sequence[Sequence[int]], **engine_args: Any) -> PlainAnswers:
    """Run the prompts in stock vLLM alone."""
    order = range(len(prompts))
    with InProcessEngine(model, **engine_args) as engine:
        _warm_up(engine)
        return PlainAnswers(
            cold=_all_cold(engine, prompts), device=_all(engine, "device", prompts, order)
        )


def run_offloaded(
    model: Path,
    prompts: Sequence[Sequence[int]],
    kvtier: Mapping[str, Any],
    *,
    warm_order: Sequence[int] | None = None,
    **engine_args: Any,
) -> OffloadedAnswers:
    """Run the prompts in vLLM with kvtier. `warm_order`: in which order they come back."""
    order = range(len(prompts)) if warm_order is None else warm_order
    with InProcessEngine(model, kvtier, **engine_args) as engine:
        _warm_up(engine)
        cold = _all_cold(engine, prompts)
        engine.settle()
        engine.reset_device_cache()
        warm = _all(engine, "warm", prompts, order)
        engine.settle()
        return OffloadedAnswers(cold, warm)


def compare(
    prompts: Sequence[Sequence[int]], plain: PlainAnswers, offloaded: OffloadedAnswers
) -> Comparison:
    """Hold the answers against each other."""
    from_host = [answer for answer in offloaded.warm if answer.cached_tokens]
    return Comparison(
        tokens_identical=all(
            len({tuple(answer.tokens) for answer in answers}) == 1
            for answers in zip(
                plain.cold, plain.device, offloaded.cold, offloaded.warm, strict=True
            )
        ),
        logprobs_identical=all(
            _same_as_plain(answer, references)
            for answers in (offloaded.cold, offloaded.warm)
            for answer, *references in zip(answers, plain.cold, plain.device, strict=True)
        ),
        prompt_tokens=sum(map(len, prompts)),
        host_tokens=sum(answer.cached_tokens for answer in offloaded.warm),
        prompts_from_host=len(from_host),
        seconds_cold=_median_seconds(offloaded.cold),
        seconds_device=_median_seconds(plain.device),
        seconds_warm=_median_seconds(from_host),
    )


def _same_as_plain(answer: Answer, references: Sequence[Answer]) -> bool:
    """Whether the plain engine gave the same when it computed as many tokens."""
    return any(
        answer.logprobs == reference.logprobs
        for reference in references
        if answer.cached_tokens == reference.cached_tokens
    )


def _all(
    engine: InProcessEngine, name: str, prompts: Sequence[Sequence[int]], order: Sequence[int]
) -> list[Answer]:
    """Run the prompts one by one in the given order; the answers are in the prompts' order."""
    for index in order:
        engine.generate(f"{name}-{index}", prompts[index])
    return [engine.answer(f"{name}-{index}") for index in range(len(prompts))]


def _all_cold(engine: InProcessEngine, prompts: Sequence[Sequence[int]]) -> list[Answer]:
    answers = _all(engine, "cold", prompts, range(len(prompts)))
    if any(answer.cached_tokens for answer in answers):
        raise RuntimeError("a new prompt was found in a cache: prompts must not share a prefix")
    return answers


def _warm_up(engine: InProcessEngine) -> None:
    """The first requests of a process pay for what is set up on first use."""
    for index, prompt in enumerate(random_prompts(2, 4 * BLOCK_TOKENS, "for warming up")):
        assert len(prompt) <= WARM_UP_TOKENS
        engine.generate(f"warm-up-{index}", prompt)
    engine.settle()


def _median_seconds(answers: Sequence[Answer]) -> float:
    return median(answer.time_to_first_token for answer in answers) if answers else float("inf")
