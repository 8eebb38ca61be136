"""vLLM 0.26's own tiering on its CPU platform, for the rehearsal of `tests.bench.gpu_ttft`.

vLLM loads `HostTieringSpec` by name. Only the worker is replaced, since vLLM's needs CUDA. For
other releases, see `tests.bench.vllm_host_tiering`.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
from vllm.v1.kv_offload.base import OffloadingWorker, TransferResult
from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec


class CopyingWorker(OffloadingWorker):  # type: ignore[misc]
    """Copies synchronously, inside the submitting call. One group, one device block per row."""

    def __init__(self, kv_caches: Any, region: Any) -> None:
        (refs,) = kv_caches.group_data_refs
        self._region = region
        self._pages = [
            (
                kv_caches.tensors[ref.tensor_idx].tensor.view(torch.int8),
                region.create_next_view(ref.page_size_bytes),
            )
            for ref in refs
        ]
        self._finished: list[TransferResult] = []

    def submit_store(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        for device, host in self._pages:
            for block, slot in zip(src_spec.block_ids, dst_spec.block_ids, strict=True):
                host[slot].copy_(device[block])
        return self._finish(job_id)

    def submit_load(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        for device, host in self._pages:
            for slot, block in zip(src_spec.block_ids, dst_spec.block_ids, strict=True):
                device[block].copy_(host[slot])
        return self._finish(job_id)

    def _finish(self, job_id: int) -> bool:
        self._finished.append(TransferResult(job_id, success=True))
        return True

    def get_finished(self) -> list[Any]:
        finished, self._finished = self._finished, []
        return finished

    def wait(self, job_ids: Collection[int]) -> None:
        """Nothing to wait for: all copies were synchronous."""

    def shutdown(self) -> None:
        self._pages.clear()
        self._region.cleanup()


class HostTieringSpec(TieringOffloadingSpec):  # type: ignore[misc]
    """vLLM's tiering with that worker."""

    def get_worker(self, kv_caches: Any) -> CopyingWorker:
        region = SharedOffloadRegion(
            engine_id=self.config.engine_id,
            num_blocks=self.num_blocks,
            rank=0,
            kv_bytes_per_block=self.kv_bytes_per_chunk,
            cpu_page_size=self.cpu_page_size_per_worker,
        )
        return CopyingWorker(kv_caches, region)
