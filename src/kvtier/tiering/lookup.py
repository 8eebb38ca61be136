"""Finds out which blocks of a prompt are in host memory or in a tier below.

A block that is readable in host memory is a HIT. One that is being written there is HIT_PENDING if
it is worth waiting for, otherwise a MISS. For a block that is not there, the tiers are asked in
their order. If one has it, the answer is HIT_PENDING: the block is noted in `TierRequest.wanted`,
and `kvtier.tiering.promotion` brings it up at the end of the step.

A prompt is looked up from its start, up to the first miss. No block behind a miss can be a hit in
this step, so no tier is asked for one. Groups with a window are looked up from the end backwards,
and a miss only starts a new window. A miss does not end the lookup either if the engine does not
state the direction of a group.

`Lookup.block` answers for one key, and `Lookup.prefix` for a run of keys. Both give the same
answers, but `prefix` asks a tier for many keys in one call. If a tier does not know yet, or has
failed to load a block after it answered HIT, `prefix` continues with one key at a time.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

from kvtier.base import LookupResult, PrefixLookup
from kvtier.tiering.health import BreakerState
from kvtier.tiering.request import Awaited

if TYPE_CHECKING:
    from kvtier.base import OffloadingStats, OffloadKey
    from kvtier.cpu.policies.base import BlockStatus
    from kvtier.tiering.primary import CPUPrimaryTierOffloadingManager
    from kvtier.tiering.promotion import Promotions
    from kvtier.tiering.recording import LookupNotes
    from kvtier.tiering.request import Step, TierRequest
    from kvtier.tiering.tier_calls import GuardedTier

_HIT = LookupResult.HIT
_MISS = LookupResult.MISS
_HIT_PENDING = LookupResult.HIT_PENDING
_RETRY = LookupResult.RETRY
_CLOSED = BreakerState.CLOSED

_FIRST_BATCH = 16
"""Keys in the first batch for a tier. Small, because answers behind a miss are not used."""
_BATCH_GROWTH = 4
_BEYOND_WINDOW = 2
"""Blocks in addition to the window that a lookup in a group with a window may need."""


@dataclass(frozen=True, slots=True)
class GroupShape:
    """How the blocks of one KV-cache group are looked up."""

    tokens_per_block: int
    """Tokens in one offloaded block."""
    window_blocks: int | None = None
    """Consecutive blocks that a hit needs, looked up from the end of the prompt backwards. None:
    all blocks, looked up from the start."""
    is_uncertain: bool = False
    """True if the engine does not state in which direction it looks up."""


class Groups:
    """All KV-cache groups, by the last four bytes of their keys."""

    def __init__(self, shapes: Mapping[int, GroupShape]) -> None:
        by_suffix = {index.to_bytes(4, "big"): shape for index, shape in shapes.items()}
        self._tokens = {group: shape.tokens_per_block for group, shape in by_suffix.items()}
        self.is_only_one = len(shapes) == 1
        """True if there is one group, so that a lookup in it covers the whole prompt."""
        self.windows = {
            group: shape.window_blocks + _BEYOND_WINDOW
            for group, shape in by_suffix.items()
            if shape.window_blocks is not None
        }
        """The groups with a window: the most blocks of each to promote for a request."""
        self.uncertain = frozenset(
            group for group, shape in by_suffix.items() if shape.is_uncertain
        )

    def num_tokens(self, keys: Sequence[OffloadKey]) -> int:
        """The number of prompt tokens that these blocks cover. Blocks of different groups cover the
        same tokens, so the largest number of any group counts. A group that is not known counts as
        0."""
        if len(self._tokens) <= 1:
            # Most models have one group. No key has another one, unless the engine is wrong.
            return len(keys) * self._tokens.get(keys[0][-4:], 0) if keys else 0
        tokens: dict[bytes, int] = {}
        for key in keys:
            group = key[-4:]
            tokens[group] = tokens.get(group, 0) + self._tokens.get(group, 0)
        return max(tokens.values(), default=0)


class Lookup:
    """Looks up blocks in host memory and in the tiers. Scheduler thread only.

    The manager usually answers itself for a key that is readable in host memory or behind a miss.
    """

    def __init__(
        self,
        primary: CPUPrimaryTierOffloadingManager,
        notes: LookupNotes,
        promotions: Promotions,
        groups: Groups,
        step: Step,
    ) -> None:
        self._primary = primary
        self._notes = notes
        self._promotions = promotions
        self._windows = groups.windows
        self._uncertain = groups.uncertain
        self._not_from_start = groups.uncertain | groups.windows.keys()
        self._step = step
        self.num_without_room = 0
        """Lookups that found a block below for which host memory has no room."""

    # --- one block ------------------------------------------------------------------------------

    def block(
        self, key: OffloadKey, group: bytes, in_host: LookupResult, request: TierRequest
    ) -> LookupResult:
        """The answer for one key. `in_host`: the answer of the primary tier."""
        if group in self._windows:
            return self._block_in_window(key, group, in_host, request)
        if in_host is _HIT_PENDING:
            if request.wanted.step != self._step.number:
                self._begin_step(request)
            return self._promotions.await_writer(key, request)
        return self.below(key, group, request) if in_host is _MISS else in_host

    def _block_in_window(
        self, key: OffloadKey, group: bytes, in_host: LookupResult, request: TierRequest
    ) -> LookupResult:
        """Like `block`, for a group with a window."""
        wanted, result = request.wanted, in_host
        if wanted.step != self._step.number:
            self._begin_step(request)
        if in_host is _HIT_PENDING:
            result = self._promotions.await_writer(key, request)
        elif in_host is _MISS:
            if wanted.ended.get(group) is _MISS:
                del wanted.ended[group]  # that miss was behind this key in the prompt
            result = self.below(key, group, request)
        if result is _HIT or result is _HIT_PENDING:
            wanted.move_to_end(key, group)
        else:
            wanted.drop(group)
        return result

    def below(
        self,
        key: OffloadKey,
        group: bytes,
        request: TierRequest,
        asked: GuardedTier | None = None,
        its_answer: LookupResult = _MISS,
    ) -> LookupResult:
        """The answer for a key that is not in host memory: asks the tiers in their order. The
        manager calls this instead of `block`, to save a call for each key. `asked`: a tier that has
        already answered, and `its_answer`."""
        step, wanted, sources = self._step, request.wanted, request.sources
        if wanted.step != step.number:
            self._begin_step(request)
        elif wanted.ended and wanted.ended.get(group) is _MISS:
            if group not in self._uncertain:
                # The key is behind the miss, or before it and looked up again.
                return _HIT_PENDING if key in wanted.runs.get(group, ()) else _MISS
            del wanted.ended[group]
            wanted.drop(group)
        result = _MISS
        for tier in sources.open:
            if (tier.breaker.state is not _CLOSED and not tier.lets(request, step.now)) or (
                sources.failed and tier in sources.failed.get(key, ())
            ):
                continue
            answer = its_answer if tier is asked else tier.look_up(key, request.context)
            if answer is _RETRY or answer is _HIT_PENDING:
                result = _RETRY if self._may_ask_again(tier, key, request) else result
                continue
            if request.wait.asking:
                self._notes.answered(tier, key, request)
            if answer is _HIT:
                # Promote nothing behind a RETRY: that key may turn out to be a miss.
                is_new = group not in wanted.ended and key not in wanted.runs.get(group, ())
                num_wanted = self._want((key,) if is_new else (), group, tier, request)
                return _HIT_PENDING if num_wanted or not is_new else _MISS
        wanted.ended[group] = result
        if result is _RETRY:
            request.wait.note(step.now, step.number)
        else:
            is_final = group not in wanted.runs and group not in self._not_from_start
            wanted.missed = group if is_final else wanted.missed
            self._notes.missed(key, request)
        return result

    def _may_ask_again(self, tier: GuardedTier, key: OffloadKey, request: TierRequest) -> bool:
        """True while a tier that does not know yet has time left to find out. Afterwards, the
        request declines the tier."""
        now = self._step.now
        since = request.wait.asking.setdefault((tier, key), now)
        if now - since <= tier.settings.lookup_timeout_s:
            return True
        tier.lookup_is_late(now)
        request.decline(tier)
        self._notes.late(tier, request, now - since)
        return False

    # --- a run of blocks ------------------------------------------------------------------------

    def prefix(self, keys: Sequence[OffloadKey], request: TierRequest) -> PrefixLookup:
        """The number of leading keys that hit, in host memory or below. Only for groups that are
        looked up from the start."""
        if request.wanted.step != self._step.number:
            self._begin_step(request)
        group = keys[0][-4:]
        if (known := self._known_answer(keys, group, request)) is not None:
            return known
        answer = self._prefix(keys, group, request)
        while not answer.is_final and self._promotions.declines(group, request):
            answer = self._prefix(keys, group, request)
        if not answer.is_final:
            return self._await(keys, answer, group, request)
        if request.leases and request.queued is None:
            self._promotions.leases.extend(request, self._step.now)
        return answer

    def _prefix(
        self, keys: Sequence[OffloadKey], group: bytes, request: TierRequest
    ) -> PrefixLookup:
        num_hits, is_final, size = 0, True, _FIRST_BATCH
        is_known = not (group in request.wanted.ended or request.wait.asking)
        is_known = is_known and not request.sources.failed
        while num_hits < len(keys):
            if not is_known:
                rest = self._one_by_one(keys[num_hits:], group, request)
                return PrefixLookup(num_hits + rest.num_hits, is_final and rest.is_final)
            run = keys[num_hits : num_hits + size]
            num_found, all_ready, is_known = self._run(run, group, request)
            num_hits += num_found
            is_final = is_final and all_ready
            if num_found < len(run) and is_known:
                break
            size *= _BATCH_GROWTH
        return PrefixLookup(num_hits, is_final)

    def _run(
        self, keys: Sequence[OffloadKey], group: bytes, request: TierRequest
    ) -> tuple[int, bool, bool]:
        """Look up a part of a prefix. Returns how many leading keys hit, whether all of those are
        readable now, and whether the answer for the next key is known: not if a tier has answered
        RETRY."""
        primary, context = self._primary, request.context
        if primary.find_all(keys, context):
            return len(keys), True, True
        blocks = primary.blocks_of(keys)
        if all(blocks):
            if primary.use_run(keys, cast("list[BlockStatus]", blocks), context):
                return len(keys), True, True
            return *self._await_writers(keys, request), True
        num_head = blocks.index(None)
        # Note the use of these before asking the tiers: it leaves less room for promoted blocks.
        head = cast("list[BlockStatus]", blocks[:num_head])
        all_ready = not head or primary.use_run(keys[:num_head], head, context)
        missing = [key for key, block in zip(keys, blocks, strict=True) if block is None]
        num_found, is_known = self._ask_all(missing, group, request)
        if num_found < len(missing):
            end = keys.index(missing[num_found])
            keys, blocks = keys[:end], blocks[:end]
        others = [block for block in blocks[num_head:] if block is not None]
        if others:
            all_ready &= primary.use_run([block.key for block in others], others, context)
        if all_ready:
            return len(keys), not num_found, is_known
        num_hits, all_ready = self._await_writers(keys, request)
        return num_hits, all_ready, is_known or num_hits < len(keys)

    def _ask_all(
        self, keys: Sequence[OffloadKey], group: bytes, request: TierRequest
    ) -> tuple[int, bool]:
        """Ask the tiers for a run of missing blocks. Returns how many leading blocks they have and
        host memory has room for, and whether the answer for the next key is known: not if a tier
        has answered RETRY."""
        num_found, size = 0, _FIRST_BATCH
        while num_found < len(keys):
            # In batches: if blocks alternate between tiers, most answers for all the rest would be
            # of no use.
            batch = keys[num_found : num_found + size]
            num_wanted, is_known = self._ask_batch(batch, group, request)
            if not num_wanted:
                return num_found, is_known
            num_found += num_wanted
            size = size * _BATCH_GROWTH if num_wanted == len(batch) else _FIRST_BATCH
        return num_found, True

    def _ask_batch(
        self, keys: Sequence[OffloadKey], group: bytes, request: TierRequest
    ) -> tuple[int, bool]:
        """Ask the tiers in their order, up to the first tier that has the first block. Returns the
        same as `_ask_all`, for the blocks that this tier has."""
        if group in request.wanted.ended:
            return 0, True  # no room for more
        is_known = True
        for tier in request.sources.open:
            if tier.breaker.state is not _CLOSED and not tier.lets(request, self._step.now):
                continue
            answers = tier.look_up_batch(keys, request.context)
            num_hits = _num_leading_hits(answers)
            if num_hits:
                found = keys[:num_hits] if num_hits < len(keys) else keys
                return self._want(found, group, tier, request), True
            if answers and answers[0] is not _MISS:
                is_known = False
        if is_known:
            request.wanted.ended[group] = _MISS
            self._notes.missed(keys[0], request)
        return 0, is_known

    def _one_by_one(
        self, keys: Sequence[OffloadKey], group: bytes, request: TierRequest
    ) -> PrefixLookup:
        """Like `_prefix`, but asks the tiers for one key at a time. Only the first tier is asked
        for all keys in one call."""
        first = request.sources.open[0] if request.sources.open else None
        missing = [key for key in keys if not self._primary.has(key)]
        answers: dict[OffloadKey, LookupResult] = {}
        if first is not None and first.lets(request, self._step.now):
            batch = first.look_up_batch(missing, request.context)
            answers = dict(zip(missing, batch, strict=False))
        num_hits, is_counting, is_final = 0, True, True
        for key in keys:
            result = self._primary.lookup(key, request.context)
            if result is not _MISS and request.wait.asking:
                request.wait.found(key, request.sources.all)
            if result is _HIT_PENDING:
                result = self._promotions.await_writer(key, request)
            elif result is _MISS:
                answer = answers.get(key)
                asked = None if answer is None else first
                result = self.below(key, group, request, asked, answer or _MISS)
            if result is _MISS:
                break
            is_final = is_final and result is _HIT
            is_counting = is_counting and result is not _RETRY
            num_hits += is_counting
        return PrefixLookup(num_hits, is_final)

    def _await_writers(self, keys: Sequence[OffloadKey], request: TierRequest) -> tuple[int, bool]:
        """For blocks that are all in host memory or being written there: return how many leading
        ones are hits, and whether all of those are readable now."""
        all_ready = True
        for n, key in enumerate(keys):
            if not self._primary.is_ready(key):
                if self._promotions.await_writer(key, request) is _MISS:
                    return n, all_ready
                all_ready = False
        return len(keys), all_ready

    # --- the same prefix again ------------------------------------------------------------------
    # A waiting request asks in every step. Checking its thousands of blocks each time would hold
    # the interpreter lock, which the threads that load them need.

    def _known_answer(
        self, keys: Sequence[OffloadKey], group: bytes, request: TierRequest
    ) -> PrefixLookup | None:
        """The last answer, if the promotion that it waits for is still under way. Else None."""
        wait = request.wait
        awaited = wait.awaited.pop(group, None)
        if awaited is None:
            return None
        job = awaited.job
        if job.is_done or request not in job.wanters or wait.has_given_up or keys != awaited.keys:
            return None
        wait.note(self._step.now, self._step.number)
        wait.awaited[group] = awaited
        return awaited.answer

    def _await(
        self, keys: Sequence[OffloadKey], answer: PrefixLookup, group: bytes, request: TierRequest
    ) -> PrefixLookup:
        """The answer for a request that has to wait. If it waits only for promotions of other
        requests, and computing is much faster, it gets only the blocks before those. Otherwise, if
        only the end of a promotion can change the answer, remember it."""
        if request in self._promotions.wanting or request.wait.asking:
            return answer  # the next lookup may give another one
        hits = keys[: answer.num_hits]
        jobs = [self._primary.writer_of(key) for key in hits]
        first = next((n for n, job_id in enumerate(jobs) if job_id is not None), None)
        if first is None:
            return answer  # it waits for the device only
        may_leave = request.queued is None
        if may_leave and self._promotions.leaves(jobs[first:], hits[first:], request):
            # The device may still be writing blocks before the first promoted one.
            return PrefixLookup(first, all(map(self._primary.is_ready, hits[:first])))
        last = next(job_id for job_id in reversed(jobs) if job_id is not None)
        request.wait.awaited[group] = Awaited(keys, answer, self._promotions.jobs[last])
        return answer

    # --- what `block` and `prefix` share --------------------------------------------------------

    def add_to(self, stats: OffloadingStats) -> None:
        """Move the counter into `stats`."""
        if self.num_without_room:
            stats.counters["kvtier_tiering_no_room_blocks"] = self.num_without_room
            self.num_without_room = 0

    def _begin_step(self, request: TierRequest) -> None:
        """Decide which tiers the request asks in this step. Called at its first lookup below."""
        if request.queued is not None and not request.queued.is_being_looked_up:
            request.queued.leave()
            request.wait.forget_waited()
        step, sources = self._step, request.sources
        request.wanted.begin(step.number)
        if not self._notes.may_ask(request):
            sources.open = ()
        elif step.all_in_use and not sources.declined:
            sources.open = sources.all
        else:
            sources.open = tuple(
                tier
                for tier in sources.all
                if tier.lets(request, step.now) and tier not in sources.declined
            )

    def _want(
        self, keys: Sequence[OffloadKey], group: bytes, tier: GuardedTier, request: TierRequest
    ) -> int:
        """Note that a tier has these blocks, to promote them at the end of the step. Returns how
        many fit into host memory. If some do not, the run ends at the first of those."""
        wanted = request.wanted
        if request not in self._promotions.wanting:
            self._promotions.want(request)
            wanted.max_blocks = self._primary.num_fitting(request.context)
            if request.queued is not None:
                wanted.max_blocks = min(wanted.max_blocks, request.queued.room)
            request.wait.note(self._step.now, self._step.number)
        num_fitting = wanted.add(keys, group, tier)
        if num_fitting < len(keys):
            self.num_without_room += request.queued is None
            wanted.ended[group] = _MISS
            self._notes.no_room(keys[num_fitting], request)
        return num_fitting


def _num_leading_hits(answers: Sequence[LookupResult]) -> int:
    num_hits = answers.count(_HIT)
    if num_hits == len(answers) or (num_hits == len(answers) - 1 and answers[-1] is not _HIT):
        return num_hits
    return next(n for n, answer in enumerate(answers) if answer is not _HIT)
