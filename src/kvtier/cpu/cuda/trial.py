"""A worker with caches of its own, for the self-test and the benchmarks."""

from __future__ import annotations

import mmap
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from statistics import median
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from kvtier.base import (
    CanonicalKVCacheRef,
    CanonicalKVCaches,
    CanonicalKVCacheTensor,
    GPULoadStoreSpec,
)
from kvtier.cpu.common import CPULoadStoreSpec
from kvtier.cpu.cuda.copies import Copies
from kvtier.cpu.gpu_worker import GPUOffloadingWorker
from kvtier.cpu.shared_offload_region import SharedOffloadRegion

__all__ = [
    "Bandwidth",
    "JobsFailed",
    "OpenCopies",
    "Trial",
    "measure",
    "measure_plain_copy",
    "open_trial",
]

OpenCopies = Callable[[Any, SharedOffloadRegion, ExitStack], Copies]

_NUM_JOBS = 4
_NUM_ROUNDS = 5


class JobsFailed(RuntimeError):
    """Jobs of the worker failed; the log has the reasons."""


@dataclass(slots=True)
class Trial:
    """A worker for one group. A block has a page in each tensor, and there is a slot per block."""

    worker: GPUOffloadingWorker
    tensors: list[Any]
    """Byte tensors on the device, of shape (num_blocks, page bytes)."""
    rows: NDArray[np.uint8]
    """The slots, of shape (num_blocks, bytes). A slot holds the pages of its block in order."""
    num_blocks: int
    _next_job: int = 0

    def submit(self, is_store: bool, blocks: NDArray[np.int64], slots: NDArray[np.int64]) -> int:
        """Start a job that copies between these blocks and these slots. Returns its id."""
        return self.ready(is_store, blocks, slots)()

    def ready(
        self, is_store: bool, blocks: NDArray[np.int64], slots: NDArray[np.int64]
    ) -> Callable[[], int]:
        """Prepare a job as for `submit`. Returns a function that starts it and returns its id."""
        self._next_job += 1
        job = self._next_job
        device, host = GPULoadStoreSpec(blocks, [len(blocks)], [0]), CPULoadStoreSpec(slots)

        def submit() -> int:
            taken = (
                self.worker.submit_store(job, device, host)
                if is_store
                else self.worker.submit_load(job, host, device)
            )
            if not taken:
                raise RuntimeError("the worker refused a job")
            return job

        return submit

    def finish(self, jobs: Sequence[int]) -> float:
        """Wait for `jobs`, which must be all jobs under way. Returns the sum of their durations.

        Raises `JobsFailed` if one failed; the reason is in the log.
        """
        self.worker.wait(jobs)
        results = self.worker.get_finished()
        failed = [result.job_id for result in results if not result.success]
        if failed or {result.job_id for result in results} != set(jobs):
            raise JobsFailed(f"of {len(jobs)} jobs, {len(failed)} failed: see the log")
        return sum(result.transfer_time or 0.0 for result in results)


@contextmanager
def open_trial(
    device: Any,
    page_bytes: int,
    num_tensors: int,
    num_blocks: int,
    open_copies: OpenCopies | None = None,
) -> Iterator[Trial]:
    """Open a worker with random bytes in its caches. `open_copies`: as for the worker."""
    data_bytes = page_bytes * num_tensors
    row_bytes = -(-data_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
    region = SharedOffloadRegion(f"selftest-{os.getpid()}", num_blocks, 0, row_bytes, data_bytes)
    with ExitStack() as undo:
        undo.callback(region.cleanup)
        tensors = [
            torch.randint(0, 256, (num_blocks, page_bytes), dtype=torch.uint8, device=device)
            for _ in range(num_tensors)
        ]
        caches = CanonicalKVCaches(
            [CanonicalKVCacheTensor(tensor, page_bytes) for tensor in tensors],
            [[CanonicalKVCacheRef(index, page_bytes) for index in range(num_tensors)]],
        )
        worker = GPUOffloadingWorker(caches, region, 1, open_copies=open_copies)
        undo.pop_all()
    trial = Trial(worker, tensors, np.asarray(region.create_kv_memoryview()), num_blocks)
    try:
        yield trial
    finally:
        trial.rows = trial.rows[:0].copy()  # a view would keep the region mapped
        worker.shutdown()


class Bandwidth(NamedTuple):
    """Median GB/s, measured from the submission of the first copy until the last byte is copied."""

    load: float
    """To the device."""
    store: float
    """From the device."""
    both: float
    """Both directions at the same time, in sum."""


def measure(
    device: Any,
    page_bytes: int,
    num_tensors: int,
    num_bytes: int,
    open_copies: OpenCopies | None = None,
) -> Bandwidth:
    """The bandwidth of the worker with scattered pages, split into several jobs.

    `num_bytes`: bytes to copy in each round, rounded down to whole blocks. `open_copies`: as for
    the worker.
    """
    num_blocks = num_bytes // (page_bytes * num_tensors)
    num_bytes = num_blocks * page_bytes * num_tensors
    with open_trial(device, page_bytes, num_tensors, num_blocks, open_copies) as trial:
        loads, stores = (_jobs(trial, is_store) for is_store in (False, True))

        def handed_over(jobs: list[int]) -> list[int]:
            trial.worker.flush()
            return jobs

        return Bandwidth(
            _rate(lambda: handed_over(loads()), num_bytes, device, trial.finish),
            _rate(lambda: handed_over(stores()), num_bytes, device, trial.finish),
            _rate(lambda: handed_over(loads(2) + stores(2)), 4 * num_bytes, device, trial.finish),
        )


def measure_plain_copy(device: Any, num_bytes: int) -> Bandwidth:
    """The bandwidth of torch's copy of contiguous pinned memory: the limit of the bus."""
    host = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)
    other = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)
    on_device = torch.empty(2, num_bytes, dtype=torch.uint8, device=device)
    streams = torch.cuda.Stream(device), torch.cuda.Stream(device)

    def load() -> None:
        with torch.cuda.stream(streams[0]):
            on_device[0].copy_(host, non_blocking=True)

    def store() -> None:
        with torch.cuda.stream(streams[1]):
            other.copy_(on_device[1], non_blocking=True)

    def both() -> None:
        for _ in range(2):
            load()
            store()

    return Bandwidth(
        _rate(load, num_bytes, device),
        _rate(store, num_bytes, device),
        _rate(both, 4 * num_bytes, device),
    )


def _jobs(trial: Trial, is_store: bool) -> Callable[..., list[int]]:
    """Return a function `submit(times)`. It submits jobs that together copy every block `times`
    times, and returns the ids of these jobs."""
    order = np.random.default_rng(0)
    shares, slots = (
        np.array_split(order.permutation(trial.num_blocks), _NUM_JOBS) for _ in range(2)
    )

    def submit(times: int = 1) -> list[int]:
        return [
            trial.submit(is_store, share, part)
            for _ in range(times)
            for share, part in zip(shares, slots, strict=True)
        ]

    return submit


def _rate(
    start: Callable[[], Any],
    num_bytes: int,
    device: Any,
    finish: Callable[[Any], object] = lambda _: None,
) -> float:
    """Median GB/s of the copies that `start` submits. When `start` returns, all copies must be on
    the device's streams; they need not have ended. `finish` is called with the result of `start`
    after each round, outside the measured time."""
    seconds = []
    for _ in range(1 + _NUM_ROUNDS):
        torch.cuda.synchronize(device)
        began = time.perf_counter()
        started = start()
        torch.cuda.synchronize(device)
        seconds.append(time.perf_counter() - began)
        finish(started)
    return num_bytes / median(seconds[1:]) / 1e9
