"""Looks for blocks below the primary tier, and notes what is to be brought up."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from kvtier.base import LookupResult, PrefixLookup
from kvtier.tiering.health import BreakerState

if TYPE_CHECKING:
    from kvtier.base import OffloadKey
    from kvtier.tiering.groups import Groups
    from kvtier.tiering.link import TierLink
    from kvtier.tiering.primary import CPUPrimaryTierOffloadingManager
    from kvtier.tiering.promotions import Promotions
    from kvtier.tiering.request import TierRequest
    from kvtier.tiering.step import Step

_HIT = LookupResult.HIT
_MISS = LookupResult.MISS
_HIT_PENDING = LookupResult.HIT_PENDING
_RETRY = LookupResult.RETRY
_CLOSED = BreakerState.CLOSED

_FIRST_BATCH = 16
"""How many keys a tier is first asked for at once. Most prompts end with their first miss."""


class Search:
    """Answers for blocks that are not readable in the primary tier. Scheduler thread only.

    What is found goes into the `wanted` of its request; `Promotions` brings it up at the end of the
    step. A prompt is looked up from its start, and its first miss ends it: nothing behind that can
    be a hit in this step, and no tier is asked for it. Groups with a window are looked up
    backwards, and there a miss only begins the window anew.
    """

    def __init__(
        self,
        primary: CPUPrimaryTierOffloadingManager,
        promotions: Promotions,
        groups: Groups,
        step: Step,
    ) -> None:
        self._primary = primary
        self._promotions = promotions
        self._windows = groups.windows
        self._step = step
        self.num_without_room = 0
        """Blocks found below that do not fit into the primary tier."""

    def look_up(
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
        step = self._step
        if request.step != step.number:
            self._begin(request)
        elif request.ended and request.ended.get(group) is _MISS:
            # But it may be asked again for what is before the miss.
            return _HIT_PENDING if key in request.wanted.get(group, ()) else _MISS
        result = _MISS
        for link in request.open:
            if link.breaker.state is not _CLOSED and not link.lets(request, step.now):
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
            request.waits(step.now, step.number)
        return result

    def look_up_in_window(
        self, key: OffloadKey, group: bytes, result: LookupResult, request: TierRequest
    ) -> LookupResult:
        """The same for a group that is looked up backwards. `result`: the primary tier's answer."""
        if request.step != self._step.number:
            self._begin(request)
        if result is _HIT_PENDING:
            result = self._promotions.await_writer(key, request)
        elif result is _MISS:
            if request.ended.get(group) is _MISS:
                del request.ended[group]  # a miss closer to the end
            result = self.look_up(key, group, request)
        run = request.wanted.setdefault(group, {})
        if result is _HIT or result is _HIT_PENDING:
            # Another scan may ask for it again: the last one counts.
            run[key] = run.pop(key, None)
        else:
            request.num_wanted -= sum(link is not None for link in run.values())
            run.clear()
        return result

    def look_up_prefix(self, keys: Sequence[OffloadKey], request: TierRequest) -> PrefixLookup:
        """How many leading keys hit, here or below. For groups looked up from the start."""
        start, batch = 0, _FIRST_BATCH
        num_hits, is_counting, is_final = 0, True, True
        while True:
            here = keys[start:] if start else keys
            num_here, all_ready = self._primary.lookup_prefix(here, request.context)
            if not all_ready:
                num_here, all_ready = self._await_writers(here[:num_here], request)
                is_final = is_final and all_ready
            start += num_here
            num_hits += num_here * is_counting
            if start == len(keys) or self._primary.has(keys[start]):
                break  # the end; or what is being promoted, and not waited for any more
            for result in self._look_up_batch(keys, start, batch, request):
                if result is _MISS:
                    return PrefixLookup(num_hits, is_final)
                is_final = False
                is_counting = is_counting and result is _HIT_PENDING
                num_hits += is_counting
                start += 1
            batch *= 4
        return PrefixLookup(num_hits, is_final)

    def _look_up_batch(
        self, keys: Sequence[OffloadKey], start: int, most: int, request: TierRequest
    ) -> Iterator[LookupResult]:
        """Answers for up to `most` keys from `start` on, until one that is in the primary tier."""
        has = self._primary.has
        stop = min(start + most, len(keys))
        end = start + 1
        while end < stop and not has(keys[end]):
            end += 1
        asked = keys[start:end]
        group = asked[0][-4:]
        if request.step != self._step.number:
            self._begin(request)
        first = request.open[0] if request.open else None
        answers: Sequence[LookupResult] = ()
        if (
            first is not None
            and first.lets(request, self._step.now)
            and request.ended.get(group) is not _MISS
        ):
            answers = first.look_up_batch(asked, request.context)
        for n, answer in enumerate(answers):
            yield self.look_up(asked[n], group, request, first, answer)
        if not answers:
            yield self.look_up(asked[0], group, request)

    def _await_writers(self, keys: Sequence[OffloadKey], request: TierRequest) -> tuple[int, bool]:
        """How many of these blocks, which are there or being written, are worth waiting for; and
        whether none of those has to be waited for."""
        all_ready = True
        for n, key in enumerate(keys):
            if not self._primary.is_ready(key):
                if self._promotions.await_writer(key, request) is _MISS:
                    return n, all_ready
                all_ready = False
        return len(keys), all_ready

    def _begin(self, request: TierRequest) -> None:
        """A request asks for something for the first time in this step."""
        step = self._step
        request.begin_step(step.number)
        if not request.may_wait(step.now, step.number):
            request.open = ()
        elif step.all_in_use and not request.declined:
            request.open = request.sources
        else:
            request.open = tuple(
                link
                for link in request.sources
                if link.lets(request, step.now) and link not in request.declined
            )

    def _may_ask_again(self, link: TierLink, key: OffloadKey, request: TierRequest) -> bool:
        """Whether a tier that does not know yet has time left to find out."""
        now = self._step.now
        since = request.asking.setdefault((link, key), now)
        if now - since <= link.settings.lookup_timeout_s:
            return True
        link.lookup_is_late(now)
        request.decline(link)
        return False

    def _want(
        self, key: OffloadKey, group: bytes, link: TierLink, request: TierRequest
    ) -> LookupResult:
        """A block was found below: bring it up at the end of the step, if it can be of use."""
        if request not in self._promotions.wanting:
            self._promotions.wanting[request] = None
            request.max_wanted = self._primary.num_fitting(request.context)
            request.waits(self._step.now, self._step.number)
        wanted = request.wanted.get(group)
        if wanted is None:
            wanted = request.wanted[group] = {}
        # What is behind a block that may be missing is not promoted before that is known.
        if key not in wanted and group not in request.ended:
            if request.num_wanted >= request.max_wanted:
                self.num_without_room += 1
                request.ended[group] = _MISS
                return _MISS
            wanted[key] = link
            request.num_wanted += 1
        return _HIT_PENDING
