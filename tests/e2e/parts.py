"""Parts of an engine that misbehave by seed, put in place by configuration."""

from __future__ import annotations

import os
import uuid
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace
from random import Random
from typing import TYPE_CHECKING, NamedTuple

from kvtier.base import (
    CanonicalKVCaches,
    GPULoadStoreSpec,
    LoadStoreSpec,
    OffloadingWorker,
    TransferResult,
)
from kvtier.cpu.host_worker import HostOffloadingWorker
from kvtier.cpu.spec import CPUOffloadingSpec
from kvtier.testing import ExampleBacking, FaultSchedule, FaultyTier
from kvtier.tiering.base import JobResult, TransferJob
from kvtier.tiering.example.manager import ExampleSecondaryTierManager
from kvtier.tiering.spec import TieringOffloadingSpec
from tests.e2e.workload import WorkerSetup

if TYPE_CHECKING:
    from kvtier.base import OffloadingSpec

_NOT_A_NUMBER = 255
"""A block of such bytes is floats that are not numbers: it spoils everything computed with it."""


class VirtualClock:
    """A clock that the life moves."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


# --- below host memory --------------------------------------------------------------------------


class FaultyExampleTier(FaultyTier):
    """The example tier with faults drawn from the seed. It counts jobs it has not reported."""

    def __init__(
        self,
        offloading_spec: OffloadingSpec,
        primary_kv_view: memoryview,
        tier_type: str,
        max_blocks: int,
        fault_seed: int,
        fault_rates: Mapping[str, float],
        simulate_async: bool = False,
        latency_ms: float = 0,
    ) -> None:
        self.example = ExampleSecondaryTierManager(
            offloading_spec,
            primary_kv_view,
            tier_type,
            max_blocks=max_blocks,
            simulate_async=simulate_async,
            latency_ms=latency_ms,
        )
        schedule = FaultSchedule(fault_seed, fault_rates, delay_polls=(1, 10))
        super().__init__(self.example, schedule, backing=ExampleBacking(self.example))
        self.unreported: dict[int, TransferJob] = {}
        self._is_timed = simulate_async

    def submit_store(self, job: TransferJob) -> None:
        self.unreported[job.job_id] = job
        super().submit_store(job)

    def submit_load(self, job: TransferJob) -> None:
        self.unreported[job.job_id] = job
        super().submit_load(job)

    def get_finished_jobs(self) -> Iterable[JobResult]:
        results = super().get_finished_jobs()
        return list(map(self._told, results)) if isinstance(results, list) else results

    def _told(self, result: JobResult) -> JobResult:
        if type(result) is not JobResult:
            return result
        self.unreported.pop(result.job_id, None)
        # Measured times would make the life depend on the speed of this machine.
        return result if self._is_timed else replace(result, transfer_time=None)

    def heal(self) -> None:
        """Stop all faults, and release jobs that hang."""
        self.schedule = FaultSchedule()
        self.recover()


# --- between device and host memory -------------------------------------------------------------


class _Copy(NamedTuple):
    due: int
    """The poll at which it is made, unless a wait comes first."""
    device: GPULoadStoreSpec
    slots: LoadStoreSpec
    is_store: bool
    fails: bool


class StepwiseWorker(OffloadingWorker):
    """Makes each copy at a poll drawn from the seed, or when it is waited for. Code that relies on
    a copy without waiting always reads wrong bytes.

    Copies that are due at the same time are made in any order. A copy that fails copies nothing; a
    failed load leaves garbage on the device.
    """

    def __init__(
        self,
        worker: OffloadingWorker,
        caches: CanonicalKVCaches,
        setup: WorkerSetup,
        chance: Random,
    ) -> None:
        assert isinstance(worker, HostOffloadingWorker)
        self._worker = worker
        self._arrays = [tensor.tensor for tensor in caches.tensors]
        self._setup = setup
        self._chance = chance
        self._num_polls = 0
        self._open: dict[int, _Copy] = {}
        self._finished: list[TransferResult] = []
        self.tally: Counter[str] = Counter()

    @property
    def num_open(self) -> int:
        """Jobs that were accepted and not reported."""
        return len(self._open) + len(self._finished)

    def heal(self) -> None:
        """Stop all failures."""
        self._setup = WorkerSetup(True, self._setup.max_delay, refused=0.0, failed=0.0)

    def submit_store(
        self, job_id: int, src_spec: GPULoadStoreSpec, dst_spec: LoadStoreSpec
    ) -> bool:
        return self._accept(job_id, src_spec, dst_spec, is_store=True)

    def submit_load(self, job_id: int, src_spec: LoadStoreSpec, dst_spec: GPULoadStoreSpec) -> bool:
        return self._accept(job_id, dst_spec, src_spec, is_store=False)

    def _accept(
        self, job_id: int, device: GPULoadStoreSpec, slots: LoadStoreSpec, is_store: bool
    ) -> bool:
        what = "stores" if is_store else "loads"
        if self._chance.random() < self._setup.refused:
            self.tally[f"refused {what}"] += 1
            return False
        due = self._num_polls + self._chance.randint(0, self._setup.max_delay)
        fails = self._chance.random() < self._setup.failed
        self._open[job_id] = _Copy(due, device, slots, is_store, fails)
        return True

    def get_finished(self) -> list[TransferResult]:
        self._num_polls += 1
        due = [job_id for job_id, copy in self._open.items() if copy.due < self._num_polls]
        self._chance.shuffle(due)
        for job_id in due:
            self._make(job_id)
        finished, self._finished = self._finished, []
        return finished

    def wait(self, job_ids: Collection[int]) -> None:
        for job_id in job_ids:
            if job_id in self._open:
                self.tally["copies made because they were waited for"] += 1
                self._make(job_id)

    def _make(self, job_id: int) -> None:
        copy = self._open.pop(job_id)
        what = "stores" if copy.is_store else "loads"
        if copy.fails:
            self.tally[f"failed {what}"] += 1
            if not copy.is_store:
                for array in self._arrays:
                    array[copy.device.block_ids] = _NOT_A_NUMBER
            self._finished.append(TransferResult(job_id, success=False))
            return
        # Done here at once; the real worker does it on a thread of its own.
        self._worker._run(job_id, copy.device, copy.slots, copy.is_store)
        self._finished += self._worker.get_finished()

    def shutdown(self) -> None:
        self._worker.shutdown()


def _unreliable(
    spec: CPUOffloadingSpec, worker: OffloadingWorker, caches: CanonicalKVCaches
) -> OffloadingWorker:
    setup, seed = spec.config.engine_config
    if not setup.is_stepwise:
        return worker
    rank = spec.config.parallel.rank
    return StepwiseWorker(worker, caches, setup, Random(f"rank {rank} of life {seed}"))


class UnreliableCPUSpec(CPUOffloadingSpec):
    """Host memory alone. `engine_config`: a `WorkerSetup`, and the seed of the life."""

    def get_worker(self, kv_caches: CanonicalKVCaches) -> OffloadingWorker:  # type: ignore[override]
        return _unreliable(self, super().get_worker(kv_caches), kv_caches)


class UnreliableTieringSpec(TieringOffloadingSpec):
    """Host memory with tiers below."""

    def get_worker(self, kv_caches: CanonicalKVCaches) -> OffloadingWorker:  # type: ignore[override]
        return _unreliable(self, super().get_worker(kv_caches), kv_caches)


def new_engine_id() -> str:
    """An id that is unique on this machine."""
    return f"e2e-{os.getpid()}-{uuid.uuid4().hex[:12]}"
