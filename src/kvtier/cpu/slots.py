"""The slots of the primary tier: states, generations, pins, and slots that are out of use."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence, Set
from typing import TYPE_CHECKING

from kvtier.base import ReqContext
from kvtier.cpu.policies.base import (
    FREE,
    QUARANTINED,
    WRITING,
    BlockStatus,
    CachePolicy,
    SlotState,
)
from kvtier.cpu.policies.tenants import TenantPolicy

if TYPE_CHECKING:
    from kvtier.base import OffloadKey


class SlotTable:
    """Which block is in which slot, and which slots can be reused. Scheduler thread only.

    Only the table changes the state of a slot (FREE, WRITING, READY, QUARANTINED), its pins and its
    generation. Other objects read the counts below.

    A slot that a transfer may still be using is never reused. Such a slot is out of use for one of
    two reasons:

    - `quarantine`: a device transfer may have been using the slot at a reset. The slot is freed
      when a later device transfer ends, because engines flush earlier transfers before they start
      later ones.
    - `held`: a transfer of a lower tier was given up, or was under way at a reset. The slot is
      freed when that transfer ends.

    Some slots must stay free for the transfer that ends a quarantine. So no store or promotion
    starts if more than `num_blocks - reserve` slots would then be in transfer. During a quarantine,
    stores and promotions together take at most half of the slots that were free at the reset. When
    that half is used up, the quarantine ends at the end of the current engine step, or of the
    second step after the reset if that is later.
    """

    def __init__(self, num_blocks: int, policy: CachePolicy) -> None:
        self.num_blocks = num_blocks
        self.reserve = min(max(1, num_blocks // 256), num_blocks - 1)
        self.policy = policy
        self._tenants = policy if isinstance(policy, TenantPolicy) else None
        # The built-in policies keep blocks in the dictionary of their base class. Reading that
        # dictionary directly saves a Python call per key.
        overrides_get = type(policy).get is not CachePolicy.get
        self.get = policy.get if overrides_get else policy.blocks.get
        """The block of a key, readable or not; None if there is none."""
        self._resident = None if overrides_get else policy.blocks
        self.used: list[BlockStatus] = []
        """Slots that have been used at least once, by number."""
        self._free: list[BlockStatus] = []
        self.quarantine: dict[BlockStatus, None] = {}
        """Slots that device transfers from before a reset may be using."""
        self.held: dict[BlockStatus, int] = {}
        """Slots out of use, with the number of tier transfers that may be using each."""
        self.allowance = 0
        """Slots that stores and promotions may still take before the quarantine ends."""
        self._num_steps_in_quarantine = 0
        self.is_only_for_device = False
        """True after a quarantine that ended without proof: a device transfer from before the reset
        may still be writing. Later device transfers wait for it, but a tier would not."""
        self.generation = 0
        """Grows when blocks are added or dropped, and when held slots are freed. Two blocks of one
        key never have the same generation."""
        self.num_writing = 0
        self.num_evictable = 0
        self.num_pinned = 0
        self.on_evicted: Callable[[Sequence[tuple[OffloadKey, BlockStatus]]], None] | None = None
        """Called with the blocks that are being evicted. Must not change the table."""

    # --- questions ------------------------------------------------------------------------------

    def num_free(self) -> int:
        """Number of slots that hold nothing and can be taken."""
        return len(self._free) + self.num_blocks - len(self.used)

    def num_in_transfer(self) -> int:
        """Number of slots that are being written, pinned or held. Quarantined slots count only if
        they are held."""
        return self.num_writing + self.num_pinned + len(self.held)

    def sure_room_for(self, context: ReqContext, num_kept: int) -> int:
        """A lower limit of the number of new blocks that a request can store now, if `num_kept`
        blocks stay for it."""
        num_free = self.num_free()
        if self._tenants is not None:
            return self._tenants.sure_room_for(context, num_kept, num_free)
        return num_free + max(self.num_evictable - num_kept, 0)

    def room_for(self, context: ReqContext, kept: Sequence[BlockStatus]) -> tuple[int, int]:
        """How many new blocks a request can store now, and how many it could in an otherwise idle
        cache. `kept`: blocks that stay. Slots out of use count as taken only in the first
        number."""
        num_free = self.num_free()
        if self._tenants is not None:
            return self._tenants.room_for(context, kept, num_free)
        num_idle = self.num_evictable - sum(block.ref_cnt == 0 for block in kept)
        return num_free + num_idle, self.num_blocks - len(kept)

    @property
    def has_tenants(self) -> bool:
        """True if the cache is shared by tenants, with floors and caps."""
        return self._tenants is not None

    def by_tenant(
        self, blocks: list[BlockStatus], context: ReqContext
    ) -> list[tuple[ReqContext, list[BlockStatus]]]:
        """The blocks of each tenant, and a request of that tenant that stands for them: without
        tenants, `context`; its id is the beginning of the others' ids."""
        if self._tenants is None:
            return [(context, blocks)] if blocks else []
        parts: dict[int, list[BlockStatus]] = {}
        for block in blocks:
            parts.setdefault(block.charge.account.index, []).append(block)
        return [
            (self._tenants.context_of(index, f"{context.req_id} ({index})"), part)
            for index, part in parts.items()
        ]

    def has_room_for(self, num_new: int, context: ReqContext) -> bool:
        """True if a request can store new blocks without evicting any."""
        return num_new <= min(self.num_free(), self.num_chargeable(context))

    def num_chargeable(self, context: ReqContext) -> int:
        """Blocks that may be added for a request without evicting any, if there are slots."""
        return self.num_blocks if self._tenants is None else self._tenants.num_under_cap(context)

    def split(self, offered: dict[OffloadKey, int]) -> tuple[list[OffloadKey], list[BlockStatus]]:
        """The offered keys that have no block, and the blocks of the offered keys that have one."""
        if self._resident is not None and self._resident.keys().isdisjoint(offered):
            return list(offered), []
        get = self.get
        new = [key for key in offered if get(key) is None]
        return new, [block for key in offered if (block := get(key)) is not None]

    # --- pins -----------------------------------------------------------------------------------

    def pin(self, blocks: Iterable[BlockStatus | None]) -> int:
        """Pin the readable blocks among `blocks`, which names no block twice. Returns the number of
        blocks that are missing or not readable."""
        newly_pinned: list[BlockStatus] = []
        num_unreadable = 0
        for block in blocks:
            if block is None or block.ref_cnt < 0:
                num_unreadable += 1
                continue
            if block.ref_cnt == 0:
                newly_pinned.append(block)
            block.ref_cnt += 1
        if newly_pinned:
            self.num_evictable -= len(newly_pinned)
            self.num_pinned += len(newly_pinned)
            self.policy.pinned(newly_pinned)
        return num_unreadable

    def unpin(self, blocks: Iterable[BlockStatus]) -> None:
        """Take one pin off each of these blocks."""
        unpinned: list[BlockStatus] = []
        for block in blocks:
            block.ref_cnt -= 1
            if block.ref_cnt == 0:
                unpinned.append(block)
        if unpinned:
            self.num_evictable += len(unpinned)
            self.num_pinned -= len(unpinned)
            self.policy.unpinned(unpinned)

    # --- writes ---------------------------------------------------------------------------------

    def make_room(self, wanted: int, protected: Set[OffloadKey]) -> list[OffloadKey] | None:
        """Evict blocks until `wanted` slots are free, and the tenant may have this many more.
        Returns the keys of the evicted blocks.

        Returns None and evicts nothing if too few blocks can be evicted.
        """
        missing = wanted - self.num_free()
        if self._tenants is not None:
            victims = self._tenants.make_room(missing, protected)
        else:
            victims = self.policy.evict(missing, protected) if missing > 0 else []
        if not victims:
            return None if victims is None else []
        if self.on_evicted is not None:
            self.on_evicted(victims)
        freed = [block for _, block in victims]
        for block in freed:
            block.ref_cnt = FREE
        self._free += freed
        self.num_evictable -= len(victims)
        return [key for key, _ in victims]

    def take(self, keys: list[OffloadKey], writer: object) -> list[BlockStatus]:
        """Take a free slot for each key, for `writer` to fill. The caller has made room."""
        free = self._free
        n = len(keys)
        if len(free) < n:
            first = len(self.used)
            never_used = [BlockStatus(i) for i in range(first, first + n - len(free))]
            self.used += never_used
            # Highest number first, because slots are taken from the end of the list.
            free[:0] = reversed(never_used)
        blocks = free[-n:]
        del free[-n:]
        blocks.reverse()
        self.generation += 1
        generation = self.generation
        for key, block in zip(keys, blocks, strict=True):
            block.key = key
            block.ref_cnt = WRITING
            block.generation = generation
            block.writer = writer
            block.history = None
        self.num_writing += n
        self.allowance -= n
        return blocks

    def publish(self, written: Sequence[BlockStatus]) -> None:
        """Make blocks readable after they were written."""
        for block in written:
            block.ref_cnt = 0
        self.num_writing -= len(written)
        self.num_evictable += len(written)
        self.policy.unpinned(written)

    def discard(self, failed: Sequence[BlockStatus]) -> None:
        """Drop blocks whose write failed, and free their slots."""
        self._remove(failed)
        for block in failed:
            self._release(block)

    def _remove(self, written: Sequence[BlockStatus]) -> None:
        """Remove blocks from the cache while they are being written."""
        for block in written:
            self.policy.remove(block.key)
            self.generation += 1  # invalidates `RequestUse.fills_tier_since`
        self.num_writing -= len(written)

    def _release(self, block: BlockStatus) -> None:
        block.ref_cnt = FREE
        self._free.append(block)

    def drop(self, blocks: Sequence[BlockStatus]) -> None:
        """Drop readable blocks that nothing uses, and free their slots."""
        self.pin(blocks)  # so that the policy no longer counts them as evictable
        for block in blocks:
            self.policy.remove(block.key)
            self._release(block)
        self.num_pinned -= len(blocks)
        self.generation += 1

    # --- slots out of use -----------------------------------------------------------------------

    def withdraw(self, block_ids: Set[int]) -> None:
        """Take free slots out of use until `let_go`. Slots that are not free stay as they are."""
        first = len(self.used)
        never_used = [BlockStatus(n) for n in range(first, max(block_ids, default=-1) + 1)]
        self.used += never_used
        for block in never_used:
            block.ref_cnt = FREE
        free = [*reversed(never_used), *self._free]
        self._free = [block for block in free if block.block_id not in block_ids]
        self.held.update((block, 1) for block in free if block.block_id in block_ids)
        for block in self.held:
            block.ref_cnt = QUARANTINED
        self.generation += 1

    def give_up(self, blocks: Sequence[BlockStatus]) -> None:
        """Drop blocks that a tier is writing, and hold their slots until `let_go`."""
        self._remove(blocks)
        for block in blocks:
            block.writer = None
            block.ref_cnt = QUARANTINED
            self.held[block] = 1

    def hold(self, blocks: Iterable[BlockStatus]) -> None:
        """Record that a tier transfer is using these slots. Called before `reset`."""
        for block in blocks:
            self.held[block] = self.held.get(block, 0) + 1

    def let_go(self, blocks: Iterable[BlockStatus]) -> None:
        """Free held slots, because the tier transfer that held them has ended."""
        self.generation += 1  # invalidates `RequestUse.fills_tier_since`
        for block in blocks:
            self.held[block] -= 1
            if not self.held[block]:
                del self.held[block]
                if block not in self.quarantine:
                    self._release(block)

    def take_back(
        self, keys: Sequence[OffloadKey], blocks: Sequence[BlockStatus], req_context: ReqContext
    ) -> None:
        """Put the blocks of held slots back into the cache, in the state WRITING."""
        self.generation += 1
        for block in blocks:
            del self.held[block]
            block.ref_cnt = WRITING
            block.generation = self.generation
        self.num_writing += len(blocks)
        self.policy.on_store_miss(keys, req_context)
        self.policy.insert_run(keys, blocks, keys, req_context)

    def end_step_in_quarantine(self) -> None:
        """Called at the end of each engine step during a quarantine."""
        self._num_steps_in_quarantine += 1
        if self._num_steps_in_quarantine > 1 and not self.allowance:
            # No store is possible, so none will end the quarantine. The slots can go to the device:
            # the engine flushes the transfers from before the reset before it starts later ones.
            self.end_quarantine()
            self.is_only_for_device = True

    def end_quarantine(self) -> None:
        """Free the quarantined slots, except held ones. Called when a device transfer that began
        after the last reset has ended, because all earlier ones have then ended, too."""
        self.is_only_for_device = False
        if self.quarantine:
            for block in self.quarantine:
                if block not in self.held:
                    self._release(block)
            self.quarantine = {}

    def reset(self) -> list[OffloadKey]:
        """Empty the cache. Returns the keys of the blocks that were readable.

        The caller has called `hold` for every slot that a tier transfer is using. All other pins
        and writes are the device's.
        """
        removed: list[OffloadKey] = []
        for block in self.used:
            if block.ref_cnt >= 0:
                removed.append(block.key)
            if block.ref_cnt == 0:
                self._release(block)
            elif block.ref_cnt > 0 or block.ref_cnt == WRITING:
                num_transfers = max(block.ref_cnt, 1)
                if num_transfers > self.held.get(block, 0):
                    self.quarantine[block] = None
                block.ref_cnt = QUARANTINED
            block.writer = block.place = None
        self.policy.clear()
        self.num_writing = self.num_evictable = self.num_pinned = 0
        # Half of the free slots: the other half is kept for another reset.
        self.allowance = (self.num_free() + 1) // 2
        self._num_steps_in_quarantine = 0
        return removed

    def states(self) -> Counter[SlotState]:
        """How many slots are in each state. For tests and inspection."""
        states = Counter(block.state for block in self.used)
        states[SlotState.FREE] += self.num_blocks - len(self.used)
        return states
