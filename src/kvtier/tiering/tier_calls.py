"""Guards the calls of one tier.

Exceptions, invalid answers and slow calls of a tier are handled here. Each is counted, and the
first of each kind is logged. An invalid answer makes the breaker cut the tier off at once.
Exceptions and slow calls do so if they happen too often.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from itertools import islice
from typing import TYPE_CHECKING, TypeVar

from kvtier.base import (
    Locality,
    LookupResult,
    OffloadingEvent,
    OffloadingStats,
    OffloadPolicy,
    RequestOffloadingContext,
)
from kvtier.seal import SealFailure
from kvtier.tiering.base import JobResult, SecondaryTierManager
from kvtier.tiering.cascade import Backlog, StoreLimits, WriteBudget
from kvtier.tiering.guard import LoadSpeed
from kvtier.tiering.health import BreakerState, CircuitBreaker, TierSettings
from kvtier.tiering.jobs import JobTable
from kvtier.tiering.metrics import TierStats, add_own_stats, tier_label
from kvtier.tiering.recording import TierNotes
from kvtier.tiering.request import TierRequest
from kvtier.tiering.write_policy import WRITE_POLICIES

if TYPE_CHECKING:
    from kvtier.base import OffloadKey, ReqContext, ScheduleEndContext
    from kvtier.observe.rollout import Switches
    from kvtier.tiering.primary import CPUPrimaryTierOffloadingManager

logger = logging.getLogger(__name__)

T = TypeVar("T")

_HIT, _MISS = LookupResult.HIT, LookupResult.MISS
_CLOSED, _OPEN = BreakerState.CLOSED, BreakerState.OPEN

_LONGEST_CALL_S = 0.1
"""Seconds. A longer call counts as blocking, because it has kept the scheduler waiting."""
_STORES = object()
"""Stands for all stores together as the user in `CircuitBreaker.lets`."""
_MAX_NOTIFIED = 64
"""After a rest (`is_resting`), a tier is notified of at most this many ended requests per step."""
_MAX_UNNOTIFIED = 10_000
"""The most ended requests that are kept while a tier is resting; older ones are dropped."""
_MAX_SHOWN = 200
_SHUTDOWN_SHARE = 0.5
"""Tiers have this share of the shutdown time to drain before `shutdown` is called."""
_ONLY_RESULTS = frozenset({LookupResult})
_ONLY_KEYS = frozenset({bytes})


class GuardedTier:
    """One tier as the orchestrator uses it: its guarded calls, jobs, breakers and statistics.
    Scheduler thread only."""

    def __init__(
        self,
        manager: SecondaryTierManager,
        position: int,
        settings: TierSettings,
        primary: CPUPrimaryTierOffloadingManager,
        switches: Switches,
        clock: Callable[[], float],
    ) -> None:
        self.manager = manager
        self._switches = switches
        self.medium, self.locality = manager.medium, manager.locality
        wanted = settings.enable_kv_events
        if wanted is None:
            wanted = bool(primary.media) and manager.locality is Locality.LOCAL
        self.has_events = wanted
        """True if the engine gets the tier's events."""
        manager.enable_kv_events = self.has_events
        self.settings = settings
        self.name = f"tier {position} ({manager.tier_type})"
        self.label = tier_label(position, manager.tier_type)
        """In metrics, events and the status of the engine."""
        self.notes = TierNotes(primary.journal, position, self.name)
        self.breaker = CircuitBreaker(settings.breaker, self.notes.breaker)
        """For the tier as a whole: lookups and loads."""
        self.store_breaker = CircuitBreaker(settings.breaker, self.notes.store_breaker)
        """For its stores: a tier that is full or read-only can still be read."""
        self.is_broken = False
        """True once the tier has failed to switch to a new namespace. It is not used again."""
        self.bit = 1 << position
        """Stands for the tier in `BlockHistory`."""
        make_policy = WRITE_POLICIES[settings.write_policy]
        self.write_policy = make_policy(primary.num_blocks, manager.capacity_blocks)
        self.budget = WriteBudget(settings.write_budget, primary.block_bytes, clock())
        self.stats = TierStats(self.label)
        self.load_speed = LoadSpeed(settings.load_timeout_s)
        self.stores = StoreLimits(settings.max_pinned_share, primary)
        self.backlog = Backlog()
        self.jobs = JobTable(self, clock, primary.block_bytes)
        self._handles_step_end = _overrides(manager, "on_schedule_end")
        """True if the tier has its own `on_schedule_end`."""
        self._names_missing = _overrides(manager, "missing")
        self._clock = clock
        self.last_call_s = 0.0
        """How long the last call took; for a lookup, the time until its answer."""
        self._is_blocking = False
        """True if a call has kept the scheduler waiting since the last harvest."""
        self._unnotified: deque[ReqContext] = deque(maxlen=_MAX_UNNOTIFIED)
        """Requests that have ended while the tier was resting."""
        self._warned: set[str] = set()
        self._usage: dict[str, float] = {}

    # --- may it be used? ------------------------------------------------------------------------

    def is_resting(self, now: float) -> bool:
        """True while the tier gets no calls except `begin_epoch`: the breaker has cut it off after
        a call that kept the scheduler waiting, or it is broken and has no jobs left."""
        if self.is_broken:
            return not self.jobs
        return self._is_blocking and self.breaker.is_pausing(now)

    @property
    def is_in_use(self) -> bool:
        """True if the end of a step should call `step_ended`."""
        if self.is_broken or self.is_resting(self._clock()):
            return False
        return self.breaker.state is not _OPEN or bool(self.jobs)

    @property
    def is_closed(self) -> bool:
        """True if every request may use the tier."""
        return self.breaker.state is _CLOSED and not self.is_broken

    def is_cut_off(self, now: float) -> bool:
        """True if new requests are not announced to the tier."""
        return self.is_broken or self.breaker.is_pausing(now)

    def lets(self, request: TierRequest, now: float) -> bool:
        """True if this request may use the tier."""
        if self.breaker.state is _CLOSED:
            return not self.is_broken
        return not self.is_broken and self.breaker.lets(request, now)

    def lets_store(self, now: float) -> bool:
        """True if blocks may be stored now."""
        return (
            self._stores_are_on
            and not self.is_broken
            and self.breaker.lets(_STORES, now)
            and self.store_breaker.lets(_STORES, now)
        )

    @property
    def loads_are_on(self) -> bool:
        """False while an operator has switched off loads from the tier, for new requests."""
        return self.label not in self._switches.loads_off

    @property
    def _stores_are_on(self) -> bool:
        return self.label not in self._switches.stores_off

    @property
    def not_stored_because(self) -> str:
        """What blocks are counted under that `lets_store` has refused."""
        return "shed_blocks" if self._stores_are_on else "switched_off_blocks"

    @property
    def takes_offers(self) -> bool:
        """True if the tier may be asked which blocks it lacks. Not while new blocks wait for it,
        because it would name those too."""
        is_in_use = self.is_closed and self.store_breaker.is_closed and self._stores_are_on
        return is_in_use and self._names_missing and not self.backlog

    # --- calls ----------------------------------------------------------------------------------

    def look_up(self, key: OffloadKey, context: ReqContext) -> LookupResult:
        """The tier's answer; MISS if the call fails or the answer is invalid."""
        # `call`, inlined: one more function call for each block would be noticeable.
        start = self._clock()
        try:
            answer = self.manager.lookup(key, context)
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:
            self._raised("lookup", error)
            return _MISS
        self.last_call_s = self._clock() - start
        if self.last_call_s > _LONGEST_CALL_S:
            self._blocked("lookup")
        if type(answer) is LookupResult:
            if answer is _MISS:
                self.stats.num_misses += 1
            elif answer is _HIT:
                self.stats.num_hits += 1
            else:
                self.stats.num_unknown += 1
            return answer
        self._violated(f"lookup answered {_shown(answer)}")
        return _MISS

    def look_up_batch(
        self, keys: Sequence[OffloadKey], context: ReqContext
    ) -> Sequence[LookupResult]:
        """The tier's answers, at most one for each key; none if the call fails or an answer is
        invalid."""
        none: Sequence[LookupResult] = ()
        answers = self.call("lookup_batch", self.manager.lookup_batch, keys, context, default=none)
        if (
            not isinstance(answers, (list, tuple))
            or len(answers) > len(keys)
            or not set(map(type, answers)) <= _ONLY_RESULTS
        ):
            self._violated(f"lookup_batch answered {_shown(answers)} for {len(keys)} keys")
            return none
        self.stats.count_answers(answers)
        return answers

    def lookup_is_late(self, now: float) -> None:
        """The tier did not answer in time whether it has a block."""
        self.stats.count("late_lookups")
        self.breaker.failed(now, is_timeout=True)

    def wants_whole_requests(self, context: ReqContext) -> bool:
        """Announce a request. Returns True if the tier wants all blocks of the request."""
        plain = RequestOffloadingContext()
        answer = self.call("on_new_request", self.manager.on_new_request, context, default=plain)
        if type(answer) is not RequestOffloadingContext:
            self._violated(f"on_new_request answered {_shown(answer)}")
            return False
        return answer.policy is OffloadPolicy.REQUEST_LEVEL

    def notify_finished(self, context: ReqContext) -> None:
        """Notify the tier that a request has ended. If the tier is resting, this happens later."""
        if self.is_resting(self._clock()):
            self._unnotified.append(context)
        else:
            self.call(
                "on_request_finished", self.manager.on_request_finished, context, default=None
            )

    def missing(self, keys: Sequence[OffloadKey], context: ReqContext) -> Sequence[OffloadKey]:
        """The keys, in their order, that the tier says it lacks."""
        none: Sequence[OffloadKey] = ()
        return self.call("missing", self._missing, keys, context, default=none)

    def _missing(self, keys: Sequence[OffloadKey], context: ReqContext) -> Sequence[OffloadKey]:
        answer: object = self.manager.missing(keys, context)
        if (found := _found_in(keys, answer)) is not None:
            return found
        self._violated(f"missing answered {_shown(answer)} for {len(keys)} keys")
        return ()

    def known_keys(self, most: int) -> Sequence[OffloadKey]:
        """Some blocks that the tier says it has."""
        none: Sequence[OffloadKey] = ()
        keys = self.call("known_keys", self.manager.known_keys, most, default=none)
        if not isinstance(keys, (list, tuple)) or not all(isinstance(key, bytes) for key in keys):
            self._violated(f"known_keys answered {_shown(keys)}")
            return none
        return list(dict.fromkeys(keys[:most]))

    def has_pending_work(self, now: float) -> bool:
        """True if a job under way may still end in time, or if the tier has other work."""
        return self.jobs.has_pending(now) or (
            self.is_closed
            and bool(self.call("has_pending_work", self.manager.has_pending_work, default=False))
        )

    def finished_jobs(self, most: int) -> list[JobResult]:
        """The tier's reports of finished jobs, at most `most`. They are not checked."""
        self._is_blocking = False
        results: list[JobResult] = []
        # Collected one by one, to keep the reports that come before an exception.
        self.call("get_finished_jobs", self._collect_finished, results, most, default=None)
        return results

    def _collect_finished(self, results: list[JobResult], most: int) -> None:
        for result in islice(self.manager.get_finished_jobs(), most):
            results.append(result)  # noqa: PERF402

    def begin_epoch(self, fingerprint: bytes) -> None:
        """Switch the tier to a new namespace: the blocks that it keeps are not valid any more."""
        num_errors = self.stats.counters["errors"]
        self.call("begin_epoch", self.manager.begin_epoch, fingerprint, default=None)
        has_failed = self.stats.counters["errors"] > num_errors
        if has_failed or self.manager.fingerprint != fingerprint:
            self.is_broken = True
            self.breaker.trip(self._clock(), "it did not switch to its new namespace")
            logger.error(
                "%s did not switch to its new namespace after a reset of the cache. It could serve "
                "blocks from before the reset, so it is not used any more until the engine is "
                "restarted. Fix its begin_epoch.",
                self.name,
            )

    def step_ended(self, step: int, context: ScheduleEndContext) -> None:
        """A scheduling step has ended."""
        if self._handles_step_end:
            self.call("on_schedule_end", self.manager.on_schedule_end, context, default=None)
        for breaker in (self.breaker, self.store_breaker):
            prober = breaker.prober
            if prober is None:
                continue
            is_asking = (
                isinstance(prober, TierRequest)
                and prober.wanted.step == step
                and prober.wait.is_for_answer_of(self)
            )
            if not is_asking:
                breaker.step_ended()
        if self._unnotified:
            for _ in range(min(len(self._unnotified), _MAX_NOTIFIED)):
                self.notify_finished(self._unnotified.popleft())

    def take_events(self) -> list[OffloadingEvent]:
        """The tier's events, if the engine gets them."""
        if not self.has_events or self.is_resting(self._clock()):
            return []
        none: list[OffloadingEvent] = []
        return self.call("take_events", self._taken_events, default=none)

    def _taken_events(self) -> list[OffloadingEvent]:
        taken: Iterable[object] = self.manager.take_events()
        events = [event for event in taken if isinstance(event, OffloadingEvent)]
        for event in events:
            event.tier = self.label
            self.notes.event(event)
        return events

    def is_awaited(self, now: float) -> bool:
        """True if a request waits for loads of the tier, or if its events should be taken."""
        if self.jobs.has_awaited_loads(now):
            return True
        if not self.has_events or self.is_resting(now):
            return False
        answer = self.call("has_announcements", self.manager.has_announcements, default=False)
        return answer is True

    def add_stats(self, stats: OffloadingStats) -> None:
        """Add the orchestrator's statistics of this tier, and the tier's own."""
        if not self.is_resting(self._clock()):
            self.call("take_seal_failures", _count_seal_failures, self, default=None)
            self.call("get_stats", self._add_own_stats, stats, default=None)
            self._usage = self.call("usage", _usage_of, self.manager, default=self._usage)
        self.stats.add_to(stats, self._usage | _gauges_of(self))

    def _add_own_stats(self, stats: OffloadingStats) -> None:
        add_own_stats(self.manager.get_stats(), self.label, stats)

    # --- guarded calls, and failures ------------------------------------------------------------

    def call(self, what: str, method: Callable[..., T], *args: object, default: T) -> T:
        """Call a method of the tier. Returns `default` if the method raises."""
        start = self._clock()
        try:
            answer = method(*args)
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:  # a client library's panic, a cancelled task
            self._raised(what, error)
            return default
        self.last_call_s = self._clock() - start
        if self.last_call_s > _LONGEST_CALL_S:
            self._blocked(what)
        return answer

    def _raised(self, what: str, error: BaseException) -> None:
        self.stats.count("errors")
        self._warn_once(f"{what} raised", f"{what} raised {_shown(error)}")
        self.breaker.failed(self._clock())

    def _blocked(self, what: str) -> None:
        self._is_blocking = True
        self.stats.count("blocking_calls")
        self._warn_once(
            f"{what} blocked",
            f"{what} kept the scheduler waiting for more than {_LONGEST_CALL_S:g} s; a tier must "
            "wait and copy on threads of its own",
        )
        self.breaker.failed(self._clock(), is_timeout=True)

    def note_refused(self, error: Exception) -> None:
        """The tier has not begun a job."""
        self._warn_once("a job was not begun", f"did not begin a job: {_shown(error)}")

    def note_unknown_job(self, result: object) -> None:
        """The tier has reported a job that it does not have."""
        self._violated(f"get_finished_jobs reported {_shown(result)}, a job it was never given")

    def note_bad_report(self, result: object) -> None:
        """The tier has reported a job, but the report cannot be read."""
        self._violated(f"get_finished_jobs answered {_shown(result)}")

    def _violated(self, what: str) -> None:
        """The tier has broken its contract: cut it off."""
        self.stats.count("violations")
        self._warn_once(what.split(maxsplit=1)[0], what)
        self.breaker.trip(self._clock(), "it has broken its contract")

    def _warn_once(self, kind: str, message: str) -> None:
        """Log a warning, once for each kind."""
        if kind not in self._warned:
            self._warned.add(kind)
            logger.warning("%s: %s. Further ones are counted, not logged.", self.name, message)


def _found_in(keys: Sequence[OffloadKey], answer: object) -> Sequence[OffloadKey] | None:
    """The keys that `answer` names, in the order of `keys`. None if `answer` is no list of some of
    them."""
    # Only lists and tuples are iterated: anything else may be endless.
    if not isinstance(answer, (list, tuple)) or len(answer) > len(keys):
        return None
    if not answer:
        return ()
    if not set(map(type, answer)) <= _ONLY_KEYS:
        return None
    named = set(answer)
    found = [key for key in keys if key in named]
    return found if len(found) == len(answer) else None


def _count_seal_failures(tier: GuardedTier) -> None:
    for reason, n in tier.manager.take_seal_failures().items():
        tier.stats.count(f"seal_{SealFailure(reason)}", int(n))


def _gauges_of(tier: GuardedTier) -> dict[str, float]:
    """The state of a tier, by the names of `tier_series`."""
    return {
        "breaker_state": tier.breaker.state.value,
        "store_breaker_state": tier.store_breaker.state.value,
        "load_jobs": tier.jobs.num_loads,
        "store_jobs": len(tier.jobs) - tier.jobs.num_loads,
        "pinned_blocks": tier.stores.num_pinned,
        "pin_limit_blocks": tier.stores.max_pinned,
        "waiting_blocks": tier.backlog.num_blocks,
        "loading_blocks": tier.jobs.num_loading,
    }


def _usage_of(tier: SecondaryTierManager) -> dict[str, float]:
    """How full a tier is, by the names of `tier_series`."""
    usage = tier.usage()
    if usage is None:
        return {}
    known = {"used_bytes": usage.used_bytes, "capacity_bytes": usage.capacity_bytes}
    return {name: float(value) for name, value in known.items() if value is not None}


def _overrides(tier: SecondaryTierManager, method: str) -> bool:
    """True if a tier overrides a method, which does nothing by default."""
    found = getattr(tier, method)
    return getattr(found, "__func__", None) is not getattr(SecondaryTierManager, method)


def _shown(thing: object) -> str:
    """What a tier has answered or raised, shortened for the log."""
    try:
        text = repr(thing)
    except Exception:
        text = f"a {type(thing).__name__} that cannot be shown"
    return text if len(text) <= _MAX_SHOWN else f"{text[:_MAX_SHOWN]}..."


# --- shutdown of all tiers ----------------------------------------------------------------------


def close_tiers(
    tiers: Sequence[SecondaryTierManager], timeout_s: float, spent_s: float = 0.0
) -> None:
    """Drain and shut down all tiers in parallel. Return when all have ended, or after `timeout_s`.
    `spent_s`: how much of that time has passed already.

    If a tier raises, the exception is logged and the other tiers are closed all the same. This also
    holds for a tier that its constructor has not set up fully. Afterwards no tier can reach the
    primary tier's slots: asking for a row raises. A tier that has not ended keeps a daemon thread,
    which does not keep the process alive.
    """
    start, left_s = time.monotonic(), max(0.0, timeout_s - spent_s)
    drains = [_run(tier, "drain_jobs") for tier in tiers]
    _join(drains, start + left_s * _SHUTDOWN_SHARE)
    shutdowns = [_run(tier, "shutdown") for tier in tiers]
    _join(shutdowns + drains, start + left_s)
    for tier, drain, shutdown in zip(tiers, drains, shutdowns, strict=True):
        if drain.is_alive() or shutdown.is_alive():
            logger.error(
                "Tier %r did not end within %g s: it is left behind. Blocks on their way to it are "
                "lost. Raise shutdown_timeout_ms if it needs more time.",
                _name_of(tier),
                timeout_s,
            )
        _release_rows(tier)


def _name_of(tier: SecondaryTierManager) -> str:
    return str(getattr(tier, "tier_type", type(tier).__name__))


def _release_rows(tier: SecondaryTierManager) -> None:
    try:
        if hasattr(tier, "rows"):
            tier.rows.release()
    except Exception:
        logger.exception("Tier %r: its rows cannot be released", _name_of(tier))


def _run(tier: SecondaryTierManager, method: str) -> threading.Thread:
    name = _name_of(tier)

    def call() -> None:
        try:
            getattr(tier, method)()
        except Exception:
            logger.exception("Tier %r: %s raised", name, method)

    thread = threading.Thread(target=call, name=f"kvtier-{method}-{name}", daemon=True)
    thread.start()
    return thread


def _join(threads: Sequence[threading.Thread], deadline: float) -> None:
    for thread in threads:
        thread.join(min(max(0.0, deadline - time.monotonic()), threading.TIMEOUT_MAX))
