"""Bytes per second and processor time of the disk tier, beside `fio` and vLLM's own tier."""

from __future__ import annotations

from statistics import median
from typing import Any

from tests.bench import fio
from tests.bench.disk_rounds import (
    COLD,
    FIO_DEPTH,
    IO_URING,
    JOB_BYTES,
    JOBS_AT_ONCE,
    KVTIER,
    PSYNC,
    ROUNDS,
    SCATTERED,
    TIER_BYTES,
    VLLM,
    KiB,
    Measured,
    MiB,
    What,
    disk_rounds,
    ratios,
    size_name,
    typical,
    with_spread,
)
from tests.bench.report import print_table, save, verdict, verdict_at_least
from tests.bench.scratch import scratch_directory
from tests.bench.worker import vllm_python

SIZES = (64 * KiB, 256 * KiB, 1 * MiB, 4 * MiB)
MIN_TO_FIO = {64 * KiB: 0.60, 256 * KiB: 0.75, 1 * MiB: 0.90, 4 * MiB: 0.90}
MIN_TO_VLLM = {64 * KiB: 3.0, 1 * MiB: 1.5}
MAX_CPU_TO_VLLM = 1.0
OURS = (KVTIER, SCATTERED)

WHAT_IS_COMPARED = f"""
Tiers of {size_name(TIER_BYTES)}, all full, on one file system, in turns, {ROUNDS} rounds of each.
Figures and ratios are medians over the rounds; in parentheses, the lowest and the highest.
  kvtier     seals and verifies every block; a store evicts. The blocks of a job lie side by side,
             as those of a prompt do that was stored at once. Jobs come in random order.
  scattered  the same, but the blocks of every job lie all over the slab.
  vLLM       its fs tier with its C helper, 32 threads and O_DIRECT; checks nothing, never evicts.
             Its directories are there before; what is too much is removed between the rounds.
  fio        blocks at random places of a file that was written before, O_DIRECT; psync with as
             many threads as kvtier has, and io_uring at depth {FIO_DEPTH}. The better one counts.
             These use a few buffers again and again, which stay in the processor's caches. `cold`
             is io_uring with as many buffers as the tiers have rows.
Full load: {JOBS_AT_ONCE} jobs of {size_name(JOB_BYTES)} at a time.
One request: one job of {size_name(JOBS_AT_ONCE * JOB_BYTES)} at a time."""


def run() -> None:
    python_with_vllm = vllm_python("disk_speed")
    fio.require_fio()
    figures: dict[What, Measured] = {}
    with scratch_directory() as directory, disk_rounds(directory, python_with_vllm) as rounds:
        for block_bytes in SIZES:
            figures |= rounds.measure(block_bytes, alone=block_bytes in MIN_TO_VLLM)
        about = rounds.about
    print(WHAT_IS_COMPARED)
    print(f"About the tiers: {about}")
    full_load = {what: measured for what, measured in figures.items() if not what.is_alone}
    alone = {what: measured for what, measured in figures.items() if what.is_alone}
    result = {
        "about": about,
        "full_load": show_full_load(full_load),
        "processor_time": show_processor_time(full_load),
        "one_request": show_one_request(alone),
    }
    save("disk_speed", result)


def megabytes(measured: Measured, *names: str) -> list[str]:
    return [f"{typical(measured, name) / 1e6:,.0f}" for name in names]


def show_full_load(figures: dict[What, Measured]) -> dict[str, Any]:
    result: dict[str, Any] = {}
    speeds = []
    compared = []
    verdicts = []
    for what, measured in figures.items():
        better = max(PSYNC, IO_URING, key=lambda name: typical(measured, name))
        to_fio = {name: ratios(measured, name, better) for name in OURS}
        to_cold = {name: ratios(measured, name, COLD) for name in OURS}
        to_vllm = {name: ratios(measured, name, VLLM) for name in OURS}
        speeds.append([str(what), *megabytes(measured, *OURS, PSYNC, IO_URING, COLD, VLLM)])
        compared.append(
            [
                str(what),
                *(
                    with_spread(values[name])
                    for values in (to_fio, to_cold, to_vllm)
                    for name in OURS
                ),
            ]
        )
        limit = MIN_TO_FIO[what.block_bytes]
        verdicts += [
            verdict_at_least(f"{what}, {name}/fio", median(values), limit)
            for name, values in to_fio.items()
        ]
        verdicts += verdicts_on_vllm(what, to_vllm, "full load")
        result[str(what)] = {
            "rounds": measured,
            "to_fio": to_fio,
            "to_fio_cold": to_cold,
            "to_vllm": to_vllm,
        }
    print_table("Full load: MB/s", ["", *OURS, PSYNC, IO_URING, COLD, VLLM], speeds)
    print_table(
        "Full load: ratios",
        ["", *(f"{name}/{other}" for other in ("fio", COLD, VLLM) for name in OURS)],
        compared,
    )
    print_lines(verdicts)
    return result


def show_one_request(figures: dict[What, Measured]) -> dict[str, Any]:
    result: dict[str, Any] = {}
    rows = []
    verdicts = []
    for what, measured in figures.items():
        to_vllm = {name: ratios(measured, name, VLLM) for name in OURS}
        rows.append(
            [
                str(what),
                *megabytes(measured, *OURS, VLLM),
                *(with_spread(values) for values in to_vllm.values()),
            ]
        )
        verdicts += verdicts_on_vllm(what, to_vllm, "one request")
        result[str(what)] = {"rounds": measured, "to_vllm": to_vllm}
    print_table(
        "One request at a time: MB/s, and ratios",
        ["", *OURS, VLLM, *(f"{name}/vLLM" for name in OURS)],
        rows,
    )
    print_lines(verdicts)
    return result


def verdicts_on_vllm(what: What, to_vllm: dict[str, list[float]], load: str) -> list[str]:
    limit = MIN_TO_VLLM.get(what.block_bytes)
    if limit is None:
        return []
    return [
        verdict_at_least(f"{what}, {load}, {name}/vLLM", median(values), limit)
        for name, values in to_vllm.items()
    ]


def show_processor_time(figures: dict[What, Measured]) -> dict[str, Any]:
    field = "cpu_s_per_gb"
    result: dict[str, Any] = {}
    rows = []
    verdicts = []
    for what, measured in figures.items():
        seconds = {name: typical(measured, name, field) for name in (*OURS, VLLM)}
        to_vllm = {name: ratios(measured, name, VLLM, field) for name in OURS}
        rows.append(
            [
                str(what),
                *(f"{value:.3f}" for value in seconds.values()),
                *(with_spread(values) for values in to_vllm.values()),
            ]
        )
        verdicts += [
            verdict(f"{what}, processor time, {name}/vLLM", median(values), MAX_CPU_TO_VLLM)
            for name, values in to_vllm.items()
        ]
        result[str(what)] = {"s_per_gb": seconds, "to_vllm": to_vllm}
    print_table(
        "Full load: processor seconds per GB, of all threads, and of whoever submits and polls",
        ["", *OURS, VLLM, *(f"{name}/vLLM" for name in OURS)],
        rows,
    )
    print_lines(verdicts)
    return result


def print_lines(lines: list[str]) -> None:
    for line in lines:
        print("  " + line)
