"""The orchestrator: what is stored cascades down, what is found below is promoted."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from kvtier.base import (
    LoadStoreSpec,
    LookupResult,
    OffloadingEvent,
    OffloadingManager,
    OffloadingStats,
    OffloadPolicy,
    PrefixLookup,
    PrepareStoreOutput,
    RequestOffloadingContext,
)
from kvtier.tiering.base import TransferJob
from kvtier.tiering.closing import close_tiers
from kvtier.tiering.guard import PrefillRate
from kvtier.tiering.health import BreakerState, TierSettings
from kvtier.tiering.leases import Leases
from kvtier.tiering.link import TierLink
from kvtier.tiering.primary import CPUPrimaryTierOffloadingManager
from kvtier.tiering.request import TierRequest
from kvtier.tiering.write_policy import WriteMoment

if TYPE_CHECKING:
    from kvtier.base import OffloadKey, ReqContext, ScheduleEndContext
    from kvtier.tiering.base import SecondaryTierManager
    from kvtier.tiering.jobs import Job

__all__ = ["CPUPrimaryTierOffloadingManager", "GroupShape", "TieringOffloadingManager"]

logger = logging.getLogger(__name__)

_HIT = LookupResult.HIT
_MISS = LookupResult.MISS
_HIT_PENDING = LookupResult.HIT_PENDING
_RETRY = LookupResult.RETRY
_CLOSED = BreakerState.CLOSED

_MIN_PINNED = 32
"""So many slots may be pinned by the stores of a tier, however small its share is."""
_MAX_UNANNOUNCED = 4096
"""Requests that were never announced, and hence may never be said to have finished."""
_FIRST_BATCH = 16
"""How many keys a tier is first asked for at once. Most prompts end with their first miss."""
_BEYOND_WINDOW = 2
"""How many blocks more than its window a scan of a windowed group may need."""


@dataclass(frozen=True, slots=True)
class GroupShape:
    """What the orchestrator has to know about the blocks of one KV-cache group."""

    tokens_per_block: int
    """Tokens of one offloaded block."""
    window_blocks: int | None = None
    """How many blocks in a row a hit needs, where blocks are looked up from the end of the prompt
    backwards. None: all of them, looked up from the start."""


class TieringOffloadingManager(OffloadingManager):
    """A primary tier and any number of tiers below it. Scheduler thread only; nothing blocks.

    Stores. What the device has written into the primary tier goes to every tier below, each with
    one job, when that tier's write policy says so. The slots stay pinned until the tier reports.

    Loads. A block that is not in the primary tier is looked for below. If it is there, the answer
    is HIT_PENDING, and at the end of the step one job for each (tier, request) brings up the run of
    blocks that can still be a hit. What has arrived is kept for those who wanted it until they load
    it, give up, or have not come back for it in the time a load may take.

    Deadlines. A request is kept waiting for at most the longest `lookup_timeout_s` and the longest
    `load_timeout_s` of its tiers together; then what is not there yet is a MISS. Time is read at
    the start and at the end of a step. Tiers are asked for finished jobs once in a step, before
    anyone is judged late.

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
        leaves the tiers below as they are. `prefill_tokens_per_s`: None to learn it, 0 to promote
        whatever it takes. `clock`: seconds, never going back.
        """
        tiers = list(secondary_tiers or ())
        settings = list(settings) if settings is not None else [TierSettings() for _ in tiers]
        if len(settings) != len(tiers):
            raise ValueError(f"{len(settings)} settings for {len(tiers)} tiers: give one for each")
        self.primary_tier = primary_tier
        self.secondary_tiers = tiers
        self._links = tuple(
            TierLink(tier, position, its, self._max_pinned(its), clock)
            for position, (tier, its) in enumerate(zip(tiers, settings, strict=True))
        )
        self._groups = {index.to_bytes(4, "big"): shape for index, shape in (groups or {}).items()}
        self._windows = {
            group: shape.window_blocks + _BEYOND_WINDOW
            for group, shape in self._groups.items()
            if shape.window_blocks is not None
        }
        self._new_fingerprint = new_fingerprint
        self._fingerprint = tiers[0].fingerprint if tiers else b""
        self._prefill = PrefillRate(prefill_tokens_per_s)
        self._shutdown_timeout_s = shutdown_timeout_s
        self._clock = clock
        self._now = clock()
        self._step = 0
        self._step_has_begun = False
        self._all_closed = True
        """Whether every tier was in use when the step began."""
        self._job_id = 0
        self._requests: dict[str, TierRequest] = {}
        self._unannounced: dict[str, None] = {}
        self._wanting: dict[TierRequest, None] = {}
        """Requests that have found blocks below in this step."""
        self._promoting: dict[int, Job] = {}
        self._parked: dict[OffloadKey, dict[tuple[TierRequest, TierLink], None]] = {}
        """Blocks to be cascaded to a request-level tier once they are written."""
        self._leases = Leases(primary_tier)
        self._counters: dict[str, int] = {}
        self._is_shut_down = False
        # Calls for one request come in a row: remembering the last one saves a look-up.
        self._last_context: ReqContext | None = None
        self._last_request: TierRequest | None = None
        self._look_up_in_primary = primary_tier.lookup

    def _max_pinned(self, settings: TierSettings) -> int:
        num_blocks = self.primary_tier.num_blocks
        least = max(1, min(_MIN_PINNED, num_blocks - self.primary_tier.reserve))
        return max(int(settings.max_pinned_share * num_blocks), least)

    # --- requests -------------------------------------------------------------------------------

    def on_new_request(self, req_context: ReqContext) -> RequestOffloadingContext:
        self.primary_tier.on_new_request(req_context)
        request = self._announce(req_context)
        if request.request_level:
            return RequestOffloadingContext(OffloadPolicy.REQUEST_LEVEL)
        return RequestOffloadingContext()

    def _announce(self, context: ReqContext) -> TierRequest:
        """Make a request known to the tiers that are in use."""
        request = TierRequest(context)
        former = self._requests.get(context.req_id)
        if former is not None:
            # The id is used again while stores of the request that had it are under way.
            request.prepared = former.prepared
            self._withdraw(former)
            self._tell_finished(former)
        self._unannounced.pop(context.req_id, None)
        now = self._clock()
        links, request_level = [], []
        for link in self._links:
            if not link.is_cut_off(now):
                links.append(link)
                if link.wants_whole_requests(context):
                    request_level.append(link)
        request.links = tuple(links)
        request.request_level = tuple(request_level)
        allows = context.load_tier_filter.allows
        sources = [link for link in links if allows(link.tier.medium, link.tier.locality)]
        request.sources = tuple(sources)
        if sources:
            request.most_wait = max(link.settings.lookup_timeout_s for link in sources) + max(
                link.settings.load_timeout_s for link in sources
            )
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
                oldest = self._requests[next(iter(self._unannounced))]
                self._withdraw(oldest)
                self._tell_finished(oldest)
            request = self._announce(context)
            request.is_announced = False
            self._unannounced[context.req_id] = None
        self._last_context, self._last_request = context, request
        return request

    def on_request_finished(self, req_context: ReqContext) -> None:
        request = self._requests.get(req_context.req_id)
        self.primary_tier.on_request_finished(req_context)
        if request is None:
            return
        request.finished = True
        self._withdraw(request)
        self._tell_if_finished(request)

    def _withdraw(self, request: TierRequest) -> None:
        """It waits for nothing any more."""
        self._leases.end_for(request)
        self._wanting.pop(request, None)
        for job in self._promoting.values():
            job.wanters.pop(request, None)
        for link in self._links:
            if link.breaker.prober is request and link.breaker.probe is None:
                link.breaker.prober = None

    def _tell_if_finished(self, request: TierRequest) -> None:
        """Tell the tiers, once nothing can be submitted for it any more."""
        if request.finished and not request.prepared and not request.num_parked:
            self._tell_finished(request)

    def _tell_finished(self, request: TierRequest) -> None:
        req_id = request.context.req_id
        for link in request.links:
            link.call(
                "on_request_finished", link.tier.on_request_finished, request.context, default=None
            )
        request.links = request.sources = request.request_level = ()
        if self._requests.get(req_id) is request:
            del self._requests[req_id]
            self._unannounced.pop(req_id, None)
        if self._last_request is request:
            self._last_context = self._last_request = None

    def touch(self, keys: Collection[OffloadKey], req_context: ReqContext) -> None:
        keys = list(keys)
        self.primary_tier.touch(keys, req_context)
        for link in self._request_of(req_context).links:
            if link.breaker.is_closed:
                link.call("touch", link.tier.touch, keys, req_context, default=None)

    # --- steps ----------------------------------------------------------------------------------

    def _begin_step(self) -> None:
        """Take in what the tiers have finished, then judge who is late. Once in a step."""
        self._step_has_begun = True
        self._now = now = self._clock()
        for link in self._links:
            for job, moved in link.harvest(now):
                if job.transfer.is_promotion:
                    self._end_promotion(job, moved, link)
                else:
                    self.primary_tier.complete_read(job.transfer.job_id)
            for job in link.take_late(now):
                self._give_up_promotion(job)
        self._all_closed = all(link.is_closed for link in self._links)

    def on_schedule_end(self, context: ScheduleEndContext) -> None:
        if not self._step_has_begun:
            self._begin_step()
        self._now = now = self._clock()
        self.primary_tier.on_schedule_end(context)
        for req_id in context.preempted_req_ids:
            request = self._requests.get(req_id)
            if request is not None:
                request.goes_on()
        if self._wanting:
            self._promote_wanted()
        self._leases.end_expired(now)
        self._prefill.step_ended(now)
        for link in self._links:
            if link.is_in_use:
                link.call("on_schedule_end", link.tier.on_schedule_end, context, default=None)
                link.step_ended()
        self._step += 1
        self._step_has_begun = False

    def has_pending_work(self) -> bool:
        now = self._clock()
        return bool(self._wanting) or any(
            link.has_active_jobs(now)
            or (
                link.breaker.is_closed
                and link.call("has_pending_work", link.tier.has_pending_work, default=False)
            )
            for link in self._links
        )

    # --- lookups --------------------------------------------------------------------------------

    def lookup(self, key: OffloadKey, req_context: ReqContext) -> LookupResult:
        if not self._step_has_begun:
            self._begin_step()
        result = self._look_up_in_primary(key, req_context)
        if result is _HIT and not self._windows:
            return _HIT
        if req_context is self._last_context:
            request = self._last_request
            assert request is not None
        else:
            request = self._request_of(req_context)
        group = key[-4:]
        if group in self._windows:
            return self._look_up_in_window(key, group, result, request)
        if result is _HIT:
            return _HIT
        if result is _HIT_PENDING:
            return self._await_writer(key, request)
        return self._look_up_below(key, group, request)

    def lookup_prefix(self, keys: Iterable[OffloadKey], req_context: ReqContext) -> PrefixLookup:
        keys = list(keys)
        if not keys or keys[0][-4:] in self._windows:
            return super().lookup_prefix(keys, req_context)
        if not self._step_has_begun:
            self._begin_step()
        request = self._request_of(req_context)
        look_up_run = self.primary_tier.lookup_prefix
        start, batch = 0, _FIRST_BATCH
        num_hits, is_counting, is_final = 0, True, True
        while True:
            num_present, all_ready = look_up_run(keys[start:] if start else keys, req_context)
            if not all_ready:
                num_present, all_ready = self._await_writers(
                    keys[start : start + num_present], request
                )
                is_final = is_final and all_ready
            start += num_present
            num_hits += num_present * is_counting
            if start == len(keys) or self.primary_tier.has(keys[start]):
                break  # the end; or what is being promoted, and not waited for any more
            for result in self._look_up_batch_below(keys, start, batch, request):
                if result is _MISS:
                    return PrefixLookup(num_hits, is_final)
                is_final = False
                is_counting = is_counting and result is _HIT_PENDING
                num_hits += is_counting
                start += 1
            batch *= 4
        return PrefixLookup(num_hits, is_final)

    def _await_writers(self, keys: Sequence[OffloadKey], request: TierRequest) -> tuple[int, bool]:
        """How many of these blocks, which are there or being written, are worth waiting for; and
        whether none of those has to be waited for."""
        all_ready = True
        for n, key in enumerate(keys):
            if not self.primary_tier.is_ready(key):
                if self._await_writer(key, request) is _MISS:
                    return n, all_ready
                all_ready = False
        return len(keys), all_ready

    def _look_up_batch_below(
        self, keys: Sequence[OffloadKey], start: int, most: int, request: TierRequest
    ) -> Iterable[LookupResult]:
        """Answers for up to `most` keys from `start` on, until one that is in the primary tier."""
        has = self.primary_tier.has
        stop = min(start + most, len(keys))
        end = start + 1
        while end < stop and not has(keys[end]):
            end += 1
        asked = keys[start:end]
        group = asked[0][-4:]
        if request.step != self._step:
            self._begin_asking(request)
        answers: Sequence[LookupResult] = ()
        first = request.open[0] if request.open else None
        if first is not None and first.lets(request, self._now) and group not in request.ended:
            answers = first.look_up_batch(asked, request.context)
        for n, answer in enumerate(answers):
            yield self._look_up_below(asked[n], group, request, first, answer)
        if not answers:
            yield self._look_up_below(asked[0], group, request)

    def _look_up_below(
        self,
        key: OffloadKey,
        group: bytes,
        request: TierRequest,
        asked: TierLink | None = None,
        its_answer: LookupResult = _MISS,
    ) -> LookupResult:
        """Ask the tiers, in their order, for a block that is not in the primary tier.

        `asked`: one that has answered already.
        """
        if request.step != self._step:
            self._begin_asking(request)
        elif request.ended and request.ended.get(group) is _MISS:
            # Nothing behind a miss can be a hit. But it may be asked again for what is before it.
            return _HIT_PENDING if key in request.wanted.get(group, ()) else _MISS
        result = _MISS
        for link in request.open:
            if link.breaker.state is not _CLOSED and not link.lets(request, self._now):
                continue
            if request.avoided and link in request.avoided.get(key, ()):
                continue
            answer = its_answer if link is asked else link.look_up(key, request.context)
            if answer is _RETRY or answer is _HIT_PENDING:
                if self._may_ask_again(link, key, request):
                    result = _RETRY
                continue
            if request.asking:
                request.asking.pop((link, key), None)
            if answer is _HIT:
                return self._want(key, group, link, request)
        request.ended[group] = result
        if result is _RETRY:
            request.waits(self._now, self._step)
        return result

    def _may_ask_again(self, link: TierLink, key: OffloadKey, request: TierRequest) -> bool:
        """Whether a tier that does not know yet has time left to find out."""
        since = request.asking.setdefault((link, key), self._now)
        if self._now - since <= link.settings.lookup_timeout_s:
            return True
        link.lookup_is_late(self._now)
        request.decline(link)
        return False

    def _begin_asking(self, request: TierRequest) -> None:
        """A request asks for something for the first time in this step."""
        request.begin_step(self._step)
        now = self._now
        if not request.may_wait(now, self._step):
            request.open = ()
        elif self._all_closed and not request.declined:
            request.open = request.sources
        else:
            request.open = tuple(
                link
                for link in request.sources
                if link.lets(request, now) and link not in request.declined
            )

    def _want(
        self, key: OffloadKey, group: bytes, link: TierLink, request: TierRequest
    ) -> LookupResult:
        """A block was found below: bring it up at the end of the step, if it can be of use."""
        if request not in self._wanting:
            self._wanting[request] = None
            request.max_wanted = self.primary_tier.num_fitting(request.context)
            request.waits(self._now, self._step)
        wanted = request.wanted.get(group)
        if wanted is None:
            wanted = request.wanted[group] = {}
        # What is behind a block that may be missing is not promoted before that is known.
        if key not in wanted and group not in request.ended:
            if request.num_wanted >= request.max_wanted:
                self._count("kvtier_tiering_no_room_blocks", 1)
                request.ended[group] = _MISS
                return _MISS
            wanted[key] = link
            request.num_wanted += 1
        return _HIT_PENDING

    def _await_writer(self, key: OffloadKey, request: TierRequest) -> LookupResult:
        """A block is on its way into the primary tier: from the device, or from below."""
        job_id = self.primary_tier.writer_of(key)
        if job_id is None:
            return _HIT_PENDING
        if not request.may_wait(self._now, self._step):
            return _MISS
        self._promoting[job_id].wanters[request] = None
        request.waits(self._now, self._step)
        return _HIT_PENDING

    def _look_up_in_window(
        self, key: OffloadKey, group: bytes, result: LookupResult, request: TierRequest
    ) -> LookupResult:
        """The same for a group that is scanned backwards, in which a miss ends nothing."""
        if request.step != self._step:
            self._begin_asking(request)
        if result is _HIT_PENDING:
            result = self._await_writer(key, request)
        elif result is _MISS:
            if request.ended.get(group) is _MISS:
                del request.ended[group]  # a miss closer to the end
            result = self._look_up_below(key, group, request)
        run = request.wanted.setdefault(group, {})
        if result is _HIT or result is _HIT_PENDING:
            # Another scan may ask for it again: the last one counts.
            run[key] = run.pop(key, None)
        else:
            request.num_wanted -= sum(link is not None for link in run.values())
            run.clear()
        return result

    # --- promotions -----------------------------------------------------------------------------

    def _promote_wanted(self) -> None:
        """Send one job for each tier and request that found blocks there in this step."""
        for request in self._wanting:
            by_link = self._by_link(request)
            for link, keys in by_link.items():
                if not self._promote(keys, link, request):
                    break  # what comes behind would be of no use
        self._wanting = {}

    def _by_link(self, request: TierRequest) -> dict[TierLink, list[OffloadKey]]:
        """What to bring up for a request, in prompt order, by tier."""
        by_link: dict[TierLink, list[OffloadKey]] = {}
        for group, wanted in request.wanted.items():
            keys = list(wanted)
            window = self._windows.get(group)
            if window is not None:
                if group in request.ended:
                    continue  # it is not known yet which window it will be
                keys = keys[-window:][::-1]
            for key in keys:
                link = wanted[key]
                if link is None:
                    continue
                if not self.primary_tier.has(key):
                    by_link.setdefault(link, []).append(key)
                elif not self.primary_tier.is_ready(key):
                    self._await_writer(key, request)
        return by_link

    def _promote(self, keys: list[OffloadKey], link: TierLink, request: TierRequest) -> bool:
        """Bring up blocks, or the head of them. Whether all of them are on their way."""
        if not link.lets(request, self._now):
            return False
        wanted = len(keys)
        if not self._is_worth_it(keys, link):
            if not link.explores(self._now):
                link.count("declined_blocks", wanted)
                request.decline(link)
                return False
            del keys[link.explored_blocks :]
        del keys[link.num_loadable(len(keys)) :]
        del keys[self.primary_tier.num_writable(len(keys), request.context) :]
        if not keys:
            return False
        self._job_id += 1
        output = self.primary_tier.prepare_write(self._job_id, keys, request.context)
        if output is None:
            return False
        transfer = self._transfer(output.keys_to_store, output.store_spec, True, request.context)
        job = link.submit_load(transfer, self._now)
        self._promoting[transfer.job_id] = job
        job.wanters[request] = None
        if job.is_late:
            self._give_up_promotion(job)
        return len(keys) == wanted

    def _is_worth_it(self, keys: Sequence[OffloadKey], link: TierLink) -> bool:
        """Whether loading is not slower than computing, as far as is known."""
        tokens_per_s = self._prefill.tokens_per_s
        if tokens_per_s is None:
            return True
        load_time = link.estimate.predict(len(keys) + link.num_loading)
        num_tokens = self._num_tokens(keys)
        return not load_time or not num_tokens or load_time * tokens_per_s <= num_tokens

    def _num_tokens(self, keys: Sequence[OffloadKey]) -> int:
        """The tokens that these blocks stand for: groups hold the same tokens."""
        tokens: dict[bytes, int] = {}
        for key in keys:
            group = key[-4:]
            shape = self._groups.get(group)
            if shape is not None:
                tokens[group] = tokens.get(group, 0) + shape.tokens_per_block
        return max(tokens.values(), default=0)

    def _end_promotion(self, job: Job, moved: Sequence[OffloadKey], link: TierLink) -> None:
        transfer = job.transfer
        del self._promoting[transfer.job_id]
        self.primary_tier.complete_write(transfer.job_id, moved)
        if job.is_stale:
            return
        wanters = [request for request in job.wanters if not request.finished]
        if len(moved) < len(transfer.keys):
            failed = set(transfer.keys).difference(moved)
            for request in wanters:
                for key in failed:
                    request.avoided.setdefault(key, set()).add(link)
        if moved and wanters:
            expires = self._now + link.settings.load_timeout_s
            self._leases.begin(moved, wanters, transfer.req_context, expires)
        if self._parked:
            self._cascade_parked(transfer.keys)

    def _give_up_promotion(self, job: Job) -> None:
        """It is late. Those who wait for it do not, and the slots wait for the tier."""
        self.primary_tier.give_up_write(job.transfer.job_id)
        self._count("kvtier_tiering_given_up_requests", len(job.wanters))
        for request in job.wanters:
            request.given_up = True
        job.wanters.clear()
        if self._parked:
            self._cascade_parked(job.transfer.keys)

    # --- loads ----------------------------------------------------------------------------------

    def prepare_load(self, keys: Collection[OffloadKey], req_context: ReqContext) -> LoadStoreSpec:
        spec = self.primary_tier.prepare_load(keys, req_context)
        request = self._request_of(req_context)
        request.goes_on()
        if request.leases:
            self._leases.end_for(request)
        return spec

    def complete_load(self, keys: Collection[OffloadKey], req_context: ReqContext) -> None:
        self.primary_tier.complete_load(keys, req_context)

    # --- stores ---------------------------------------------------------------------------------

    def prepare_store(
        self, keys: Collection[OffloadKey], req_context: ReqContext
    ) -> PrepareStoreOutput | None:
        keys = list(keys)
        output = self.primary_tier.prepare_store(keys, req_context)
        request = self._request_of(req_context)
        if output is None:
            return None
        new = output.keys_to_store
        if new:
            request.prepared.append(new)
            if self._prefill.is_learnt and self._groups:
                self._prefill.note_computed(self._num_tokens(new))
        if request.request_level and len(new) < len(keys):
            stored = set(new)
            self._offer_again([key for key in keys if key not in stored], request)
        return output

    def complete_store(
        self, keys: Collection[OffloadKey], req_context: ReqContext, success: bool = True
    ) -> None:
        request = self._request_of(req_context)
        num_stored = self.primary_tier.finish_store(keys, req_context, success)
        in_order = _take_prepared(request.prepared, keys)
        if num_stored and request.links:
            self._cascade(in_order, request.links, WriteMoment.STORED, request)
        if self._parked:
            self._cascade_parked(keys)
        self._tell_if_finished(request)

    def _cascade(
        self,
        keys: Sequence[OffloadKey],
        links: Iterable[TierLink],
        moment: WriteMoment,
        request: TierRequest,
    ) -> None:
        """Send blocks that can be read down to tiers, one job for each."""
        context = request.context
        now = self._clock()
        for link in links:
            chosen = link.write_policy.select(keys, moment, context)
            n = link.num_storable(len(chosen), now) if chosen else 0
            if not n:
                continue
            if n < len(chosen):
                chosen = chosen[:n]
            self._job_id += 1
            kept, spec = self.primary_tier.prepare_read(self._job_id, chosen, context)
            link.submit_store(self._transfer(kept, spec, False, context), now)

    def _transfer(
        self,
        keys: Sequence[OffloadKey],
        spec: LoadStoreSpec,
        is_promotion: bool,
        context: ReqContext,
    ) -> TransferJob:
        block_ids: np.ndarray[tuple[int], np.dtype[np.int64]] = spec.block_ids  # type: ignore[attr-defined]
        block_ids.flags.writeable = False
        return TransferJob(self._job_id, keys, block_ids, is_promotion, context, self._fingerprint)

    def _offer_again(self, keys: Sequence[OffloadKey], request: TierRequest) -> None:
        """Cascade blocks that were there already to the tiers that want whole requests."""
        ready = []
        for key in keys:
            if self.primary_tier.is_ready(key):
                ready.append(key)
            elif self.primary_tier.has(key):
                waiting = self._parked.setdefault(key, {})
                for link in request.request_level:
                    if (request, link) not in waiting:
                        waiting[request, link] = None
                        request.num_parked += 1
        if ready:
            self._cascade(ready, request.request_level, WriteMoment.HIT, request)

    def _cascade_parked(self, keys: Iterable[OffloadKey]) -> None:
        """These blocks have been written, or will not be: cascade those that someone waits for."""
        by_target: dict[tuple[TierRequest, TierLink], list[OffloadKey]] = {}
        for key in keys:
            for target in self._parked.pop(key, ()):
                by_target.setdefault(target, []).append(key)
        for (request, link), parked in by_target.items():
            request.num_parked -= len(parked)
            ready = [key for key in parked if self.primary_tier.is_ready(key)]
            if ready and link in request.links:
                self._cascade(ready, (link,), WriteMoment.HIT, request)
            self._tell_if_finished(request)

    # --- the whole cache ------------------------------------------------------------------------

    def reset_cache(self) -> None:
        self._leases.end_all()
        self._wanting = {}
        self._parked = {}
        self.primary_tier.reset_cache()
        if self._new_fingerprint is not None:
            self._fingerprint = self._new_fingerprint()
        for link in self._links:
            link.begin_epoch(self._fingerprint if self._new_fingerprint is not None else None)
        for request in list(self._requests.values()):
            request.goes_on()
            request.step = -1
            request.prepared = []
            request.num_parked = 0
            self._tell_if_finished(request)

    def take_events(self) -> Iterable[OffloadingEvent]:
        events = list(self.primary_tier.take_events())
        for link in self._links:
            events += link.take_events()
        return events

    def get_stats(self) -> OffloadingStats:
        stats = self.primary_tier.get_stats()
        stats.counters.update(self._counters)
        self._counters = {}
        stats.gauges["kvtier_tiering_leased_blocks"] = self._leases.num_blocks
        stats.gauges["kvtier_tiering_prefill_tokens_per_s"] = self._prefill.tokens_per_s or 0.0
        for link in self._links:
            link.add_stats(stats)
        return stats

    def shutdown(self) -> None:
        """Let the tiers finish, for at most `shutdown_timeout_s`, then take the slots from them."""
        if self._is_shut_down:
            return
        self._is_shut_down = True
        close_tiers(self.secondary_tiers, self._shutdown_timeout_s)
        self.primary_tier.shutdown()

    def _count(self, name: str, n: int) -> None:
        self._counters[name] = self._counters.get(name, 0) + n


def _take_prepared(
    prepared: list[list[OffloadKey]], keys: Collection[OffloadKey]
) -> Sequence[OffloadKey]:
    """The store that has ended, in prompt order; `keys`, if it is not clear which one has."""
    num_keys = len(keys)
    for i, store in enumerate(prepared):
        if len(store) == num_keys and store[0] in keys and store[-1] in keys:
            del prepared[i]
            return store
    # Some of several stores: what is left of each is still to come.
    ended = set(keys)
    # Not in place: the lists are the engine's as well.
    prepared[:] = [
        left for store in prepared if (left := [key for key in store if key not in ended])
    ]
    return list(keys)
