"""The copying half of the CPU tier for caches on a CUDA device."""

from __future__ import annotations

import logging
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
from kvtier.cpu.cell_size import require_cell_fits
from kvtier.cpu.cuda.copies import Copies, Ticket
from kvtier.cpu.cuda.copy_paths import Path
from kvtier.cpu.cuda.device_tensors import device_of, device_tensors
from kvtier.cpu.cuda.driver import CudaDriver, CudaError, cuda_driver
from kvtier.cpu.cuda.page_kernel import KernelUnavailable, PageKernel
from kvtier.cpu.cuda.page_table import Grid, HostCell, PageTable
from kvtier.cpu.cuda.pinning import pin_region
from kvtier.cpu.cuda.streams import StreamCopies
from kvtier.cpu.cuda.unpinned import UnpinnedCopies
from kvtier.cpu.shared_offload_region import SharedOffloadRegion
from kvtier.cpu.slot_worker import SlotWorker
from kvtier.cpu.transfer_plan import Asked, TransferRefused, plan_transfer

__all__ = ["GPUOffloadingWorker", "open_pinned", "open_unpinned"]

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class _Job:
    job_id: int
    ticket: Ticket
    group_sizes: tuple[int, ...]


class GPUOffloadingWorker(SlotWorker):
    """Has blocks copied between a CUDA device and the shared region, beside the model's kernels.

    Submitting a job checks it as a whole, leaves it to `copies` and returns; whether it is done is
    seen from the device's own marks, without waiting. Jobs of one direction are done in the order
    in which they were submitted; the directions do not wait for each other. Every job begins after
    all that the calling thread's current stream was given before it, so a store finds what was
    computed. A store's blocks must not be overwritten, nor a load's read, before the job is
    reported or `wait` returns.

    A job that cannot be right copies nothing and is reported as failed, with the reason in the log.
    So is one that the driver refuses, when nothing of it is copied any more. After a store its
    slots hold the pages of that store and zeros, and nothing from before.

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
        """`open_copies`: what does the copying instead of the device, given the device, the region
        and where to leave what is to be undone at the end."""
        super().__init__(region)
        tensors = device_tensors(kv_caches)
        require_cell_fits([tensor.page_bytes for tensor in tensors], region, blocks_per_chunk)
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
            """What does the copying."""
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
                    # All before it are done when it is.
                    _wait(job)
                    break

    def flush(self) -> None:
        """Return when the device has been given all jobs that were submitted.

        For engines that may unmap their caches: synchronising the device then covers all jobs.
        """
        self.copies.flush()

    def shutdown(self) -> None:
        """Finish all jobs, let go of the device's memory, and clean up the region. Idempotent.

        What was not reported yet can still be asked for with `get_finished`.
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
            self._let_go()

    def _let_go(self) -> None:
        try:
            self._undo.close()
        except Exception:
            logger.exception("The device could not be let go of in order")
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
        except BaseException:  # an interrupt: nobody will ask for this job
            self._unreported.discard(job_id)
            raise
        else:
            (self._stores if is_store else self._loads).append(job)
        return True

    def _start(
        self, job_id: int, device_spec: GPULoadStoreSpec, slot_spec: LoadStoreSpec, is_store: bool
    ) -> _Job:
        asked = Asked.take(device_spec, slot_spec)
        num_pages = asked.blocks.size * self._table.most_pages
        ticket = self.copies.start(
            lambda: self._grids(asked, is_store), num_pages, is_store=is_store
        )
        return _Job(job_id, ticket, asked.group_sizes)

    def _grids(self, asked: Asked, is_store: bool) -> list[Grid]:
        """What a job copies. Any thread."""
        table = self._table
        transfers = plan_transfer(
            asked,
            is_store=is_store,
            blocks_per_chunk=table.blocks_per_chunk,
            num_slots=table.num_slots,
            num_blocks_of_group=table.num_blocks_of_group,
        )
        return table.grids(transfers, is_store=is_store)

    def _collect(self, jobs: deque[_Job]) -> None:
        """Note the results of what has ended, in order."""
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
    """What is reported of such a job; the log has the reason."""
    name = "Store" if is_store else "Load"
    if isinstance(error, TransferRefused):
        # As text: a log that keeps its records would keep the frames of this job with them.
        logger.error("%s job %d failed: %s", name, job_id, str(error))
        return TransferResult(job_id, success=False, transfer_size=0)
    logger.error("%s job %d failed", name, job_id, exc_info=error)
    return TransferResult(job_id, success=False)


def _wait(job: _Job) -> None:
    try:
        job.ticket.wait()
    except Exception as error:
        # It is told when the job is asked for.
        logger.debug("Job %d: %s", job.job_id, error)


def open_pinned(
    device: Any,
    region: SharedOffloadRegion,
    undo: ExitStack,
    choose: Callable[[Grid], Path] | None = None,
) -> Copies:
    """The quickest that this machine has; slower ones, and a warning, if memory cannot be pinned.

    `choose`: as for `StreamCopies`. Raises `CudaUnavailable` if there is no driver.
    """
    driver = cuda_driver()
    with torch.cuda.device(device):
        torch.cuda.current_stream().synchronize()  # the device's context is this thread's now
        if not pin_region(region, driver):
            return open_unpinned(device, region, undo)
        undo.callback(_unpin, region, driver)
        kernel = _open_kernel(device, driver)
        copies = StreamCopies(device, driver, kernel, choose)
    undo.callback(_close, copies, device)
    return copies


def open_unpinned(device: Any, _region: SharedOffloadRegion, undo: ExitStack) -> Copies:
    """What there is for a region that cannot be pinned."""
    copies = UnpinnedCopies(device, cuda_driver())
    undo.callback(_close, copies, device)
    return copies


def _close(copies: Copies, device: Any) -> None:
    with ExitStack() as steps:
        steps.callback(torch.cuda.set_device, torch.cuda.current_device())
        steps.callback(copies.close)
        # First of all: a thread that never had to do with the device has no context to free memory
        # in. Closed it is even if the device has failed.
        steps.callback(torch.cuda.set_device, device)


def _open_kernel(device: Any, driver: CudaDriver) -> PageKernel | None:
    try:
        stream = torch.cuda.current_stream().cuda_stream
        return PageKernel(driver, torch.cuda.get_device_properties(device), stream)
    except (KernelUnavailable, CudaError) as error:
        logger.warning(
            "Pages below 128 KiB are copied by the copy engines, up to eleven times slower than "
            "the bus (16 KiB): %s",
            error,
        )
        return None


def _unpin(region: SharedOffloadRegion, driver: CudaDriver) -> None:
    try:
        driver.unregister_host(region.address)
    except CudaError as error:
        logger.warning("The shared region could not be unpinned: %s", error)
