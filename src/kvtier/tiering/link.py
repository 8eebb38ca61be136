"""The orchestrator's side of one tier: every call to it, every job at it, and how it is doing.

Whatever a tier does (raise, answer nonsense, report what it was never given, not report at all,
take its time), it ends here: it is counted, logged once for each kind, and cuts the tier off when
it happens too often.
"""

from __future__ import annotations

import logging
import re
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from math import exp, inf
from typing import TYPE_CHECKING, TypeVar

from kvtier.base import (
    LookupResult,
    OffloadingEvent,
    OffloadingStats,
    OffloadPolicy,
    RequestOffloadingContext,
)
from kvtier.seal import SealFailure
from kvtier.tiering.base import JobNotBegun, JobResult, SecondaryTierManager, TransferJob
from kvtier.tiering.guard import Exploration, TransferEstimate
from kvtier.tiering.health import BreakerState, CircuitBreaker, TierSettings
from kvtier.tiering.jobs import Job
from kvtier.tiering.request import TierRequest
from kvtier.tiering.write_policy import WRITE_POLICIES

if TYPE_CHECKING:
    from kvtier.base import OffloadKey, ReqContext

logger = logging.getLogger(__name__)

T = TypeVar("T")

_MISS = LookupResult.MISS
_CLOSED, _OPEN = BreakerState.CLOSED, BreakerState.OPEN

_LONGEST_CALL_S = 0.1
"""A call that takes longer has waited for something, on the scheduler's thread."""

_STORES = object()
"""Stands for all stores where a breaker asks who wants to use the tier."""

_STORE_BYTES = 128 << 20
"""Of one store, at most. The slots of a burst come back little by little then, and the tier has the
next store when one has ended, however long the engine's steps are."""

_SPARE_PINS = 1.5
"""Slots that stores may pin, in multiples of those that keep the tier busy."""
_LEAST_PINNED, _LEAST_PINNED_BYTES = 4, 32 << 20
"""However slow a tier is, its stores may pin so much: smaller ones would make it slower still."""
_NEWEST_SHARE = 0.25
"""How much the newest store counts in how many slots are needed."""
_GIVEN_BACK_FOR_S = 30.0
"""How long a block that was loaded lets the tier's stores pin one more slot, on average."""

_OFFERED_BYTES_PER_S = 128 << 20
"""How much of what requests used, and the tier lacks, it is offered again; one store at a time."""
_FIRST_OFFER_BYTES, _OFFER_S = 16 << 20, 0.25
"""Of the first such store; the next ones are sized so that the tier takes about this long for each.
A new store may have to wait that long behind one."""

_EXPLORE_EVERY_S = 20.0
_LONGEST_EXPLORATION_S, _EXPLORATION_SHARE = 1.0, 0.5
"""How long an exploration may be expected to take, and which part of the time that a load may: it
must not be late, and the tier is there for others."""

_MOST_TOLD = 64
"""How many requests that have ended a tier is told of in one step, after a rest."""
_MAX_UNTOLD = 10_000
_MAX_SHOWN = 200
_MAX_TIMES = 4096
_MAX_EXTRA_RESULTS = 100
"""How many reports of jobs that it was never given are taken at once."""
_CLOCK_SLACK_S = 1.0
_ONLY_RESULTS = frozenset({LookupResult})
_ONLY_KEYS = frozenset({bytes})


class TierLink:
    """One tier, guarded. Scheduler thread only."""

    def __init__(
        self,
        tier: SecondaryTierManager,
        position: int,
        settings: TierSettings,
        max_pinned: int,
        clock: Callable[[], float],
        block_bytes: int,
    ) -> None:
        self.tier = tier
        self._block_bytes = block_bytes
        self.medium, self.locality = tier.medium, tier.locality
        tier.enable_kv_events = settings.enable_kv_events
        self.settings = settings
        self.name = f"tier {position} ({tier.tier_type})"
        self._event_name = event_name(position, tier.tier_type)
        self.prefix = metric_prefix(position, tier.tier_type)
        self.max_pinned = max_pinned
        """Slots that its stores may pin, at the most."""
        self._least_pinned = min(max_pinned, max(_LEAST_PINNED, _LEAST_PINNED_BYTES // block_bytes))
        self._pins_needed = float(max_pinned)
        """Slots that keep the tier busy with stores, with some to spare; all until it is known."""
        self._num_given_back = 0.0
        """Blocks that requests have got from the tier, those of a while ago counting less."""
        self._last_harvest = clock()
        self._most_in_store = max(1, _STORE_BYTES // block_bytes)
        self.write_policy = WRITE_POLICIES[settings.write_policy]()
        self.breaker = CircuitBreaker(settings.breaker, self._tell)
        """Of the tier as a whole: lookups and loads."""
        self.store_breaker = CircuitBreaker(settings.breaker, self._tell_of_stores)
        """Of its stores: a tier that is full or read-only can still be read."""
        self.is_broken = False
        """Whether it must not be used any more, because its namespace could not be changed."""
        self.estimate = TransferEstimate()
        self.exploration = Exploration(
            min(_LONGEST_EXPLORATION_S, settings.load_timeout_s * _EXPLORATION_SHARE)
        )
        self.probes: set[int] = set()
        """Jobs by which it is first measured, while they are under way."""
        self.probed_at = -inf
        """When they began."""
        self.num_pinned = 0
        """Slots that its stores are reading."""
        self.num_loading = 0
        """Slots that its loads are writing."""
        self._clock = clock
        self._jobs: dict[int, Job] = {}
        self._loads: deque[Job] = deque()
        self._stores: deque[Job] = deque()
        """Each in order of deadlines; those that are done leave when they come to the front."""
        self._is_blocking = False
        """Whether a call has kept the scheduler waiting since it was last asked for jobs."""
        self._untold: deque[ReqContext] = deque(maxlen=_MAX_UNTOLD)
        """Requests that have ended while it was resting."""
        self.hears_of_steps = _overrides(tier, "on_schedule_end")
        """Whether the tier does anything when a step ends."""
        self._num_late_blocks = 0
        """Slots of loads that have missed their deadline and were not reported."""
        self._num_late_stores = 0
        """Stores that have missed their deadline and were not reported."""
        self._stores_go_on_until = -inf
        """Up to then no store is late: others have ended, and it may be their turn it waits for."""
        self.backlog: deque[tuple[Sequence[OffloadKey], TierRequest]] = deque()
        """Blocks in the primary tier that are to be stored when its stores need fewer slots, in the
        order in which they came."""
        self.num_waiting = 0
        """Blocks in the backlog."""
        self._offer: Job | None = None
        """The last store of blocks that it lacked."""
        self._next_offer_at = -inf
        self._most_in_offer = max(1, _FIRST_OFFER_BYTES // block_bytes)
        self._names_missing = _overrides(tier, "missing")
        self._explore_at = 0.0
        self._said: set[str] = set()
        self._counters: Counter[str] = Counter()
        self._load_seconds: deque[float] = deque(maxlen=_MAX_TIMES)
        self._store_seconds: deque[float] = deque(maxlen=_MAX_TIMES)

    # --- calls to the tier ----------------------------------------------------------------------

    def is_resting(self, now: float) -> bool:
        """Whether the tier is not called at all: it has kept the scheduler waiting, and the pause
        is not over. Its finished jobs can wait as well."""
        if self.is_broken:
            return not self._jobs
        return self._is_blocking and self.breaker.is_pausing(now)

    @property
    def is_in_use(self) -> bool:
        """Whether there is anything to tell the tier about."""
        if self.is_broken or self.is_resting(self._clock()):
            return False
        return self.breaker.state is not _OPEN or bool(self._jobs)

    @property
    def is_closed(self) -> bool:
        """Whether everyone may look into the tier."""
        return self.breaker.state is _CLOSED and not self.is_broken

    def is_cut_off(self, now: float) -> bool:
        """Whether the tier is not to be bothered at all."""
        return self.is_broken or self.breaker.is_pausing(now)

    def lets(self, request: TierRequest, now: float) -> bool:
        """Whether this request may look into the tier."""
        if self.breaker.state is _CLOSED:
            return not self.is_broken
        return not self.is_broken and self.breaker.lets(request, now)

    def look_up(self, key: OffloadKey, context: ReqContext) -> LookupResult:
        """The tier's answer, or MISS if it has none."""
        # `call`, written out: one more call for every block would show.
        start = self._clock()
        try:
            answer = self.tier.lookup(key, context)
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:
            self._raised("lookup", error)
            return _MISS
        if self._clock() - start > _LONGEST_CALL_S:
            self._blocked("lookup")
        if type(answer) is LookupResult:
            return answer
        self.violated(f"lookup answered {_shown(answer)}")
        return _MISS

    def look_up_batch(
        self, keys: Sequence[OffloadKey], context: ReqContext
    ) -> Sequence[LookupResult]:
        """The tier's answers, at most one for each key."""
        none: Sequence[LookupResult] = ()
        answers = self.call("lookup_batch", self.tier.lookup_batch, keys, context, default=none)
        if (
            not isinstance(answers, (list, tuple))
            or len(answers) > len(keys)
            or not set(map(type, answers)) <= _ONLY_RESULTS
        ):
            self.violated(f"lookup_batch answered {_shown(answers)} for {len(keys)} keys")
            return none
        return answers

    def wants_whole_requests(self, context: ReqContext) -> bool:
        """Announce a request; whether the tier wants all of its blocks."""
        plain = RequestOffloadingContext()
        answer = self.call("on_new_request", self.tier.on_new_request, context, default=plain)
        if type(answer) is not RequestOffloadingContext:
            self.violated(f"on_new_request answered {_shown(answer)}")
            return False
        return answer.policy is OffloadPolicy.REQUEST_LEVEL

    def missing(self, keys: Sequence[OffloadKey], context: ReqContext) -> Sequence[OffloadKey]:
        """Those of the keys, in their order, that the tier says it lacks."""
        none: Sequence[OffloadKey] = ()
        return self.call("missing", self._missing, keys, context, default=none)

    def _missing(self, keys: Sequence[OffloadKey], context: ReqContext) -> Sequence[OffloadKey]:
        answer: object = self.tier.missing(keys, context)
        # Anything else than a list is not iterated: it may have no end.
        if isinstance(answer, (list, tuple)) and len(answer) <= len(keys):
            if not answer:
                return ()
            if set(map(type, answer)) <= _ONLY_KEYS:
                named = set(answer)
                found = [key for key in keys if key in named]
                if len(found) == len(answer):
                    return found
        self.violated(f"missing answered {_shown(answer)} for {len(keys)} keys")
        return ()

    def call(self, what: str, method: Callable[..., T], *args: object, default: T) -> T:
        """Call the tier; `default`, if that fails."""
        start = self._clock()
        try:
            answer = method(*args)
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:  # a client library's panic, a cancelled task
            self._raised(what, error)
            return default
        if self._clock() - start > _LONGEST_CALL_S:
            self._blocked(what)
        return answer

    def _raised(self, what: str, error: BaseException) -> None:
        self._counters["errors"] += 1
        self._say(f"{what} raised", f"{what} raised {_shown(error)}")
        self.breaker.failed(self._clock())

    def _blocked(self, what: str) -> None:
        self._is_blocking = True
        self._counters["blocking_calls"] += 1
        self._say(
            f"{what} blocked",
            f"{what} kept the scheduler waiting for more than {_LONGEST_CALL_S:g} s; a tier must "
            "wait and copy on threads of its own",
        )
        self.breaker.failed(self._clock(), is_timeout=True)

    def violated(self, what: str) -> None:
        """The tier has broken its contract: cut it off."""
        self._counters["violations"] += 1
        self._say(what.split(maxsplit=1)[0], what)
        self.breaker.trip(self._clock(), "it has broken its contract")

    def _say(self, kind: str, message: str) -> None:
        """Log what is worth knowing, once for each kind."""
        if kind not in self._said:
            self._said.add(kind)
            logger.warning("%s: %s. Further ones are counted, not logged.", self.name, message)

    def _tell(self, level: int, message: str) -> None:
        logger.log(level, "%s: %s.", self.name, message)

    def _tell_of_stores(self, level: int, message: str) -> None:
        logger.log(level, "%s: stores: %s.", self.name, message)

    # --- jobs -----------------------------------------------------------------------------------

    def lets_store(self, now: float) -> bool:
        """Whether blocks may be stored now."""
        return (
            not self.is_broken
            and self.breaker.lets(_STORES, now)
            and self.store_breaker.lets(_STORES, now)
        )

    @property
    def num_storable(self) -> int:
        """How many blocks one more store may have: its slots are pinned meanwhile, and given back
        all at once."""
        return max(0, min(self._most_in_store, self._num_pinnable - self.num_pinned))

    @property
    def _num_pinnable(self) -> int:
        """How many slots its stores may pin now: what keeps the tier busy, and as many again as
        requests have got from it of late. More would only protect blocks that wait for the tier,
        at the expense of blocks that requests use."""
        wanted = int(self._pins_needed + self._num_given_back)
        return min(self.max_pinned, max(wanted, self._least_pinned))

    def _note_store_pace(self, job: Job, seconds: float, now: float, lag: float) -> None:
        """A store has taken so long, once the tier began with it. `lag`: how long ago the tier was
        asked for finished jobs before.

        Little's law: the slots that were pinned, times the part of its life in which the job was
        not waiting for its turn, would have been enough.
        """
        life = now - job.submitted
        busy_share = min(1.0, (seconds + lag) / life) if life > 0 else 1.0
        needed = _SPARE_PINS * job.num_beside * busy_share
        self._pins_needed += (needed - self._pins_needed) * _NEWEST_SHARE

    @property
    def stands_still(self) -> bool:
        """Whether it has stores that it does not end: nothing should wait for those."""
        return self._num_late_stores > 0

    @property
    def takes_offers(self) -> bool:
        """Whether to ask the tier which blocks it lacks. Not while new stores wait for it: it lacks
        those as well."""
        is_in_use = self.is_closed and self.store_breaker.is_closed
        return is_in_use and self._names_missing and not self.backlog

    def num_offerable(self, now: float) -> int:
        """How many blocks that it lacks may be offered now: none while some are under way, and no
        more than leaves half of its share to new stores."""
        is_busy = self._offer is not None and not self._offer.is_done
        if is_busy or self.stands_still or now < self._next_offer_at:
            return 0
        left = (self.max_pinned + 1) // 2 - self.num_pinned
        return max(0, min(self._most_in_offer, self.num_storable, left))

    def note_offer(self, job: Job, now: float) -> None:
        """Blocks that it lacked are being stored. The next ones have to wait for a time that
        depends on how many these are."""
        self._offer = job
        num_bytes = len(job.transfer.keys) * self._block_bytes
        self._next_offer_at = now + num_bytes / _OFFERED_BYTES_PER_S

    def _note_offer_pace(self, num_blocks: int, seconds: float) -> None:
        """An offer of so many blocks has taken the tier so long."""
        most = self._most_in_store
        if seconds > 0:
            most = min(most, int(num_blocks * _OFFER_S / seconds))
        self._most_in_offer = max(1, most)

    def submit_store(self, transfer: TransferJob, now: float) -> Job:
        """Send a cascade. The slots are pinned until `harvest` yields it. If the tier has not begun
        it, the job is done, and they are not."""
        job = self._enter(transfer, now, self.settings.store_timeout_s, self._stores)
        self.num_pinned += len(transfer.keys)
        job.num_beside = self.num_pinned
        self.store_breaker.submitted(transfer.job_id)
        # If it raises, it may have begun all the same: only its report ends the job.
        self.call("submit_store", self._submit, self.tier.submit_store, job, default=None)
        return job

    def expect_load(self, transfer: TransferJob, now: float) -> Job:
        """Enter a promotion that is about to be sent."""
        job = self._enter(transfer, now, self.settings.load_timeout_s, self._loads)
        job.num_beside = self.num_loading_in_time
        self.num_loading += len(transfer.keys)
        return job

    def submit_load(self, job: Job) -> None:
        """Send it. The slots are the tier's until `harvest` yields it.

        `is_done`, if the tier has not begun it. `is_late`, if it raised anything else: then nobody
        should wait, but it may have begun all the same.
        """
        is_submitted = self.call(
            "submit_load", self._submit, self.tier.submit_load, job, default=False
        )
        if not is_submitted:
            self._is_late(job)

    def _submit(self, submit: Callable[[TransferJob], None], job: Job) -> bool:
        try:
            submit(job.transfer)
        except JobNotBegun as error:
            self._say("a job was not begun", f"did not begin a job: {_shown(error)}")
            del self._jobs[job.transfer.job_id]
            refused = JobResult(job.transfer.job_id, False)
            self._settle(job, refused, (), self._clock(), lag=0.0)
        return True

    def num_loadable(self, wanted: int) -> int:
        """How many of `wanted` blocks may be loaded now.

        A tier that has not given back slots in time gets no more than its share of them.
        """
        if self._num_late_blocks:
            return max(0, min(wanted, self.max_pinned - self.num_loading))
        return wanted

    def _is_late(self, job: Job) -> None:
        job.is_late = True
        if job.transfer.is_promotion:
            self._num_late_blocks += len(job.transfer.keys)
        else:
            self._num_late_stores += 1

    def _is_overdue(self, job: Job, now: float) -> bool:
        """Whether a job has missed its deadline. A store has not while others end: a burst may take
        the tier longer than each of its stores."""
        if now < job.deadline:
            return False
        return job.transfer.is_promotion or now >= self._stores_go_on_until

    def _enter(self, transfer: TransferJob, now: float, timeout: float, queue: deque[Job]) -> Job:
        job = self._jobs[transfer.job_id] = Job(transfer, now, now + timeout)
        queue.append(job)
        self.breaker.submitted(transfer.job_id)
        return job

    def harvest(self, now: float) -> Iterator[tuple[Job, Sequence[OffloadKey]]]:
        """What the tier has finished since the last time: the job, and the keys of the blocks that
        were really moved."""
        if (not self._jobs and not self.breaker.is_closed) or self.is_resting(now):
            return
        self._is_blocking = False
        lag, self._last_harvest = now - self._last_harvest, now
        if self._num_given_back:
            self._num_given_back *= exp(-lag / _GIVEN_BACK_FOR_S)
        results: list[JobResult] = []
        # Not at once: what is reported before it raises has been reported.
        self.call("get_finished_jobs", self._collect_finished, results, default=None)
        for result in results:
            is_one = type(result) is JobResult and type(result.job_id) is int
            job = self._jobs.pop(result.job_id, None) if is_one else None
            if job is None:
                self.violated(f"get_finished_jobs reported {_shown(result)}, never given to it")
                continue
            moved = self._moved(job, result)
            self._settle(job, result, moved, now, lag)
            yield job, moved

    def _collect_finished(self, results: list[JobResult]) -> None:
        most = 2 * len(self._jobs) + _MAX_EXTRA_RESULTS
        for result in islice(self.tier.get_finished_jobs(), most):
            results.append(result)  # noqa: PERF402

    def _moved(self, job: Job, result: JobResult) -> Sequence[OffloadKey]:
        try:
            if bool(result.success):  # it may be numpy's
                return job.transfer.keys
            named = set(result.successful_keys or ())
        except Exception:
            self.violated(f"get_finished_jobs answered {_shown(result)}")
            return ()
        return [key for key in job.transfer.keys if key in named]

    def _settle(
        self, job: Job, result: JobResult, moved: Sequence[OffloadKey], now: float, lag: float
    ) -> None:
        """Count what a job has come to. `lag`: see `_note_store_pace`."""
        job.is_done = True
        job_id, num_blocks = job.transfer.job_id, len(job.transfer.keys)
        seconds = _possible(result.transfer_time, now - job.submitted)
        is_promotion = job.transfer.is_promotion
        done = "loaded" if is_promotion else "stored"
        self._counters[f"{done}_blocks"] += len(moved)
        self._counters[f"{done}_bytes"] += len(moved) * self._block_bytes
        self._counters["failed_loads" if is_promotion else "failed_stores"] += num_blocks - len(
            moved
        )
        if is_promotion:
            self.num_loading -= num_blocks
            self._num_late_blocks -= num_blocks * job.is_late
        else:
            self.num_pinned -= num_blocks
            self._num_late_stores -= job.is_late
            if moved:
                self._stores_go_on_until = now + self.settings.store_timeout_s
                if job is self._offer:
                    self._note_offer_pace(
                        num_blocks, now - job.submitted if seconds is None else seconds
                    )
        if seconds is not None:
            (self._load_seconds if is_promotion else self._store_seconds).append(seconds)
            if is_promotion and moved:
                num_beside = job.num_beside + self.num_loading_in_time
                self.estimate.note(num_blocks, seconds, num_beside)
                if job.is_awaited:
                    self.exploration.begin_anew()
                else:
                    self.exploration.note(num_blocks, seconds)
                    if self.estimate.is_in_doubt:
                        self._explore_at = now  # another one decides
            elif moved:
                self._note_store_pace(job, seconds, now, lag)
        if is_promotion and job.wanters:
            self._num_given_back += len(moved)
        self._probe_ended(job)
        if job.is_late:
            return
        timeout = self.settings.load_timeout_s if is_promotion else self.settings.store_timeout_s
        is_slow = seconds is not None and seconds > timeout
        is_good = not is_slow and (bool(moved) or num_blocks <= _possible_count(result.num_gone))
        for breaker in (self.breaker,) if is_promotion else (self.breaker, self.store_breaker):
            if not (is_promotion or breaker is self.store_breaker or breaker.probe == job_id):
                continue  # a store says nothing about loads, unless it was to be the proof
            if is_good:
                breaker.succeeded(job_id)
            else:
                breaker.failed(now, job_id, is_timeout=is_slow)

    def take_late(self, now: float) -> Iterator[Job]:
        """Promotions that have missed their deadline. Call after `harvest`."""
        for queue, breaker in ((self._loads, self.breaker), (self._stores, self.store_breaker)):
            while queue and (
                queue[0].is_done or queue[0].is_late or self._is_overdue(queue[0], now)
            ):
                job = queue.popleft()
                if job.is_done or job.is_late:
                    continue
                self._is_late(job)
                job_id = job.transfer.job_id
                breaker.failed(now, job_id, is_timeout=True)
                if job.transfer.is_promotion:
                    self._counters["late_loads"] += 1
                    num_blocks = len(job.transfer.keys) + job.num_beside
                    self.estimate.note_late(num_blocks, now - job.submitted)
                    self.exploration.begin_anew()
                    self._probe_ended(job)
                    yield job
                else:
                    self._counters["late_stores"] += 1
                    if self.breaker.probe == job_id:
                        self.breaker.failed(now, job_id, is_timeout=True)

    def lookup_is_late(self, now: float) -> None:
        """The tier did not find out in time whether it has a block."""
        self._counters["late_lookups"] += 1
        self.breaker.failed(now, is_timeout=True)

    @property
    def num_jobs(self) -> int:
        """Jobs that the tier has not reported."""
        return len(self._jobs)

    @property
    def num_late(self) -> int:
        """Of those, blocks of loads and stores that are late: grows when another one is."""
        return self._num_late_blocks + self._num_late_stores

    @property
    def num_loading_in_time(self) -> int:
        """Slots that its loads are writing, but for those that are late: for the latter, the next
        load may not have to wait."""
        return self.num_loading - self._num_late_blocks

    def has_overdue_jobs(self, now: float) -> bool:
        """Whether a job has missed its deadline, and was not found to be late yet."""
        # In order of deadlines: the first one that has not ended tells.
        for queue in (self._loads, self._stores):
            job = next((job for job in queue if not (job.is_done or job.is_late)), None)
            if job is not None and self._is_overdue(job, now):
                return True
        return False

    def has_awaited_loads(self, now: float) -> bool:
        """Whether a request waits for a load that may still end in time."""
        return any(
            self._may_end_in_time(job, now)
            and any(not request.is_withdrawn for request in job.wanters)
            for job in self._loads
        )

    def _may_end_in_time(self, job: Job, now: float) -> bool:
        return not (job.is_done or job.is_late or self._is_overdue(job, now))

    def has_pending_work(self, now: float) -> bool:
        """Whether a job is under way that may still end in time, or the tier has other work."""
        # In order of deadlines, and without most of those that are late: the first one tells.
        for queue in (self._loads, self._stores):
            if any(self._may_end_in_time(job, now) for job in queue):
                return True
        return self.is_closed and bool(
            self.call("has_pending_work", self.tier.has_pending_work, default=False)
        )

    def forget_jobs(self) -> None:
        """Nobody wants what jobs under way will bring."""
        for job in self._jobs.values():
            job.wanters.clear()

    def begin_epoch(self, fingerprint: bytes) -> None:
        """Nothing kept before is valid any more: `fingerprint` is the new namespace."""
        num_errors = self._counters["errors"]
        self.call("begin_epoch", self.tier.begin_epoch, fingerprint, default=None)
        if self._counters["errors"] > num_errors or self.tier.fingerprint != fingerprint:
            self.is_broken = True
            self.breaker.trip(self._clock(), "it did not take its new namespace")
            logger.error(
                "%s did not take its new namespace, so it could serve blocks from before the "
                "reset: it is not used any more. Mend its begin_epoch.",
                self.name,
            )

    @property
    def was_probed(self) -> bool:
        """Whether it was measured, or is being measured."""
        return self.probed_at > -inf

    def begin_probing(self, job_ids: Iterable[int], now: float) -> None:
        """These jobs measure it, but for those that it refused when they were submitted: one that
        raised may never be reported."""
        under_way = (self._jobs.get(job_id) for job_id in job_ids)
        self.probes.update(
            job.transfer.job_id for job in under_way if job is not None and not job.is_late
        )
        self.probed_at = now

    def is_probed_since(self, now: float, seconds: float) -> bool:
        """Whether it has been measured for no longer than this."""
        return now - self.probed_at <= seconds

    def _probe_ended(self, job: Job) -> None:
        """A job has ended, or is late: if it was the last one to measure the tier, that is done."""
        if job.transfer.job_id in self.probes:
            self.probes.remove(job.transfer.job_id)
            if not self.probes:
                self.estimate.trust()

    def known_keys(self, most: int) -> Sequence[OffloadKey]:
        """Some blocks that the tier says it has."""
        none: Sequence[OffloadKey] = ()
        keys = self.call("known_keys", self.tier.known_keys, most, default=none)
        if not isinstance(keys, (list, tuple)) or not all(isinstance(key, bytes) for key in keys):
            self.violated(f"known_keys answered {_shown(keys)}")
            return none
        return list(dict.fromkeys(keys[:most]))

    def may_explore(self, now: float) -> bool:
        """Whether to try a tier again that was found slower than computing. Now and then."""
        return now >= self._explore_at

    def explored(self, now: float) -> None:
        """It is tried now."""
        self._explore_at = now + _EXPLORE_EVERY_S

    def step_ended(self, step: int) -> None:
        """A scheduling step has ended."""
        for breaker in (self.breaker, self.store_breaker):
            prober = breaker.prober
            if prober is None:
                continue
            is_asking = (
                isinstance(prober, TierRequest) and prober.step == step and prober.is_asking(self)
            )
            if not is_asking:
                breaker.step_ended()
        if self._untold:
            for _ in range(min(len(self._untold), _MOST_TOLD)):
                self.tell_finished(self._untold.popleft())

    def tell_finished(self, context: ReqContext) -> None:
        """A request has ended. A tier that is resting hears of it later."""
        if self.is_resting(self._clock()):
            self._untold.append(context)
        else:
            self.call("on_request_finished", self.tier.on_request_finished, context, default=None)

    # --- figures --------------------------------------------------------------------------------

    def count(self, name: str, n: int) -> None:
        """Count something under the tier's name."""
        self._counters[name] += n

    def take_events(self) -> list[OffloadingEvent]:
        """The tier's own events, if they are wanted."""
        if not self.settings.enable_kv_events or self.is_resting(self._clock()):
            return []
        none: list[OffloadingEvent] = []
        return self.call("take_events", self._taken_events, default=none)

    def _taken_events(self) -> list[OffloadingEvent]:
        taken: Iterable[object] = self.tier.take_events()
        events = [event for event in taken if isinstance(event, OffloadingEvent)]
        for event in events:
            event.tier = self._event_name
        return events

    def add_stats(self, stats: OffloadingStats) -> None:
        """Add the tier's figures, and the tier's own, to those of the others."""
        if not self.is_resting(self._clock()):
            self.call("take_seal_failures", self._count_seal_failures, default=None)
            self.call("get_stats", self._add_own_stats, stats, default=None)
        for name, count in self._counters.items():
            if count:
                stats.counters[self.prefix + name] = count
        self._counters.clear()
        stats.gauges[self.prefix + "breaker_state"] = self.breaker.state.value
        stats.gauges[self.prefix + "store_breaker_state"] = self.store_breaker.state.value
        stats.gauges[self.prefix + "pinned_blocks"] = self.num_pinned
        stats.gauges[self.prefix + "waiting_blocks"] = self.num_waiting
        stats.gauges[self.prefix + "loading_blocks"] = self.num_loading
        for name, seconds in (
            ("load_seconds", self._load_seconds),
            ("store_seconds", self._store_seconds),
        ):
            if seconds:
                stats.histograms[self.prefix + name] = list(seconds)
                seconds.clear()

    def _count_seal_failures(self) -> None:
        for reason, n in self.tier.take_seal_failures().items():
            self._counters[f"seal_{SealFailure(reason)}"] += int(n)

    def _add_own_stats(self, stats: OffloadingStats) -> None:
        own = self.tier.get_stats()
        if own is not None:
            # Two tiers of one type have the same names for their own figures.
            for name, value in own.counters.items():
                stats.counters[name] = stats.counters.get(name, 0) + value
            for name, value in own.gauges.items():
                stats.gauges[name] = stats.gauges.get(name, 0) + value
            for name, values in own.histograms.items():
                stats.histograms.setdefault(name, []).extend(values)


def _overrides(tier: SecondaryTierManager, method: str) -> bool:
    """Whether a tier has its own version of a method that by itself does nothing."""
    found = getattr(tier, method)
    return getattr(found, "__func__", None) is not getattr(SecondaryTierManager, method)


def _possible_count(number: object) -> int:
    """0 where a tier says something else than a number."""
    return number if type(number) is int else 0


def _possible(seconds: object, elapsed: float) -> float | None:
    """The time that a tier has stamped, if a job of that age can have taken it."""
    if not isinstance(seconds, (int, float)) or not 0 <= seconds <= elapsed + _CLOCK_SLACK_S:
        return None
    return float(seconds)


def _shown(thing: object) -> str:
    """What a tier has answered or raised, for the log: short, whatever it is."""
    try:
        text = repr(thing)
    except Exception:
        text = f"a {type(thing).__name__} that cannot be shown"
    return text if len(text) <= _MAX_SHOWN else f"{text[:_MAX_SHOWN]}..."


def event_name(position: int, tier_type: str) -> str:
    """How events name a tier."""
    return f"tier_{position}_{re.sub('[^a-z0-9]+', '_', tier_type.lower())}"


def metric_prefix(position: int, tier_type: str) -> str:
    """What the names of a tier's figures begin with."""
    return f"kvtier_{event_name(position, tier_type)}_"
