"""A worker with caches of its own, to try the device's paths with."""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

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
from kvtier.cpu.cuda.jobs_failed import JobsFailed
from kvtier.cpu.gpu_worker import GPUOffloadingWorker
from kvtier.cpu.shared_offload_region import SharedOffloadRegion

__all__ = ["OpenCopies", "Rig", "open_rig"]

OpenCopies = Callable[[Any, SharedOffloadRegion, ExitStack], Copies]


@dataclass(slots=True)
class Rig:
    """One group whose blocks have a page in each of some tensors, and as many slots as blocks."""

    worker: GPUOffloadingWorker
    tensors: list[Any]
    """Bytes on the device, of shape (num_blocks, page bytes)."""
    rows: NDArray[np.uint8]
    """The slots, of shape (num_blocks, bytes); a slot holds its pages one after the other."""
    num_blocks: int
    _next_job: int = 0

    def submit(self, is_store: bool, blocks: NDArray[np.int64], slots: NDArray[np.int64]) -> int:
        """Start a job that copies these blocks from or to these slots; its id."""
        return self.ready(is_store, blocks, slots)()

    def ready(
        self, is_store: bool, blocks: NDArray[np.int64], slots: NDArray[np.int64]
    ) -> Callable[[], int]:
        """What starts such a job."""
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
        """Wait for all jobs there are, `jobs`, and return the seconds that they took on the device.

        Raises `JobsFailed` if one did; the reason is in the log."""
        self.worker.wait(jobs)
        results = self.worker.get_finished()
        failed = [result.job_id for result in results if not result.success]
        if failed or {result.job_id for result in results} != set(jobs):
            raise JobsFailed(f"of {len(jobs)} jobs, {len(failed)} failed: see the log")
        return sum(result.transfer_time or 0.0 for result in results)


@contextmanager
def open_rig(
    device: Any,
    page_bytes: int,
    num_tensors: int,
    num_blocks: int,
    open_copies: OpenCopies | None = None,
) -> Iterator[Rig]:
    """Everything is random bytes at first. `open_copies`: as for the worker."""
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
    rig = Rig(worker, tensors, np.asarray(region.create_kv_memoryview()), num_blocks)
    try:
        yield rig
    finally:
        rig.rows = rig.rows[:0].copy()  # the region is not unmapped while someone holds a part
        worker.shutdown()
