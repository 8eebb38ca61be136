"""A kvtier spec for vLLM that loads one wrong bit, which a comparison must detect."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from kvtier.base import GPULoadStoreSpec, LoadStoreSpec, OffloadingWorker, TransferResult
from kvtier.integrations.vllm.spec import KVTierOffloadingSpec
from kvtier.integrations.vllm.worker import WorkerAdapter


class CorruptingWorker(OffloadingWorker):
    """Flips the lowest bit of one byte in the first block of every load."""

    def __init__(self, worker: OffloadingWorker, cache: Any) -> None:
        self._worker = worker
        self._cache = cache

    def submit_store(
        self, job_id: int, src_spec: GPULoadStoreSpec, dst_spec: LoadStoreSpec
    ) -> bool:
        return self._worker.submit_store(job_id, src_spec, dst_spec)

    def submit_load(self, job_id: int, src_spec: LoadStoreSpec, dst_spec: GPULoadStoreSpec) -> bool:
        accepted = self._worker.submit_load(job_id, src_spec, dst_spec)
        self._worker.wait({job_id})
        # The last byte of a float32, part of the exponent: the value is doubled or halved.
        self._cache[int(dst_spec.block_ids[0]), 3] ^= 1
        return accepted

    def get_finished(self) -> list[TransferResult]:
        return self._worker.get_finished()

    def wait(self, job_ids: Collection[int]) -> None:
        self._worker.wait(job_ids)

    def shutdown(self) -> None:
        self._worker.shutdown()


class CorruptingSpec(KVTierOffloadingSpec):
    """kvtier's spec with the corrupting worker."""

    def get_worker(self, kv_caches: Any) -> WorkerAdapter:
        adapter = super().get_worker(kv_caches)
        if not isinstance(adapter.inner, CorruptingWorker):
            adapter._worker = CorruptingWorker(adapter.inner, kv_caches.tensors[0].tensor)
        return adapter
