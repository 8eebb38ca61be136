"""The host worker's copies beside the bare memory copies they consist of, page by page."""

from __future__ import annotations

import ctypes
import os
import time
from statistics import median
from typing import Any

import numpy as np

from kvtier.base import (
    CanonicalKVCacheRef,
    CanonicalKVCaches,
    CanonicalKVCacheTensor,
    GPULoadStoreSpec,
)
from kvtier.cpu.common import CPULoadStoreSpec
from kvtier.cpu.host_worker import HostOffloadingWorker
from kvtier.cpu.shared_offload_region import SharedOffloadRegion
from tests.bench.report import print_table, run_alone, save

KiB = 1024
SHAPES = ((1 * KiB, 32), (4 * KiB, 32), (16 * KiB, 32), (64 * KiB, 32), (1024 * KiB, 1))
"""(bytes of a page, tensors)"""
BYTES = 1 << 28
ROUNDS = 7


def seconds_of_bare_copies(arrays: list[Any], order: Any, page: int) -> float:
    """Copy each page of each array with one `memmove`, in the given order, to a dense buffer."""
    target = np.zeros(len(order) * page, dtype=np.uint8)
    sources = [array.ctypes.data + int(block) * page for array in arrays for block in order]
    places = [target.ctypes.data + i * page for i in range(len(order))] * len(arrays)
    memmove = ctypes.memmove
    start = time.perf_counter()
    for place, source in zip(places, sources, strict=True):
        memmove(place, source, page)
    return time.perf_counter() - start


def seconds_of_job(worker: HostOffloadingWorker, job_id: int, store: bool, specs: Any) -> float:
    device, slots = specs
    if store:
        assert worker.submit_store(job_id, device, slots)
    else:
        assert worker.submit_load(job_id, slots, device)
    worker.wait([job_id])
    (result,) = worker.get_finished()
    assert result.success
    assert result.transfer_time is not None
    return result.transfer_time


def measure(page: int, num_tensors: int) -> dict[str, float]:
    """GB/s with pages in random order on both sides."""
    num_blocks = BYTES // (page * num_tensors)
    row = -(-page * num_tensors // 4096) * 4096
    random = np.random.default_rng(0)
    arrays = [
        random.integers(0, 255, (num_blocks, page), dtype=np.uint8) for _ in range(num_tensors)
    ]
    caches = CanonicalKVCaches(
        [CanonicalKVCacheTensor(array, page) for array in arrays],
        [[CanonicalKVCacheRef(i, page) for i in range(num_tensors)]],
    )
    region = SharedOffloadRegion(f"bench-{os.getpid()}", num_blocks, 0, row, page * num_tensors)
    worker = HostOffloadingWorker(caches, region, blocks_per_chunk=1)
    blocks, slots = random.permutation(num_blocks), random.permutation(num_blocks)
    specs = GPULoadStoreSpec(blocks, [num_blocks], [0]), CPULoadStoreSpec(slots)
    spent: dict[str, list[float]] = {"store": [], "load": [], "bare": []}
    try:
        for round_ in range(ROUNDS):
            spent["store"].append(seconds_of_job(worker, 2 * round_, True, specs))
            spent["bare"].append(seconds_of_bare_copies(arrays, blocks, page))
            spent["load"].append(seconds_of_job(worker, 2 * round_ + 1, False, specs))
    finally:
        worker.shutdown()
    return {what: BYTES / median(seconds) / 1e9 for what, seconds in spent.items()}


def run() -> None:
    result = {}
    rows = []
    for page, num_tensors in SHAPES:
        speed = measure(page, num_tensors)
        store, load = speed["store"] / speed["bare"], speed["load"] / speed["bare"]
        result[f"{page}x{num_tensors}"] = speed | {"store_ratio": store, "load_ratio": load}
        rows.append(
            [
                f"{page // KiB} KiB x {num_tensors}",
                *(f"{speed[what]:.1f}" for what in ("store", "load", "bare")),
                f"{store:.2f}",
                f"{load:.2f}",
            ]
        )
    print_table(
        "Host copies in GB/s, pages in random order; ratio to bare copies of the same pages",
        ["page x tensors", "store", "load", "bare", "store ratio", "load ratio"],
        rows,
    )
    save("host_copy", result)


if __name__ == "__main__":
    run_alone(run, __doc__)
