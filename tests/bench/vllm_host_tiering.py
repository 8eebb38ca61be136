"""Stock vLLM's own tiering on its CPU platform, with a worker from kvtier.

vLLM loads `HostTieringSpec` by name. Manager, tiers, policies and shared memory are vLLM's. The
copies between device and shared memory are kvtier's, since vLLM's worker needs CUDA.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from vllm.v1.kv_offload.base import OffloadingWorker, TransferResult
from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion
from vllm.v1.kv_offload.tiering.example.manager import ExampleSecondaryTierManager
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec

from kvtier.cpu.common import CPULoadStoreSpec
from kvtier.cpu.host_worker import HostOffloadingWorker
from kvtier.integrations.vllm.worker import gpu_spec_from_vllm, kv_caches_from_vllm
from tests.bench.vllm_meters import UNTIMED


class HostRegion:
    """vLLM's shared memory, with the methods that kvtier's worker expects of a region."""

    def __init__(self, region: Any, cpu_page_size: int) -> None:
        self._region = region
        self.num_blocks = region.num_chunks
        self.cpu_page_size = cpu_page_size

    def require_cell_fits(self, page_bytes: Sequence[int], blocks_per_chunk: int) -> None:
        """Nothing to check: vLLM sized the region for these caches."""

    def create_next_worker_view(self, page_bytes: int) -> NDArray[np.uint8]:
        view: NDArray[Any] = self._region.create_next_worker_view(page_bytes).numpy()
        return view.view(np.uint8)

    def cleanup(self) -> None:
        self._region.cleanup()


class HostWorker(OffloadingWorker):  # type: ignore[misc]
    """kvtier's worker for caches in host memory, behind vLLM's interface."""

    def __init__(self, worker: HostOffloadingWorker) -> None:
        self._worker = worker

    def submit_store(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        slots = CPULoadStoreSpec(dst_spec.chunk_ids)
        return self._worker.submit_store(job_id, gpu_spec_from_vllm(src_spec), slots)

    def submit_load(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        slots = CPULoadStoreSpec(src_spec.chunk_ids)
        return self._worker.submit_load(job_id, slots, gpu_spec_from_vllm(dst_spec))

    def get_finished(self) -> list[Any]:
        return [
            TransferResult(
                job_id=result.job_id,
                success=result.success,
                transfer_size=result.transfer_size,
                transfer_time=result.transfer_time,
            )
            for result in self._worker.get_finished()
        ]

    def wait(self, job_ids: Collection[int]) -> None:
        self._worker.wait(job_ids)

    def shutdown(self) -> None:
        self._worker.shutdown()


class HostTieringSpec(TieringOffloadingSpec):  # type: ignore[misc]
    """vLLM's tiering with that worker."""

    def get_worker(self, kv_caches: Any) -> HostWorker:
        region = SharedOffloadRegion(
            engine_id=self.config.engine_id,
            num_chunks=self.num_chunks,
            rank=self.config.parallel.rank,
            kv_bytes_per_chunk=self.kv_bytes_per_chunk,
            cpu_page_size=self.cpu_page_size_per_worker,
        )
        host_region: Any = HostRegion(region, self.cpu_page_size_per_worker)
        return HostWorker(
            HostOffloadingWorker(kv_caches_from_vllm(kv_caches), host_region, self.blocks_per_chunk)
        )


class KeepingTier(ExampleSecondaryTierManager):  # type: ignore[misc]
    """vLLM's example tier records names and moves no bytes, so its loads return wrong bytes.

    This tier also moves the bytes. That time is not counted: a real tier has threads for it.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._rows = np.asarray(self._primary_kv_view).view(np.uint8)
        self._kept: dict[bytes, NDArray[np.uint8]] = {}

    def submit_store(self, job_metadata: Any) -> None:
        super().submit_store(job_metadata)
        with UNTIMED.here():
            for key, row in zip(job_metadata.keys, job_metadata.chunk_ids, strict=True):
                self._kept[key] = self._rows[row].copy()

    def submit_load(self, job_metadata: Any) -> None:
        super().submit_load(job_metadata)
        with UNTIMED.here():
            for key, row in zip(job_metadata.keys, job_metadata.chunk_ids, strict=True):
                self._rows[row] = self._kept[key]

    def shutdown(self) -> None:
        del self._rows
        super().shutdown()
