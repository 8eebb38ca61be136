"""The copying half of the CPU tier for caches in host memory, as CPU engines have them."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Collection

from kvtier.base import (
    CanonicalKVCaches,
    GPULoadStoreSpec,
    LoadStoreSpec,
    TransferResult,
)
from kvtier.cpu.lane import Lane
from kvtier.cpu.page_copier import PageCopier
from kvtier.cpu.shared_offload_region import SharedOffloadRegion
from kvtier.cpu.slot_worker import SlotWorker
from kvtier.cpu.transfer_plan import Asked, TransferRefused, plan_transfer

__all__ = ["HostOffloadingWorker"]

logger = logging.getLogger(__name__)


class HostOffloadingWorker(SlotWorker):
    """Copies in two threads of its own, one for stores and one for loads.

    So neither direction waits for the other, and jobs of one direction are done in the order in
    which they were submitted. What a job says is checked in those threads as well: a job that
    cannot be right copies nothing and is reported as failed, with the reason in the log.

    After a store its slots hold the pages of that store and zeros, and nothing from before.

    The worker owns `region` from the moment its constructor returns; `shutdown` cleans it up.
    """

    def __init__(
        self, kv_caches: CanonicalKVCaches, region: SharedOffloadRegion, blocks_per_chunk: int
    ) -> None:
        super().__init__(region)
        self._copier: PageCopier | None = PageCopier(kv_caches, region, blocks_per_chunk)
        self._stores = Lane("kvtier-store")
        self._loads = Lane("kvtier-load")
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

        What was not reported yet can still be asked for with `get_finished`.
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
            lane = self._stores if is_store else self._loads
            try:
                lane.put(lambda: self._run(job_id, device_spec, slot_spec, is_store))
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
            # As text: a log that keeps its records would keep the frames of this job with them.
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
        """Copy, and return the number of bytes copied."""
        copier = self._copier
        assert copier is not None
        transfers = plan_transfer(
            Asked.take(device_spec, slot_spec),
            is_store=is_store,
            blocks_per_chunk=copier.blocks_per_chunk,
            num_slots=copier.num_slots,
            num_blocks_of_group=copier.num_blocks_of_group,
        )
        if is_store:
            return sum(map(copier.store, transfers))
        return sum(map(copier.load, transfers))
