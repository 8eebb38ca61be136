"""A worker with caches of known bytes, and an oracle beside it."""

from __future__ import annotations

import itertools
import mmap
import time
from collections.abc import Collection, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from kvtier.base import OffloadingWorker, TransferResult
from kvtier.cpu.shared_offload_region import SharedOffloadRegion
from tests.gpu.cache_layout import Bytes, CacheLayout
from tests.gpu.jobs import Job
from tests.gpu.places import Place

RANK, WORLD_SIZE = 1, 3  # there is a cell before this one and one behind it
POISON = 0xEE

_PATIENCE_S = 60.0


def row_bytes(layout: CacheLayout, world_size: int = WORLD_SIZE) -> int:
    return -(-world_size * layout.cell_bytes // mmap.PAGESIZE) * mmap.PAGESIZE


class CheckedWorker:
    """One rank's worker, and all bytes that it could touch: actual and expected ones."""

    def __init__(
        self,
        place: Place,
        layout: CacheLayout,
        worker: OffloadingWorker,
        rows: Bytes,
        memory: Any,
        rank: int,
    ) -> None:
        self.place, self.layout, self.worker, self.rank = place, layout, worker, rank
        self.rows = rows
        """All rows of the region, without a copy, as another process sees them."""
        self.memory: list[Any] = memory
        """The allocations on the device."""
        self.expected_rows = rows.copy()
        self.expected_memory = [place.download(allocation) for allocation in self.memory]

    def apply(self, *jobs: Job) -> None:
        """Apply these jobs, in this order, to the expected bytes."""
        for job in jobs:
            job.apply(self.layout, self.rank, self.expected_rows, self.expected_memory)

    def check(self) -> None:
        """Compare every byte of the region, other ranks' cells included, and of all allocations."""
        require_equal(self.rows, self.expected_rows, "the region")
        for index, (allocation, expected) in enumerate(
            zip(self.memory, self.expected_memory, strict=True)
        ):
            require_equal(self.place.download(allocation), expected, f"allocation {index}")

    def do(self, *jobs: Job, first_id: int = 0, by_polling: bool = False) -> list[TransferResult]:
        """Submit jobs, check that they succeed, and return the results by job id.

        Stores and loads do not wait for each other, so they must not touch the same memory.
        """
        stores, loads = (
            [part for job in jobs if job.is_store is is_store for part in job.parts]
            for is_store in (True, False)
        )
        for stored, loaded in itertools.product(stores, loads):
            assert not {*stored.slots} & {*loaded.slots}, "their order is undefined"
            tensors, others = (
                self.layout.groups[part.group_idx].keys() for part in (stored, loaded)
            )
            if tensors & others:
                assert not {*stored.blocks} & {*loaded.blocks}
        ids = range(first_id, first_id + len(jobs))
        for job_id, job in zip(ids, jobs, strict=True):
            assert job.submit(self.worker, job_id)
        results = finish(self.worker, ids, by_polling=by_polling)
        assert [result.job_id for result in results] == list(ids)
        for result, job in zip(results, jobs, strict=True):
            assert result.success
            assert result.transfer_size == job.size(self.layout)
            assert result.transfer_time is not None
            assert result.transfer_time > 0 or not result.transfer_size
        self.apply(*jobs)
        return results

    def let_go(self) -> None:
        """Drop all views of the region."""
        self.rows = np.empty(0, np.uint8)

    def page(self, tensor_idx: int, block: int) -> Any:
        """The bytes of a page on the device, without a copy."""
        return self.layout.page(self.memory, tensor_idx, block)


@contextmanager
def open_checked_worker(
    place: Place,
    layout: CacheLayout,
    directory: Path,
    *,
    num_slots: int = 4,
    seed: int = 1,
    rank: int = RANK,
) -> Iterator[CheckedWorker]:
    """Open a worker. All rows are filled with a pattern, all allocations with random bytes."""
    row, cell = row_bytes(layout), layout.cell_bytes
    with ExitStack() as undo:
        others, region = (
            SharedOffloadRegion("engine", num_slots, whose, row, cell, directory=str(directory))
            for whose in (None, rank)
        )
        undo.callback(others.cleanup)
        undo.callback(region.cleanup)
        memory = [place.upload(allocation) for allocation in layout.new_memory(seed)]
        worker = place.open_worker(layout.canonical(memory), region, layout.blocks_per_chunk)
        undo.callback(worker.shutdown)
        rows = np.asarray(others.create_kv_memoryview())
        rows[:] = POISON
        rig = CheckedWorker(place, layout, worker, rows, memory, rank)
        del rows
        undo.callback(rig.let_go)
        yield rig


def poll(worker: OffloadingWorker, count: int) -> list[TransferResult]:
    """Poll until `count` results have come."""
    results: list[TransferResult] = []
    deadline = time.monotonic() + _PATIENCE_S
    while len(results) < count:
        results += worker.get_finished()
        assert time.monotonic() < deadline, f"{len(results)} of {count} jobs ended in time"
    return results


def finish(
    worker: OffloadingWorker, job_ids: Collection[int], *, by_polling: bool = False
) -> list[TransferResult]:
    """All results by job id. Each of these jobs, and no other, must be reported once."""
    if by_polling:
        results = poll(worker, len(job_ids))
    else:
        worker.wait(job_ids)
        results = worker.get_finished()
    assert worker.get_finished() == []
    assert sorted(result.job_id for result in results) == sorted(job_ids)
    return sorted(results, key=lambda result: result.job_id)


def require_equal(actual: Bytes, expected: Bytes, what: str) -> None:
    """numpy's assertion, with a shorter message."""
    if not np.array_equal(actual, expected):
        actual, expected = actual.reshape(-1), expected.reshape(-1)
        differ = np.flatnonzero(actual != expected)
        raise AssertionError(
            f"{what}: {len(differ)} bytes differ, from {differ[0]} to {differ[-1]}: "
            f"{actual[differ[0]]} in place of {expected[differ[0]]}, and so on"
        )
