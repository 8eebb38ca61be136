"""Looks for blocks below the primary tier, and notes what is to be brought up."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, cast

from kvtier.base import LookupResult, PrefixLookup
from kvtier.tiering.health import BreakerState
from kvtier.tiering.request import Awaited

if TYPE_CHECKING:
    from kvtier.base import OffloadKey
    from kvtier.cpu.policies.base import BlockStatus
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
    backwards, and there a miss only begins the window anew; so it does where it is not known in
    which direction a group is looked up.
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
        self._uncertain = groups.uncertain
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
            if group not in self._uncertain:
                # But it may be asked again for what is before the miss.
                return _HIT_PENDING if key in request.wanted.get(group, ()) else _MISS
            del request.ended[group]
            request.drop_wanted(group)
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
        elif group not in request.wanted and group not in self._uncertain:
            request.missed = group
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
        if result is _HIT or result is _HIT_PENDING:
            # Another scan may ask for it again: the last one counts.
            run = request.wanted.setdefault(group, {})
            run[key] = run.pop(key, None)
        else:
            request.drop_wanted(group)
        return result

    def look_up_prefix(self, keys: Sequence[OffloadKey], request: TierRequest) -> PrefixLookup:
        """How many leading keys hit, here or below. For groups looked up from the start."""
        if request.step != self._step.number:
            self._begin(request)
        group = keys[0][-4:]
        awaited = request.awaited.pop(group, None)
        if awaited is not None and self._is_still_awaited(awaited, keys, request):
            request.awaited[group] = awaited
            return awaited.answer
        answer = self._look_up_prefix(keys, group, request)
        while not answer.is_final and self._promotions.declines(group, request):
            answer = self._look_up_prefix(keys, group, request)
        if not answer.is_final:
            self._note_awaited(keys, answer, group, request)
        return answer

    def _look_up_prefix(
        self, keys: Sequence[OffloadKey], group: bytes, request: TierRequest
    ) -> PrefixLookup:
        # The first keys alone: most prompts end with their first miss.
        num_hits, is_final, size = 0, True, _FIRST_BATCH
        is_known = not (group in request.ended or request.asking or request.avoided)
        while num_hits < len(keys):
            if not is_known:
                rest = self._look_up_one_by_one(keys[num_hits:], group, request)
                return PrefixLookup(num_hits + rest.num_hits, is_final and rest.is_final)
            chunk = keys[num_hits : num_hits + size]
            num_found, all_ready, is_known = self._look_up_chunk(chunk, group, request)
            num_hits += num_found
            is_final = is_final and all_ready
            if num_found < len(chunk) and is_known:
                break
            size *= 4
        return PrefixLookup(num_hits, is_final)

    def _note_awaited(
        self, keys: Sequence[OffloadKey], answer: PrefixLookup, group: bytes, request: TierRequest
    ) -> None:
        """Remember what a request waits for. It asks in every step, and to look at thousands of
        blocks again would take the interpreter from the threads that bring them."""
        if request in self._promotions.wanting or request.asking:
            return  # there is more to be done than to wait
        for key in reversed(keys[: answer.num_hits]):
            job_id = self._primary.writer_of(key)
            if job_id is not None:
                request.awaited[group] = Awaited(keys, answer, self._promotions.jobs[job_id])
                return

    def _is_still_awaited(
        self, awaited: Awaited, keys: Sequence[OffloadKey], request: TierRequest
    ) -> bool:
        """Whether it asks the same again, and there is no more to say. If so, it waits."""
        job = awaited.job
        if job.is_done or request not in job.wanters or request.given_up or keys != awaited.keys:
            return False
        request.waits(self._step.now, self._step.number)
        return True

    def _look_up_chunk(
        self, keys: Sequence[OffloadKey], group: bytes, request: TierRequest
    ) -> tuple[int, bool, bool]:
        """How many of the keys, from the first on, are hits; whether all of those can be read; and
        whether it is known that the next one is none."""
        primary, context = self._primary, request.context
        if primary.find_all(keys, context):
            return len(keys), True, True
        blocks = primary.blocks_of(keys)
        if all(blocks):
            if primary.note_run(keys, cast("list[BlockStatus]", blocks), context):
                return len(keys), True, True
            return *self._await_writers(keys, request), True
        num_head = blocks.index(None)
        # First: what it uses here leaves less room for what is brought up.
        head = cast("list[BlockStatus]", blocks[:num_head])
        all_ready = not head or primary.note_run(keys[:num_head], head, context)
        missing = [key for key, block in zip(keys, blocks, strict=True) if block is None]
        num_found, is_known = self._find_below(missing, group, request)
        if num_found < len(missing):
            end = keys.index(missing[num_found])
            keys, blocks = keys[:end], blocks[:end]
        others = [block for block in blocks[num_head:] if block is not None]
        if others:
            all_ready &= primary.note_run([block.key for block in others], others, context)
        if all_ready:
            return len(keys), not num_found, is_known
        num_hits, all_ready = self._await_writers(keys, request)
        return num_hits, all_ready, is_known or num_hits < len(keys)

    def _find_below(
        self, keys: Sequence[OffloadKey], group: bytes, request: TierRequest
    ) -> tuple[int, bool]:
        """How many of the keys, from the first on, tiers have; and whether the next is known."""
        num_found, size = 0, _FIRST_BATCH
        while num_found < len(keys):
            # Not all the rest at once: tiers may have the blocks in turns.
            run = keys[num_found : num_found + size]
            num_wanted, is_known = self._find_run(run, group, request)
            if not num_wanted:
                return num_found, is_known
            num_found += num_wanted
            size = size * 4 if num_wanted == len(run) else _FIRST_BATCH
        return num_found, True

    def _find_run(
        self, keys: Sequence[OffloadKey], group: bytes, request: TierRequest
    ) -> tuple[int, bool]:
        """The same, up to where another tier has to be asked."""
        if group in request.ended:
            return 0, True  # no room for more
        is_known = True
        for link in request.open:
            if link.breaker.state is not _CLOSED and not link.lets(request, self._step.now):
                continue
            answers = link.look_up_batch(keys, request.context)
            num_hits = _num_leading_hits(answers)
            if num_hits:
                found = keys[:num_hits] if num_hits < len(keys) else keys
                return self._want_run(found, group, link, request), True
            if answers and answers[0] is not _MISS:
                is_known = False
        if is_known:
            request.ended[group] = _MISS
        return 0, is_known

    def _want_run(
        self, keys: Sequence[OffloadKey], group: bytes, link: TierLink, request: TierRequest
    ) -> int:
        """Blocks were found below: bring them up at the end of the step. Returns how many fit."""
        self._expect(request)
        wanted = request.wanted.setdefault(group, {})
        num_fitting = request.max_wanted - request.num_wanted
        if not wanted.keys().isdisjoint(keys):
            known = [key in wanted for key in keys]
            num_fitting += sum(known)  # those behind the last known one come later, or never
        if num_fitting < len(keys):
            self.num_without_room += 1
            request.ended[group] = _MISS
            keys = keys[: max(num_fitting, 0)]
        num_wanted = len(wanted)
        wanted.update(dict.fromkeys(keys, link))
        request.num_wanted += len(wanted) - num_wanted
        return len(keys)

    def _look_up_one_by_one(
        self, keys: Sequence[OffloadKey], group: bytes, request: TierRequest
    ) -> PrefixLookup:
        """The same with every tier asked for every key, where they do not know yet, or have failed.
        But the first tier is asked for all of them at once."""
        first = request.open[0] if request.open else None
        missing = [key for key in keys if not self._primary.has(key)]
        answers: dict[OffloadKey, LookupResult] = {}
        if first is not None and first.lets(request, self._step.now):
            told = first.look_up_batch(missing, request.context)
            answers = dict(zip(missing, told, strict=False))
        num_hits, is_counting, is_final = 0, True, True
        for key in keys:
            result = self._primary.lookup(key, request.context)
            if result is _HIT_PENDING:
                result = self._promotions.await_writer(key, request)
            elif result is _MISS:
                answer = answers.get(key)
                asked = None if answer is None else first
                result = self.look_up(key, group, request, asked, answer or _MISS)
            if result is _MISS:
                break
            is_final = is_final and result is _HIT
            is_counting = is_counting and result is not _RETRY
            num_hits += is_counting
        return PrefixLookup(num_hits, is_final)

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
        self._expect(request)
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

    def _expect(self, request: TierRequest) -> None:
        """Something is brought up for the request at the end of the step."""
        if request not in self._promotions.wanting:
            self._promotions.wanting[request] = None
            request.max_wanted = self._primary.num_fitting(request.context)
            request.waits(self._step.now, self._step.number)


def _num_leading_hits(answers: Sequence[LookupResult]) -> int:
    num_hits = answers.count(_HIT)
    if num_hits == len(answers) or (num_hits == len(answers) - 1 and answers[-1] is not _HIT):
        return num_hits
    return next(n for n, answer in enumerate(answers) if answer is not _HIT)
