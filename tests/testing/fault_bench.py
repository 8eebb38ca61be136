"""A faulty tier over one without threads, and slots to see what it does to them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from kvtier.base import OffloadKey, ReqContext, make_offload_key
from kvtier.testing import ExampleBacking, Fault, FaultKind, FaultSchedule, FaultyTier, payload_of
from kvtier.testing.harness import sample_spec
from kvtier.testing.job_ledger import LentSlots
from kvtier.tiering.base import JobResult, TransferJob
from kvtier.tiering.example.manager import ExampleSecondaryTierManager

ROW_BYTES = 4096
REQUEST = ReqContext("request")


class Clock:
    """A clock that tests advance."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def keys_of(*numbers: int) -> list[OffloadKey]:
    return [make_offload_key(bytes([number]) * 32, 0) for number in numbers]


class Bench:
    """Submits jobs with its own slots, and reads them."""

    def __init__(self, schedule: FaultSchedule) -> None:
        self.slots = LentSlots(64, ROW_BYTES)
        spec = sample_spec(ROW_BYTES, 64, "bench", "engine")
        self.example = ExampleSecondaryTierManager(spec, self.slots.view, "example")
        self.tier = FaultyTier(self.example, schedule, backing=ExampleBacking(self.example))
        self.num_jobs = 0

    def new_job(self, keys: Sequence[OffloadKey], is_promotion: bool) -> TransferJob:
        slots = self.slots.lend(len(keys))
        if not is_promotion:
            for key, slot in zip(keys, slots, strict=True):
                self.slots.fill(slot, payload_of(key, ROW_BYTES))
        self.num_jobs += 1
        ids = np.array(slots, dtype=np.int64)
        fingerprint = self.example.fingerprint
        return TransferJob(self.num_jobs, tuple(keys), ids, is_promotion, REQUEST, fingerprint)

    def store(self, *numbers: int) -> TransferJob:
        job = self.new_job(keys_of(*numbers), is_promotion=False)
        self.tier.submit_store(job)
        return job

    def load(self, *numbers: int) -> TransferJob:
        job = self.new_job(keys_of(*numbers), is_promotion=True)
        self.tier.submit_load(job)
        return job

    def keep(self, *numbers: int) -> None:
        """Put blocks into the tier, past the faults."""
        job = self.new_job(keys_of(*numbers), is_promotion=False)
        self.example.submit_store(job)
        list(self.example.get_finished_jobs())

    def poll(self) -> list[JobResult]:
        return list(self.tier.get_finished_jobs())

    def poll_ids(self) -> list[int]:
        return [result.job_id for result in self.poll()]

    def arrived(self, job: TransferJob) -> list[bool]:
        """For each block of a load, True if its slot holds it."""
        return [
            self.slots.content(slot) == payload_of(key, ROW_BYTES)
            for key, slot in zip(job.keys, job.block_ids.tolist(), strict=True)
        ]

    def untouched(self, job: TransferJob) -> bool:
        return all(self.slots.is_poison(slot) for slot in job.block_ids.tolist())


@contextmanager
def bench_with(schedule: FaultSchedule) -> Iterator[Bench]:
    bench = Bench(schedule)
    try:
        yield bench
    finally:
        bench.example.shutdown()
        assert bench.slots.close() == []


@contextmanager
def bench_with_fault(
    method: str, kind: FaultKind, clock: Clock | None = None, **details: Any
) -> Iterator[Bench]:
    """With one fault, at the first call of `method`."""
    faults = [Fault(method, 0, kind, **details)]
    with bench_with(FaultSchedule(faults=faults, clock=clock or Clock())) as bench:
        yield bench
