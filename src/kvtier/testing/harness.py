"""Drives one tier as an engine would, and checks the contract at every call.

Needs no pytest: a tier's mistakes are raised as `AssertionError`.
"""

from __future__ import annotations

import mmap
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from kvtier.base import (
    CanonicalKVCaches,
    LookupResult,
    OffloadingEvent,
    OffloadingManager,
    OffloadingSpec,
    OffloadingWorker,
    OffloadKey,
    ReqContext,
    ScheduleEndContext,
    make_offload_key,
)
from kvtier.config import (
    OffloadingCacheConfig,
    OffloadingConfig,
    OffloadingGroupConfig,
    OffloadingModelConfig,
    OffloadingParallelConfig,
)
from kvtier.testing.job_ledger import JobLedger, LentSlots, Report, demand, payload_of
from kvtier.tiering.base import JobNotBegun, JobResult, SecondaryTierManager, TransferJob

if TYPE_CHECKING:
    from types import TracebackType


__all__ = ["SampleSpec", "TierHarness", "sample_spec"]

_TOKENS_PER_BLOCK = 16
_TIER_ANSWERS = (LookupResult.HIT, LookupResult.MISS, LookupResult.RETRY)
_EMPTY_IF = {
    "get_finished_jobs": "no job has ended",
    "take_events": "no block was stored or removed",
}
_SET_BY_THE_BASE = ("fingerprint", "rows", "tier_type")
_FIRST_PAUSE_S = 0.0001
_LONGEST_PAUSE_S = 0.005


class SampleSpec(OffloadingSpec):
    """A spec that has a configuration but no engine. A tier needs no more than that."""

    def get_manager(self) -> OffloadingManager:
        raise NotImplementedError("a tier under test has no manager above it")

    def get_worker(self, kv_caches: CanonicalKVCaches) -> OffloadingWorker:
        raise NotImplementedError("a tier under test has no worker above it")


def sample_spec(row_bytes: int, num_blocks: int, namespace: str, engine_id: str) -> SampleSpec:
    """Return a spec with two KV-cache groups and rows of `row_bytes`, a multiple of the page size.

    `namespace` identifies the weights, so a tier that outlives the process accepts the spec. Specs
    with the same `namespace` and `row_bytes` have the same fingerprint.
    """
    config = OffloadingConfig(
        groups=tuple(
            OffloadingGroupConfig(_TOKENS_PER_BLOCK, (f"layer.{group_id}",), group_id)
            for group_id in range(2)
        ),
        worker_kv_bytes_per_block=row_bytes,
        engine_id=engine_id,
        model=OffloadingModelConfig(name="sample", dtype="bfloat16"),
        cache=OffloadingCacheConfig(tokens_per_hash=_TOKENS_PER_BLOCK),
        parallel=OffloadingParallelConfig(),
        extra_config={
            "cpu_bytes_to_use": row_bytes * num_blocks,
            "cache_namespace": namespace,
        },
    )
    return SampleSpec(config)


class TierHarness:
    """One tier, the slots above it, and the engine's side of the contract. A context manager.

    The payload of every block is a function of its key. When a job is reported, the harness checks
    that the job exists and was not reported before, that a load wrote exactly the bytes of each
    block that it names, and that a store did not change its slots. Then the harness fills the job's
    slots with a fixed pattern.

    When the context ends, every job must have been reported, and no free slot may have changed.
    """

    def __init__(
        self,
        make_tier: Callable[[OffloadingSpec, memoryview], SecondaryTierManager],
        *,
        num_slots: int = 96,
        row_bytes: int = 8192,
        patience_s: float = 20.0,
        namespace: str | None = None,
    ) -> None:
        """`row_bytes`: a multiple of the page size, like the rows of a real primary tier.
        `namespace`: the namespace of an earlier harness, to find its blocks. None: a new one."""
        if row_bytes < 1 or row_bytes % mmap.PAGESIZE:
            raise ValueError(
                f"row_bytes = {row_bytes}: give a multiple of the page size, {mmap.PAGESIZE} bytes"
            )
        self.namespace = uuid.uuid4().hex if namespace is None else namespace
        self.patience_s = patience_s
        """Seconds to wait for a lookup, a job, `drain_jobs` or `shutdown` before the harness
        fails."""
        self.spec = sample_spec(row_bytes, num_slots, self.namespace, engine_id=uuid.uuid4().hex)
        self.fingerprint = self.spec.config.fingerprint()
        """The fingerprint of new jobs."""
        self.slots = LentSlots(num_slots, row_bytes)
        self.ledger = JobLedger(self.slots)
        self.events: list[OffloadingEvent] = []
        """All events that the tier has returned."""
        self.longest_call_s: dict[str, float] = {}
        """Seconds of the longest call on the scheduler's thread, by method."""
        self._num_polls = 0
        self._num_jobs = 0
        self._num_requests = 0
        self._is_drained = False
        self._is_shut_down = False
        self.tier = _usable(make_tier(self.spec, self.slots.view))

    # --- blocks --------------------------------------------------------------------------------

    @staticmethod
    def keys(count: int, start: int = 0, group_idx: int = 0) -> list[OffloadKey]:
        """Return keys of `count` blocks, in prompt order. Equal arguments give equal keys."""
        numbers = range(start, start + count)
        return [make_offload_key(b"block-%026d" % number, group_idx) for number in numbers]

    def hits(self, keys: Iterable[OffloadKey]) -> set[OffloadKey]:
        """Return the keys that are a HIT."""
        return {key for key in keys if self.look_up(key) is LookupResult.HIT}

    def look_up(self, key: OffloadKey) -> LookupResult:
        """Look up a key. Repeats the lookup at every step while the answer is RETRY."""
        return self._ask_until_known(lambda request: [self.call("lookup", key, request)])[0]

    def look_up_batch(self, keys: Sequence[OffloadKey]) -> list[LookupResult]:
        """Look up keys with `lookup_batch`, which may stop at the first MISS. Repeats the lookup
        at every step while an answer is RETRY."""
        return self._ask_until_known(lambda request: self._call_for_answers(keys, request))

    def _call_for_answers(self, keys: Sequence[OffloadKey], request: ReqContext) -> Any:
        answers = self.call("lookup_batch", keys, request)
        demand(
            isinstance(answers, (list, tuple)),
            f"lookup_batch answered {answers!r}: give a list or a tuple of LookupResults",
        )
        return answers

    def _ask_until_known(self, ask: Callable[[ReqContext], Any]) -> list[LookupResult]:
        request = self.new_request()
        answers: list[LookupResult] = []

        def is_known() -> bool:
            nonlocal answers
            answers = list(ask(request))
            strange = [answer for answer in answers if answer not in _TIER_ANSWERS]
            demand(not strange, f"a lookup was answered {strange}: say HIT, MISS or RETRY")
            return LookupResult.RETRY not in answers

        self._step_until(
            is_known, lambda: f"a lookup was still answered RETRY after {self.patience_s} s"
        )
        self.call("on_request_finished", request)
        return answers

    # --- jobs ----------------------------------------------------------------------------------

    def store(self, keys: Sequence[OffloadKey]) -> TransferJob:
        """Fill slots with these blocks, and submit a store of them."""
        job = self._new_job(keys, is_promotion=False)
        for key, slot in zip(job.keys, job.block_ids.tolist(), strict=True):
            self.slots.fill(slot, payload_of(key, self.slots.row_bytes))
        return self._submit(job)

    def load(self, keys: Sequence[OffloadKey]) -> TransferJob:
        """Submit a load of these blocks into slots that hold the fixed pattern of free slots."""
        return self._submit(self._new_job(keys, is_promotion=True))

    def wait_for(self, *jobs: TransferJob) -> list[Report]:
        """Step until these jobs are reported, and return their reports."""
        reports = self.ledger.reports
        self._step_until(
            lambda: all(job.job_id in reports for job in jobs),
            lambda: (
                f"{self.ledger.describe_unreported()} not reported within {self.patience_s} s. "
                "Report every submitted job exactly once, also when there was nothing to do, when "
                "there was no room, and when the job failed"
            ),
        )
        return [reports[job.job_id] for job in jobs]

    def step(self) -> None:
        """Make one step of the engine: poll the tier once, and end the step."""
        self._num_polls += 1
        for result in self._call_for_several("get_finished_jobs"):
            self.ledger.accept(result, self._num_polls)
        self.events += self._call_for_several("take_events")
        self.call("on_schedule_end", ScheduleEndContext())

    def _new_job(self, keys: Sequence[OffloadKey], is_promotion: bool) -> TransferJob:
        if len(keys) <= self.slots.num_slots:  # otherwise `lend` raises: waiting would not help
            self._step_until(
                lambda: self.slots.num_free >= len(keys),
                lambda: (
                    f"{self.ledger.describe_unreported()} not reported, and {len(keys)} slots are "
                    "not free"
                ),
            )
        block_ids = np.array(self.slots.lend(len(keys)), dtype=np.int64)
        block_ids.flags.writeable = False
        self._num_jobs += 1
        return TransferJob(
            job_id=self._num_jobs,
            keys=tuple(keys),
            block_ids=block_ids,
            is_promotion=is_promotion,
            req_context=self.new_request(),
            fingerprint=self.fingerprint,
        )

    def _submit(self, job: TransferJob) -> TransferJob:
        self.ledger.note_submitted(job)
        try:
            self.call("submit_load" if job.is_promotion else "submit_store", job)
        except JobNotBegun:
            # The exception is the job's report: no other may follow, and the slots are free.
            self.ledger.accept(JobResult(job.job_id, False), self._num_polls)
        # End the request at once: in an engine, most requests end while their jobs are under way.
        self.call("on_request_finished", job.req_context)
        return job

    # --- calls on the scheduler's thread -------------------------------------------------------

    def call(self, method: str, *args: Any) -> Any:
        """Call a method of the tier and time it. It must not raise anything but `JobNotBegun`."""
        started = time.monotonic()
        try:
            return getattr(self.tier, method)(*args)
        except JobNotBegun:
            raise
        except Exception as error:
            raise AssertionError(
                f"{method} raised {error!r}. A tier reports a job as failed, or answers MISS; it "
                "does not raise into the engine"
            ) from error
        finally:
            took = time.monotonic() - started
            self.longest_call_s[method] = max(took, self.longest_call_s.get(method, 0.0))

    def new_request(self) -> ReqContext:
        """Make a request, tell the tier with `on_new_request`, and return the request."""
        self._num_requests += 1
        request = ReqContext(f"request-{self._num_requests}")
        self.call("on_new_request", request)
        return request

    def begin_epoch(self, fingerprint: bytes) -> None:
        """Begin an epoch: later jobs and lookups use this fingerprint."""
        self.fingerprint = fingerprint
        self.call("begin_epoch", fingerprint)

    def _call_for_several(self, method: str) -> list[Any]:
        answer = self.call(method)
        if not isinstance(answer, Iterable):
            raise AssertionError(
                f"{method} answered {answer!r}: give a list, an empty one if {_EMPTY_IF[method]}"
            )
        return list(answer)

    def _step_until(self, is_done: Callable[[], bool], complaint: Callable[[], str]) -> None:
        deadline = time.monotonic() + self.patience_s
        pause_s = 0.0
        while not is_done():
            demand(time.monotonic() < deadline, complaint())
            self.step()
            time.sleep(pause_s)
            pause_s = min(max(2 * pause_s, _FIRST_PAUSE_S), _LONGEST_PAUSE_S)

    # --- the end -------------------------------------------------------------------------------

    def drain(self) -> None:
        """Drain the tier, and collect all results with one poll."""
        self._is_drained = True
        self.call_in_own_thread("drain_jobs")
        self.step()
        demand(
            not self.ledger.unreported,
            f"{self.ledger.describe_unreported()} not reported by the first poll after "
            "drain_jobs, which waits until every job has ended",
        )

    def shut_down(self) -> None:
        self._is_shut_down = True
        self.call_in_own_thread("shutdown")

    def call_in_own_thread(self, method: str) -> None:
        """Call `drain_jobs` or `shutdown`, which may wait, on a thread with a time limit."""
        errors: list[Exception] = []

        def run() -> None:
            try:
                getattr(self.tier, method)()
            except Exception as error:
                errors.append(error)

        thread = threading.Thread(target=run, name=f"conformance-{method}", daemon=True)
        thread.start()
        thread.join(self.patience_s)
        demand(not thread.is_alive(), f"{method} did not return within {self.patience_s} s")
        for error in errors:
            raise AssertionError(f"{method} raised {error!r}") from error

    def demand_slots_untouched(self) -> None:
        """Raise `AssertionError` if a slot was written to while no job had it."""
        touched = self.slots.touched()
        demand(
            not touched,
            f"slots {touched} changed while no job had them. A tier writes into the slots of its "
            "loads alone, and not after it has reported them",
        )

    def release_slots(self) -> list[str]:
        """Unmap the slots. Returns the objects that still refer to them."""
        with suppress(BufferError):  # an array still refers to a row; `close` names it
            self.tier.rows.release()
        return self.slots.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        try:
            if error is None:
                if not (self._is_drained or self._is_shut_down):
                    self.drain()
                if not self._is_shut_down:
                    self.shut_down()
                if not self.slots.is_closed:
                    self.demand_slots_untouched()
        finally:
            if not self._is_shut_down:
                with suppress(AssertionError):  # the first complaint is the one to show
                    self.shut_down()
            if not self.slots.is_closed:
                self.release_slots()


def _usable(tier: object) -> SecondaryTierManager:
    """Return the tier that `make_tier` returned, or raise `AssertionError` if it is not one."""
    if not isinstance(tier, SecondaryTierManager):
        raise AssertionError(
            f"make_tier returned {tier!r}: return the tier, an instance of a subclass of "
            "SecondaryTierManager"
        )
    missing = [name for name in _SET_BY_THE_BASE if not hasattr(tier, name)]
    if missing:
        with suppress(Exception):  # the constructor may have started threads
            tier.shutdown()
        raise AssertionError(
            f"{type(tier).__name__} has no {' and no '.join(missing)}: call "
            "super().__init__(offloading_spec, primary_kv_view, tier_type) first in its constructor"
        )
    return tier
