"""The worker of the primary tier for engines that run on the CPU. Their KV caches are in host
memory, too; the code still calls them the device."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvtier.base import (
    CanonicalKVCacheRef,
    CanonicalKVCaches,
    GPULoadStoreSpec,
    LoadStoreSpec,
    TransferResult,
)
from kvtier.cpu.job_thread import JobThread
from kvtier.cpu.shared_offload_region import SharedOffloadRegion
from kvtier.cpu.worker import (
    GroupTransfer,
    JobSpec,
    Piece,
    SlotWorker,
    TransferRefused,
    device_pages,
    plan_transfer,
)

__all__ = ["HostOffloadingWorker", "PageCopier"]

logger = logging.getLogger(__name__)

_RUN_BYTES = 1 << 14
"""Smallest mean size of runs, in bytes, for which each run of adjacent pages is copied with a call
of its own. Pages of shorter runs are gathered, many in one call."""
_GATHERED_BYTES = 1 << 18
"""Bytes gathered in one call, so that its temporary buffer stays in the processor's cache."""


class HostOffloadingWorker(SlotWorker):
    """Copies in two threads of its own, one for stores and one for loads.

    Neither direction waits for the other, and jobs of one direction run in the order in which they
    were submitted. The two threads also check the jobs: an invalid job copies nothing and is
    reported as failed, with the reason in the log.

    After a store, its slots hold the pages of that store and zeros; no earlier bytes are left.

    The worker owns `region` from the moment its constructor returns; `shutdown` cleans it up.
    """

    def __init__(
        self, kv_caches: CanonicalKVCaches, region: SharedOffloadRegion, blocks_per_chunk: int
    ) -> None:
        super().__init__(region)
        self._copier: PageCopier | None = PageCopier(kv_caches, region, blocks_per_chunk)
        self._stores = JobThread("kvtier-store")
        self._loads = JobThread("kvtier-load")
        self._changed = threading.Condition()
        self._running: set[int] = set()
        self._finished: dict[int, TransferResult] = {}
        self._closed = False

    def get_finished(self) -> list[TransferResult]:
        with self._changed:
            finished, self._finished = self._finished, {}
        return list(finished.values())

    def wait(self, job_ids: Collection[int]) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._running.isdisjoint(job_ids))

    def shutdown(self) -> None:
        """Finish all jobs, end the threads and clean up the region. Idempotent.

        `get_finished` still returns the results that were not taken yet.
        """
        with self._changed:
            self._closed = True
        self._stores.close()
        self._loads.close()
        self._copier = None
        self._region.cleanup()

    def _submit(
        self, job_id: int, device_spec: GPULoadStoreSpec, slot_spec: LoadStoreSpec, is_store: bool
    ) -> bool:
        with self._changed:
            if self._closed:
                logger.warning("Job %d refused: the worker has been shut down", job_id)
                return False
            if job_id in self._running or job_id in self._finished:
                logger.warning("Job %d refused: a job of this id is not reported yet", job_id)
                return False
            thread = self._stores if is_store else self._loads
            try:
                thread.put(lambda: self._run(job_id, device_spec, slot_spec, is_store))
            except RuntimeError as error:
                logger.warning("Job %d refused: %s", job_id, error)
                return False
            self._running.add(job_id)
        return True

    def _run(
        self, job_id: int, device_spec: GPULoadStoreSpec, slot_spec: LoadStoreSpec, is_store: bool
    ) -> None:
        direction = "Store" if is_store else "Load"
        started = time.perf_counter()
        result = TransferResult(job_id, success=False, transfer_size=0)
        try:
            result.transfer_size = self._transfer(device_spec, slot_spec, is_store)
            result.success = True
        except TransferRefused as reason:
            # Logged as text: a handler that keeps records would keep the error, and with it this
            # job's memory.
            logger.error("%s job %d failed: %s", direction, job_id, str(reason))
        except Exception:
            result.transfer_size = None
            logger.exception("%s job %d failed", direction, job_id)
        result.transfer_time = time.perf_counter() - started
        with self._changed:
            self._running.discard(job_id)
            self._finished[job_id] = result
            self._changed.notify_all()

    def _transfer(
        self, device_spec: GPULoadStoreSpec, slot_spec: LoadStoreSpec, is_store: bool
    ) -> int:
        """Copy the pages of a job. Returns the number of bytes copied."""
        copier = self._copier
        assert copier is not None
        transfers = plan_transfer(
            JobSpec.take(device_spec, slot_spec),
            is_store=is_store,
            blocks_per_chunk=copier.blocks_per_chunk,
            num_slots=copier.num_slots,
            num_blocks_of_group=copier.num_blocks_of_group,
        )
        if is_store:
            return sum(map(copier.store, transfers))
        return sum(map(copier.load, transfers))


class PageCopier:
    """Copies pages between caches in host memory and one rank's cells in the shared region.

    A cell holds pages of every canonical tensor, one tensor after the other; each tensor has one
    page for each device block of the slot. A group uses some of the tensors, and may use only the
    first bytes of each page.

    Any thread may call it, and several at once if they use different slots and blocks. The GIL is
    free while bytes are copied.
    """

    def __init__(
        self, kv_caches: CanonicalKVCaches, region: SharedOffloadRegion, blocks_per_chunk: int
    ) -> None:
        device = device_pages(kv_caches)
        # Checked before views are created, because the views would outlive the error.
        region.require_cell_fits([pages.shape[1] for pages in device], blocks_per_chunk)
        self.blocks_per_chunk = blocks_per_chunk
        self.num_slots = region.num_blocks
        host = [
            _as_places(region.create_next_worker_view(pages.shape[1] * blocks_per_chunk), pages)
            for pages in device
        ]
        self._groups = [_group(refs, device, host) for refs in kv_caches.group_data_refs]
        self.num_blocks_of_group = [group.num_blocks for group in self._groups]

    def store(self, transfer: GroupTransfer) -> int:
        """Copy device pages into slots, and zero the rest of each slot. Returns bytes copied."""
        group = self._groups[transfer.group_idx]
        for tensor in group.tensors:
            device, host, pieces = tensor.pieces(transfer)
            for piece in pieces:
                host[piece.places] = device[piece.blocks]
            tensor.zero_rest(transfer)
        for places in group.unused:
            places[transfer.slots] = 0
        return len(transfer.blocks) * group.bytes_per_block

    def load(self, transfer: GroupTransfer) -> int:
        """Copy pages of slots to the device. Returns the bytes copied."""
        group = self._groups[transfer.group_idx]
        for tensor in group.tensors:
            device, host, pieces = tensor.pieces(transfer)
            for piece in pieces:
                device[piece.blocks] = host[piece.places]
        return len(transfer.blocks) * group.bytes_per_block


@dataclass(frozen=True, slots=True)
class _GroupTensor:
    """One canonical tensor as one group uses it: the first `data_bytes` of every page."""

    device: NDArray[np.uint8]
    """(num_blocks, page bytes)"""
    host: NDArray[np.uint8]
    """(num_slots, blocks_per_chunk, page bytes): a slot has a *place* for each device block."""
    data_bytes: int

    def pieces(self, transfer: GroupTransfer) -> tuple[NDArray[Any], NDArray[Any], Iterable[Piece]]:
        """The device's array, the host's array, and the indices of matching elements in both."""
        device, host = self.device[:, : self.data_bytes], self.host[:, :, : self.data_bytes]
        if transfer.pages_per_run * self.data_bytes >= _RUN_BYTES:
            return device, host, transfer.runs
        # One element per page: numpy copies elements faster than rows.
        page = np.dtype((np.void, self.data_bytes))
        portion = max(1, _GATHERED_BYTES // self.data_bytes)
        return device.view(page)[:, 0], host.view(page)[:, :, 0], transfer.portions(portion)

    def zero_rest(self, transfer: GroupTransfer) -> None:
        """In this tensor's part of the slots, zero the bytes that the store does not write: the
        padding of all places, and the places of the first slot before `first_place`."""
        if self.data_bytes < self.host.shape[2]:
            self.host[transfer.slots, :, self.data_bytes :] = 0
        self.host[transfer.slots[0], : transfer.first_place] = 0


@dataclass(frozen=True, slots=True)
class _Group:
    tensors: list[_GroupTensor]
    unused: list[NDArray[np.uint8]]
    """The host side of all other tensors."""
    num_blocks: int
    """Number of device blocks in the smallest of its tensors."""
    bytes_per_block: int


def _group(
    refs: Sequence[CanonicalKVCacheRef],
    device: Sequence[NDArray[np.uint8]],
    host: Sequence[NDArray[np.uint8]],
) -> _Group:
    data_bytes: dict[int, int] = {}
    for ref in refs:  # layers that share a tensor share its pages: they are copied once
        data_bytes[ref.tensor_idx] = max(ref.page_size_bytes, data_bytes.get(ref.tensor_idx, 0))
    return _Group(
        [_GroupTensor(device[t], host[t], count) for t, count in data_bytes.items()],
        [places for t, places in enumerate(host) if t not in data_bytes],
        min((len(device[t]) for t in data_bytes), default=0),
        sum(data_bytes.values()),
    )


def _as_places(cell_part: NDArray[np.uint8], pages: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """A rank's view (num_slots, bytes) as (num_slots, places, page bytes), without a copy."""
    return cell_part.reshape(len(cell_part), -1, pages.shape[1])
