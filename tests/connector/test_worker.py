"""The order in which a rank starts and waits for transfers."""

from __future__ import annotations

import pickle
from collections.abc import Collection

import pytest

from kvtier.base import (
    CanonicalKVCaches,
    GPULoadStoreSpec,
    LoadStoreSpec,
    OffloadingManager,
    OffloadingSpec,
    OffloadingWorker,
    TransferResult,
)
from kvtier.config import OffloadingParallelConfig
from kvtier.connector.common import ConnectorMetadata, TransferOrder
from kvtier.connector.worker import OffloadingConnectorWorker
from kvtier.cpu.common import CPULoadStoreSpec
from tests.config.sample import make_config


class Diary(OffloadingWorker):
    """A worker that records its calls, and refuses some jobs."""

    def __init__(self) -> None:
        self.entries: list[str] = []
        self.refuses: set[int] = set()

    def submit_store(
        self, job_id: int, src_spec: GPULoadStoreSpec, dst_spec: LoadStoreSpec
    ) -> bool:
        self.entries.append(f"store {job_id}")
        return job_id not in self.refuses

    def submit_load(self, job_id: int, src_spec: LoadStoreSpec, dst_spec: GPULoadStoreSpec) -> bool:
        self.entries.append(f"load {job_id}")
        return job_id not in self.refuses

    def get_finished(self) -> list[TransferResult]:
        return [TransferResult(7, success=True)]

    def wait(self, job_ids: Collection[int]) -> None:
        self.entries.append(f"wait {sorted(job_ids)}")

    def shutdown(self) -> None:
        self.entries.append("shutdown")


class DiarySpec(OffloadingSpec):
    def __init__(self) -> None:
        super().__init__(make_config(parallel=OffloadingParallelConfig(rank=1, world_size=2)))
        self.worker = Diary()

    def get_manager(self) -> OffloadingManager:
        raise NotImplementedError

    def get_worker(self, kv_caches: CanonicalKVCaches) -> OffloadingWorker:
        return self.worker


def order(job_id: int) -> TransferOrder:
    return TransferOrder(job_id, GPULoadStoreSpec([3], [1], [0]), CPULoadStoreSpec([5]))


METADATA = ConnectorMetadata([1], [order(2)], [2], [order(3)])


@pytest.fixture
def spec() -> DiarySpec:
    return DiarySpec()


@pytest.fixture
def worker(spec: DiarySpec) -> OffloadingConnectorWorker:
    worker = OffloadingConnectorWorker(spec)
    worker.register_kv_caches(CanonicalKVCaches([], []))
    return worker


def test_what_was_given_away_is_stored_before_it_is_loaded_into(
    spec: DiarySpec, worker: OffloadingConnectorWorker
) -> None:
    worker.start_kv_transfers(pickle.loads(pickle.dumps(METADATA)))
    assert spec.worker.entries == ["wait [1]", "store 2", "wait [2]", "load 3"]


def test_a_step_with_nothing_to_wait_for_does_not_wait(
    spec: DiarySpec, worker: OffloadingConnectorWorker
) -> None:
    worker.start_kv_transfers(ConnectorMetadata(loads=[order(3)]))
    assert spec.worker.entries == ["load 3"]


def test_refused_jobs_are_reported_as_failed_once(
    spec: DiarySpec, worker: OffloadingConnectorWorker
) -> None:
    spec.worker.refuses = {2, 3}
    worker.start_kv_transfers(METADATA)
    output = worker.get_finished()
    assert output.rank == 1
    assert {(r.job_id, r.success) for r in output.finished} == {(2, False), (3, False), (7, True)}
    assert [r.job_id for r in worker.get_finished().finished] == [7]


def test_what_preempted_blocks_hold_is_saved_first_and_once(
    spec: DiarySpec, worker: OffloadingConnectorWorker
) -> None:
    worker.handle_preemptions(METADATA)
    assert spec.worker.entries == ["wait [1]", "store 2", "wait [2]"]
    worker.start_kv_transfers(METADATA)
    assert spec.worker.entries[3:] == ["load 3"]


def test_nothing_works_before_the_caches_are_known(spec: DiarySpec) -> None:
    worker = OffloadingConnectorWorker(spec)
    with pytest.raises(RuntimeError, match="register_kv_caches"):
        worker.start_kv_transfers(METADATA)
    worker.shutdown()
    assert spec.worker.entries == []
