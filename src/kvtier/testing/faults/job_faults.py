"""What becomes of the jobs that a faulty tier is given."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from random import Random
from typing import NamedTuple

from kvtier.base import OffloadKey
from kvtier.testing.faults.held_back import HeldBack
from kvtier.testing.faults.kinds import Fault, FaultKind
from kvtier.testing.faults.schedule import FaultSchedule
from kvtier.tiering.base import JobResult, SecondaryTierManager, TransferJob

__all__ = ["JobFaults", "random_of"]


class _Sentence(NamedTuple):
    """A job, and what is to go wrong with it; None: nothing any more."""

    job: TransferJob
    fault: Fault | None


def random_of(fault: Fault) -> Random:
    """Chance inside one fault: the same whenever the fault is."""
    return Random(f"{fault.method}/{fault.call}/{fault.kind}")


class JobFaults:
    """Passes jobs on to the tier and takes its results, both as their faults have it.

    On the thread of its caller. It never makes up a result: what it reports, the tier has carried
    out.
    """

    def __init__(self, tier: SecondaryTierManager, schedule: FaultSchedule) -> None:
        self._tier = tier
        self._sentenced: dict[int, _Sentence] = {}
        """Jobs that the tier has been given, by id."""
        self._late_jobs: HeldBack[_Sentence] = HeldBack(schedule.clock)
        self._late_results: HeldBack[JobResult] = HeldBack(schedule.clock)
        self._hung: list[TransferJob] = []

    @property
    def any_hangs(self) -> bool:
        """Whether some job will not end before `let_go`."""
        return bool(self._hung)

    def submit(self, job: TransferJob, fault: Fault | None) -> None:
        """Pass a job on: now, later, or not before `let_go`."""
        if fault is not None and fault.kind is FaultKind.HANG:
            self.hang(job)
        elif fault is not None and _is_carried_out_late(fault):
            self._late_jobs.put(_Sentence(job, fault), fault.polls, fault.seconds)
        else:
            self._pass_on(_Sentence(job, fault))

    def hang(self, job: TransferJob) -> None:
        """Keep a job until `let_go`."""
        self._hung.append(job)

    def let_go(self) -> None:
        """Pass on, at the next poll, what hangs."""
        for job in self._hung:
            self._late_jobs.put(_Sentence(job, None))
        self._hung.clear()

    def count_poll(self) -> None:
        """One poll has passed, whether or not it was answered."""
        self._late_jobs.count_poll()
        self._late_results.count_poll()

    def take_finished(self) -> list[JobResult]:
        """What is to be reported now."""
        for sentence in self._late_jobs.take_due():
            self._pass_on(sentence)
        return [*self._harvest(), *self._late_results.take_due()]

    def put_back(self, results: list[JobResult]) -> None:
        """Report these at the next poll instead."""
        for result in results:
            self._late_results.put(result)

    def drain(self) -> None:
        """Let everything end that does not hang; its results come with the next poll."""
        for sentence in self._late_jobs.take_all():
            self._pass_on(sentence)
        self._tier.drain_jobs()
        results = list(self._harvest())
        self.put_back(results + self._late_results.take_all())

    def _pass_on(self, sentence: _Sentence) -> None:
        job, fault = sentence
        if fault is not None:
            self._sentenced[job.job_id] = sentence
        (self._tier.submit_load if job.is_promotion else self._tier.submit_store)(job)

    def _harvest(self) -> Iterator[JobResult]:
        for result in self._tier.get_finished_jobs():
            job, fault = self._sentenced.pop(result.job_id, (None, None))
            if job is None or fault is None:
                yield result
            elif fault.kind is FaultKind.FAIL:
                yield self._as_failure(result, job, fault, spared=())
            elif fault.kind is FaultKind.PARTIAL:
                yield self._as_failure(result, job, fault, spared=_part_of(result, job, fault))
            elif fault.kind is FaultKind.DELAY:
                self._late_results.put(result, fault.polls, fault.seconds)
            elif fault.kind is not FaultKind.DROP:
                yield result
                if fault.kind is FaultKind.DUPLICATE:
                    self._late_results.put(result, fault.polls, fault.seconds)

    def _as_failure(
        self, result: JobResult, job: TransferJob, fault: Fault, spared: Collection[OffloadKey]
    ) -> JobResult:
        if job.is_promotion:
            chance, rows = random_of(fault), self._tier.rows
            for key, block_id in zip(job.keys, job.block_ids.tolist(), strict=True):
                if key not in spared:
                    rows[block_id][:] = chance.randbytes(rows.row_bytes)
        return JobResult(result.job_id, False, spared or None, result.transfer_time)


def _is_carried_out_late(fault: Fault) -> bool:
    if fault.kind is FaultKind.DROP:
        return bool(fault.polls or fault.seconds)
    return fault.kind is FaultKind.LATE_WRITE


def _part_of(result: JobResult, job: TransferJob, fault: Fault) -> list[OffloadKey]:
    """Some, but not all, of the blocks that a job has really moved."""
    moved = list(job.keys if result.success else result.successful_keys or ())
    if len(moved) < 2:
        return []
    chance = random_of(fault)
    chosen = set(chance.sample(range(len(moved)), chance.randint(1, len(moved) - 1)))
    return [key for place, key in enumerate(moved) if place in chosen]
