"""Cascades: blocks in host memory go to the tiers below.

When the device has written blocks, each tier of the request gets those that its write policy
selects, in one or more jobs (`Cascades.store`). The slots of a job stay pinned until the tier
reports it. The stores of a tier may pin a limited number of slots (`StoreLimits`); blocks beyond
that wait, unpinned, in the tier's `Backlog`. When a request has ended, each tier is sent those of
its blocks that the tier lacks, at a bounded rate. This is called an offer (`Cascades.offer_used`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterable, Sequence
from math import exp, inf
from typing import TYPE_CHECKING

from kvtier.base import WriteHint
from kvtier.hints import hints_of
from kvtier.observe.journal import What
from kvtier.tiering.cleaner import Cleaner
from kvtier.tiering.write_policy import WriteMoment

if TYPE_CHECKING:
    from kvtier.base import OffloadKey, ReqContext
    from kvtier.cpu.policies.base import BlockStatus
    from kvtier.tiering.cost import PrefillRate
    from kvtier.tiering.jobs import Job, JobFactory
    from kvtier.tiering.lookup import Groups
    from kvtier.tiering.primary import CPUPrimaryTierOffloadingManager
    from kvtier.tiering.request import TierRequest
    from kvtier.tiering.tier_calls import GuardedTier

_STORE_BYTES = 128 << 20
"""The largest store, in bytes. Small stores free their slots earlier, and the tier can go on to the
next one without waiting for the engine's next step."""

_MIN_SHARE = 32
"""The stores of a tier may pin this many slots, if the primary tier has them, even if that is more
than the configured share."""
_SPARE_PINS = 1.25
"""Slots that stores may pin, as a multiple of the slots that keep the tier busy."""
_LEAST_PINNED, _LEAST_PINNED_BYTES = 4, 32 << 20
"""Stores may pin this many slots and bytes even if the tier is slow: smaller stores would make it
slower still."""
_NEWEST_SHARE = 0.25
"""Weight of the newest store in the moving average of the slots that keep the tier busy."""
_LONGEST_LAG_S, _LAG_KEPT_S = 4.0, 1.0
"""The longest lag that counts, and the seconds after which a long one counts only a third."""
_GIVEN_BACK_FOR_S = 30.0
"""Each block that a request loads from the tier lets the tier's stores pin one more slot, for this
many seconds on average."""

_NOTES = {
    "dropped_blocks": What.DROPPED,
    "over_budget_blocks": What.OVER_BUDGET,
    "shed_blocks": What.SHED,
    "switched_off_blocks": What.SWITCHED_OFF,
}
"""What blocks that are not stored have in the journal, by their counter."""
_DAY_S, _SAVED_UP_S = 86_400.0, 3600.0
"""A day, and how much of a day's budget can be saved up, in seconds."""
_UNLIMITED = 1 << 62
_INHERITS_AFTER_S = 10.0
"""Seconds until an engine uses what an earlier one had left of the budget. Tiers write notes within
about a second."""

_OFFERED_BYTES_PER_S = 128 << 20
"""The highest rate of offers to a tier, in bytes per second."""
_FIRST_OFFER_BYTES, _OFFER_S = 16 << 20, 0.25
"""The largest size of the first offer, and the seconds that the tier should take for each later
one: stores of new blocks may have to wait that long."""


class WriteBudget:
    """The bytes that may still be written to one tier: a token bucket, which is filled at the rate
    of the budget and holds an hour's share of it. Scheduler thread only.

    It is empty at the start, except for what an earlier engine had left when it ended in order
    (`inherit`). What a killed engine had left is lost. So restarts never exceed the budget.
    """

    def __init__(self, bytes_per_day: int | None, block_bytes: int, now: float) -> None:
        """`bytes_per_day`: None: no limit."""
        self._bytes_per_s = None if bytes_per_day is None else bytes_per_day / _DAY_S
        self._block_bytes = block_bytes
        self._most = max((self._bytes_per_s or 0.0) * _SAVED_UP_S, float(block_bytes))
        self._num_bytes = 0.0
        self._filled_at = now
        self._inherited = 0.0
        """Bytes that an earlier engine had left."""
        self._inherits_at = inf

    @property
    def is_limited(self) -> bool:
        """True if there is a budget."""
        return self._bytes_per_s is not None

    def inherit(self, num_bytes: float, now: float) -> None:
        """An earlier engine had left this many bytes. They can be used a while later: by then the
        tier has noted that they are taken, so no later engine gets them again."""
        self._inherited, self._inherits_at = num_bytes, now + _INHERITS_AFTER_S

    def saved_up(self, now: float) -> float:
        """The bytes that an engine leaves that ends now."""
        if self._bytes_per_s is None:
            return 0.0
        self._fill(self._bytes_per_s, now)
        return min(self._num_bytes + self._inherited, self._most)

    def num_affordable(self, now: float) -> int:
        """The number of blocks that may be written now."""
        if self._bytes_per_s is None:
            return _UNLIMITED
        self._fill(self._bytes_per_s, now)
        return int(self._num_bytes // self._block_bytes)

    def share_left(self, now: float) -> float:
        """How full the bucket is: 0 to 1."""
        if self._bytes_per_s is None:
            return 1.0
        self._fill(self._bytes_per_s, now)
        return self._num_bytes / self._most

    def _fill(self, bytes_per_s: float, now: float) -> None:
        self._num_bytes += max(0.0, now - self._filled_at) * bytes_per_s
        if now >= self._inherits_at:
            self._num_bytes += self._inherited
            self._inherited, self._inherits_at = 0.0, inf
        self._num_bytes = min(self._num_bytes, self._most)
        self._filled_at = now

    def spend(self, num_blocks: int) -> None:
        """These blocks are sent to the tier."""
        self._num_bytes -= num_blocks * self._block_bytes


class StoreLimits:
    """How many slots the stores of one tier may pin, and how large offers to it may be.

    Stores may pin as many slots as keep the tier busy, and one more for each block that requests
    have loaded from it recently. More would only protect blocks that wait for the tier, at the
    expense of blocks that requests use. Scheduler thread only.
    """

    def __init__(self, share: float, primary: CPUPrimaryTierOffloadingManager) -> None:
        """`share`: the part of the primary tier's slots that stores may pin; at least
        `_MIN_SHARE` slots."""
        self._block_bytes = block_bytes = primary.block_bytes
        most = max(1, primary.num_blocks - primary.reserve)
        max_pinned = min(most, max(int(share * primary.num_blocks), _MIN_SHARE))
        self.max_pinned = max_pinned
        """The most slots that stores may ever pin."""
        self.num_pinned = 0
        """Slots that stores are reading. The tier's `JobTable` writes it."""
        self._least_pinned = min(max_pinned, max(_LEAST_PINNED, _LEAST_PINNED_BYTES // block_bytes))
        self._pins_needed = float(max_pinned)
        """Slots that keep the tier busy, with some to spare: a moving average that starts at
        `max_pinned`."""
        self._num_working = 0
        """Slots that were pinned when the tier was last asked for finished jobs (a harvest)."""
        self._lag = 0.0
        """Seconds between two harvests: the longest of late, since the tier must stay busy in long
        engine steps, too. Older ones count less."""
        self._num_given_back = 0.0
        """Blocks that requests have loaded from the tier. Older ones count less."""
        self._most_in_store = max(1, _STORE_BYTES // block_bytes)
        self._offer: Job | None = None
        """The last offer."""
        self._next_offer_at = -inf
        self._most_in_offer = max(1, _FIRST_OFFER_BYTES // block_bytes)

    @property
    def num_storable(self) -> int:
        """The most blocks that the next store may have."""
        wanted = int(self._pins_needed + self._num_given_back)
        num_pinnable = min(self.max_pinned, max(wanted, self._least_pinned))
        return max(0, min(self._most_in_store, num_pinnable - self.num_pinned))

    def num_offerable(self, now: float) -> int:
        """Return the most blocks that may be offered now. It is 0 while an offer is under way, and
        for a while after it. Offers leave half of `max_pinned` to new blocks."""
        is_busy = self._offer is not None and not self._offer.is_done
        if is_busy or now < self._next_offer_at:
            return 0
        left = (self.max_pinned + 1) // 2 - self.num_pinned
        return max(0, min(self._most_in_offer, self.num_storable, left))

    def note_offer(self, job: Job, now: float) -> None:
        """An offer has begun. The larger it is, the later the next one may begin."""
        self._offer = job
        num_bytes = len(job.transfer.keys) * self._block_bytes
        self._next_offer_at = now + num_bytes / _OFFERED_BYTES_PER_S

    def note_stored(self, job: Job, seconds: float | None, now: float) -> None:
        """A store has ended. `seconds`: how long the tier worked on it; None: not known."""
        if job is self._offer:
            taken_s = now - job.submitted if seconds is None else seconds
            most = self._most_in_store
            if taken_s > 0:
                most = min(most, int(len(job.transfer.keys) * _OFFER_S / taken_s))
            self._most_in_offer = max(1, most)
        if seconds is not None:
            # Little's law: to stay busy, the tier needs the pinned slots times the share of the
            # store's life in which it worked on the store. The lag is added because the tier gets
            # no further store before the next harvest. If all stores ended long before the last
            # one, the tier was idle, the share is 1, and the number grows.
            life = now - job.submitted
            busy_share = min(1.0, (seconds + self._lag) / life) if life > 0 else 1.0
            needed = _SPARE_PINS * self._num_working * busy_share
            self._pins_needed += (needed - self._pins_needed) * _NEWEST_SHARE

    def note_given_back(self, num_blocks: int) -> None:
        """Requests have loaded blocks from the tier."""
        self._num_given_back += num_blocks

    def harvest_begins(self, lag: float) -> None:
        """The tier is about to be asked for finished jobs. `lag`: seconds since it was last asked.
        Lowers the weight of blocks that requests have loaded from the tier."""
        self._num_working = self.num_pinned
        newest = min(lag, _LONGEST_LAG_S) if self.num_pinned else 0.0  # else it had nothing to do
        self._lag = max(newest, self._lag * exp(-lag / _LAG_KEPT_S))
        if self._num_given_back:
            self._num_given_back *= exp(-lag / _GIVEN_BACK_FOR_S)


class Backlog:
    """Blocks in host memory that wait until one tier may store them: those of requests with a
    higher priority first, in order. They are not pinned: a block that is evicted meanwhile is not
    stored. Scheduler thread only."""

    def __init__(self) -> None:
        self._runs: dict[int, deque[tuple[Sequence[OffloadKey], TierRequest]]] = {}
        """By priority. None is empty."""
        self.num_blocks = 0

    def __bool__(self) -> bool:
        return bool(self._runs)

    def append(self, keys: Sequence[OffloadKey], request: TierRequest) -> None:
        priority = hints_of(request.context).priority
        self._runs.setdefault(priority, deque()).append((keys, request))
        self.num_blocks += len(keys)
        request.stores.num_parked += len(keys)

    def take(self, most: int) -> tuple[Sequence[OffloadKey], TierRequest]:
        """Remove and return the oldest blocks of one request of the highest priority, at most
        `most`."""
        return self._take(max(self._runs), most)

    def shed(self, most: int) -> tuple[Sequence[OffloadKey], TierRequest]:
        """The same, of the lowest priority."""
        return self._take(min(self._runs), most)

    def _take(self, priority: int, most: int) -> tuple[Sequence[OffloadKey], TierRequest]:
        runs = self._runs[priority]
        keys, request = runs.popleft()
        if most < len(keys):
            runs.appendleft((keys[most:], request))
            keys = keys[:most]
        elif not runs:
            del self._runs[priority]
        self.num_blocks -= len(keys)
        request.stores.num_parked -= len(keys)
        return keys, request


class Cascades:
    """Sends blocks down: asks the write policy, pins the blocks, submits the job. Scheduler thread
    only.

    If a method returns requests, these have fewer waiting blocks than before the call. The caller
    checks whether they are done.
    """

    def __init__(
        self,
        primary: CPUPrimaryTierOffloadingManager,
        tiers: Sequence[GuardedTier],
        jobs: JobFactory,
        prefill: PrefillRate,
        groups: Groups,
        clock: Callable[[], float],
    ) -> None:
        self._primary = primary
        self._jobs = jobs
        self.cleaner = Cleaner(primary, tiers, jobs, prefill, groups)
        self._clock = clock
        if tiers:
            primary.uses.admit_all()
        self.parked: dict[OffloadKey, dict[tuple[TierRequest, GuardedTier], None]] = {}
        """Blocks that are still being written for another request, and the (request, tier) pairs
        that wait for them. These tiers want whole requests."""

    # --- what happens to blocks -----------------------------------------------------------------

    def store(self, keys: Collection[OffloadKey], success: bool, request: TierRequest) -> None:
        """The device has written blocks, or has failed to (`success`). Send the written ones to
        every tier of the request."""
        in_order = request.stores.end(keys)
        stored = self._primary.finish_store(in_order, request.context, success)
        if stored and (request.tiers or request.withheld):
            if len(stored) < len(in_order):
                in_order = [block.key for block in stored]
            self.cleaner.recall(in_order, stored)
            for tier in request.withheld:
                tier.stats.count("kept_out_blocks", len(in_order))
                tier.notes.add(What.KEPT_OUT, in_order, request.context)
            self.cleaner.keep_out(stored, request)
            self._send(in_order, request.stores_to, WriteMoment.STORED, request, stored)

    def offer_again(self, keys: Sequence[OffloadKey], request: TierRequest) -> None:
        """A request stores blocks that are in host memory already, or are being written there for
        another request. Send them to its tiers that want whole requests."""
        ready = []
        for key in keys:
            if self._primary.is_ready(key):
                ready.append(key)
            elif self._primary.has(key):
                waiting = self.parked.setdefault(key, {})
                for tier in request.request_level:
                    if (request, tier) not in waiting:
                        waiting[request, tier] = None
                        request.stores.num_parked += 1
        if ready:
            self._send(ready, request.request_level, WriteMoment.HIT, request)

    def send_parked(self, keys: Iterable[OffloadKey]) -> Iterable[TierRequest]:
        """These blocks are no longer being written. Send those that are readable to the tiers that
        wait for them."""
        by_target: dict[tuple[TierRequest, GuardedTier], list[OffloadKey]] = {}
        for key in keys:
            for target in self.parked.pop(key, ()):
                by_target.setdefault(target, []).append(key)
        for (request, tier), parked in by_target.items():
            request.stores.num_parked -= len(parked)
            ready = [key for key in parked if self._primary.is_ready(key)]
            if ready and tier in request.stores_to:
                self._send(ready, (tier,), WriteMoment.HIT, request)
        return dict.fromkeys(request for request, _ in by_target)

    def note_used(self, used: Sequence[OffloadKey], request: TierRequest) -> None:
        """A request that used these blocks has ended. Send those that are worth it now."""
        hint = request.context.write_hint
        self.cleaner.note_used(used, request)
        for tier in self.cleaner.tracked:
            if tier not in request.stores_to:
                continue
            chosen = tier.write_policy.note_used(used)
            if hint is not None:
                chosen = used if hint is WriteHint.THROUGH else ()
            absent = self.cleaner.not_below(chosen, tier) if chosen else ()
            if absent:
                self._send(absent, (tier,), WriteMoment.USED, request)

    def offer_used(
        self, used: Sequence[OffloadKey], tier: GuardedTier, request: TierRequest
    ) -> None:
        """A request that used these blocks has ended. Send the tier those that it lacks, within its
        limits. The others are not queued: the next request that uses them offers them again."""
        if not tier.takes_offers:
            return
        missing = tier.missing(used, request.context)
        ready = [key for key in missing if self._primary.is_ready(key)]
        if not ready:
            return
        chosen = _selected(ready, tier, WriteMoment.USED, request.context)
        now = self._clock()
        num_offerable = 0 if tier.jobs.has_late_stores else tier.stores.num_offerable(now)
        part = chosen[: min(num_offerable, tier.budget.num_affordable(now))]
        tier.stats.count("held_back_blocks", len(chosen) - len(part))
        if part:
            tier.stats.count("offered_again_blocks", len(part))
            tier.stores.note_offer(self.submit(part, tier, request.context, now), now)

    # --- what waits for a tier ------------------------------------------------------------------

    def send_backlog(self, tier: GuardedTier) -> Iterable[TierRequest]:
        """Send the blocks that wait for a tier, as far as its limits allow. Called once in a
        step."""
        now = self._clock()
        served: dict[TierRequest, None] = {}
        backlog = tier.backlog
        while backlog:
            if tier.jobs.has_late_stores:
                return served | dict.fromkeys(self.drop_backlog(tier))
            if not tier.lets_store(now):
                return served | dict.fromkeys(self.drop_backlog(tier, tier.not_stored_because))
            affordable = tier.budget.num_affordable(now)
            if not affordable:
                return served | dict.fromkeys(self.drop_backlog(tier, "over_budget_blocks"))
            n = min(tier.stores.num_storable, affordable)
            if not n:
                break
            keys, request = backlog.take(n)
            served[request] = None
            ready = []
            if tier in request.tiers:  # else it was notified of the request's end
                ready = [key for key in keys if self._primary.is_ready(key)]
            if len(ready) < len(keys):
                tier.stats.count("dropped_blocks", len(keys) - len(ready))
                tier.notes.add(
                    What.DROPPED, [key for key in keys if not self._primary.is_ready(key)]
                )
            if ready:
                self.submit(ready, tier, request.context, now)
        while (excess := backlog.num_blocks - self._primary.num_blocks) > 0:
            # More blocks wait than host memory can hold, so some were evicted: drop the oldest of
            # the lowest priority.
            keys, request = backlog.shed(excess)
            served[request] = None
            tier.stats.count("dropped_blocks", len(keys))
            tier.notes.add(What.DROPPED, keys)
        return served

    def drop_backlog(
        self, tier: GuardedTier, reason: str = "dropped_blocks"
    ) -> Iterable[TierRequest]:
        """Drop the blocks that wait for a tier, and count them under `reason`."""
        requests: dict[TierRequest, None] = {}
        tier.stats.count(reason, tier.backlog.num_blocks)
        while tier.backlog:
            keys, request = tier.backlog.take(tier.backlog.num_blocks)
            tier.notes.add(_NOTES[reason], keys)
            requests[request] = None
        return requests

    # --- jobs -----------------------------------------------------------------------------------

    def _send(
        self,
        keys: Sequence[OffloadKey],
        tiers: Iterable[GuardedTier],
        moment: WriteMoment,
        request: TierRequest,
        blocks: list[BlockStatus] | None = None,
    ) -> None:
        """Send readable blocks to tiers, as many as the limits of each tier allow. The others wait.
        `blocks`: the blocks of `keys`, if the caller has them."""
        # Read the clock: the step may have begun long ago.
        now = self._clock()
        for tier in tiers:
            chosen = _selected(keys, tier, moment, request.context)
            at_hand = blocks if chosen is keys else None
            num_sent = 0
            while num_sent < len(chosen):
                if not tier.lets_store(now):
                    tier.stats.count(tier.not_stored_because, len(chosen) - num_sent)
                    tier.notes.add(
                        _NOTES[tier.not_stored_because], chosen[num_sent:], request.context
                    )
                    break
                affordable = tier.budget.num_affordable(now)
                if not affordable:
                    tier.stats.count("over_budget_blocks", len(chosen) - num_sent)
                    tier.notes.add(What.OVER_BUDGET, chosen[num_sent:], request.context)
                    break
                n = 0 if tier.backlog else min(tier.stores.num_storable, affordable)
                if not n:
                    self._let_wait(chosen[num_sent:], tier, request)
                    break
                if num_sent or n < len(chosen):
                    part = chosen[num_sent : num_sent + n]
                    parts = at_hand[num_sent : num_sent + n] if at_hand is not None else None
                    self.submit(part, tier, request.context, now, parts)
                else:
                    self.submit(chosen, tier, request.context, now, at_hand)
                num_sent += n

    def _let_wait(
        self, keys: Sequence[OffloadKey], tier: GuardedTier, request: TierRequest
    ) -> None:
        """The tier's stores have reached their limit. Queue these blocks until some stores have
        ended, or drop them if a store is late."""
        if tier.jobs.has_late_stores:
            tier.stats.count("dropped_blocks", len(keys))
            tier.notes.add(What.DROPPED, keys, request.context)
        else:
            tier.backlog.append(keys, request)

    def submit(
        self,
        keys: Sequence[OffloadKey],
        tier: GuardedTier,
        context: ReqContext,
        now: float,
        blocks: list[BlockStatus] | None = None,
    ) -> Job:
        """Pin blocks, and send them to a tier in one job. The caller has checked the tier's limits.
        `blocks`: the blocks of `keys`, if the caller has them."""
        job_id = self._jobs.new_id()
        kept, spec = self._primary.prepare_read(job_id, keys, context, blocks)
        transfer = self._jobs.make(job_id, kept, spec, False, context)
        tier.budget.spend(len(kept))
        job = tier.jobs.submit_store(transfer, now)
        if job.is_done:
            self._primary.complete_read(job_id)
        return job

    def end_store(self, job: Job, moved: Sequence[OffloadKey], tier: GuardedTier) -> None:
        """A tier has reported a store. `moved`: the blocks that it has now."""
        blocks = self._primary.complete_read(job.transfer.job_id)
        if tier.write_policy.tracks_blocks:
            self.cleaner.note_written(blocks, moved, tier)
        if job.transfer.fingerprint == self._jobs.fingerprint:
            tier.notes.add(What.STORED, moved)
        if len(moved) < len(job.transfer.keys):
            named = set(moved)
            tier.notes.add(
                What.STORE_FAILED, [key for key in job.transfer.keys if key not in named]
            )


def _selected(
    keys: Sequence[OffloadKey], tier: GuardedTier, moment: WriteMoment, context: ReqContext
) -> Sequence[OffloadKey]:
    """The blocks that go to a tier now: what the request says, or else the tier's write policy."""
    if context.write_hint is None:
        return tier.write_policy.select(keys, moment, context)
    if context.write_hint is WriteHint.THROUGH:
        return keys
    if moment is WriteMoment.STORED:
        tier.stats.count("kept_out_blocks", len(keys))
        tier.notes.add(What.KEPT_OUT, keys, context)
    return ()
