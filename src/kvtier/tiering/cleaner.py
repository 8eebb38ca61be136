"""The cleaner: writes blocks to lower tiers before they leave host memory.

Under the write policies `on_evict` and `adaptive`, a block is written to a tier when it is about to
leave host memory and the tier does not have it. Eviction cannot wait for that. So at the start of a
step, the cleaner looks at the blocks that will leave next (`CachePolicy.next_to_leave`), and writes
those that are worth it. It keeps a reserve: free slots, and blocks that can leave because they are
in the tier or not worth writing. A block that leaves earlier is lost, and is counted. If a single
step may take more slots than the largest reserve covers, blocks are written as soon as the device
has stored them.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from kvtier.base import ReqContext, WriteHint
from kvtier.hints import hints_of
from kvtier.observe.journal import What
from kvtier.tiering.request import withheld_from
from kvtier.tiering.write_policy import BlockHistory, WriteThrough

if TYPE_CHECKING:
    from kvtier.base import OffloadKey
    from kvtier.cpu.policies.base import BlockStatus
    from kvtier.tiering.cost import PrefillRate
    from kvtier.tiering.jobs import Job, JobFactory
    from kvtier.tiering.lookup import Groups
    from kvtier.tiering.primary import CPUPrimaryTierOffloadingManager
    from kvtier.tiering.request import TierRequest
    from kvtier.tiering.tier_calls import GuardedTier

    Submit = Callable[
        [Sequence[OffloadKey], GuardedTier, ReqContext, float, list[BlockStatus]], Job
    ]
    """`Cascades.submit`."""

logger = logging.getLogger(__name__)

_LEAST_RESERVE, _MOST_RESERVE = 1 / 16, 1 / 2
"""The size of the reserve, as a share of the slots."""
_BUSY_STEPS = 2
"""The reserve covers this many steps that take as many slots as the busiest one of late."""
_PEAK_KEPT = 0.999
"""What is left of the busiest step's number of slots after each further step."""
_RECENT_STEPS, _RECENT_PEAK_KEPT = 4, 0.9
"""The same two, if the newest blocks may be the next to leave. Then what may leave soon is looked
at in each step that takes slots, so it must not be much."""
_LOADS_WAIT_FACTOR = 2.0
"""How much more a write costs while loads wait for the tier."""
_LEAST_SAVED = 0.25
"""The least that a read is taken to save, as a share of the time to compute the block."""
_SCARCE_SHARE, _MOST_SCARCE_FACTOR = 0.5, 4.0
"""Below this share of the write budget's bucket, writes become more expensive, at most by this
factor."""

_ALL_TIERS = -1
"""The bits of all tiers."""
_NO_HISTORY = BlockHistory()


class Cleaner:
    """Keeps the histories of blocks in host memory, and writes blocks that are about to leave it.
    Scheduler thread only."""

    def __init__(
        self,
        primary: CPUPrimaryTierOffloadingManager,
        tiers: Sequence[GuardedTier],
        jobs: JobFactory,
        prefill: PrefillRate,
        groups: Groups,
    ) -> None:
        self._primary = primary
        self._slots = primary.slots
        self._get = primary.slots.get
        self._jobs = jobs
        self._prefill = prefill
        self._groups = groups
        if primary.slots.policy.next_to_leave(0) is None:
            _fall_back(tiers)
        self.tracked = tuple(tier for tier in tiers if tier.write_policy.tracks_blocks)
        """The tiers whose policies need the histories."""
        self.writes_leaving = tuple(tier for tier in tiers if tier.write_policy.writes_leaving)
        """The tiers that get blocks when these are about to leave."""
        self._counting = tuple(tier for tier in self.tracked if tier.write_policy.counts_uses)
        """The tiers whose policies need the numbers of uses."""
        self._tiers = tiers
        self._has_kept_out = False
        """True once blocks were kept out of tiers."""
        if self.tracked:
            primary.slots.on_evicted = self._note_evicted
        self._least_reserve = max(int(primary.num_blocks * _LEAST_RESERVE), 1)
        self._most_reserve = max(int(primary.num_blocks * _MOST_RESERVE), 1)
        self._num_evicted = 0
        self._level = 0
        """Slots taken since the start, less those freed: at the start of this step."""
        self._busiest = 0.0
        """Slots that the busiest step took. Older steps count less."""
        self._recent = 0.0
        """The same, for the last steps."""
        self._may_evict_newest = primary.slots.policy.may_evict_newest
        self._cleaned_at: dict[GuardedTier, int] = {}
        """`_level` when a tier last got all blocks that it should have had."""
        self._num_requests = 0

    # --- histories ------------------------------------------------------------------------------

    def recall(self, keys: Sequence[OffloadKey], blocks: Sequence[BlockStatus]) -> None:
        """The device has written these blocks. Restore the number of their uses, if a policy
        remembers it."""
        for tier in self._counting:
            uses = tier.write_policy.recall(keys)
            for block in blocks if uses else ():
                if block.key in uses:
                    history = _history_of(block)
                    history.num_uses = max(history.num_uses, uses[block.key])

    def keep_out(self, blocks: Sequence[BlockStatus], request: TierRequest) -> None:
        """A request has stored these blocks, and some tiers may not be to get them from it."""
        bits = _bits_of(request)
        if bits and self.tracked:
            self._has_kept_out = True
            for block in blocks:
                _history_of(block).kept_out |= bits

    def note_used(self, used: Sequence[OffloadKey], request: TierRequest) -> None:
        """A request that used these blocks has ended."""
        get = self._get
        if self._counting:
            for depth, block in enumerate(map(get, used)):
                if block is not None:
                    history = block.history
                    if history is None:
                        history = block.history = BlockHistory()
                    history.num_uses += 1
                    history.depth = depth
        if self._has_kept_out:
            bits = _bits_of(request)
            for block in map(get, used):
                if block is not None and block.history is not None:
                    block.history.kept_out &= bits

    def note_written(
        self, blocks: Sequence[BlockStatus], moved: Sequence[OffloadKey], tier: GuardedTier
    ) -> None:
        """A tier has stored `moved`, or some of it was there already. `blocks`: those of the
        job."""
        if len(moved) < len(blocks):
            named = set(moved)
            blocks = [block for block in blocks if block.key in named]
        bit = tier.bit
        for block in blocks:
            history = block.history
            if history is None:
                history = block.history = BlockHistory()
            history.below |= bit
            history.written |= bit
        tier.write_policy.note_written(len(moved))

    def note_promoted(self, job: Job, moved: Sequence[OffloadKey], tier: GuardedTier) -> None:
        """A tier has loaded blocks."""
        withheld = withheld_from(self._tiers, hints_of(job.transfer.req_context))
        if not tier.write_policy.tracks_blocks and not (withheld and self.tracked):
            return
        if job.transfer.fingerprint != self._jobs.fingerprint:
            return  # they are of an earlier namespace
        bits = sum(other.bit for other in withheld)
        self._has_kept_out |= bits > 0
        for key in moved:
            block = self._get(key)
            if block is not None:
                if bits and block.history is None:  # it was not here before
                    _history_of(block).kept_out = bits
                _history_of(block).below |= tier.bit

    def not_below(self, keys: Sequence[OffloadKey], tier: GuardedTier) -> list[OffloadKey]:
        """Those of the keys whose blocks are readable in host memory, and not known to be in the
        tier."""
        absent = []
        for key in keys:
            block = self._get(key)
            if block is not None and block.ref_cnt >= 0:
                history = block.history
                if history is None or not history.below & tier.bit:
                    absent.append(key)
        return absent

    def _note_evicted(self, victims: Sequence[tuple[OffloadKey, BlockStatus]]) -> None:
        """Blocks are leaving host memory."""
        self._num_evicted += len(victims)
        for tier in self.tracked:
            bit, policy = tier.bit, tier.write_policy
            counts_uses, writes_leaving = policy.counts_uses, policy.writes_leaving
            left_out: list[OffloadKey] = []
            unwritten: list[OffloadKey] = []
            for key, block in victims:
                history = block.history or _NO_HISTORY
                if history.below & bit:
                    if counts_uses and history.written & bit:
                        policy.note_left(key, history, True)
                    continue
                if history.kept_out & bit:
                    pass  # counted when it was stored
                elif writes_leaving and (not counts_uses or policy.is_worth_writing(history)):
                    unwritten.append(key)
                else:
                    left_out.append(key)
                if counts_uses:
                    policy.note_left(key, history, False)
            if left_out:
                tier.stats.count("left_out_blocks", len(left_out))
                tier.notes.add(What.LEFT_OUT, left_out)
            if unwritten:
                tier.stats.count("unwritten_blocks", len(unwritten))
                tier.notes.add(What.UNWRITTEN, unwritten)

    # --- the reserve ----------------------------------------------------------------------------

    @property
    def reserve(self) -> int:
        """The slots that are to be free, or hold blocks that can leave."""
        return min(max(self._least_reserve, int(_BUSY_STEPS * self._busiest)), self._most_reserve)

    def clean(self, submit: Submit, now: float) -> None:
        """Write blocks that are about to leave. Called at the start of each step."""
        if not self.writes_leaving:
            return
        num_free = self._slots.num_free()
        level = self._num_evicted - num_free
        self._busiest = max(level - self._level, self._busiest * _PEAK_KEPT)
        self._recent = max(level - self._level, self._recent * _RECENT_PEAK_KEPT)
        self._level = level
        reserve = self.reserve
        is_hasty = _BUSY_STEPS * self._busiest > _MOST_RESERVE * self._primary.num_blocks
        for tier in self.writes_leaving:
            tier.write_policy.writes_stored = is_hasty
        if num_free >= reserve:
            return
        # Looking at the reserve takes time, so do it again only when half of it may be gone.
        taken = max(reserve // 2, 1)
        if self._may_evict_newest:
            taken, reserve = 1, min(reserve, int(_RECENT_STEPS * self._recent))
        for tier in self.writes_leaving:
            cleaned_at = self._cleaned_at.get(tier)
            if cleaned_at is None or level - cleaned_at >= taken:
                num_wanted = reserve - num_free - tier.stores.num_pinned
                if num_wanted > 0 and self._clean_for(tier, num_wanted, submit, now):
                    self._cleaned_at[tier] = level
                else:
                    self._cleaned_at.pop(tier, None)

    def _clean_for(self, tier: GuardedTier, num_wanted: int, submit: Submit, now: float) -> bool:
        """Write what a tier lacks of the next blocks to leave. Returns True if all of it could be
        sent."""
        if not self._limit_of(tier, now) or not _is_usable(tier, now):
            return False
        context = self._announce(tier)
        lacking = self._next_to_leave(num_wanted, tier, context)
        self._set_price(tier, lacking, now)
        tier.write_policy.begin_pass()
        leaving = lacking
        if tier.write_policy.counts_uses:
            is_worth = tier.write_policy.is_worth_writing
            leaving = [item for item in lacking if is_worth(item[1].history or _NO_HISTORY)]
        while leaving:
            limit = self._limit_of(tier, now)
            if not limit or not tier.lets_store(now):
                break
            # Heads of prompts before their tails.
            part = leaving[limit - 1 :: -1] if limit < len(leaving) else leaving[::-1]
            del leaving[:limit]
            for its, blocks in self._slots.by_tenant([block for _, block in part], context):
                if its is not context:
                    if tier.is_cut_off(now) or not tier.lets_store(now):
                        break
                    tier.wants_whole_requests(its)
                submit([block.key for block in blocks], tier, its, now, blocks)
                if its is not context:
                    tier.notify_finished(its)
            if leaving:  # a request of its own for each job, because tiers order blocks by request
                tier.notify_finished(context)
                context = self._announce(tier)
        tier.notify_finished(context)
        return not leaving

    def _limit_of(self, tier: GuardedTier, now: float) -> int:
        """The most blocks that the next store to a tier may have."""
        return min(tier.stores.num_storable, tier.budget.num_affordable(now))

    def _next_to_leave(
        self, num_blocks: int, tier: GuardedTier, context: ReqContext
    ) -> list[tuple[OffloadKey, BlockStatus]]:
        """Those of the next blocks to leave that a tier may get and does not have, coldest
        first."""
        leaving = self._slots.policy.next_to_leave(num_blocks) or []
        lacking, below = _split(leaving, tier.bit)
        if below and tier.takes_offers:
            missing = tier.missing(below, context)
            for key in missing:  # the tier has evicted them
                block = self._get(key)
                if block is not None:
                    block.history.below &= ~tier.bit
            if missing:
                lacking, _ = _split(leaving, tier.bit)
        return lacking

    def _announce(self, tier: GuardedTier) -> ReqContext:
        """Begin a request of the cleaner. The caller ends it with `notify_finished`."""
        self._num_requests += 1
        context = ReqContext(f"kvtier cleans for {tier.name}: {self._num_requests}")
        tier.wants_whole_requests(context)
        return context

    def _set_price(
        self, tier: GuardedTier, lacking: Sequence[tuple[OffloadKey, BlockStatus]], now: float
    ) -> None:
        """Set what a write costs now, as a multiple of what it usually costs. `lacking`: the blocks
        that may be written."""
        factor = _LOADS_WAIT_FACTOR if tier.jobs.num_loading_in_time else 1.0
        share = tier.budget.share_left(now)
        if share < _SCARCE_SHARE:
            factor *= min(_SCARCE_SHARE / max(share, 1e-9), _MOST_SCARCE_FACTOR)
        tier.write_policy.price_factor = factor / self._saved_share(tier, lacking)

    def _saved_share(
        self, tier: GuardedTier, blocks: Sequence[tuple[OffloadKey, BlockStatus]]
    ) -> float:
        """The share of the time to compute blocks that is saved when they are loaded instead. 1 if
        a cost is not known. On a busy engine, loading is worth something even if it is slower than
        computing, so the share is at least `_LEAST_SAVED`."""
        rate = self._prefill.tokens_per_s
        load_s = tier.load_speed.estimate.predict(len(blocks))
        num_tokens = self._groups.num_tokens([key for key, _ in blocks])
        if not rate or load_s is None or not num_tokens:
            return 1.0
        return max(1 - load_s * rate / num_tokens, _LEAST_SAVED)

    # --- shutdown -------------------------------------------------------------------------------

    def unwritten(
        self, tier: GuardedTier, now: float
    ) -> list[tuple[ReqContext, list[BlockStatus]]]:
        """The blocks that only host memory has, as many as the tier can hold: for each tenant, the
        warmest first, heads of prompts before their tails."""
        if not _is_usable(tier, now):
            return []
        context = self._announce(tier)
        leaving = self._next_to_leave(self._primary.num_blocks, tier, context)
        tier.notify_finished(context)
        blocks = [block for _, block in reversed(leaving)][: tier.manager.capacity_blocks]
        return self._slots.by_tenant(blocks, ReqContext(f"kvtier keeps blocks for {tier.name}"))


def _split(
    leaving: Sequence[tuple[OffloadKey, BlockStatus]], bit: int
) -> tuple[list[tuple[OffloadKey, BlockStatus]], list[OffloadKey]]:
    """Those of the blocks that a tier may get and does not have, and the keys of those that it
    has."""
    lacking = []
    below = []
    for item in leaving:
        history = item[1].history
        if history is None:
            lacking.append(item)
        elif history.below & bit:
            below.append(item[0])
        elif not history.kept_out & bit:
            lacking.append(item)
    return lacking, below


def _is_usable(tier: GuardedTier, now: float) -> bool:
    """True unless the tier is cut off, or late with stores, or blocks wait for it."""
    return not (tier.backlog or tier.jobs.has_late_stores or tier.is_cut_off(now))


def _bits_of(request: TierRequest) -> int:
    """The tiers that a request keeps its blocks out of."""
    if request.context.write_hint is WriteHint.NEVER:
        return _ALL_TIERS
    return sum(tier.bit for tier in request.withheld)


def _history_of(block: BlockStatus) -> BlockHistory:
    if block.history is None:
        block.history = BlockHistory()
    history: BlockHistory = block.history
    return history


def _fall_back(tiers: Sequence[GuardedTier]) -> None:
    """The eviction policy cannot name the blocks that leave next. Write all blocks at once."""
    for tier in tiers:
        if tier.write_policy.writes_leaving:
            tier.write_policy = WriteThrough()
            logger.warning(
                "%s: the eviction policy cannot tell which blocks leave host memory next, so all "
                "blocks are written as soon as they are stored. Implement "
                "CachePolicy.next_to_leave, or use the eviction policy lru or arc.",
                tier.name,
            )
