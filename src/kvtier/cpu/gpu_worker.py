"""The worker of the CPU tier for caches on a CUDA device."""

from __future__ import annotations

import logging
import resource
import time
from collections import deque
from collections.abc import Callable, Collection
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch

from kvtier.base import (
    CanonicalKVCaches,
    GPULoadStoreSpec,
    LoadStoreSpec,
    TransferResult,
)
from kvtier.config.sizes import as_size
from kvtier.cpu.cuda.copies import Copies, CopyPath, Ticket, UnpinnedCopies
from kvtier.cpu.cuda.driver import CudaDriver, CudaError, cuda_driver
from kvtier.cpu.cuda.page_kernel import KernelUnavailable, PageKernel
from kvtier.cpu.cuda.page_table import Grid, HostCell, PageTable, device_of, device_tensors
from kvtier.cpu.cuda.streams import StreamCopies
from kvtier.cpu.shared_offload_region import SharedOffloadRegion
from kvtier.cpu.worker import JobSpec, SlotWorker, TransferRefused, plan_transfer

__all__ = ["GPUOffloadingWorker", "open_pinned", "open_unpinned", "pin_region"]

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class _Job:
    job_id: int
    ticket: Ticket
    group_sizes: tuple[int, ...]


class GPUOffloadingWorker(SlotWorker):
    """Copies blocks between a CUDA device and the shared region, beside the model's kernels.

    `submit_*` passes a job to `copies` and returns. `get_finished` queries events of the device and
    does not wait. Jobs of one direction run in the order in which they were submitted; the two
    directions do not wait for each other. Every job begins after all work that was on the calling
    thread's current stream before it, so a store copies what was computed. The engine must not
    overwrite a store's blocks, nor read a load's, before the job is reported or `wait` returns.

    An invalid job copies nothing and is reported as failed, with the reason in the log. A job that
    the driver refuses is reported as failed once none of its copies is under way. After a store,
    its slots hold the pages of that store and zeros; no earlier bytes are left.

    The worker owns `region` from the moment its constructor returns; `shutdown` cleans it up.
    """

    def __init__(
        self,
        kv_caches: CanonicalKVCaches,
        region: SharedOffloadRegion,
        blocks_per_chunk: int,
        *,
        open_copies: Callable[[Any, SharedOffloadRegion, ExitStack], Copies] | None = None,
    ) -> None:
        """`open_copies`: a function that makes the object which copies pages; by default
        `open_pinned`. Its arguments are the device, the region, and a stack on which it puts
        callbacks for the shutdown."""
        super().__init__(region)
        tensors = device_tensors(kv_caches)
        region.require_cell_fits([tensor.page_bytes for tensor in tensors], blocks_per_chunk)
        if region.rank is None:
            raise ValueError("the region was opened for the scheduler, which has no cell")
        device = device_of(kv_caches)
        self._tensors = [canonical.tensor for canonical in kv_caches.tensors]
        cell = HostCell(
            region.address + region.rank * region.cpu_page_size,
            region.row_bytes,
            region.num_blocks,
            blocks_per_chunk,
        )
        with ExitStack() as undo:
            self.copies = (open_copies or open_pinned)(device, region, undo)
            """Copies the pages of jobs."""
            zeros = self.copies.make_zeros(max(tensor.page_bytes for tensor in tensors))
            self._table = PageTable(tensors, kv_caches.group_data_refs, cell, zeros)
            self.copies.expect(self._table.columns)
            self._undo = undo.pop_all()
        self._stores: deque[_Job] = deque()
        self._loads: deque[_Job] = deque()
        self._unreported: set[int] = set()
        self._ended: list[TransferResult] = []
        self._closed = False

    def get_finished(self) -> list[TransferResult]:
        self._collect(self._stores)
        self._collect(self._loads)
        ended, self._ended = self._ended, []
        self._unreported.difference_update(result.job_id for result in ended)
        return ended

    def wait(self, job_ids: Collection[int]) -> None:
        for jobs in (self._stores, self._loads):
            for job in reversed(jobs):
                if job.job_id in job_ids:
                    # When this job has ended, all jobs before it have ended, too.
                    _wait(job)
                    break

    def flush(self) -> None:
        """Return when all submitted jobs are on the device's streams.

        For engines that may unmap their caches: after this call, synchronizing the device waits for
        all jobs.
        """
        self.copies.flush()

    def shutdown(self) -> None:
        """Finish all jobs, free the device's memory, and clean up the region. Idempotent.

        `get_finished` still returns the results that were not taken yet.
        """
        if self._closed:
            return
        self._closed = True
        try:
            for jobs in (self._stores, self._loads):
                for job in jobs:
                    _wait(job)
                self._collect(jobs)
        finally:
            self._release()

    def _release(self) -> None:
        try:
            self._undo.close()
        except Exception:
            logger.exception(
                "Some resources of the CUDA device could not be released. They are freed when this "
                "process ends"
            )
        finally:
            self._tensors.clear()
            self._region.cleanup()

    def _submit(
        self, job_id: int, device_spec: GPULoadStoreSpec, slot_spec: LoadStoreSpec, is_store: bool
    ) -> bool:
        if self._closed:
            logger.warning("Job %d refused: the worker has been shut down", job_id)
            return False
        if job_id in self._unreported:
            logger.warning("Job %d refused: a job of this id is not reported yet", job_id)
            return False
        try:
            self._unreported.add(job_id)
            job = self._start(job_id, device_spec, slot_spec, is_store)
        except Exception as error:
            self._ended.append(_failure(job_id, is_store, error))
        except BaseException:  # an interrupt: the caller does not learn that the job was taken
            self._unreported.discard(job_id)
            raise
        else:
            (self._stores if is_store else self._loads).append(job)
        return True

    def _start(
        self, job_id: int, device_spec: GPULoadStoreSpec, slot_spec: LoadStoreSpec, is_store: bool
    ) -> _Job:
        spec = JobSpec.take(device_spec, slot_spec)
        num_pages = spec.blocks.size * self._table.most_pages
        ticket = self.copies.start(
            lambda: self._grids(spec, is_store), num_pages, is_store=is_store
        )
        return _Job(job_id, ticket, spec.group_sizes)

    def _grids(self, spec: JobSpec, is_store: bool) -> list[Grid]:
        """The pages that a job copies. Raises `TransferRefused`. Any thread."""
        table = self._table
        transfers = plan_transfer(
            spec,
            is_store=is_store,
            blocks_per_chunk=table.blocks_per_chunk,
            num_slots=table.num_slots,
            num_blocks_of_group=table.num_blocks_of_group,
        )
        return table.grids(transfers, is_store=is_store)

    def _collect(self, jobs: deque[_Job]) -> None:
        """Move the results of ended jobs to `_ended`, in order."""
        while jobs:
            job = jobs[0]
            try:
                if not job.ticket.is_done():
                    return
                size, seconds = self._table.num_bytes(job.group_sizes), job.ticket.seconds()
                result = TransferResult(job.job_id, True, size, seconds)
            except Exception as error:
                result = _failure(job.job_id, jobs is self._stores, error)
            jobs.popleft()
            self._ended.append(result)


def _failure(job_id: int, is_store: bool, error: Exception) -> TransferResult:
    """The result of a failed job. Logs the reason."""
    name = "Store" if is_store else "Load"
    if isinstance(error, TransferRefused):
        # Logged as text: a handler that keeps records would keep the error, and with it this job's
        # memory.
        logger.error("%s job %d failed: %s", name, job_id, str(error))
        return TransferResult(job_id, success=False, transfer_size=0)
    logger.error("%s job %d failed", name, job_id, exc_info=error)
    return TransferResult(job_id, success=False)


def _wait(job: _Job) -> None:
    try:
        job.ticket.wait()
    except Exception as error:
        # `get_finished` reports it.
        logger.debug("Job %d: %s", job.job_id, error)


def open_pinned(
    device: Any,
    region: SharedOffloadRegion,
    undo: ExitStack,
    choose: Callable[[Grid], CopyPath] | None = None,
) -> Copies:
    """Pin the region and return `StreamCopies`; if it cannot be pinned, warn and return the slower
    `UnpinnedCopies`.

    `choose`: as for `StreamCopies`. Raises `CudaUnavailable` if there is no driver.
    """
    driver = cuda_driver()
    with torch.cuda.device(device):
        torch.cuda.current_stream().synchronize()  # makes the device's context current
        if not pin_region(region, driver):
            return open_unpinned(device, region, undo)
        undo.callback(_unpin, region, driver)
        kernel = _open_kernel(device, driver)
        copies = StreamCopies(device, driver, kernel, choose)
    undo.callback(_close, copies, device)
    return copies


def pin_region(region: SharedOffloadRegion, driver: CudaDriver) -> bool:
    """Pin the whole region for this process's device. Logs a warning and returns False on failure.

    Every rank must pin the region, because pinning maps the shared memory only for the devices of
    the calling process. Each row has a cell (a part) of every rank, so each rank pins all rows.
    """
    began = time.perf_counter()
    try:
        driver.register_host(region.address, region.size_bytes)
    except CudaError as error:
        logger.warning(
            "The shared region (%s) could not be pinned: %s. Blocks are copied through the "
            "driver's own buffers, many times slower than the bus, so offloading may not pay. %s",
            as_size(region.size_bytes),
            error,
            _remedy(region.size_bytes),
        )
        return False
    logger.info(
        "Pinned the shared region, %s, in %.1f s",
        as_size(region.size_bytes),
        time.perf_counter() - began,
    )
    return True


def _remedy(size_bytes: int) -> str:
    limit, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if limit != resource.RLIM_INFINITY and limit < size_bytes:
        return (
            f"This process may lock {limit} bytes of memory: raise that with `ulimit -l unlimited`,"
            " LimitMEMLOCK=infinity (systemd) or --ulimit memlock=-1 (Docker)"
        )
    return (
        "The limit on locked memory does not seem to be the reason. Give a smaller "
        "cpu_bytes_to_use, or look for messages of the driver in the kernel log (dmesg)"
    )


def open_unpinned(device: Any, _region: SharedOffloadRegion, undo: ExitStack) -> Copies:
    """Copies for a region that is not pinned."""
    copies = UnpinnedCopies(device, cuda_driver())
    undo.callback(_close, copies, device)
    return copies


def _close(copies: Copies, device: Any) -> None:
    with ExitStack() as steps:
        steps.callback(torch.cuda.set_device, torch.cuda.current_device())
        steps.callback(copies.close)
        # Runs first: a thread that has not used the device has no context, and needs one to free
        # memory. `close` runs even if this fails.
        steps.callback(torch.cuda.set_device, device)


def _open_kernel(device: Any, driver: CudaDriver) -> PageKernel | None:
    try:
        stream = torch.cuda.current_stream().cuda_stream
        return PageKernel(driver, torch.cuda.get_device_properties(device), stream)
    except (KernelUnavailable, CudaError) as error:
        logger.warning(
            "The copy kernel cannot be used: %s. Pages below 128 KiB are copied by the copy "
            "engines, which is up to 11 times slower (with pages of 16 KiB)",
            error,
        )
        return None


def _unpin(region: SharedOffloadRegion, driver: CudaDriver) -> None:
    try:
        driver.unregister_host(region.address)
    except CudaError as error:
        logger.warning("The shared region could not be unpinned: %s", error)
