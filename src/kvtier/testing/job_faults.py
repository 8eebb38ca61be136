"""Injects faults into jobs, and damages the blocks that a tier keeps."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from random import Random
from typing import Generic, NamedTuple, TypeVar

from kvtier.base import OffloadKey
from kvtier.testing.damage import BackingBytes, Damage, inflict
from kvtier.testing.faults import Fault, FaultKind, FaultSchedule
from kvtier.tiering.base import JobResult, SecondaryTierManager, TransferJob

__all__ = ["BitRot", "HeldBack", "JobFaults", "random_of"]

T = TypeVar("T")


class HeldBack(Generic[T]):
    """A queue. An item becomes due when a number of polls and a number of seconds have passed."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._polls = 0
        self._held: list[tuple[int, float, T]] = []

    def put(self, item: T, polls: int = 0, seconds: float = 0.0) -> None:
        """Add `item`. By default, it is due at the next `take_due`."""
        self._held.append((self._polls + polls, self._clock() + seconds, item))

    def count_poll(self) -> None:
        """Count one poll."""
        self._polls += 1

    def take_due(self) -> list[T]:
        """Remove and return the items that are due, in order."""
        if not self._held:
            return []
        now = self._clock()
        due, waiting = [], []
        for held in self._held:
            poll, when, item = held
            if poll <= self._polls and when <= now:
                due.append(item)
            else:
                waiting.append(held)
        self._held = waiting
        return due

    def take_all(self) -> list[T]:
        """Remove and return all items, due or not."""
        held, self._held = self._held, []
        return [item for _, _, item in held]


_MAX_REMEMBERED = 64


class BitRot:
    """Damages stored blocks. Remembers the last stored keys, because a swap needs two blocks."""

    def __init__(self, backing: BackingBytes) -> None:
        self._backing = backing
        self._stored: dict[OffloadKey, None] = {}

    def note_stored(self, job: TransferJob) -> None:
        """Remember the keys of a store."""
        self._stored.update(dict.fromkeys(job.keys))
        while len(self._stored) > _MAX_REMEMBERED:
            del self._stored[next(iter(self._stored))]

    def damage_one_of(self, job: TransferJob, fault: Fault) -> bool:
        """Damage one block that the load will read. Returns False if no block of the load is
        stored, or if a swap finds no second block."""
        kept = [key for key in job.keys if self._is_kept(job.fingerprint, key)]
        if not kept:
            return False
        chance = random_of(fault)
        key = chance.choice(kept)
        other: OffloadKey | None = None
        if fault.damage is Damage.SWAP:
            candidates = dict.fromkeys(kept) | self._stored
            others = [k for k in candidates if k != key and self._is_kept(job.fingerprint, k)]
            if not others:
                return False
            other = chance.choice(others)
        seed = chance.getrandbits(32)
        inflict(self._backing, job.fingerprint, key, fault.damage, other=other, seed=seed)
        return True

    def _is_kept(self, fingerprint: bytes, key: OffloadKey) -> bool:
        try:
            self._backing.read(fingerprint, key)
        except KeyError:
            return False
        return True


class _FaultyJob(NamedTuple):
    """A job, and the fault to apply to it, if any."""

    job: TransferJob
    fault: Fault | None


def random_of(fault: Fault) -> Random:
    """Return a random generator that gives the same numbers for the same fault in every run."""
    return Random(f"{fault.method}/{fault.call}/{fault.kind}")


class JobFaults:
    """Passes jobs on to the tier and results back, and applies the faults of the jobs.

    Runs on the caller's thread. It reports only jobs that the tier has carried out.
    """

    def __init__(self, tier: SecondaryTierManager, schedule: FaultSchedule) -> None:
        self._tier = tier
        self._faulty_jobs: dict[int, _FaultyJob] = {}
        """Jobs with a fault, by job id, until the tier reports them."""
        self._late_jobs: HeldBack[_FaultyJob] = HeldBack(schedule.clock)
        self._late_results: HeldBack[JobResult] = HeldBack(schedule.clock)
        self._hung: list[TransferJob] = []

    @property
    def any_hangs(self) -> bool:
        """True while a job hangs: it is not passed on before `let_go`."""
        return bool(self._hung)

    def submit(self, job: TransferJob, fault: Fault | None) -> None:
        """Pass a job on to the tier: now, at a later poll, or not before `let_go`."""
        if fault is not None and fault.kind is FaultKind.HANG:
            self.hang(job)
        elif fault is not None and _is_carried_out_late(fault):
            self._late_jobs.put(_FaultyJob(job, fault), fault.polls, fault.seconds)
        else:
            self._pass_on(_FaultyJob(job, fault))

    def hang(self, job: TransferJob) -> None:
        """Keep a job until `let_go`."""
        self._hung.append(job)

    def let_go(self) -> None:
        """Pass the hanging jobs on to the tier at the next poll."""
        for job in self._hung:
            self._late_jobs.put(_FaultyJob(job, None))
        self._hung.clear()

    def count_poll(self) -> None:
        """Count one poll, whether or not it returned results."""
        self._late_jobs.count_poll()
        self._late_results.count_poll()

    def take_finished(self) -> list[JobResult]:
        """Return the results to report now."""
        for faulty in self._late_jobs.take_due():
            self._pass_on(faulty)
        return [*self._harvest(), *self._late_results.take_due()]

    def put_back(self, results: list[JobResult]) -> None:
        """Report these results at the next poll instead."""
        for result in results:
            self._late_results.put(result)

    def drain(self) -> None:
        """Drain all jobs that do not hang; the next poll reports their results."""
        for faulty in self._late_jobs.take_all():
            self._pass_on(faulty)
        self._tier.drain_jobs()
        results = list(self._harvest())
        self.put_back(results + self._late_results.take_all())

    def _pass_on(self, faulty: _FaultyJob) -> None:
        job, fault = faulty
        if fault is not None:
            self._faulty_jobs[job.job_id] = faulty
        (self._tier.submit_load if job.is_promotion else self._tier.submit_store)(job)

    def _harvest(self) -> Iterator[JobResult]:
        for result in self._tier.get_finished_jobs():
            job, fault = self._faulty_jobs.pop(result.job_id, (None, None))
            if job is None or fault is None:
                yield result
            elif fault.kind is FaultKind.FAIL:
                yield self._as_failure(result, job, fault, successful=())
            elif fault.kind is FaultKind.PARTIAL:
                yield self._as_failure(result, job, fault, successful=_part_of(result, job, fault))
            elif fault.kind is FaultKind.DELAY:
                self._late_results.put(result, fault.polls, fault.seconds)
            elif fault.kind is not FaultKind.DROP:
                yield result
                if fault.kind is FaultKind.DUPLICATE:
                    self._late_results.put(result, fault.polls, fault.seconds)

    def _as_failure(
        self, result: JobResult, job: TransferJob, fault: Fault, successful: Collection[OffloadKey]
    ) -> JobResult:
        if job.is_promotion:
            chance, rows = random_of(fault), self._tier.rows
            for key, block_id in zip(job.keys, job.block_ids.tolist(), strict=True):
                if key not in successful:
                    rows[block_id][:] = chance.randbytes(rows.row_bytes)
        return JobResult(result.job_id, False, successful or None, result.transfer_time)


def _is_carried_out_late(fault: Fault) -> bool:
    if fault.kind is FaultKind.DROP:
        return bool(fault.polls or fault.seconds)
    return fault.kind is FaultKind.LATE_WRITE


def _part_of(result: JobResult, job: TransferJob, fault: Fault) -> list[OffloadKey]:
    """Return some, but not all, of the blocks that a job moved."""
    moved = list(job.keys if result.success else result.successful_keys or ())
    if len(moved) < 2:
        return []
    chance = random_of(fault)
    chosen = set(chance.sample(range(len(moved)), chance.randint(1, len(moved) - 1)))
    return [key for place, key in enumerate(moved) if place in chosen]
