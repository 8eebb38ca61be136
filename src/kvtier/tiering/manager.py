"""The orchestrator: sends stored blocks down to the tiers, and promotes blocks from them.

Stores (`cascade`). Blocks that the device has written into the primary tier go to every tier below
whose write policy selects them, in one or more jobs for each tier. The slots of a job stay pinned
until the tier reports it.

Uses (`request`). When a request has finished and its stores have left the device, every tier gets
one call of `touch` with the blocks that the request used, and is offered those that it lacks.

Loads (`lookup`, `promotion`). If a block is not in the primary tier, the tiers below are asked for
it. If one has it, the answer is HIT_PENDING, and at the end of the step one job for each request
and tier loads the blocks that can still become hits. Blocks that have arrived are leased to the
requests that wanted them. A lease ends when its requests have loaded blocks or ended, or when
`load_timeout_s` has passed.

Load or compute (`guard`, `cost`). Blocks are not loaded if computing them is faster, unless
computing them would delay other requests too much.

Deadlines (`request.Wait`, `jobs`). A request waits for at most the longest `lookup_timeout_s` plus
the longest `load_timeout_s` of its tiers. Then blocks that have not arrived are a MISS. One step
counts for at most the longer of these two timeouts, so that a long step does not end a wait that
has just begun. `Step.now` is set from the clock at the start and at the end of a step, when a
request arrives, and when a store finds no room. Each step begins by asking the tiers for finished
jobs, which is called harvesting. Only then are jobs judged late.

Health (`tier_calls`, `health`). Every tier has two breakers, one of them for stores alone. A tier
is cut off for a while if it repeatedly raises, is late or does not report its jobs, and at once if
an answer is invalid or it reports a job that it was never given. Slots that it may still be writing
are quarantined until it reports the job, however long that takes.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from itertools import chain
from typing import TYPE_CHECKING

from kvtier.base import (
    LoadStoreSpec,
    LookupResult,
    OffloadingEvent,
    OffloadingStats,
    OffloadPolicy,
    PrefixLookup,
    PrepareStoreOutput,
    ReqContext,
    RequestOffloadingContext,
)
from kvtier.cpu.prompt_log import PromptWatching
from kvtier.cpu.prompt_sources import PromptSources
from kvtier.observe.journal import Journal
from kvtier.tiering.ahead import LookAhead
from kvtier.tiering.cascade import Cascades
from kvtier.tiering.cost import PrefillRate
from kvtier.tiering.guard import PROBE_SIZES, LoadGuard
from kvtier.tiering.health import TierSettings
from kvtier.tiering.jobs import JobCount, JobFactory, count_jobs
from kvtier.tiering.lookup import Groups, GroupShape, Lookup
from kvtier.tiering.metrics import tier_label
from kvtier.tiering.primary import CPUPrimaryTierOffloadingManager
from kvtier.tiering.promotion import Promotions
from kvtier.tiering.recording import LookupNotes
from kvtier.tiering.request import RequestTable, Step
from kvtier.tiering.tier_calls import GuardedTier, close_tiers

if TYPE_CHECKING:
    from kvtier.base import OffloadKey, ScheduleEndContext
    from kvtier.observe.rollout import Switches
    from kvtier.tiering.base import SecondaryTierManager
    from kvtier.tiering.cleaner import Cleaner

__all__ = ["CPUPrimaryTierOffloadingManager", "GroupShape", "TieringOffloadingManager"]

_HIT = LookupResult.HIT
_MISS = LookupResult.MISS
_HIT_PENDING = LookupResult.HIT_PENDING

_STEPPED_FOR_S = 1.0
"""The engine keeps stepping for jobs that no request waits for, but at most this many seconds after
its last work: a request that came or ended, or blocks from the device."""
_SEND_SHARE, _SEND_PAUSE_S = 0.5, 0.002
"""At shutdown: the share of the timeout in which waiting blocks are still sent to tiers, and the
seconds between two attempts."""


class TieringOffloadingManager(PromptWatching):
    """A primary tier and the tiers below it. Scheduler thread only. Only `shutdown` waits."""

    def __init__(
        self,
        primary_tier: CPUPrimaryTierOffloadingManager,
        secondary_tiers: Sequence[SecondaryTierManager] | None = None,
        *,
        settings: Sequence[TierSettings] | None = None,
        groups: Mapping[int, GroupShape] | None = None,
        new_fingerprint: Callable[[], bytes] | None = None,
        prefill_tokens_per_s: float | None = None,
        shutdown_timeout_s: float = 10.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """The tiers below are given in lookup order. This object owns all tiers from now on.

        `settings`: one for each tier below. `groups`: how each group is looked up, by the group
        index in keys; a group without an entry is looked up from the start of the prompt.
        `new_fingerprint`: makes the namespace after a `reset_cache`; None: a reset leaves the tiers
        below as they are. `prefill_tokens_per_s`: None: learn it, from `note_prefill` or else from
        the cadence of stores; 0: promote blocks however long that takes. `clock`: in seconds.
        """
        self.primary_tier = primary_tier
        self.secondary_tiers = tiers = list(secondary_tiers or ())
        super().__init__([tier_label(n, tier.tier_type) for n, tier in enumerate(tiers)])
        self.journal = primary_tier.journal = Journal(clock, new_fingerprint is not None)
        self._tiers = _guarded(tiers, settings, primary_tier, self.switches, clock)
        self.media = (*primary_tier.media, *(t.medium for t in self._tiers if t.has_events))
        self._new_fingerprint = new_fingerprint
        self._shutdown_timeout_s = shutdown_timeout_s
        self._is_shut_down = False
        self._clock = clock
        self._step = Step(clock())
        self._asked_in_step = -1
        """The last step in which tiers were harvested because a store found no room."""
        self._groups = Groups(groups or {})
        self._windows = self._groups.windows
        self._jobs = JobFactory(tiers[0].fingerprint if tiers else b"")
        self._prefill = PrefillRate(prefill_tokens_per_s)
        self._guard = LoadGuard(self._prefill, self._groups, self._tiers, self._jobs.fingerprint)
        self._promotions = Promotions(
            primary_tier, self._jobs, self._groups, self._guard, self._step
        )
        notes = LookupNotes(self.journal, self._tiers, self._step)
        self._lookup = Lookup(primary_tier, notes, self._promotions, self._groups, self._step)
        self._ahead = LookAhead(primary_tier, self._lookup, self._promotions, self._step)
        self._cascades = Cascades(
            primary_tier, self._tiers, self._jobs, self._prefill, self._groups, clock
        )
        self._requests = RequestTable(
            primary_tier, self._tiers, self._promotions, self._cascades, self._step, clock
        )
        self._get_block = primary_tier.slots.get
        self._note_use = primary_tier.uses.note
        self._reuse_filter = primary_tier.uses.filter
        labels = {tier.manager: tier.label for tier in self._tiers}
        self.sources = PromptSources(labels, self._prefill.seconds_if_known)
        self._guard.begin(self._step.now)
        if self._prefill.may_learn:
            _probe(self._tiers, self._requests, self._promotions)

    # --- requests -------------------------------------------------------------------------------

    def on_new_request(self, req_context: ReqContext) -> RequestOffloadingContext:
        self.primary_tier.on_new_request(req_context)
        request = self._requests.announce(req_context)
        if request.request_level:
            return RequestOffloadingContext(OffloadPolicy.REQUEST_LEVEL)
        return RequestOffloadingContext()

    def on_request_queued(
        self,
        req_context: ReqContext,
        find_blocks: Callable[[], Sequence[OffloadKey]],
        *,
        priority: int = 0,
    ) -> None:
        self._ahead.enter(self._requests.of(req_context), find_blocks, priority)

    def on_request_finished(self, req_context: ReqContext) -> None:
        self._requests.finish(req_context)

    def touch(self, keys: Collection[OffloadKey], req_context: ReqContext) -> None:
        self.primary_tier.touch(keys, req_context)
        # Engines call this in many steps. Tiers get one call, when the request has ended.
        self._requests.of(req_context).has_run = True

    # --- steps ----------------------------------------------------------------------------------

    def _begin_step(self) -> None:
        """Harvest the tiers, find the jobs that are late, and send blocks that wait for a tier.
        Called once in a step."""
        self._step.has_begun = True
        step = self._step
        step.now = now = self._clock()
        for tier in self._tiers:
            self._harvest(tier, now)
            for job in tier.jobs.take_late(now):
                self._promotions.give_up(job, tier)
                self._send_parked(job.transfer.keys)
            if tier.backlog:
                for request in self._cascades.send_backlog(tier):
                    self._requests.end_if_done(request)
        self._cascades.cleaner.clean(self._cascades.submit, now)
        step.all_in_use = all(tier.is_closed for tier in self._tiers)

    def _harvest(self, tier: GuardedTier, now: float) -> None:
        """Take in the jobs that a tier has finished."""
        for job, moved in tier.jobs.harvest(now):
            if job.transfer.is_promotion:
                self._promotions.end(job, moved, tier)
                self._send_parked(job.transfer.keys)
                self._cascades.cleaner.note_promoted(job, moved, tier)
            else:
                self._cascades.end_store(job, moved, tier)

    def on_schedule_end(self, context: ScheduleEndContext) -> None:
        if not self._step.has_begun:
            self._begin_step()
        step = self._step
        step.now = now = self._clock()
        self.primary_tier.on_schedule_end(context)
        self._ahead.end_step(context.new_req_ids)
        for req_id in context.preempted_req_ids:
            request = self._requests.get(req_id)
            if request is not None:
                request.goes_on()
        if self._promotions.has_some_to_send:
            self._promotions.send()
        self._promotions.leases.end_expired(now)
        self._guard.step_ended(now)
        for tier in self._tiers:
            if tier.is_in_use:
                tier.step_ended(step.number, context)
        step.end()
        self.observe_step()

    def tiers_of(self, req_context: ReqContext) -> Mapping[OffloadKey, SecondaryTierManager]:
        """The promoted blocks of a request, and the tier that each came from. Other blocks were in
        the primary tier already."""
        request = self._requests.get(req_context.req_id)
        return {} if request is None else request.brought_up

    def note_prefill(self, num_tokens: int, mean_position: float, seconds: float) -> None:
        self._prefill.note_prefill(num_tokens, mean_position, seconds)

    def has_pending_work(self) -> bool:
        now = self._clock()
        if not self._step.has_begun and any(tier.jobs.has_overdue(now) for tier in self._tiers):
            self._begin_step()  # finds late jobs: there may be no further step
        if self._promotions.wanting or self._ahead.has_some_to_look_up():
            return True
        if any(tier.is_awaited(now) for tier in self._tiers):
            return True
        return now - self._step.last_work < _STEPPED_FOR_S and any(
            tier.has_pending_work(now) for tier in self._tiers
        )

    def is_moving_blocks(self) -> bool:
        """True if a tier has work that may still end in time, or if blocks wait for a tier. For
        callers that wait until all blocks are stored: unlike `has_pending_work`, it does not turn
        False after one second."""
        now = self._clock()
        return any(tier.backlog or tier.has_pending_work(now) for tier in self._tiers)

    # --- lookups and loads ----------------------------------------------------------------------

    def lookup(self, key: OffloadKey, req_context: ReqContext) -> LookupResult:
        if not self._step.has_begun:
            self._begin_step()
        requests = self._requests
        request = requests.last
        if request is None or req_context is not requests.last_context:
            request = requests.of(req_context)
        # The primary tier's `lookup`, inlined: thousands of lookups hit in host memory or come
        # after a miss, and one more function call for each would be noticeable.
        if self._reuse_filter is not None:
            self._reuse_filter.count((key,), request.use.brought)
        block = self._get_block(key)
        if block is None:
            wanted = request.wanted
            if wanted.step == self._step.number and (
                not request.sources.all or wanted.missed == key[-4:]
            ):
                return _MISS  # there is no tier to ask, or the key is behind a miss
            if key[-4:] in self._windows:
                return self._lookup.block(key, key[-4:], _MISS, request)
            return self._lookup.below(key, key[-4:], request)
        use = request.use
        known = use.keys.get(key)
        if known != block.generation:
            if known is None and use.fresh:
                use.keys[key] = block.generation
                use.fresh.append(key)
            else:
                self._note_use(block, use)
        if block.ref_cnt >= 0 and not self._windows:
            return _HIT
        in_host = _HIT if block.ref_cnt >= 0 else _HIT_PENDING
        return self._lookup.block(key, key[-4:], in_host, request)

    def lookup_prefix(self, keys: Iterable[OffloadKey], req_context: ReqContext) -> PrefixLookup:
        keys = list(keys)
        if not keys or keys[0][-4:] in self._windows:
            return super().lookup_prefix(keys, req_context)
        if not self._step.has_begun:
            self._begin_step()
        request = self._requests.of(req_context)
        if self._reuse_filter is not None:
            self._reuse_filter.count(keys, request.use.brought)
        return self.answered(keys, self._lookup.prefix(keys, request), req_context)

    def prepare_load(self, keys: Collection[OffloadKey], req_context: ReqContext) -> LoadStoreSpec:
        spec = self.primary_tier.prepare_load(keys, req_context)
        request = self._requests.of(req_context)
        self.sources.note_load(keys, request.brought_up)
        self._requests.begin_load(request)
        if request.leases:
            self._promotions.leases.end_for(request)
        return spec

    def complete_load(self, keys: Collection[OffloadKey], req_context: ReqContext) -> None:
        self.primary_tier.complete_load(keys, req_context)

    # --- stores ---------------------------------------------------------------------------------

    def prepare_store(
        self, keys: Collection[OffloadKey], req_context: ReqContext
    ) -> PrepareStoreOutput | None:
        keys = list(keys)
        if not self.primary_tier.has_room_for(len(keys), req_context):
            self._look_for_room()
        output = self.primary_tier.prepare_store(keys, req_context)
        request = self._requests.of(req_context)
        request.has_run = True
        if output is None:
            return None
        new = output.keys_to_store
        if new:
            request.stores.begin(new)
            if self._prefill.learns_from_stores:
                self._prefill.note_computed(self._groups.num_tokens(new))
        if request.request_level and len(new) < len(keys):
            stored = set(new)
            self._cascades.offer_again([key for key in keys if key not in stored], request)
        return output

    def _look_for_room(self) -> None:
        """Harvest the tiers: jobs that pin slots may have ended. At most once in a step.

        This does not begin a step. Many engines store blocks after `on_schedule_end`, and the next
        step must begin with its own harvest, to find everything that has ended by then.
        """
        step = self._step
        if self._asked_in_step == step.number:
            return
        self._asked_in_step = step.number
        step.now = now = self._clock()
        for tier in self._tiers:
            if tier.jobs:
                self._harvest(tier, now)

    def complete_store(
        self, keys: Collection[OffloadKey], req_context: ReqContext, success: bool = True
    ) -> None:
        self._step.last_work = self._clock()
        request = self._requests.of(req_context)
        self._cascades.store(keys, success, request)
        self._send_parked(keys)
        self._requests.end_if_done(request)

    def _send_parked(self, keys: Iterable[OffloadKey]) -> None:
        """These blocks are no longer being written: send them to the tiers that wait for them."""
        if self._cascades.parked:
            for request in self._cascades.send_parked(keys):
                self._requests.end_if_done(request)

    # --- the whole cache ------------------------------------------------------------------------

    def reset_cache(self) -> None:
        self._promotions.forget_all()
        self._cascades.parked = {}
        self.primary_tier.reset_cache()
        if self._new_fingerprint is not None:
            self._jobs.fingerprint = self._new_fingerprint()
        for tier in self._tiers:
            tier.jobs.forget_wanters()
            self._cascades.drop_backlog(tier)
            if self._new_fingerprint is not None:
                tier.begin_epoch(self._jobs.fingerprint)
        for request in self._requests:
            request.reset()
            self._requests.end_if_done(request)

    def take_events(self) -> Iterable[OffloadingEvent]:
        below = (tier.take_events() for tier in self._tiers)
        return list(chain(self.primary_tier.take_events(), *below))

    def take_stats(self) -> OffloadingStats:
        stats = self.primary_tier.take_stats()
        self._lookup.add_to(stats)
        self._requests.add_to(stats)
        self.sources.add_to(stats)
        self._promotions.add_to(stats)
        self._guard.add_to(stats)
        for tier in self._tiers:
            tier.add_stats(stats)
        return stats

    @property
    def job_count(self) -> JobCount:
        """The jobs of all tiers."""
        return count_jobs(self._jobs.last_id, [tier.jobs for tier in self._tiers])

    def open_work(self) -> dict[str, int]:
        """The sizes of all tables that must be empty once everything has ended. For tests and
        inspection."""
        return {
            "requests": len(self._requests),
            "queued requests": len(self._ahead),
            **self._promotions.open_work(),
            "parked blocks": len(self._cascades.parked),
            "waiting blocks": sum(tier.backlog.num_blocks for tier in self._tiers),
            "jobs": sum(len(tier.jobs) for tier in self._tiers),
            "slots of tiers": len(self.primary_tier.tier_pins()),
        }

    def shutdown(self) -> None:
        """Let the tiers finish for at most `shutdown_timeout_s`, then end their access to the
        slots. In the first half of that time, blocks that wait for a tier are still sent to it."""
        if self._is_shut_down:
            return
        self._is_shut_down = True
        super().shutdown()
        start = time.monotonic()
        _keep_warm(self._cascades.cleaner, self._requests, self._clock())
        while any(tier.backlog for tier in self._tiers):
            if time.monotonic() - start >= self._shutdown_timeout_s * _SEND_SHARE:
                break
            self._begin_step()
            time.sleep(_SEND_PAUSE_S)
        self._guard.keep(self._clock())
        close_tiers(self.secondary_tiers, self._shutdown_timeout_s, time.monotonic() - start)
        self.primary_tier.shutdown()


def _guarded(
    tiers: Sequence[SecondaryTierManager],
    settings: Sequence[TierSettings] | None,
    primary_tier: CPUPrimaryTierOffloadingManager,
    switches: Switches,
    clock: Callable[[], float],
) -> tuple[GuardedTier, ...]:
    if settings is None:
        settings = [TierSettings()] * len(tiers)
    if len(settings) != len(tiers):
        raise ValueError(f"{len(settings)} settings for {len(tiers)} tiers: give one for each")
    return tuple(
        GuardedTier(tier, position, its, primary_tier, switches, clock)
        for position, (tier, its) in enumerate(zip(tiers, settings, strict=True))
    )


def _keep_warm(cleaner: Cleaner, requests: RequestTable, now: float) -> None:
    """Let the blocks that only host memory has wait for the tiers that would have got them later.
    Called at shutdown."""
    for tier in cleaner.writes_leaving:
        for context, blocks in cleaner.unwritten(tier, now):
            request = requests.announce(context)
            if tier in request.tiers:
                tier.backlog.append([block.key for block in blocks], request)
            requests.finish(context)


def _probe(tiers: Iterable[GuardedTier], requests: RequestTable, promotions: Promotions) -> None:
    """Measure each tier that has blocks and whose speed is not known from an earlier engine. Called
    at the start, when host memory is empty."""
    for tier in tiers:
        if tier.load_speed.estimate.sums is not None or not tier.breaker.is_closed:
            continue
        keys = tier.known_keys(sum(PROBE_SIZES))
        if keys:
            context = ReqContext(f"kvtier probes {tier.name}")
            promotions.probe(list(keys), tier, requests.announce(context))
            requests.finish(context)
