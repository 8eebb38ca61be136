"""The worker half of the connector: one in each worker process, for one rank."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvtier.base import TransferResult
from kvtier.connector.common import ConnectorMetadata, WorkerOutput

if TYPE_CHECKING:
    from kvtier.base import CanonicalKVCaches, OffloadingSpec, OffloadingWorker

__all__ = ["OffloadingConnectorWorker"]


class OffloadingConnectorWorker:
    """Carries out, for one rank, the transfers that the scheduler half has planned. Called on the
    worker's main thread. The order in every step: `start_kv_transfers`, the model, `get_finished`.
    """

    def __init__(self, spec: OffloadingSpec) -> None:
        self._spec = spec
        self._rank = spec.config.parallel.rank
        self._worker: OffloadingWorker | None = None
        self._refused: list[TransferResult] = []
        self._saved: ConnectorMetadata | None = None
        """The metadata of a step whose stores `handle_preemptions` has started already."""

    def register_kv_caches(self, kv_caches: CanonicalKVCaches) -> None:
        """Hand over this rank's device caches. Call it once, before any other method."""
        self._worker = self._spec.get_worker(kv_caches)

    def start_kv_transfers(self, metadata: ConnectorMetadata) -> None:
        """Start the step's transfers; call it before the model runs. Waits only for transfers from
        before a reset, and for stores whose device blocks the model or a load would overwrite."""
        if metadata is not self._saved:
            self._save(metadata)
        self._saved = None
        worker = self._the_worker()
        for job_id, device, offloaded in metadata.loads:
            if not worker.submit_load(job_id, offloaded, device):
                self._refuse(job_id)

    def handle_preemptions(self, metadata: ConnectorMetadata) -> None:
        """Start the step's stores early, and wait for stores whose device blocks were given away.

        For engines that overwrite blocks of preempted requests before they call
        `start_kv_transfers`. That call, with the same metadata, then starts the loads only.
        """
        self._save(metadata)
        self._saved = metadata

    def _save(self, metadata: ConnectorMetadata) -> None:
        worker = self._the_worker()
        if metadata.flush:
            worker.wait(metadata.flush)
        for job_id, device, offloaded in metadata.stores:
            if not worker.submit_store(job_id, device, offloaded):
                self._refuse(job_id)
        if metadata.wait_for:
            worker.wait(metadata.wait_for)

    def get_finished(self) -> WorkerOutput:
        """Transfers that have ended since the last call, failed ones included. Does not wait."""
        refused, self._refused = self._refused, []
        return WorkerOutput(self._rank, [*refused, *self._the_worker().get_finished()])

    def shutdown(self) -> None:
        """End all transfers and release the caches."""
        if self._worker is not None:
            self._worker.shutdown()

    def _refuse(self, job_id: int) -> None:
        # Report it as failed: the scheduler half waits for a report from every rank.
        self._refused.append(TransferResult(job_id, success=False))

    def _the_worker(self) -> OffloadingWorker:
        if self._worker is None:
            raise RuntimeError("call register_kv_caches first")
        return self._worker
