"""What all workers of the CPU tier have in common, wherever the caches are."""

from __future__ import annotations

from abc import abstractmethod

from kvtier.base import GPULoadStoreSpec, LoadStoreSpec, OffloadingWorker
from kvtier.cpu.notice_board import NoticeBoard
from kvtier.cpu.shared_offload_region import SharedOffloadRegion

__all__ = ["SlotWorker"]


class SlotWorker(OffloadingWorker):
    """Copies between a rank's caches and its cells in a region that it owns."""

    def __init__(self, region: SharedOffloadRegion) -> None:
        self._region = region

    @property
    def board(self) -> NoticeBoard:
        """Where this rank leaves notes for the scheduler, past the engine. Until `shutdown`."""
        return self._region.board

    def submit_store(
        self, job_id: int, src_spec: GPULoadStoreSpec, dst_spec: LoadStoreSpec
    ) -> bool:
        return self._submit(job_id, src_spec, dst_spec, is_store=True)

    def submit_load(self, job_id: int, src_spec: LoadStoreSpec, dst_spec: GPULoadStoreSpec) -> bool:
        return self._submit(job_id, dst_spec, src_spec, is_store=False)

    @abstractmethod
    def _submit(
        self, job_id: int, device_spec: GPULoadStoreSpec, slot_spec: LoadStoreSpec, is_store: bool
    ) -> bool:
        """Start a job of either direction; as the two above."""
