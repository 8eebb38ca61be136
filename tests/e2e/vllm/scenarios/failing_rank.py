"""An engine of two ranks, of which the second fails while a file is in a folder."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from kvtier.base import GPULoadStoreSpec, LoadStoreSpec, OffloadingWorker
from tests.e2e.vllm.scenarios.faulty_transfers import FAULTS, FaultyWorker

if TYPE_CHECKING:
    from kvtier.integrations.vllm.worker import WorkerAdapter

WITH_FAILING_RANK = {
    "spec_name": "FailingRankSpec",
    "spec_module_path": "tests.e2e.vllm.scenarios.failing_rank",
}
"""Keys of kvtier's options for such an engine. Its `engine_config` has the folder as `faults`."""
FAILING_RANK = 1

Copies = Literal["loads", "stores"]


class FailingRankWorker(FaultyWorker):
    """Fails copies of a kind while a file with the name of that kind exists."""

    def __init__(self, worker: OffloadingWorker, folder: Path) -> None:
        super().__init__(worker)
        self._folder = folder

    def submit_store(
        self, job_id: int, src_spec: GPULoadStoreSpec, dst_spec: LoadStoreSpec
    ) -> bool:
        FAULTS.failing_stores = self._is_failing("stores")
        return super().submit_store(job_id, src_spec, dst_spec)

    def submit_load(self, job_id: int, src_spec: LoadStoreSpec, dst_spec: GPULoadStoreSpec) -> bool:
        FAULTS.failing_loads = self._is_failing("loads")
        return super().submit_load(job_id, src_spec, dst_spec)

    def _is_failing(self, copies: Copies) -> bool:
        return (self._folder / copies).exists()


def __getattr__(name: str) -> object:
    # Made when vLLM loads it by name: tests import this module without vLLM.
    if name != "FailingRankSpec":
        raise AttributeError(name)
    from kvtier.integrations.vllm.spec import KVTierOffloadingSpec

    class FailingRankSpec(KVTierOffloadingSpec):
        def get_worker(self, kv_caches: Any) -> WorkerAdapter:
            adapter = super().get_worker(kv_caches)
            config = self.kvtier_config
            if config.parallel.rank == FAILING_RANK:
                folder = Path(config.engine_config["faults"])
                adapter._worker = FailingRankWorker(adapter.inner, folder)
            return adapter

    return FailingRankSpec
