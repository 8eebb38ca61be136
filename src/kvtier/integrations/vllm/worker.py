"""The adapter between vLLM's model runner and a kvtier worker.

vLLM's connector asserts that every transfer succeeds. So a failed transfer is handled as follows:

- A **store**: the worker records its slots as poisoned on the notice board, then reports the store
  as done. The scheduler side finds the record before the blocks become readable, and drops the
  blocks (`manager_state.StoreFailures`).
- A **load** is tried again, at most twice. If it still fails, `KVTierConnector` makes vLLM compute
  the load's device blocks. vLLM's own connector cannot do that: there `get_finished` raises, and
  the engine stops with the reason. vLLM never uses the device blocks of a failed load as loaded
  blocks.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection
from dataclasses import dataclass

from kvtier.base import (
    BlockIDsLoadStoreSpec,
    CanonicalKVCacheRef,
    CanonicalKVCaches,
    CanonicalKVCacheTensor,
    GPULoadStoreSpec,
    LoadStoreSpec,
    OffloadingWorker,
    TransferResult,
)
from kvtier.cpu.notice_board import NoticeBoard
from kvtier.integrations.vllm import vllm_api

logger = logging.getLogger(__name__)

_MAX_RETRIES = 2


class TransferFailedError(RuntimeError):
    """A copy from host memory to the device failed, and vLLM cannot compute the blocks instead."""


def kv_caches_from_vllm(kv_caches: vllm_api.CanonicalKVCaches) -> CanonicalKVCaches:
    """The same caches in kvtier's types. The tensors themselves are shared."""
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
    """The same device blocks in kvtier's type."""
    return GPULoadStoreSpec(spec.block_ids, spec.group_sizes, spec.block_indices)


@dataclass(slots=True)
class _Load:
    """A load that has not ended."""

    src_spec: LoadStoreSpec
    dst_spec: GPULoadStoreSpec
    retries_left: int = _MAX_RETRIES


@dataclass(frozen=True, slots=True)
class LostLoad:
    """A load that has failed after all retries."""

    job_id: int
    device_blocks: frozenset[int]
    """All device blocks of the load. Their content is unknown."""


class WorkerAdapter(vllm_api.OffloadingWorker):
    """A kvtier worker with the interface of vLLM's. Called on the main thread of a worker
    process."""

    def __init__(
        self,
        worker: OffloadingWorker,
        board: NoticeBoard,
        rank: int,
        *,
        fatal_because: str | None,
        flush: Callable[[], None] | None,
    ) -> None:
        """`fatal_because`: why vLLM cannot compute the blocks of a load that has failed after all
        retries, and the remedy. For such a load, `get_finished` raises `TransferFailedError` with
        this text. None: vLLM can compute the blocks, and the caller takes such loads with
        `take_lost_loads` after every `get_finished`.

        `flush`: hands all jobs to the device. Called at the end of every step, because before vLLM
        sleeps, it waits for the device and then unmaps the caches. None: not needed.
        """
        self._flush = flush
        self._worker = worker
        self._board = board
        self._rank = rank
        self._fatal_because = fatal_because
        self._loads: dict[int, _Load] = {}
        self._stores: dict[int, LoadStoreSpec] = {}
        self._refused: list[int] = []
        """Jobs that the worker did not accept. They count as failed."""
        self._lost: list[LostLoad] = []

    @property
    def inner(self) -> OffloadingWorker:
        """The kvtier worker."""
        return self._worker

    def submit_store(
        self, job_id: int, src_spec: vllm_api.GPULoadStoreSpec, dst_spec: LoadStoreSpec
    ) -> bool:
        self._stores[job_id] = dst_spec
        if not self._worker.submit_store(job_id, gpu_spec_from_vllm(src_spec), dst_spec):
            self._refused.append(job_id)
        return True

    def submit_load(
        self, job_id: int, src_spec: LoadStoreSpec, dst_spec: vllm_api.GPULoadStoreSpec
    ) -> bool:
        load = self._loads[job_id] = _Load(src_spec, gpu_spec_from_vllm(dst_spec))
        self._submit(job_id, load)
        return True

    def get_finished(self) -> list[vllm_api.TransferResult]:
        if self._flush is not None and (self._loads or self._stores):
            self._flush()
        refused, self._refused = self._refused, []
        ended = self._worker.get_finished()
        ended += [TransferResult(job_id, success=False) for job_id in refused]
        results = []
        for result in ended:
            load = self._loads.get(result.job_id)
            if result.success:
                self._loads.pop(result.job_id, None)
                self._stores.pop(result.job_id, None)
            elif load is None:
                self._poison(result.job_id)
            elif load.retries_left:
                load.retries_left -= 1
                self._submit(result.job_id, load)
                continue
            else:
                self._lose(result.job_id)
            results.append(
                vllm_api.TransferResult(
                    job_id=result.job_id,
                    success=True,
                    transfer_size=result.transfer_size if result.success else None,
                    transfer_time=result.transfer_time if result.success else None,
                )
            )
        return results

    def take_lost_loads(self) -> list[LostLoad]:
        """The loads that have failed after all retries, since the last call."""
        lost, self._lost = self._lost, []
        return lost

    def wait(self, job_ids: Collection[int]) -> None:
        """Return when these jobs have ended and will not be tried again."""
        for job_id in job_ids:
            load = self._loads.get(job_id)
            if load is not None:
                # The load's device blocks may belong to another request as soon as this returns.
                load.retries_left = 0
        self._worker.wait(job_ids)

    def shutdown(self) -> None:
        self._worker.shutdown()

    def _submit(self, job_id: int, load: _Load) -> None:
        if not self._worker.submit_load(job_id, load.src_spec, load.dst_spec):
            self._refused.append(job_id)

    def _poison(self, job_id: int) -> None:
        spec = self._stores.pop(job_id)
        assert isinstance(spec, BlockIDsLoadStoreSpec)
        self._board.poison(self._rank, spec.block_ids.tolist())
        logger.error(
            "a store of %d blocks to host memory failed on rank %d: the blocks are dropped, and "
            "will be computed again when they are needed",
            len(spec.block_ids),
            self._rank,
        )

    def _lose(self, job_id: int) -> None:
        load = self._loads.pop(job_id)
        what = (
            f"a load of {len(load.dst_spec.block_ids)} device blocks from host memory failed "
            f"{1 + _MAX_RETRIES} times on rank {self._rank}"
        )
        if self._fatal_because is not None:
            raise TransferFailedError(
                f"{what}. The reason is in the log of this process. The engine stops here rather "
                f"than use wrong bytes: {self._fatal_because}"
            )
        logger.error("%s: vLLM computes these blocks instead", what)
        self._lost.append(LostLoad(job_id, frozenset(load.dst_spec.block_ids.tolist())))
