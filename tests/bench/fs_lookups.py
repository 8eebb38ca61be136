"""How soon the fs tier answers lookups, beside vLLM's own tier."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

from tests.bench.disk_subjects import FS, VLLM_FS, Case, LookUp
from tests.bench.report import print_table, run_alone, save, scratch_directory
from tests.bench.worker import Worker, vllm_python, worker

NUM_KEYS = 2048
BLOCK_BYTES = 1 << 16
JOB_BLOCKS = 128
JOBS_AT_ONCE = 4
ROUNDS = 9

KVTIER, VLLM = "kvtier", "vLLM"
WHICH = ("first", "again")
HOW = {
    "prompt, present": LookUp(is_present=True, is_prompt=True),
    "prompt, absent": LookUp(is_present=False, is_prompt=True),
    "each, present": LookUp(is_present=True, is_prompt=False),
    "each, absent": LookUp(is_present=False, is_prompt=False),
}

WHAT_IS_COMPARED = f"""
Lookups of {NUM_KEYS:,} blocks, all present or all absent, by an engine that has just started and
has looked up none of them (`first`), and by its next request for the same blocks (`again`). The
directories are in the kernel's caches. One step each millisecond, until every answer is known.
  prompt     the blocks of one prompt: the lookup ends at the first absent block.
  each       one by one: every block is looked up.
Answered: time until the last answer. On the thread: time of all steps on the scheduler's thread.
Medians of {ROUNDS} rounds, kvtier and vLLM in turns."""

Rounds = dict[str, dict[str, list[dict[str, Any]]]]
"""Measurements by kind of lookup and by tier."""


def run() -> None:
    python_with_vllm = vllm_python("fs_lookups")
    print(WHAT_IS_COMPARED)
    with tiers(python_with_vllm) as asked:
        rounds: Rounds = {how: {name: [] for name in asked} for how in HOW}
        for _ in range(ROUNDS):
            for how, by_tier in rounds.items():
                for name, measured in by_tier.items():
                    measured.append(asked[name].ask({"look_up": asdict(HOW[how])}))
    save("fs_lookups", {"rounds": rounds, "typical": show(rounds)})


@contextmanager
def tiers(python_with_vllm: str) -> Iterator[dict[str, Worker]]:
    """Start both tiers, filled with the blocks that are looked up."""
    pythons = {KVTIER: (sys.executable, FS), VLLM: (python_with_vllm, VLLM_FS)}
    with scratch_directory() as directory, ExitStack() as stack:
        workers: dict[str, Worker] = {}
        for name, (python, subject) in pythons.items():
            own = stack.enter_context(TemporaryDirectory(dir=directory))
            workers[name] = stack.enter_context(worker(python, "tests.bench.disk_load", subject))
            case = Case(
                own, f"bench-{os.getpid()}", BLOCK_BYTES, NUM_KEYS, JOB_BLOCKS, JOBS_AT_ONCE
            )
            workers[name].ask({"begin": asdict(case)})
        yield workers
        for each in workers.values():
            each.ask({"end": 0})


def show(rounds: Rounds) -> dict[str, Any]:
    result: dict[str, Any] = {}
    rows = []
    for how, by_tier in rounds.items():
        for which in WHICH:
            typical = {
                name: {
                    field: median(each[which][field] for each in measured)
                    for field in ("answered_s", "on_thread_s", "steps")
                }
                for name, measured in by_tier.items()
            }
            ours, theirs = typical[KVTIER], typical[VLLM]
            rows.append(
                [
                    f"{how}, {which}",
                    *(f"{1e3 * each['answered_s']:.2f}" for each in (ours, theirs)),
                    *(f"{1e3 * each['on_thread_s']:.2f}" for each in (ours, theirs)),
                    *(f"{1e6 * each['on_thread_s'] / NUM_KEYS:.2f}" for each in (ours, theirs)),
                    *(f"{each['steps']:.0f}" for each in (ours, theirs)),
                ]
            )
            result[f"{how}, {which}"] = typical
    columns = ("ms until answered", "ms on the thread", "us per key", "steps")
    header = ["", *(f"{column}, {name}" for column in columns for name in (KVTIER, VLLM))]
    print_table(f"{NUM_KEYS:,} lookups", header, rows)
    return result


if __name__ == "__main__":
    run_alone(run, __doc__)
