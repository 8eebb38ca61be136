"""How late the scheduler is while the disk tier works at full rate, beside vLLM's own tier."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

from tests.bench.disk_subjects import DISK, VLLM_FS, Case, Watch
from tests.bench.report import print_table, run_alone, save, scratch_directory, verdict
from tests.bench.worker import Worker, vllm_python, worker

KiB, MiB = 1 << 10, 1 << 20
SIZES = (64 * KiB, 1 * MiB)
TIER_BYTES = 1536 * MiB
JOB_BYTES = 8 * MiB
JOBS_AT_ONCE = 16
ROUNDS = 5
SECONDS = 1.5
MAX_TO_VLLM = 1.0

IDLE, KVTIER, VLLM = "idle", "kvtier", "vLLM"
POINTS = ("p50", "p99", "max")
FIGURES = ("wake", "lookup", "answer", "step")

WHAT_IS_COMPARED = f"""
A loop looks up 64 blocks every millisecond, while {JOBS_AT_ONCE} jobs of {JOB_BYTES // MiB} MiB
are under way, loads and stores in turn. `wake`: delay until the step began. `lookup`: duration of
the lookups. `answer`: delay until the lookups were answered. `step`: delay until finished jobs were
collected and new ones submitted. `idle`: kvtier's tier without jobs. Microseconds; medians of
{ROUNDS} rounds, kvtier and vLLM in turns."""


def run() -> None:
    compare_jitter("disk_jitter", DISK, judged=("answer", "step"))


def compare_jitter(name: str, subject: str, judged: Sequence[str]) -> None:
    """Measure, print and save. `subject`: kvtier's tier. `judged`: figures that must not be worse
    than vLLM's; the others are only shown."""
    theirs = vllm_python(name)
    print(WHAT_IS_COMPARED)
    with scratch_directory() as directory:
        result = {}
        for size in SIZES:
            rounds = measure(size, str(directory), subject, theirs)
            result[f"{size // KiB} KiB"] = show(f"{size // KiB} KiB", rounds, judged)
    save(name, result)


def measure(
    block_bytes: int, directory: str, subject: str, python_with_vllm: str
) -> dict[str, list[dict[str, Any]]]:
    rounds: dict[str, list[dict[str, Any]]] = {IDLE: [], KVTIER: [], VLLM: []}
    with ExitStack() as stack:
        workers: dict[str, Worker] = {}
        for name, python, measured_tier in (
            (KVTIER, sys.executable, subject),
            (VLLM, python_with_vllm, VLLM_FS),
        ):
            own = stack.enter_context(TemporaryDirectory(dir=directory))
            workers[name] = stack.enter_context(
                worker(python, "tests.bench.disk_load", measured_tier)
            )
            case = Case(
                own,
                f"bench-{os.getpid()}",
                block_bytes,
                TIER_BYTES // block_bytes,
                JOB_BYTES // block_bytes,
                JOBS_AT_ONCE,
            )
            workers[name].ask({"begin": asdict(case)})
        for _ in range(ROUNDS):
            for name, measured in rounds.items():
                watch = Watch(SECONDS, is_busy=name != IDLE)
                asked = workers[VLLM if name == VLLM else KVTIER]
                measured.append(asked.ask({"watch": asdict(watch)}))
        for each in workers.values():
            each.ask({"end": 0})
    return rounds


def show(
    size: str, rounds: dict[str, list[dict[str, Any]]], judged: Sequence[str]
) -> dict[str, Any]:
    rows = []
    ratios = {}
    for what in FIGURES:
        typical = {
            name: {point: median(each[what][point] for each in rounds[name]) for point in POINTS}
            for name in rounds
        }
        rows += [
            [f"{what}, {name}", *(f"{typical[name][point]:,.0f}" for point in POINTS)]
            for name in rounds
        ]
        pairs = zip(rounds[KVTIER], rounds[VLLM], strict=True)
        ratios[what] = [ours[what]["p99"] / theirs[what]["p99"] for ours, theirs in pairs]
    print_table(f"Blocks of {size}: microseconds", ["", *POINTS], rows)
    for name in (KVTIER, VLLM):
        speed = median(each["bytes_per_s"] for each in rounds[name])
        print(f"  {name} moved {speed / 1e6:,.0f} MB/s meanwhile")
    for what in judged:
        values = ratios[what]
        print(
            "  "
            + verdict(f"{size}, p99 of {what}, kvtier/vLLM", median(values), MAX_TO_VLLM)
            + f" ({min(values):.2f} to {max(values):.2f})"
        )
    return {"rounds": rounds, "p99_ratios": ratios}


if __name__ == "__main__":
    run_alone(run, __doc__)
