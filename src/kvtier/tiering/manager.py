"""The orchestrator: what is stored cascades down, what is found below is promoted."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from kvtier.base import (
    LoadStoreSpec,
    LookupResult,
    OffloadingEvent,
    OffloadingManager,
    OffloadingStats,
    OffloadPolicy,
    PrefixLookup,
    PrepareStoreOutput,
    ReqContext,
    RequestOffloadingContext,
    TierFilter,
)
from kvtier.tiering.cascades import Cascades
from kvtier.tiering.closing import close_tiers
from kvtier.tiering.groups import Groups, GroupShape
from kvtier.tiering.guard import PrefillRate
from kvtier.tiering.health import TierSettings
from kvtier.tiering.jobs import JobCount
from kvtier.tiering.learnt import Learnt, read_note, write_note
from kvtier.tiering.link import TierLink
from kvtier.tiering.primary import CPUPrimaryTierOffloadingManager
from kvtier.tiering.promotions import Promotions
from kvtier.tiering.request import TierRequest
from kvtier.tiering.search import Search
from kvtier.tiering.step import Step
from kvtier.tiering.transfers import TransferFactory

if TYPE_CHECKING:
    from kvtier.base import OffloadKey, ScheduleEndContext
    from kvtier.tiering.base import SecondaryTierManager

__all__ = ["CPUPrimaryTierOffloadingManager", "GroupShape", "TieringOffloadingManager"]

logger = logging.getLogger(__name__)

_HIT = LookupResult.HIT
_MISS = LookupResult.MISS
_HIT_PENDING = LookupResult.HIT_PENDING

_MIN_PINNED = 32
"""So many slots may be pinned by the stores of a tier, however small its share is."""
_PROBED_BLOCKS = 9
_NOTED_EVERY_S = 30.0
"""How often tiers are given what was learnt, to keep it for the next start."""
_STEPPED_FOR_S = 1.0
"""Jobs that nobody waits for keep the engine stepping for at most this long after it last brought
work: a request that came or ended, or blocks from the device."""
_SEND_SHARE, _SEND_PAUSE_S = 0.5, 0.002
"""At shutdown: the share of the time in which blocks that wait for a tier are still sent, and how
often it is seen to."""
_MAX_UNANNOUNCED = 4096
"""Requests that were never announced, and hence may never be said to have finished."""


class TieringOffloadingManager(OffloadingManager):
    """A primary tier and any number of tiers below it. Scheduler thread only; nothing blocks.

    Stores. What the device has written into the primary tier goes to every tier below, each with
    one job, when that tier's write policy says so. The slots stay pinned until the tier reports.

    Uses. When a request has finished and its stores have left the device, every tier hears once
    which blocks it used, and is offered again what it lacks of them.

    Loads. A block that is not in the primary tier is looked for below. If it is there, the answer
    is HIT_PENDING, and at the end of the step one job for each (tier, request) brings up the run of
    blocks that can still be a hit. What has arrived is kept for those who wanted it until they load
    it, give up, or have not come back for it in the time a load may take.

    Deadlines. A request is kept waiting for at most the longest `lookup_timeout_s` and the longest
    `load_timeout_s` of its tiers together; then what is not there yet is a MISS. Of a single step
    no more than the longer of the two counts, so that a long one does not end what has just begun.
    Time is read at the start and at the end of a step. Tiers are asked for finished jobs once in a
    step, before anyone is judged late.

    Health. Every tier has a breaker. One that raises, answers nonsense, reports what it was never
    given, is late or does not report is cut off for a while. Slots it may still be writing are
    quarantined until it reports, however long that takes.

    A request that was not announced is announced to the tiers at its first call.
    """

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
        """Tiers are in lookup order; all of them belong to this object from now on.

        `settings`: one for each tier. `groups`: by the group index in keys; those not named are
        looked up from the start. `new_fingerprint`: the namespace after a `reset_cache`; None
        leaves the tiers below as they are. `prefill_tokens_per_s`: None to learn it
        (`note_prefill`, or else the cadence of stores), 0 to promote whatever it takes. `clock`:
        seconds, never going back.
        """
        tiers = list(secondary_tiers or ())
        settings = list(settings) if settings is not None else [TierSettings() for _ in tiers]
        if len(settings) != len(tiers):
            raise ValueError(f"{len(settings)} settings for {len(tiers)} tiers: give one for each")
        self.primary_tier = primary_tier
        self.secondary_tiers = tiers
        self._links = tuple(
            TierLink(tier, position, its, self._max_pinned(its), clock, primary_tier.block_bytes)
            for position, (tier, its) in enumerate(zip(tiers, settings, strict=True))
        )
        self._new_fingerprint = new_fingerprint
        self._shutdown_timeout_s = shutdown_timeout_s
        self._is_shut_down = False
        self._clock = clock
        self._step = Step(clock())
        self._step_has_begun = False
        self._asked_in_step = -1
        """The step in which tiers were last asked because a store found no room."""
        self._last_work = self._step.now
        """When the engine last brought work."""
        self._groups = Groups(groups or {})
        self._windows = self._groups.windows
        self._prefill = PrefillRate(prefill_tokens_per_s)
        self._transfers = TransferFactory(tiers[0].fingerprint if tiers else b"")
        self._promotions = Promotions(
            primary_tier, self._transfers, self._groups, self._prefill, self._step
        )
        self._search = Search(primary_tier, self._promotions, self._groups, self._step)
        self._cascades = Cascades(primary_tier, self._transfers, clock)
        self._requests: dict[str, TierRequest] = {}
        self._unannounced: dict[str, None] = {}
        # Calls for one request come in a row: remembering the last one saves a look-up.
        self._last_context: ReqContext | None = None
        self._last_request: TierRequest | None = None
        self._get_block = primary_tier.get_block
        self._note_use = primary_tier.note_use
        self._counts_keys = primary_tier.counts_keys
        self._fingerprint = self._transfers.fingerprint
        """Of the time before any reset: that of the next engine."""
        self._note_at = self._step.now + _NOTED_EVERY_S
        if self._prefill.may_learn:
            self._recall()
            self._probe()
        if tiers and not self._prefill.is_known:
            logger.info(
                "The prefill rate is %s: promotions are made whatever they take.",
                "not known yet" if self._prefill.heeds_stores else "given as 0",
            )

    def _max_pinned(self, settings: TierSettings) -> int:
        num_blocks = self.primary_tier.num_blocks
        most = max(1, num_blocks - self.primary_tier.reserve)
        return min(most, max(int(settings.max_pinned_share * num_blocks), _MIN_PINNED))

    # --- what was learnt ------------------------------------------------------------------------

    def _recall(self) -> None:
        """Go by what an earlier engine has learnt, until this one knows better."""
        for link in self._links:
            note = link.call("kept_note", link.tier.kept_note, default=None)
            learnt = read_note(note, self._fingerprint)
            if learnt.loads is not None:
                link.estimate.recall(learnt.loads)
            if learnt.prefill is not None:
                self._prefill.recall(learnt.prefill)

    def _probe(self) -> None:
        """Measure tiers that have blocks and were not measured before. Host memory is empty."""
        for link in self._links:
            if link.estimate.sums is not None or not link.breaker.is_closed:
                continue
            keys = link.known_keys(_PROBED_BLOCKS)
            if keys:
                context = ReqContext(f"kvtier probes {link.name}")
                request = self._announce(context)
                self._promotions.probe(list(keys), link, request)
                self.on_request_finished(context)

    def _keep_what_was_learnt(self) -> None:
        """Give every tier a note for the next engine. The tier writes it on a thread of its own."""
        for link in self._links:
            learnt = Learnt(link.estimate.sums, self._prefill.line)
            if learnt != (None, None) and link.breaker.is_closed:
                note = write_note(learnt, self._fingerprint)
                link.call("keep_note", link.tier.keep_note, note, default=None)

    # --- requests -------------------------------------------------------------------------------

    def on_new_request(self, req_context: ReqContext) -> RequestOffloadingContext:
        self.primary_tier.on_new_request(req_context)
        request = self._announce(req_context)
        if request.request_level:
            return RequestOffloadingContext(OffloadPolicy.REQUEST_LEVEL)
        return RequestOffloadingContext()

    def _announce(self, context: ReqContext) -> TierRequest:
        """Make a request known to the tiers that are in use."""
        request = TierRequest(context, self.primary_tier.use_of(context))
        former = self._requests.get(context.req_id)
        if former is not None:
            # The id is used again while stores of the request that had it are under way.
            request.prepared = former.prepared
            self._let_go(former)
        # The step may have begun long ago, when the engine had nothing to do.
        self._step.now = self._last_work = now = self._clock()
        links = [link for link in self._links if not link.is_cut_off(now)]
        request.request_level = tuple(link for link in links if link.wants_whole_requests(context))
        request.links = tuple(links)
        request.sources = request.links
        if context.load_tier_filter is not TierFilter.ALL:
            allows = context.load_tier_filter.allows
            request.sources = tuple(link for link in links if allows(link.medium, link.locality))
        if request.sources:
            lookup_timeout = max(link.settings.lookup_timeout_s for link in request.sources)
            load_timeout = max(link.settings.load_timeout_s for link in request.sources)
            request.most_wait = lookup_timeout + load_timeout
            request.most_step = max(lookup_timeout, load_timeout)
        self._requests[context.req_id] = request
        self._last_context, self._last_request = context, request
        return request

    def _request_of(self, context: ReqContext) -> TierRequest:
        if context is self._last_context:
            assert self._last_request is not None
            return self._last_request
        request = self._requests.get(context.req_id)
        if request is None:
            if len(self._unannounced) >= _MAX_UNANNOUNCED:
                self._let_go(self._requests[next(iter(self._unannounced))])
            request = self._announce(context)
            self._unannounced[context.req_id] = None
        self._last_context, self._last_request = context, request
        return request

    def on_request_finished(self, req_context: ReqContext) -> None:
        self._last_work = self._clock()
        request = self._requests.get(req_context.req_id)
        if request is not None and request.has_run and request.links:
            request.used = tuple(request.use.keys)  # which the primary tier forgets next
        self.primary_tier.on_request_finished(req_context)
        if request is not None:
            request.finished = True
            self._withdraw(request)
            self._tell_if_finished(request)

    def _let_go(self, request: TierRequest) -> None:
        """Forget a request that may never be said to have finished."""
        self._withdraw(request)
        self._tell_used(request)
        self._tell_finished(request)

    def _withdraw(self, request: TierRequest) -> None:
        """It waits for nothing any more."""
        self._promotions.withdraw(request)
        for link in self._links:
            link.breaker.let_go(request)

    def _tell_if_finished(self, request: TierRequest) -> None:
        """Tell the tiers what it has used, once none of its stores is under way from the device;
        and that it has ended, once nothing can be submitted for it any more."""
        if request.finished and not request.prepared:
            self._tell_used(request)
            if not request.num_parked:
                self._tell_finished(request)

    def _tell_used(self, request: TierRequest) -> None:
        """Tell the tiers which blocks a request has used, and offer them what they lack."""
        used, request.used = request.used, ()
        if not used:
            return
        for link in request.links:
            if link.is_closed:
                link.call("touch", link.tier.touch, used, request.context, default=None)
                self._cascades.offer_used(used, link, request)

    def _tell_finished(self, request: TierRequest) -> None:
        req_id = request.context.req_id
        for link in request.links:
            link.tell_finished(request.context)
        request.links = request.sources = request.request_level = ()
        if self._requests.get(req_id) is request:
            del self._requests[req_id]
            self._unannounced.pop(req_id, None)
        if self._last_request is request:
            self._last_context = self._last_request = None

    def touch(self, keys: Collection[OffloadKey], req_context: ReqContext) -> None:
        self.primary_tier.touch(keys, req_context)
        # Engines say this in step after step. The tiers hear it once, when the request has ended.
        self._request_of(req_context).has_run = True

    # --- steps ----------------------------------------------------------------------------------

    def _begin_step(self) -> None:
        """Take in what the tiers have finished, then judge who is late. Once in a step."""
        self._step_has_begun = True
        step = self._step
        step.now = now = self._clock()
        for link in self._links:
            self._harvest(link, now)
            for job in link.take_late(now):
                self._promotions.give_up(job)
                self._send_parked(job.transfer.keys)
            if link.backlog:
                for request in self._cascades.send_backlog(link):
                    self._tell_if_finished(request)
        step.all_in_use = all(link.is_closed for link in self._links)

    def _harvest(self, link: TierLink, now: float) -> None:
        """Take in what a tier has finished."""
        for job, moved in link.harvest(now):
            if job.transfer.is_promotion:
                self._promotions.end(job, moved, link)
                self._send_parked(job.transfer.keys)
            else:
                self.primary_tier.complete_read(job.transfer.job_id)

    def on_schedule_end(self, context: ScheduleEndContext) -> None:
        if not self._step_has_begun:
            self._begin_step()
        step = self._step
        step.now = now = self._clock()
        self.primary_tier.on_schedule_end(context)
        for req_id in context.preempted_req_ids:
            request = self._requests.get(req_id)
            if request is not None:
                request.goes_on()
        if self._promotions.has_some_to_send:
            self._promotions.send()
        self._promotions.leases.end_expired(now)
        self._prefill.step_ended(now)
        if now >= self._note_at and self._prefill.may_learn:
            self._note_at = now + _NOTED_EVERY_S
            self._keep_what_was_learnt()
        for link in self._links:
            if link.is_in_use:
                if link.hears_of_steps:
                    link.call("on_schedule_end", link.tier.on_schedule_end, context, default=None)
                link.step_ended(step.number)
        step.number += 1
        self._step_has_begun = False

    def tiers_of(self, req_context: ReqContext) -> Mapping[OffloadKey, SecondaryTierManager]:
        """Which tier blocks were brought up from for this request. Those that are not there were in
        the primary tier already."""
        request = self._requests.get(req_context.req_id)
        return {} if request is None else request.brought_up

    def note_prefill(self, num_tokens: int, mean_position: float, seconds: float) -> None:
        self._prefill.note_prefill(num_tokens, mean_position, seconds)

    def has_pending_work(self) -> bool:
        now = self._clock()
        if not self._step_has_begun and any(link.has_overdue_jobs(now) for link in self._links):
            self._begin_step()  # the engine may not take another one
        if self._promotions.wanting or any(link.has_awaited_loads(now) for link in self._links):
            return True
        return now - self._last_work < _STEPPED_FOR_S and any(
            link.has_pending_work(now) for link in self._links
        )

    def is_moving_blocks(self) -> bool:
        """Whether tiers have work that may still end in time, or are to get some. Unlike
        `has_pending_work` without a bound: for those who want to wait until all is stored."""
        now = self._clock()
        return any(link.backlog or link.has_pending_work(now) for link in self._links)

    # --- lookups and loads ----------------------------------------------------------------------

    def lookup(self, key: OffloadKey, req_context: ReqContext) -> LookupResult:
        if not self._step_has_begun:
            self._begin_step()
        if req_context is self._last_context:
            request = self._last_request
            assert request is not None
        else:
            request = self._request_of(req_context)
        # Not by the primary tier's own `lookup`: most answers are a HIT, and come by the thousand.
        if self._counts_keys:
            self.primary_tier.count_key(key, request.use)
        block = self._get_block(key)
        result = _MISS
        if block is not None:
            use = request.use
            known = use.keys.get(key)
            if known != block.generation:
                if known is None and use.fresh:
                    # What `note_use` does for one of many: a call for each would show.
                    use.keys[key] = block.generation
                    use.fresh.append(key)
                else:
                    self._note_use(block, use)
            result = _HIT if block.ref_cnt >= 0 else _HIT_PENDING
        if self._windows and key[-4:] in self._windows:
            return self._search.look_up_in_window(key, key[-4:], result, request)
        if result is _MISS and request.sources:
            group = key[-4:]
            if request.missed == group and request.step == self._step.number:
                return _MISS  # nothing behind a miss can be a hit
            return self._search.look_up(key, group, request)
        if result is _HIT_PENDING:
            return self._promotions.await_writer(key, request)
        return result

    def lookup_prefix(self, keys: Iterable[OffloadKey], req_context: ReqContext) -> PrefixLookup:
        keys = list(keys)
        if not keys or keys[0][-4:] in self._windows:
            return super().lookup_prefix(keys, req_context)
        if not self._step_has_begun:
            self._begin_step()
        request = self._request_of(req_context)
        if self._counts_keys:
            for key in keys:
                self.primary_tier.count_key(key, request.use)
        return self._search.look_up_prefix(keys, request)

    def prepare_load(self, keys: Collection[OffloadKey], req_context: ReqContext) -> LoadStoreSpec:
        spec = self.primary_tier.prepare_load(keys, req_context)
        request = self._request_of(req_context)
        request.has_run = True
        request.goes_on()
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
        request = self._request_of(req_context)
        request.has_run = True
        if output is None:
            return None
        new = output.keys_to_store
        if new:
            request.prepared[new[0]] = new
            if self._prefill.heeds_stores:
                self._prefill.note_computed(self._groups.num_tokens(new))
        if request.request_level and len(new) < len(keys):
            stored = set(new)
            self._cascades.offer_again([key for key in keys if key not in stored], request)
        return output

    def _look_for_room(self) -> None:
        """Tiers may have ended jobs that pin slots: ask them, once in a step.

        This does not begin a step: many engines offer stores after `on_schedule_end`, and the next
        step's lookups must find what ends until then.
        """
        step = self._step
        if self._asked_in_step == step.number:
            return
        self._asked_in_step = step.number
        step.now = now = self._clock()
        for link in self._links:
            if link.num_jobs:
                self._harvest(link, now)

    def complete_store(
        self, keys: Collection[OffloadKey], req_context: ReqContext, success: bool = True
    ) -> None:
        self._last_work = self._clock()
        request = self._request_of(req_context)
        self._cascades.store(keys, success, request)
        self._send_parked(keys)
        self._tell_if_finished(request)

    def _send_parked(self, keys: Iterable[OffloadKey]) -> None:
        """These blocks have been written, or will not be: some may wait for that."""
        if self._cascades.parked:
            for request in self._cascades.send_parked(keys):
                self._tell_if_finished(request)

    # --- the whole cache ------------------------------------------------------------------------

    def reset_cache(self) -> None:
        self._promotions.forget_all()
        self._cascades.parked = {}
        self.primary_tier.reset_cache()
        if self._new_fingerprint is not None:
            self._transfers.fingerprint = self._new_fingerprint()
        for link in self._links:
            link.forget_jobs()
            self._cascades.drop_backlog(link)
            if self._new_fingerprint is not None:
                link.begin_epoch(self._transfers.fingerprint)
        for request in list(self._requests.values()):
            request.goes_on()
            request.step = -1
            request.prepared = {}
            request.used = ()
            request.num_parked = 0
            self._tell_if_finished(request)

    def take_events(self) -> Iterable[OffloadingEvent]:
        events = list(self.primary_tier.take_events())
        for link in self._links:
            events += link.take_events()
        return events

    def get_stats(self) -> OffloadingStats:
        stats = self.primary_tier.get_stats()
        if self._promotions.num_trials:
            stats.counters["kvtier_tiering_trial_requests"] = self._promotions.num_trials
            self._promotions.num_trials = 0
        if self._promotions.num_given_up or self._search.num_without_room:
            stats.counters["kvtier_tiering_given_up_requests"] = self._promotions.num_given_up
            stats.counters["kvtier_tiering_no_room_blocks"] = self._search.num_without_room
            self._promotions.num_given_up = self._search.num_without_room = 0
        stats.gauges["kvtier_tiering_leased_blocks"] = self._promotions.leases.num_blocks
        stats.gauges["kvtier_tiering_prefill_tokens_per_s"] = self._prefill.tokens_per_s or 0.0
        for link in self._links:
            link.add_stats(stats)
        return stats

    @property
    def job_count(self) -> JobCount:
        """How many were given to tiers, and how many of those are open, and late."""
        links = self._links
        return JobCount(
            self._transfers.last_id,
            sum(link.num_jobs for link in links),
            sum(link.num_late for link in links),
        )

    def open_work(self) -> dict[str, int]:
        """How many entries each table has that must be empty once everything has ended. For tests
        and inspection."""
        return {
            "requests": len(self._requests),
            "wanting requests": len(self._promotions.wanting),
            "promotions": len(self._promotions.jobs),
            "leases": len(self._promotions.leases),
            "leased blocks": self._promotions.leases.num_blocks,
            "parked blocks": len(self._cascades.parked),
            "waiting blocks": sum(link.num_waiting for link in self._links),
            "jobs": sum(link.num_jobs for link in self._links),
            "slots of tiers": len(self.primary_tier.tier_pins()),
        }

    def shutdown(self) -> None:
        """Let the tiers finish, for at most `shutdown_timeout_s`, then take the slots from them.
        What waits for a tier is sent in the first half of that time, as the tier takes it."""
        if self._is_shut_down:
            return
        self._is_shut_down = True
        start = time.monotonic()
        while any(link.backlog for link in self._links):
            if time.monotonic() - start >= self._shutdown_timeout_s * _SEND_SHARE:
                break
            self._begin_step()
            time.sleep(_SEND_PAUSE_S)
        if self._prefill.may_learn:
            self._keep_what_was_learnt()
        spent_s = time.monotonic() - start
        close_tiers(self.secondary_tiers, self._shutdown_timeout_s, spent_s)
        self.primary_tier.shutdown()
