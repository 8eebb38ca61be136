"""An engine whose copies between host memory and the device can be made to fail, or to wait."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from kvtier.base import GPULoadStoreSpec, LoadStoreSpec, OffloadingWorker, TransferResult
from tests.e2e.vllm.scenarios.engine import Engine

if TYPE_CHECKING:
    from kvtier.integrations.vllm.worker import WorkerAdapter

WITH_FAULTS = {
    "spec_name": "FaultySpec",
    "spec_module_path": "tests.e2e.vllm.scenarios.faulty_transfers",
}
"""Keys of kvtier's options for such an engine."""


@dataclass
class Faults:
    """The faults of the engine in this process."""

    failing_loads: int = 0
    """Number of next loads that copy nothing and fail."""
    failing_stores: int = 0
    are_held: bool = False
    """True: copies do not begin until this is False, or until they are waited for."""
    held: dict[int, tuple[bool, Any, Any]] = field(default_factory=dict)
    """Copies that have not begun, by job: whether it is a load, source and target."""


FAULTS = Faults()


class FaultyWorker(OffloadingWorker):
    """Wraps a worker. A failing transfer copies nothing: the target keeps its former content."""

    def __init__(self, worker: OffloadingWorker) -> None:
        self._worker = worker
        self._held: dict[int, tuple[bool, Any, Any]] = FAULTS.held
        self._failed: list[TransferResult] = []

    def submit_store(
        self, job_id: int, src_spec: GPULoadStoreSpec, dst_spec: LoadStoreSpec
    ) -> bool:
        if FAULTS.failing_stores:
            FAULTS.failing_stores -= 1
            self._failed.append(TransferResult(job_id, success=False))
            return True
        self._held[job_id] = False, src_spec, dst_spec
        return self._begin_unless_held()

    def submit_load(self, job_id: int, src_spec: LoadStoreSpec, dst_spec: GPULoadStoreSpec) -> bool:
        if FAULTS.failing_loads:
            FAULTS.failing_loads -= 1
            self._failed.append(TransferResult(job_id, success=False))
            return True
        self._held[job_id] = True, src_spec, dst_spec
        return self._begin_unless_held()

    def get_finished(self) -> list[TransferResult]:
        self._begin_unless_held()
        failed, self._failed = self._failed, []
        return failed + self._worker.get_finished()

    def wait(self, job_ids: Collection[int]) -> None:
        self._begin(set(job_ids) & set(self._held))
        self._worker.wait(job_ids)

    def shutdown(self) -> None:
        self._worker.shutdown()

    def _begin_unless_held(self) -> bool:
        return FAULTS.are_held or self._begin(list(self._held))

    def _begin(self, job_ids: Collection[int]) -> bool:
        accepted = True
        for job_id in job_ids:
            is_load, source, target = self._held.pop(job_id)
            submit = self._worker.submit_load if is_load else self._worker.submit_store
            accepted = submit(job_id, source, target) and accepted
        return accepted


class FaultyEngine(Engine):
    """An engine with such a worker, controlled by `FAULTS`."""

    def under_way(self) -> list[str]:
        """The kinds of the copies that are held."""
        return ["load" if is_load else "store" for is_load, _, _ in FAULTS.held.values()]

    def set_faults(self, **faults: Any) -> None:
        for name, value in faults.items():
            assert hasattr(FAULTS, name)
            setattr(FAULTS, name, value)


def __getattr__(name: str) -> object:
    # Made when vLLM loads it by name: tests import this module without vLLM.
    if name != "FaultySpec":
        raise AttributeError(name)
    from kvtier.integrations.vllm.spec import KVTierOffloadingSpec

    class FaultySpec(KVTierOffloadingSpec):
        def get_worker(self, kv_caches: Any) -> WorkerAdapter:
            adapter = super().get_worker(kv_caches)
            if not isinstance(adapter.inner, FaultyWorker):
                adapter._worker = FaultyWorker(adapter.inner)
            return adapter

    return FaultySpec
