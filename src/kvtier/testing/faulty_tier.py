"""Wraps a tier and injects faults into its calls and jobs."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar, cast

from kvtier import seal
from kvtier.base import (
    Locality,
    LookupResult,
    Medium,
    OffloadingEvent,
    OffloadingStats,
    OffloadKey,
    ReqContext,
    RequestOffloadingContext,
    ScheduleEndContext,
)
from kvtier.testing.damage import BackingBytes
from kvtier.testing.faults import Fault, FaultKind, FaultSchedule, InjectedFault
from kvtier.testing.job_faults import BitRot, JobFaults, random_of
from kvtier.tiering.base import (
    JobResult,
    PrimaryRows,
    SecondaryTierManager,
    TierUsage,
    TransferJob,
)

if TYPE_CHECKING:
    from kvtier.base import OffloadingSpec
    from kvtier.config.namespace import NamespaceDescription
    from kvtier.cpu.policies.tenants import Tenancy
    from kvtier.seal.keys import SealKeys

__all__ = ["FaultyTier"]

T = TypeVar("T")

_GARBAGE: tuple[Any, ...] = ("garbage", None, 7, object())


class FaultyTier(SecondaryTierManager):
    """Passes every call on to `tier`, except where `schedule` has a fault.

    It has no threads: faults happen on the caller's thread. So if `tier` has no threads either,
    every run is the same. The fault of a job is drawn when the job is submitted.
    """

    def __init__(
        self,
        tier: SecondaryTierManager,
        schedule: FaultSchedule | None = None,
        *,
        backing: BackingBytes | None = None,
    ) -> None:
        """`backing`: access to the stored bytes of `tier`; needed for faults of kind `corrupt`."""
        # The base's constructor is not called: the wrapped tier has what that constructor sets up.
        self.tier = tier
        self.schedule = FaultSchedule() if schedule is None else schedule
        if self.schedule.can_have(FaultKind.CORRUPT) and backing is None:
            raise ValueError(
                "the schedule has faults of kind 'corrupt', which need access to the stored bytes: "
                "give `backing`"
            )
        # The base's version is a class method, which cannot reach the wrapped tier.
        self.build_metric_definitions = tier.build_metric_definitions  # type: ignore[method-assign]
        self.injected: list[Fault] = []
        """Every fault so far, in order. `FaultSchedule(faults=injected)` repeats them."""
        self._jobs = JobFaults(tier, self.schedule)
        self._bit_rot = None if backing is None else BitRot(backing)
        self._is_dark = False
        self._answering = threading.Event()
        """Cleared while `drain_jobs`, or a `shutdown` that hangs, must not return."""
        self._answering.set()
        self._is_shut_down = False

    # --- faults that are switched by hand ------------------------------------------------------

    def go_dark(self) -> None:
        """Stop responding until `recover`: lookups are answered RETRY, jobs are accepted but
        neither carried out nor reported, and `drain_jobs` does not return."""
        self._is_dark = True
        self._answering.clear()

    def recover(self) -> None:
        """End `go_dark` and every `hang`: jobs that hung are carried out at the next poll."""
        self._is_dark = False
        self._jobs.let_go()
        self._answering.set()

    # --- lookups -------------------------------------------------------------------------------

    def lookup(self, key: OffloadKey, req_context: ReqContext) -> LookupResult:
        fault = self.schedule.next_fault("lookup")
        if self._is_dark:
            return LookupResult.RETRY
        self._inject(fault, "lookup")
        if fault is not None and fault.kind is FaultKind.DELAY:
            return LookupResult.RETRY
        if fault is not None:
            return cast("LookupResult", _garbage_of(fault))
        return self.tier.lookup(key, req_context)

    def lookup_batch(
        self, keys: Sequence[OffloadKey], req_context: ReqContext
    ) -> Sequence[LookupResult]:
        fault = self.schedule.next_fault("lookup_batch")
        if self._is_dark:
            return [LookupResult.RETRY] * len(keys)
        self._inject(fault, "lookup_batch")
        answers = list(self.tier.lookup_batch(keys, req_context))
        if fault is None:
            return answers
        chance = random_of(fault)
        if fault.kind is FaultKind.DELAY:
            if answers:
                answers[chance.randrange(len(answers))] = LookupResult.RETRY
            return answers
        spoilt: list[Any] = [
            _garbage_of(fault),
            [_garbage_of(fault)] * len(keys),
            [LookupResult.HIT] * (len(keys) + 1),
        ]
        return cast("Sequence[LookupResult]", chance.choice(spoilt))

    # --- jobs ----------------------------------------------------------------------------------

    def submit_store(self, job: TransferJob) -> None:
        self._submit(job, "submit_store")
        if self._bit_rot is not None:
            self._bit_rot.note_stored(job)

    def submit_load(self, job: TransferJob) -> None:
        self._submit(job, "submit_load")

    def _submit(self, job: TransferJob, method: str) -> None:
        fault = self.schedule.next_fault(method)
        if self._is_dark:
            self._jobs.hang(job)
            return
        if fault is not None and fault.kind is FaultKind.CORRUPT:
            damaged = self._bit_rot is not None and self._bit_rot.damage_one_of(job, fault)
            fault = fault if damaged else None
        if fault is not None:
            self.injected.append(fault)
            if fault.kind is FaultKind.RAISE:
                raise InjectedFault(f"{method}: job {job.job_id} was refused")
        self._jobs.submit(job, fault)
        if self._jobs.any_hangs:
            self._answering.clear()
        if fault is not None and fault.kind is FaultKind.RAISE_AFTER:
            raise InjectedFault(f"{method}: job {job.job_id} was accepted all the same")

    def get_finished_jobs(self) -> Iterable[JobResult]:
        fault = self.schedule.next_fault("get_finished_jobs")
        self._jobs.count_poll()
        if self._is_dark:
            return ()
        if fault is not None and fault.kind is FaultKind.RAISE:
            self.injected.append(fault)
            raise InjectedFault("get_finished_jobs")
        results = self._jobs.take_finished()
        return results if fault is None else self._spoilt(results, fault)

    def _spoilt(self, results: list[JobResult], fault: Fault) -> Iterable[JobResult]:
        chance = random_of(fault)
        if fault.kind is FaultKind.REORDER:
            if len(results) < 2:
                return results
            shift = chance.randrange(1, len(results))
            results = results[shift:] + results[:shift]
        elif fault.kind is FaultKind.UNKNOWN_JOB:
            # No engine gives a job a negative id.
            results.insert(chance.randint(0, len(results)), JobResult(-1 - fault.call, True))
        elif chance.random() < 0.5:
            results.insert(chance.randint(0, len(results)), _garbage_of(fault))
        else:
            self._jobs.put_back(results)
            results = _garbage_of(fault)
        self.injected.append(fault)
        return results

    def drain_jobs(self) -> None:
        """Carry out all jobs. The next poll has their results, including those that were late. If
        a job hangs, wait for `recover` or `shutdown`."""
        fault = self.schedule.next_fault("drain_jobs")
        if fault is not None and not self._is_dark:
            self._inject(fault, "drain_jobs")
            self._answering.clear()
        self._answering.wait()
        if not self._is_shut_down:
            self._jobs.drain()

    def shutdown(self) -> None:
        """Shut down the wrapped tier. Jobs that hang are never carried out."""
        fault = self.schedule.next_fault("shutdown")
        if fault is not None:
            self.injected.append(fault)
            if fault.kind is FaultKind.HANG:
                self._answering.clear()
                self._answering.wait()
        self._is_shut_down = True
        self._answering.set()
        self.tier.shutdown()
        if fault is not None and fault.kind is FaultKind.RAISE:
            raise InjectedFault("shutdown")

    # --- calls that can raise, or return garbage -----------------------------------------------

    def touch(self, keys: Collection[OffloadKey], req_context: ReqContext) -> None:
        self._fault_of("touch")
        self.tier.touch(keys, req_context)

    def drop(self, keys: Collection[OffloadKey], req_context: ReqContext) -> None:
        self._fault_of("drop")
        self.tier.drop(keys, req_context)

    def missing(self, keys: Sequence[OffloadKey], req_context: ReqContext) -> Sequence[OffloadKey]:
        return self._answer("missing", lambda: self.tier.missing(keys, req_context))

    def on_new_request(self, req_context: ReqContext) -> RequestOffloadingContext:
        return self._answer("on_new_request", lambda: self.tier.on_new_request(req_context))

    def on_request_finished(self, req_context: ReqContext) -> None:
        self._fault_of("on_request_finished")
        self.tier.on_request_finished(req_context)

    def on_schedule_end(self, context: ScheduleEndContext) -> None:
        self._fault_of("on_schedule_end")
        self.tier.on_schedule_end(context)

    def has_pending_work(self) -> bool:
        return self._answer("has_pending_work", self.tier.has_pending_work)

    def take_events(self) -> Iterable[OffloadingEvent]:
        return self._answer("take_events", self.tier.take_events)

    def has_announcements(self) -> bool:
        return self._answer("has_announcements", self.tier.has_announcements)

    def get_stats(self) -> OffloadingStats | None:
        return self._answer("get_stats", self.tier.get_stats)

    def usage(self) -> TierUsage | None:
        return self._answer("usage", self.tier.usage)

    @property
    def start_remark(self) -> str:
        return self.tier.start_remark

    def describe_namespace(self) -> NamespaceDescription:
        return self.tier.describe_namespace()

    def begin_epoch(self, fingerprint: bytes) -> None:
        self._fault_of("begin_epoch")
        self.tier.begin_epoch(fingerprint)

    def take_seal_failures(self) -> Counter[seal.SealFailure]:
        return self._answer("take_seal_failures", self.tier.take_seal_failures)

    def _answer(self, method: str, ask: Callable[[], T]) -> T:
        fault = self._fault_of(method)
        return ask() if fault is None else cast("T", _garbage_of(fault))

    def _fault_of(self, method: str) -> Fault | None:
        """Return the fault of this call, or None. For methods that have faults even after
        `go_dark`. Raises `InjectedFault` for the kind RAISE."""
        fault = self.schedule.next_fault(method)
        self._inject(fault, method)
        return fault

    def _inject(self, fault: Fault | None, method: str) -> None:
        """Record the fault, if there is one. Raises `InjectedFault` for the kind RAISE."""
        if fault is not None:
            self.injected.append(fault)
            if fault.kind is FaultKind.RAISE:
                raise InjectedFault(method)

    # --- passed on without faults ---------------------------------------------------------------

    def known_keys(self, most: int) -> Sequence[OffloadKey]:
        return self.tier.known_keys(most)

    def keep_note(self, note: bytes) -> None:
        self.tier.keep_note(note)

    def kept_note(self) -> bytes | None:
        return self.tier.kept_note()

    @property
    def capacity_blocks(self) -> int | None:  # type: ignore[override]
        return self.tier.capacity_blocks

    @property
    def keeps_quotas(self) -> bool:  # type: ignore[override]
        return self.tier.keeps_quotas

    def tenancy(self, keys: Mapping[str, Any], num_blocks: int) -> Tenancy | None:
        return self.tier.tenancy(keys, num_blocks)

    @property
    def medium(self) -> Medium | None:  # type: ignore[override]
        return self.tier.medium

    @property
    def locality(self) -> Locality | None:
        return self.tier.locality

    @locality.setter
    def locality(self, locality: Locality | None) -> None:
        self.tier.locality = locality

    @property
    def enable_kv_events(self) -> bool:
        return self.tier.enable_kv_events

    @enable_kv_events.setter
    def enable_kv_events(self, enable: bool) -> None:
        self.tier.enable_kv_events = enable

    @property
    def offloading_spec(self) -> OffloadingSpec:  # type: ignore[override]
        return self.tier.offloading_spec

    @property
    def tier_type(self) -> str:  # type: ignore[override]
        return self.tier.tier_type

    @property
    def rows(self) -> PrimaryRows:  # type: ignore[override]
        return self.tier.rows

    @property
    def fingerprint(self) -> bytes:  # type: ignore[override]
        return self.tier.fingerprint

    @property
    def seal_keys(self) -> SealKeys | None:  # type: ignore[override]
        return self.tier.seal_keys

    def seal_block(self, job: TransferJob, key: OffloadKey, payload: memoryview) -> bytes:
        return self.tier.seal_block(job, key, payload)

    def verify_block(
        self,
        job: TransferJob,
        key: OffloadKey,
        header: bytes | bytearray | memoryview,
        payload: memoryview,
    ) -> bool:
        return self.tier.verify_block(job, key, header, payload)

    def refuse_block(self, failure: seal.SealFailure) -> None:
        self.tier.refuse_block(failure)


def _garbage_of(fault: Fault) -> Any:
    return random_of(fault).choice(_GARBAGE)
