"""Time to first token of a prompt in stock vLLM on the CPU, by where its blocks are."""

from __future__ import annotations

import time
from statistics import median
from typing import Any

from kvtier.testing.vllm.in_process import BLOCK_TOKENS
from kvtier.testing.vllm.tiny_model import LLAMA
from tests.bench.report import (
    missed,
    print_table,
    run_alone,
    save,
    scratch_directory,
    verdict,
    verdict_at_least,
)
from tests.bench.vllm_ttft_rounds import (
    BELOW,
    DEVICE,
    DISK,
    FS,
    HOST,
    PROMPT_BLOCKS,
    PROMPT_TOKENS,
    RECOMPUTED,
    SOURCES,
)
from tests.bench.worker import Worker, vllm_python, worker

PROMPTS = {False: 8, True: 12}
"""Prompts of an engine without the guard and with it; the guard decides only after eight loads from
a tier. Each prompt comes from every source in turn, so that all see the same machine."""
GUARDS = {False: "guard off", True: "guard on"}
MAX_RATIO = 1.0
CLEARLY_QUICKER = 0.5
"""Limit of a tier's ratio to recomputing. Below it, the guard must load prompts from the tier."""
MIN_LOADED_SHARE = 0.75
"""Least share of prompts that the guard must then load."""

COMPUTED_TOKENS = PROMPT_TOKENS - PROMPT_BLOCKS * BLOCK_TOKENS
BLOCK_BYTES = LLAMA.bytes_per_block(BLOCK_TOKENS)

WHAT_IS_COMPARED = f"""
Prompts of {PROMPT_TOKENS:,} tokens, one at a time, in stock vLLM on its CPU platform with a model
of four small layers, on one core. Each prompt is computed, comes from the device's cache, from host
memory and from the tier below, one after the other. {PROMPT_BLOCKS} blocks of
{BLOCK_BYTES >> 10} KiB are loaded; the last {COMPUTED_TOKENS} tokens are always computed. Tiers
bypass the page cache (O_DIRECT) where the file system allows it. With the guard on, kvtier may
compute blocks that it expects to be slower to load: `tokens` and MB show that, and the prompt still
counts for the tier."""


def run() -> None:
    print(WHAT_IS_COMPARED, flush=True)
    with (
        scratch_directory() as scratch,
        worker(vllm_python("vllm_ttft"), "tests.bench.vllm_ttft_rounds", str(scratch)) as process,
    ):
        result = {
            f"{tier}, {GUARDS[guard]}": show(tier, guard, measure(process, tier, guard))
            for guard in GUARDS
            for tier in (DISK, FS)
        }
    for tier in (DISK, FS):
        judge_guard(tier, *(result[f"{tier}, {name}"][BELOW] for name in GUARDS.values()))
    save("vllm_ttft", result)


def judge_guard(tier: str, without: dict[str, Any], with_guard: dict[str, Any]) -> None:
    """Check that the guard loads where loading is faster."""
    tokens = with_guard["tokens"]
    share = sum(cached > PROMPT_TOKENS / 2 for cached in tokens) / len(tokens)
    if without["ratio"] < CLEARLY_QUICKER:
        what = f"vllm_ttft, {tier}: prompts that the guard lets load"
        print("\n  " + verdict_at_least(what, share, MIN_LOADED_SHARE))


def measure(process: Worker, tier: str, guard: bool) -> list[dict[str, Any]]:
    began = time.monotonic()
    answers: list[dict[str, Any]] = process.ask(
        {"run": {"tier": tier, "guard": guard, "prompts": PROMPTS[guard]}}
    )
    require_same_tokens(f"vllm_ttft, {tier}, {GUARDS[guard]}", answers)
    print(
        f"\n  {tier}, {GUARDS[guard]}: {PROMPTS[guard]} prompts from {len(SOURCES)} sources, "
        f"{time.monotonic() - began:.0f} s",
        flush=True,
    )
    return answers


def require_same_tokens(what: str, answers: list[dict[str, Any]]) -> None:
    """Check that a prompt has the same answer from every source."""
    for first in range(0, len(answers), len(SOURCES)):
        of_one_prompt = answers[first : first + len(SOURCES)]
        if any(each["tokens"] != of_one_prompt[0]["tokens"] for each in of_one_prompt):
            missed.append(f"{what}: tokens differ from those computed")


def show(tier: str, guard: bool, answers: list[dict[str, Any]]) -> dict[str, Any]:
    """Print the time to first token from each source."""
    name = f"{tier}, {GUARDS[guard]}"
    by_source = {
        source: [each for each in answers if each["source"] == source] for source in SOURCES
    }
    computed = median(each["seconds"] for each in by_source[RECOMPUTED])
    rows, result = [], {}
    for source, of_source in by_source.items():
        seconds = sorted(each["seconds"] for each in of_source)
        figures = {
            "seconds": [each["seconds"] for each in of_source],
            "tokens": [each["cached_tokens"] for each in of_source],
            "median_s": median(seconds),
            "ratio": median(seconds) / computed,
            "cached_tokens": median(each["cached_tokens"] for each in of_source),
            "bytes_from_host": BLOCK_BYTES * median(e["blocks_from_host"] for e in of_source),
            "bytes_from_below": BLOCK_BYTES * median(e["blocks_from_below"] for e in of_source),
        }
        result[source] = figures
        rows.append(
            [
                tier if source == BELOW else source,
                f"{figures['median_s'] * 1e3:.1f}",
                f"{seconds[0] * 1e3:.1f} to {seconds[-1] * 1e3:.1f}",
                f"{figures['ratio']:.3f}",
                f"{figures['cached_tokens']:,.0f}",
                f"{figures['bytes_from_host'] / 1e6:.1f}",
                f"{figures['bytes_from_below'] / 1e6:.1f}",
            ]
        )
    print_table(
        f"{name}: milliseconds to the first token, and hits (medians)",
        ["from", "median", "lowest to highest", "ratio", "tokens", "MB from host", "MB from below"],
        rows,
    )
    for source in (DEVICE, HOST, BELOW):
        what = f"vllm_ttft, {name}: {tier if source == BELOW else source} to recomputed"
        print("  " + verdict(what, result[source]["ratio"], MAX_RATIO))
    if not guard:
        require_sources(f"vllm_ttft, {name}", by_source)
    return result


def require_sources(what: str, by_source: dict[str, list[dict[str, Any]]]) -> None:
    """Check that each prompt came from the intended source only."""
    whole, nothing = PROMPT_BLOCKS, 0
    expected = {
        RECOMPUTED: (nothing, nothing, nothing),
        DEVICE: (whole, nothing, nothing),
        HOST: (whole, whole, nothing),
        BELOW: (whole, whole, whole),
    }
    for source, answers in by_source.items():
        for each in answers:
            found = (
                each["cached_tokens"] // BLOCK_TOKENS,
                each["blocks_from_host"],
                each["blocks_from_below"],
            )
            if found != expected[source]:
                missed.append(
                    f"{what}: blocks cached, from host, from below are {found}, not "
                    f"{expected[source]}, of a prompt from {source}"
                )


if __name__ == "__main__":
    run_alone(run, __doc__)
