"""What the orchestrator records for each request, and the table of all requests.

Each record states which modules write it. Tiers get a call of `on_new_request` when a request
arrives, of `touch` when it has ended and its stores have left the device, and of
`on_request_finished` once nothing can be submitted for it any more.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from math import inf
from typing import TYPE_CHECKING, NamedTuple

from kvtier.base import TierFilter
from kvtier.hints import hints_of
from kvtier.tiering.metrics import WAIT_SECONDS

if TYPE_CHECKING:
    from kvtier.base import LookupResult, OffloadingStats, OffloadKey, PrefixLookup, ReqContext
    from kvtier.cpu.uses import RequestUse
    from kvtier.hints import RequestHints
    from kvtier.tiering.ahead import Queued
    from kvtier.tiering.base import SecondaryTierManager
    from kvtier.tiering.cascade import Cascades
    from kvtier.tiering.jobs import Job
    from kvtier.tiering.primary import CPUPrimaryTierOffloadingManager
    from kvtier.tiering.promotion import Promotions
    from kvtier.tiering.tier_calls import GuardedTier

_MAX_UNANNOUNCED = 4096
"""The most requests kept that the engine has not announced. It may not report their end either."""
_MAX_WAITS = 4096
"""At most this many times are kept between two calls of `get_stats`."""
_NEWEST_STEP = 0.1
"""Weight of the newest step in the moving average of their durations."""
_LONGEST_STEP, _LEAST_STEP_S = 4, 0.1
"""Limit on a step in that average: this many times the average, plus this many seconds. An engine
that was stopped for a minute is not slow."""


class Step:
    """The scheduling step. The manager writes it. `RequestTable` writes `num_requests`, and also
    `now` and `last_work`."""

    __slots__ = (
        "_ended_at",
        "_had_requests",
        "all_in_use",
        "has_begun",
        "last_work",
        "lasts_s",
        "now",
        "num_requests",
        "number",
    )

    def __init__(self, now: float) -> None:
        self.number = 0
        self.has_begun = False
        """True once tiers were harvested (asked for finished jobs) for this step."""
        self.now = now
        """The time used for decisions in this step: read when tiers were last harvested, when a
        request was announced, or when the step ended."""
        self.last_work = now
        """Time of the engine's last work: a request that came or ended, or stored blocks."""
        self.num_requests = 0
        """Requests that the engine has announced and that have not ended, without prefetches."""
        self.all_in_use = True
        """True if the breaker of every tier was closed when the step began."""
        self.lasts_s = 0.0
        """How long steps with requests take, on average."""
        self._ended_at = now
        self._had_requests = False
        """True if there were requests at the end of the last step."""

    def end(self) -> None:
        """The step ends `now`."""
        if self._had_requests:
            lasted_s = min(self.now - self._ended_at, _LONGEST_STEP * self.lasts_s + _LEAST_STEP_S)
            self.lasts_s += (lasted_s - self.lasts_s) * _NEWEST_STEP
        self._ended_at = self.now
        self._had_requests = self.num_requests > 0
        self.number += 1
        self.has_begun = False


class Awaited(NamedTuple):
    """An answer for a prefix that cannot change before this promotion has ended."""

    keys: Sequence[OffloadKey]
    answer: PrefixLookup
    job: Job


class Wait:
    """What a request waits for, and how long it has waited. `kvtier.tiering.lookup` also writes
    `asking` and `awaited`."""

    __slots__ = (
        "_last",
        "_last_step",
        "_total_s",
        "_waited_s",
        "asking",
        "awaited",
        "has_given_up",
        "longest_s",
        "longest_step_s",
    )

    def __init__(self, tiers: Sequence[GuardedTier]) -> None:
        lookup_timeout = max((tier.settings.lookup_timeout_s for tier in tiers), default=0.0)
        load_timeout = max((tier.settings.load_timeout_s for tier in tiers), default=0.0)
        self.longest_s = lookup_timeout + load_timeout
        """How long the request may wait in total."""
        self.longest_step_s = max(lookup_timeout, load_timeout)
        """The most time that a single step adds to the wait. A long step must not end a wait that
        has just begun."""
        self.has_given_up = False
        """True once the request has given up waiting. Then only blocks in host memory are hits."""
        self.asking: dict[tuple[GuardedTier, OffloadKey], float] = {}
        """The keys for which a tier has answered RETRY, and when it was first asked."""
        self.awaited: dict[bytes, Awaited] = {}
        """By group: the last answer, while the request waits for a promotion."""
        self._total_s = 0.0
        self._last = -inf
        self._last_step = -2
        self._waited_s = 0.0
        """Seconds from step to step in which the request waited, since `take_waited`."""

    def may_go_on(self, now: float, step: int) -> bool:
        """False once the request has waited for `longest_s` or has given up. If the last wait ended
        long ago, a new one begins."""
        if step > self._last_step + 1 and now > self._last + self.longest_s:
            self._total_s = 0.0
            self._last = now
            self.has_given_up = False
            self.asking = {}
        elif self._total_s + min(now - self._last, self.longest_step_s) > self.longest_s:
            self.has_given_up = True
        return not self.has_given_up

    def note(self, now: float, step: int) -> None:
        """The request waits in this step."""
        if step == self._last_step + 1:
            self._waited_s += now - self._last
        if self._last > -inf:
            self._total_s += min(now - self._last, self.longest_step_s)
        self._last = now
        self._last_step = step

    def take_waited(self, now: float, step: int) -> float:
        """Seconds that the request has waited since the last call, until now if it waits still. A
        wait of which only one step is known counts as 0."""
        waited, self._waited_s = self._waited_s, 0.0
        return waited + (now - self._last if self._last_step in {step - 1, step} else 0.0)

    def forget_waited(self) -> None:
        """So far, nothing has waited: the blocks were brought up for a request in the queue."""
        self._waited_s = 0.0

    def give_up(self) -> None:
        """Stop waiting: what the request waits for is late, or the request computes it."""
        self.has_given_up = True

    def is_for_answer_of(self, tier: GuardedTier) -> bool:
        """True while this tier has not answered whether it has a block."""
        return any(asked is tier for asked, _ in self.asking)

    def found(self, key: OffloadKey, tiers: Iterable[GuardedTier]) -> None:
        """The block is in host memory now: forget that these tiers were asked for it."""
        for tier in tiers:
            self.asking.pop((tier, key), None)

    def stop_asking(self, tier: GuardedTier) -> None:
        """Do not wait for the answers of this tier any more."""
        self.asking = {asked: when for asked, when in self.asking.items() if asked[0] is not tier}

    def end(self) -> None:
        """The wait is over: the request loads blocks, or was preempted."""
        self._total_s = 0.0
        self._last_step = -2
        self._last = -inf
        self.has_given_up = False
        self.asking = {}
        self.awaited = {}


class Sources:
    """The tiers that a request may load from. Lookups choose `open`. Lookups and promotions decline
    tiers. Promotions note failures."""

    __slots__ = ("all", "declined", "failed", "open")

    def __init__(self, tiers: tuple[GuardedTier, ...]) -> None:
        self.all = tiers
        """In lookup order."""
        self.open: tuple[GuardedTier, ...] = ()
        """The tiers that are asked in this step."""
        self.declined: set[GuardedTier] = set()
        """The tiers that are not asked any more: they took too long to answer, the guard chose to
        compute, or the request computes as a trial."""
        self.failed: dict[OffloadKey, set[GuardedTier]] = {}
        """By block: the tiers that answered HIT and then could not load it."""

    def note_failed(self, keys: Iterable[OffloadKey], tier: GuardedTier) -> None:
        """The tier could not load these blocks. Look for them in other tiers."""
        for key in keys:
            self.failed.setdefault(key, set()).add(tier)

    def decline(self, tier: GuardedTier) -> None:
        """Do not ask this tier any more."""
        self.declined.add(tier)
        self.open = tuple(other for other in self.open if other is not tier)

    def forget(self) -> None:
        """Ask every tier again, for every block."""
        self.declined = set()
        self.failed = {}


class Wanted:
    """Blocks that a request has found below in one step. Written by `kvtier.tiering.lookup`;
    `Promotions` clears it when it declines a tier."""

    __slots__ = ("ended", "max_blocks", "missed", "num_blocks", "runs", "step")

    def __init__(self) -> None:
        self.step = -1
        """The step that all of this belongs to."""
        self.runs: dict[bytes, dict[OffloadKey, GuardedTier | None]] = {}
        """By group: the blocks found, in the order of lookups, and the tier that has each. In a
        group with a window, blocks in host memory are here too, with None."""
        self.ended: dict[bytes, LookupResult] = {}
        """The groups whose run has ended, and why. MISS: no tier has the next block, or host memory
        has no room for it. RETRY: a tier does not know yet whether it has it."""
        self.missed: bytes | None = None
        """A group in which a MISS came before any block was found below. Each further block of this
        group that is not in host memory is a MISS in this step."""
        self.num_blocks = 0
        """Blocks to promote, in all runs together."""
        self.max_blocks = 0
        """The most blocks that can be promoted for this request at the same time."""

    def begin(self, step: int) -> None:
        """Forget what was found in earlier steps."""
        self.step = step
        self.missed = None
        self.num_blocks = 0
        if self.runs:
            self.runs = {}
        if self.ended:
            self.ended = {}

    def add(self, keys: Sequence[OffloadKey], group: bytes, tier: GuardedTier) -> int:
        """Append blocks of a tier to a run, as many as fit. Returns how many fit."""
        run = self.runs.get(group)
        if run is None:
            run = self.runs[group] = {}
        num_before = len(run)
        if self.max_blocks - self.num_blocks < len(keys):
            # Blocks that are in the run already take no further room.
            num_fitting = self.max_blocks - self.num_blocks + sum(key in run for key in keys)
            keys = keys[: max(num_fitting, 0)]
        run.update(dict.fromkeys(keys, tier))
        self.num_blocks += len(run) - num_before
        return len(keys)

    def move_to_end(self, key: OffloadKey, group: bytes) -> None:
        """A lookup in a group with a window has reached this block. The latest lookup decides the
        order."""
        run = self.runs.setdefault(group, {})
        run[key] = run.pop(key, None)

    def drop(self, group: bytes) -> None:
        """Forget what was found in this group: none of it can be a hit."""
        run = self.runs.pop(group, None)
        if run:
            self.num_blocks -= sum(tier is not None for tier in run.values())


class OpenStores:
    """Blocks of a request that are on their way down. The manager begins stores, and
    `kvtier.tiering.cascade` does the rest. `RequestTable` hands the stores over to a new request
    with the same id."""

    __slots__ = ("num_parked", "prepared")

    def __init__(self) -> None:
        self.prepared: dict[OffloadKey, list[OffloadKey]] = {}
        """Blocks that the device is writing to host memory: the stores, by their first keys."""
        self.num_parked = 0
        """Blocks to send down later: they are still being written for another request, or the
        tier's stores have reached their limit of pinned slots."""

    def begin(self, keys: list[OffloadKey]) -> None:
        """The device is about to write these blocks, given in prompt order."""
        self.prepared[keys[0]] = keys

    def end(self, keys: Collection[OffloadKey]) -> Sequence[OffloadKey]:
        """The stores of these blocks have ended. Returns the blocks in prompt order if they are
        exactly one store, otherwise in the given order."""
        prepared = self.prepared
        ended = keys if isinstance(keys, (set, frozenset)) else set(keys)
        for first, store in prepared.items():
            if first in ended and len(store) == len(ended) and ended.issuperset(store):
                del prepared[first]
                return store
        # These are parts of stores, and the rest of each is still to come. Replace the lists: the
        # engine holds them too.
        for store in list(prepared.values()):
            if not ended.isdisjoint(store):
                del prepared[store[0]]
                left = [key for key in store if key not in ended]
                if left:
                    prepared[left[0]] = left
        return list(keys)

    def forget(self) -> None:
        """The cache was reset."""
        self.prepared = {}
        self.num_parked = 0


class TierRequest:
    """One request: what it has found, what it waits for, what it has stored. Scheduler thread
    only."""

    __slots__ = (
        "brought_up",
        "context",
        "finished",
        "has_run",
        "is_announced",
        "is_withdrawn",
        "leases",
        "queued",
        "request_level",
        "sources",
        "stores",
        "stores_to",
        "tiers",
        "use",
        "used",
        "wait",
        "wanted",
        "withheld",
    )

    def __init__(
        self,
        context: ReqContext,
        use: RequestUse,
        tiers: tuple[GuardedTier, ...],
        sources: tuple[GuardedTier, ...],
        request_level: tuple[GuardedTier, ...],
        withheld: tuple[GuardedTier, ...],
    ) -> None:
        self.context = context
        self.use = use
        """The blocks it has used in the primary tier."""

        # Loads. `Leases` writes `leases`, `Promotions` writes `brought_up`.
        self.sources = Sources(sources)
        self.wanted = Wanted()
        self.wait = Wait(sources)
        self.leases: set[int] = set()
        self.brought_up: dict[OffloadKey, SecondaryTierManager] = {}
        """Blocks that tiers have loaded for it, and the tier that each came from."""
        self.queued: Queued | None = None
        """Its entry in `LookAhead`, until the engine looks it up."""

        # Stores.
        self.stores = OpenStores()

        # Lifetime: `RequestTable` writes these; the manager sets `has_run`.
        self.tiers = tiers
        """The tiers to which it was announced."""
        self.withheld = withheld
        """The tiers that must not get its blocks."""
        self.stores_to = _without(withheld, tiers)
        """Those of `tiers` that may get its blocks."""
        self.request_level = _without(withheld, request_level)
        """The tiers that want all of its blocks, even those that were in host memory already."""
        self.has_run = False
        """True once it has loaded or stored blocks, or the engine has called `touch`. Until then,
        it has used none of the blocks that it looked up: it may be aborted while it waits."""
        self.used: tuple[OffloadKey, ...] = ()
        """The blocks it used, in prompt order. Set when it finishes, and emptied when the tiers are
        notified of these blocks."""
        self.is_announced = False
        """True if the engine has announced it, and it is no prefetch: it counts in
        `Step.num_requests`."""
        self.finished = False
        """True once the engine has reported its end."""
        self.is_withdrawn = False
        """True once it wants nothing from below any more."""

    @property
    def may_wait_for_loads(self) -> bool:
        """False for a request that wants nothing from lower tiers any more, has given up waiting,
        was not announced, or is a prefetch."""
        return self.is_announced and not (self.is_withdrawn or self.wait.has_given_up)

    def decline(self, tier: GuardedTier) -> None:
        """Stop asking this tier, and load nothing from it."""
        self.sources.decline(tier)
        self.wait.stop_asking(tier)

    def goes_on(self) -> None:
        """The wait is over. If the request waits again later, its time starts from zero."""
        self.wait.end()
        self.sources.forget()

    def reset(self) -> None:
        """The cache was reset: no block that it has found, stored or used is valid any more."""
        self.goes_on()
        if self.queued is not None:
            self.queued.look_up_next()
        self.wanted.step = -1
        self.stores.forget()
        self.used = ()


def _without(
    withheld: tuple[GuardedTier, ...], tiers: tuple[GuardedTier, ...]
) -> tuple[GuardedTier, ...]:
    return tuple(tier for tier in tiers if tier not in withheld) if withheld else tiers


def withheld_from(tiers: Sequence[GuardedTier], hints: RequestHints) -> tuple[GuardedTier, ...]:
    """The tiers that must not get the blocks of a request: by the rule of its tenant, or by the
    hint `store_tiers`."""
    rule, allowed = hints.tenant, hints.store_tiers
    if rule.tiers is None and allowed is TierFilter.ALL:
        return ()
    return tuple(
        tier
        for tier in tiers
        if not (rule.may_use(tier.label) and allowed.allows(tier.medium, tier.locality))
    )


class RequestTable:
    """All requests, from their first call until nothing more can be submitted for them. Scheduler
    thread only.

    If the engine has not announced a request, the tiers get its announcement at its first call.
    """

    def __init__(
        self,
        primary: CPUPrimaryTierOffloadingManager,
        tiers: Sequence[GuardedTier],
        promotions: Promotions,
        cascades: Cascades,
        step: Step,
        clock: Callable[[], float],
    ) -> None:
        self._primary = primary
        self._tiers = tiers
        self._promotions = promotions
        self._cascades = cascades
        self._step = step
        self._clock = clock
        self._requests: dict[str, TierRequest] = {}
        self._unannounced: dict[str, None] = {}
        # Calls for one request come in a row. Keeping the last request saves a search in the table.
        self.last_context: ReqContext | None = None
        self.last: TierRequest | None = None
        self._waits: deque[float] = deque(maxlen=_MAX_WAITS)

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[TierRequest]:
        return iter(list(self._requests.values()))

    @property
    def num_unannounced(self) -> int:
        """Requests that the engine has not announced."""
        return len(self._unannounced)

    def get(self, req_id: str) -> TierRequest | None:
        """The request with this id. None: not known."""
        return self._requests.get(req_id)

    def of(self, context: ReqContext) -> TierRequest:
        """The request that a call is made for."""
        if context is self.last_context:
            assert self.last is not None
            return self.last
        request = self._requests.get(context.req_id)
        if request is None:
            if len(self._unannounced) >= _MAX_UNANNOUNCED:
                self._let_go(self._requests[next(iter(self._unannounced))])
            request = self._enter(context)
            self._unannounced[context.req_id] = None
        self.last_context, self.last = context, request
        return request

    def announce(self, context: ReqContext) -> TierRequest:
        """The engine has announced a request."""
        request = self._enter(context)
        request.is_announced = not context.is_prefetch
        self._step.num_requests += request.is_announced
        return request

    def _enter(self, context: ReqContext) -> TierRequest:
        """Enter a request, and announce it to the tiers that are not cut off."""
        use = self._primary.uses.of(context)
        former = self._requests.get(context.req_id)
        if former is not None:
            self._let_go(former)
        # The step may have begun long ago, when the engine had nothing to do.
        self._step.now = self._step.last_work = now = self._clock()
        tiers = tuple(tier for tier in self._tiers if not tier.is_cut_off(now))
        hints = hints_of(context)
        if (rule := hints.tenant).tiers is not None:
            tiers = tuple(tier for tier in tiers if rule.may_use(tier.label))
        withheld = withheld_from(self._tiers, hints)
        request_level = tuple(tier for tier in tiers if tier.wants_whole_requests(context))
        sources = tuple(tier for tier in tiers if tier.loads_are_on)
        if context.load_tier_filter is not TierFilter.ALL:
            allows = context.load_tier_filter.allows
            sources = tuple(tier for tier in sources if allows(tier.medium, tier.locality))
        request = TierRequest(context, use, tiers, sources, request_level, withheld)
        if former is not None:
            # The id is reused. The new request takes over stores that are still under way.
            request.stores.prepared = former.stores.prepared
        self._requests[context.req_id] = request
        self.last_context, self.last = context, request
        return request

    def finish(self, context: ReqContext) -> None:
        """The engine has reported the end of a request."""
        self._step.last_work = self._clock()
        request = self._requests.get(context.req_id)
        if request is not None and request.has_run and request.tiers:
            request.used = tuple(request.use.keys)  # before the primary tier forgets them
        self._primary.on_request_finished(context)
        if request is not None:
            request.finished = True
            self.note_wait(request)
            self._withdraw(request)
            self.end_if_done(request)

    def end_if_done(self, request: TierRequest) -> None:
        """If a request has finished, notify the tiers: of the blocks it used, once its stores have
        left the device; of its end, once nothing more can be submitted for it."""
        if request.finished and not request.stores.prepared:
            self._notify_used(request)
            if not request.stores.num_parked:
                self._notify_finished(request)

    def _let_go(self, request: TierRequest) -> None:
        """Forget a request whose end the engine may never report."""
        self._withdraw(request)
        self._notify_used(request)
        self._notify_finished(request)

    def begin_load(self, request: TierRequest) -> None:
        """A request loads blocks: it waits no longer."""
        request.has_run = True
        if request.queued is not None:
            request.queued.leave()
        self.note_wait(request)
        request.goes_on()

    def note_wait(self, request: TierRequest) -> None:
        """A request waits no longer, or has ended. Call it before `TierRequest.goes_on`."""
        waited_s = request.wait.take_waited(self._step.now, self._step.number)
        if waited_s > 0 and request.queued is None and request.is_announced:
            self._waits.append(waited_s)

    def add_to(self, stats: OffloadingStats) -> None:
        """Move the times that requests have waited into `stats`."""
        if self._waits:
            stats.histograms[WAIT_SECONDS] = list(self._waits)
            self._waits.clear()

    def _withdraw(self, request: TierRequest) -> None:
        """The request wants nothing from below any more."""
        if request.is_announced and not request.is_withdrawn:
            self._step.num_requests -= 1
        request.is_withdrawn = True
        if request.queued is not None:
            request.queued.leave()
        self._promotions.withdraw(request)
        for tier in self._tiers:
            tier.breaker.let_go(request)

    def _notify_used(self, request: TierRequest) -> None:
        """Notify the tiers of the blocks that a request has used, and offer them those that they
        lack."""
        used, request.used = request.used, ()
        if not used:
            return
        if hints_of(request.context).drop:
            for tier in request.tiers:
                if tier.is_closed:
                    tier.call("drop", tier.manager.drop, used, request.context, default=None)
            return
        self._cascades.note_used(used, request)
        for tier in request.tiers:
            if tier.is_closed:
                tier.call("touch", tier.manager.touch, used, request.context, default=None)
                if tier in request.stores_to:
                    self._cascades.offer_used(used, tier, request)

    def _notify_finished(self, request: TierRequest) -> None:
        req_id = request.context.req_id
        for tier in request.tiers:
            tier.notify_finished(request.context)
        request.tiers = request.sources.all = request.stores_to = request.request_level = ()
        if self._requests.get(req_id) is request:
            del self._requests[req_id]
            self._unannounced.pop(req_id, None)
        if self.last is request:
            self.last_context = self.last = None
