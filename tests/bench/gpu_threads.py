"""Bandwidth of the copy kernel by its number of threads, and its cost for the model: the table
behind `kvtier.cpu.cuda.page_kernel.direct_threads`."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

from kvtier.cpu.cuda.copies import CopyPath
from kvtier.cpu.cuda.page_kernel import Threads, direct_threads
from tests.bench.gpu_here import gpu_for
from tests.bench.report import RESULTS, print_table, run_alone, save

LOADS = (Threads(2, 512), Threads(4, 256), Threads(2, 1024), Threads(4, 512), Threads(8, 256))
STORES = (
    Threads(2, 224),
    Threads(2, 256),
    Threads(2, 288),
    Threads(2, 320),
    Threads(2, 352),
    Threads(2, 384),
    Threads(3, 192),
    Threads(4, 160),
    Threads(4, 512),
)
PAGE_BYTES = (16 << 10, 64 << 10)
NUM_BYTES = 1 << 30


def run(results: Path = RESULTS) -> None:
    if (device := gpu_for("gpu_threads")) is None:
        return
    from kvtier.cpu.cuda.trial import measure_plain_copy

    peaks = measure_plain_copy(device, NUM_BYTES)
    rows, result = [], {}
    for is_store, candidates in ((False, LOADS), (True, STORES)):
        for threads in candidates:
            found = _measured(device, threads, is_store, peaks[is_store])
            chosen = [
                p >> 10 for p in PAGE_BYTES if direct_threads(p, is_store=is_store) == threads
            ]
            name = f"{'store' if is_store else 'load'}, {threads.blocks} x {threads.of_block}"
            result[name] = found
            rows.append([name, *(f"{each:.3f}" for each in found.values()), str(chosen or "")])
            save("gpu_threads", result, results)  # after each, in case a later one fails
    print_table(
        "pages copied by a kernel alone: share of a plain copy, and how many times as long matrix\n"
        "  products take beside it (64 KiB pages)",
        ["blocks x threads", "16 KiB", "64 KiB", "8192^3", "256 x 4096^2", "chosen for KiB"],
        rows,
    )


def _measured(device: Any, threads: Threads, is_store: bool, peak: float) -> dict[str, float]:
    from kvtier.cpu.cuda import page_mover
    from kvtier.cpu.cuda.trial import measure
    from kvtier.cpu.gpu_worker import open_pinned
    from tests.bench.gpu_beside import SHAPES, beside

    by_kernel = partial(open_pinned, choose=lambda _: CopyPath.KERNEL)
    with patch.object(page_mover, "direct_threads", lambda *_, **__: threads):
        shares = {
            f"{page_bytes >> 10} KiB": measure(device, page_bytes, 1, NUM_BYTES, by_kernel)[
                is_store
            ]
            / peak
            for page_bytes in PAGE_BYTES
        }
        slowdowns = {
            "x".join(map(str, shape)): beside(
                device, shape, (PAGE_BYTES[-1], 1), CopyPath.KERNEL, is_store, 9
            )["slowdown"]
            for shape in (SHAPES[0], SHAPES[-1])
        }
    return shares | slowdowns


if __name__ == "__main__":
    run_alone(run, __doc__)
