"""Drives one tier as an engine would, and holds it to what the contract says of every call.

Needs no pytest: what a tier does wrong is said in an `AssertionError`.
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
    LookupResult,
    OffloadingEvent,
    OffloadKey,
    ReqContext,
    ScheduleEndContext,
    make_offload_key,
)
from kvtier.testing.job_ledger import JobLedger, Report, demand
from kvtier.testing.payload import payload_of
from kvtier.testing.sample_spec import sample_spec
from kvtier.testing.slots import LentSlots
from kvtier.tiering.base import JobNotBegun, JobResult, SecondaryTierManager, TransferJob

if TYPE_CHECKING:
    from types import TracebackType

    from kvtier.base import OffloadingSpec

__all__ = ["TierHarness"]

_TIER_ANSWERS = (LookupResult.HIT, LookupResult.MISS, LookupResult.RETRY)
_EMPTY_IF = {
    "get_finished_jobs": "nothing has ended",
    "take_events": "nothing has come or gone",
}
_SET_BY_THE_BASE = ("fingerprint", "rows", "tier_type")
_FIRST_PAUSE_S = 0.0001
_LONGEST_PAUSE_S = 0.005


class TierHarness:
    """One tier, the slots above it, and the engine's side of the contract. A context manager.

    The payload of every block is a function of its key. Whenever a job is reported, it is checked
    that the job exists and was not reported before, that a load has brought exactly the bytes of
    each block that it claims, and that a store has left its slots alone. The slots of a reported
    job are poisoned and watched until the end.

    On leaving, every job must have been reported, and no free slot may have changed.
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
        """`row_bytes`: a multiple of the page size, as the rows of a real primary tier are.
        `namespace`: that of an earlier harness, to find its blocks; None: one of its own."""
        if row_bytes < 1 or row_bytes % mmap.PAGESIZE:
            raise ValueError(
                f"row_bytes = {row_bytes}: give a multiple of the page size, {mmap.PAGESIZE} bytes"
            )
        self.namespace = uuid.uuid4().hex if namespace is None else namespace
        self.patience_s = patience_s
        """How long anything may take before it is taken for a hang."""
        self.spec = sample_spec(row_bytes, num_slots, self.namespace, engine_id=uuid.uuid4().hex)
        self.fingerprint = self.spec.config.fingerprint()
        """What jobs carry from now on."""
        self.slots = LentSlots(num_slots, row_bytes)
        self.ledger = JobLedger(self.slots)
        self.events: list[OffloadingEvent] = []
        """All that the tier has emitted."""
        self.longest_call_s: dict[str, float] = {}
        """Per method, the longest that a call on the scheduler's thread took."""
        self._num_polls = 0
        self._num_jobs = 0
        self._num_requests = 0
        self._is_drained = False
        self._is_shut_down = False
        self.tier = _usable(make_tier(self.spec, self.slots.view))

    # --- blocks --------------------------------------------------------------------------------

    @staticmethod
    def keys(count: int, start: int = 0, group_idx: int = 0) -> list[OffloadKey]:
        """The keys of so many blocks in prompt order; always the same ones."""
        numbers = range(start, start + count)
        return [make_offload_key(b"block-%026d" % number, group_idx) for number in numbers]

    def hits(self, keys: Iterable[OffloadKey]) -> set[OffloadKey]:
        """Those of the keys that the tier says it has."""
        return {key for key in keys if self.look_up(key) is LookupResult.HIT}

    def look_up(self, key: OffloadKey) -> LookupResult:
        """Ask until the tier knows."""
        return self._ask_until_known(lambda request: [self.call("lookup", key, request)])[0]

    def look_up_batch(self, keys: Sequence[OffloadKey]) -> list[LookupResult]:
        """Ask until the tier knows, up to the first block that it does not have."""
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
        """Submit a load of these blocks into poisoned slots."""
        return self._submit(self._new_job(keys, is_promotion=True))

    def wait_for(self, *jobs: TransferJob) -> list[Report]:
        """Step until these jobs are reported."""
        reports = self.ledger.reports
        self._step_until(
            lambda: all(job.job_id in reports for job in jobs),
            lambda: (
                f"{self.ledger.describe_unreported()} not reported within {self.patience_s} s. "
                "Every submitted job is reported exactly once, also when there was nothing to do, "
                "when there was no room, and when it failed"
            ),
        )
        return [reports[job.job_id] for job in jobs]

    def step(self) -> None:
        """One step of the engine: poll the tier once, and tell it that the step has ended."""
        self._num_polls += 1
        for result in self._call_for_several("get_finished_jobs"):
            self.ledger.accept(result, self._num_polls)
        self.events += self._call_for_several("take_events")
        self.call("on_schedule_end", ScheduleEndContext())

    def _new_job(self, keys: Sequence[OffloadKey], is_promotion: bool) -> TransferJob:
        self._step_until(
            lambda: self.slots.num_free >= len(keys),
            lambda: f"{self.ledger.describe_unreported()} not reported, and there is no free slot",
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
            # As good as a report: it must not come again, and the slots are not the tier's.
            self.ledger.accept(JobResult(job.job_id, False), self._num_polls)
        # A request may end while its jobs are under way, and most do.
        self.call("on_request_finished", job.req_context)
        return job

    # --- calls on the scheduler's thread -------------------------------------------------------

    def call(self, method: str, *args: Any) -> Any:
        """Call a method of the tier. Its time is noted, and it must not raise anything but
        `JobNotBegun`."""
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
        """A request that the tier has been told of."""
        self._num_requests += 1
        request = ReqContext(f"request-{self._num_requests}")
        self.call("on_new_request", request)
        return request

    def begin_epoch(self, fingerprint: bytes) -> None:
        """Later jobs carry this fingerprint, and the tier looks up in it."""
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
        """Let the tier end its jobs, and take all results by polling once."""
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
        """`drain_jobs` and `shutdown` may wait, so they have a thread; but not for ever."""
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
        """Nobody has written into a slot that was not theirs."""
        touched = self.slots.touched()
        demand(
            not touched,
            f"slots {touched} changed while no job had them. A tier writes into the slots of its "
            "loads alone, and not after it has reported them",
        )

    def release_slots(self) -> list[str]:
        """Unmap the slots. Answers who still holds a part of them."""
        with suppress(BufferError):  # an array was made of it; that one is named below
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
                with suppress(AssertionError):  # one complaint is enough
                    self.shut_down()
            if not self.slots.is_closed:
                self.release_slots()


def _usable(tier: object) -> SecondaryTierManager:
    """What `make_tier` has returned, if it is a tier at all."""
    if not isinstance(tier, SecondaryTierManager):
        raise AssertionError(
            f"make_tier returned {tier!r}: let it return the tier, which is made by a class "
            "derived from SecondaryTierManager"
        )
    missing = [name for name in _SET_BY_THE_BASE if not hasattr(tier, name)]
    if missing:
        with suppress(Exception):  # it may have begun something
            tier.shutdown()
        raise AssertionError(
            f"{type(tier).__name__} has no {' and no '.join(missing)}: call "
            "super().__init__(offloading_spec, primary_kv_view, tier_type) first in its constructor"
        )
    return tier
