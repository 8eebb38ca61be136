"""vLLM's model runner on one side, a kvtier worker on the other: types are mapped, nothing else.

A failed transfer. vLLM's connector has no way to be told of one: it asserts that every transfer
succeeded, and a result reported as a success makes the scheduler, which may be another process,
declare a host block readable (store) or a device block computed (load). So a failed transfer
raises here, in both directions, with what happened: the engine stops, and wrong bytes are never
used. Host memory copies do not fail in practice, short of a defect.
"""

from __future__ import annotations

from collections.abc import Collection

from kvtier.base import (
    CanonicalKVCacheRef,
    CanonicalKVCaches,
    CanonicalKVCacheTensor,
    GPULoadStoreSpec,
    LoadStoreSpec,
    OffloadingWorker,
)
from kvtier.integrations.vllm import vllm_api


class TransferFailedError(RuntimeError):
    """A copy between the device and host memory failed, and vLLM cannot be told."""


def kv_caches_from_vllm(kv_caches: vllm_api.CanonicalKVCaches) -> CanonicalKVCaches:
    """The same caches in kvtier's terms. The tensors themselves are shared."""
    return CanonicalKVCaches(
        tensors=[
            CanonicalKVCacheTensor(entry.tensor, entry.page_size_bytes)
            for entry in kv_caches.tensors
        ],
        group_data_refs=[
            [CanonicalKVCacheRef(ref.tensor_idx, ref.page_size_bytes) for ref in refs]
            for refs in kv_caches.group_data_refs
        ],
    )


def gpu_spec_from_vllm(spec: vllm_api.GPULoadStoreSpec) -> GPULoadStoreSpec:
    """The same device blocks in kvtier's terms."""
    return GPULoadStoreSpec(spec.block_ids, spec.group_sizes, spec.block_indices)


class WorkerAdapter(vllm_api.OffloadingWorker):
    """A kvtier worker, as vLLM's connector wants to see it. Worker process, main thread."""

    def __init__(self, worker: OffloadingWorker) -> None:
        self._worker = worker
        self._load_job_ids: set[int] = set()

    @property
    def inner(self) -> OffloadingWorker:
        """The kvtier worker."""
        return self._worker

    def submit_store(
        self, job_id: int, src_spec: vllm_api.GPULoadStoreSpec, dst_spec: LoadStoreSpec
    ) -> bool:
        if not self._worker.submit_store(job_id, gpu_spec_from_vllm(src_spec), dst_spec):
            raise TransferFailedError(f"job {job_id}: a store to {dst_spec} was refused")
        return True

    def submit_load(
        self, job_id: int, src_spec: LoadStoreSpec, dst_spec: vllm_api.GPULoadStoreSpec
    ) -> bool:
        self._load_job_ids.add(job_id)
        if not self._worker.submit_load(job_id, src_spec, gpu_spec_from_vllm(dst_spec)):
            raise TransferFailedError(f"job {job_id}: a load from {src_spec} was refused")
        return True

    def get_finished(self) -> list[vllm_api.TransferResult]:
        results = []
        for result in self._worker.get_finished():
            is_load = result.job_id in self._load_job_ids
            self._load_job_ids.discard(result.job_id)
            if not result.success:
                raise TransferFailedError(
                    f"job {result.job_id}: "
                    f"{'a load from' if is_load else 'a store to'} host memory failed. "
                    "vLLM's offloading connector cannot go on after a failed transfer: the "
                    "engine stops here rather than use wrong bytes. The reason is in the log "
                    "of the worker; restart the engine"
                )
            results.append(
                vllm_api.TransferResult(
                    job_id=result.job_id,
                    success=True,
                    transfer_size=result.transfer_size,
                    transfer_time=result.transfer_time,
                )
            )
        return results

    def wait(self, job_ids: Collection[int]) -> None:
        self._worker.wait(job_ids)

    def shutdown(self) -> None:
        self._worker.shutdown()
