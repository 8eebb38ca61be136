"""The slots of a slab: which block is in which slot, which are free, and what is evicted next.

Scheduler thread only, except `SlabTable.slots_of`. Holds no block data and does no I/O.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence, Set
from itertools import islice

from kvtier.base import OffloadKey, ReqContext
from kvtier.cpu.policies.base import WRITING, BlockStatus, CachePolicy
from kvtier.cpu.policies.tenants import TenantPolicy, tenant_tag
from kvtier.tiering.base import TierUsage

__all__ = ["FreeSlots", "SlabBlock", "SlabTable"]

_ADOPTED_AT_ONCE = 512
_MAX_LIVE_REQUESTS = 65_536


class SlabBlock(BlockStatus):
    """A block in a slot. `block_id` is the slot, `generation` the sequence number in the slot's
    header. These two and `key` never change, so any thread may read them."""

    __slots__ = ()

    def __init__(self, slot: int, key: OffloadKey, seq: int, ref_cnt: int = WRITING) -> None:
        self.block_id = slot
        self.key = key
        self.generation = seq
        self.ref_cnt = ref_cnt
        self.place = None
        self.used_at = 0


class FreeSlots:
    """The free slots. Neighbouring slots are handed out together where possible.

    `reset` takes the same time for any number of slots: it only computes how many are free. `take`
    finds them later, one by one.
    """

    def __init__(self, first: list[int], last: list[int]) -> None:
        """`first` and `last`: free slots in ascending order. Those in `first` are handed out before
        those in `last`."""
        self._listed = last[::-1] + first[::-1]
        self._unlisted: Iterator[int] = iter(())
        self._num_unlisted = 0

    def reset(self, num_slots: int, busy: Collection[int]) -> None:
        """Free all slots except `busy`, which `give` returns later."""
        self._listed = []
        self._unlisted = (slot for slot in range(num_slots) if slot not in busy)
        self._num_unlisted = num_slots - len(busy)

    def __len__(self) -> int:
        return len(self._listed) + self._num_unlisted

    def take(self, count: int) -> list[int]:
        """Take `count` free slots, or all of them if there are fewer."""
        listed = self._listed
        taken = listed[: -count - 1 : -1]
        del listed[len(listed) - len(taken) :]
        if len(taken) < count and self._num_unlisted:
            more = list(islice(self._unlisted, count - len(taken)))
            self._num_unlisted -= len(more)
            taken += more
        return taken

    def give(self, slots: Iterable[int]) -> None:
        """Return slots that are free again."""
        self._listed.extend(slots)


class SlabTable:
    """Every block of this namespace in the slab, by key. A `CachePolicy` decides which is evicted
    next.

    A block is being written (`writing`) or can be read (`readable`); a readable block is pinned
    while loads read it. Each stored block and each use of a block gets a sequence number; a later
    call uses larger numbers.
    """

    def __init__(
        self, new_policy: Callable[[int], CachePolicy], num_slots: int, first_seq: int
    ) -> None:
        """`new_policy`: makes an eviction policy for a number of slots."""
        self.num_slots = num_slots
        self._new_policy = new_policy
        self.note_owner: Callable[[Sequence[int], int], None] = lambda *_: None
        """Called with the slots of blocks that are charged to another tenant from now on, and its
        tag. The manager sets it."""
        self._use_policy()
        self.readable: dict[OffloadKey, SlabBlock] = {}
        """Read-only for callers."""
        self.writing: dict[OffloadKey, SlabBlock] = {}
        """Read-only for callers."""
        self._num_pinned = 0
        """Readable blocks that loads are reading; they cannot be evicted."""
        self._free = FreeSlots([], [])
        self.next_seq = first_seq
        """The next sequence number."""
        self._live: dict[str, None] = {}
        """Ids of the requests that have not ended. Until a request ends, the policy keeps its
        blocks together."""

    def _use_policy(self) -> None:
        self._policy = policy = self._new_policy(self.num_slots)
        self._tenants = policy if isinstance(policy, TenantPolicy) else None
        if self._tenants is not None:
            self._tenants.on_handed_over(self._note_handed_over)

    def _note_handed_over(self, blocks: Sequence[BlockStatus], tenant: str) -> None:
        self.note_owner([block.block_id for block in blocks], tenant_tag(tenant))

    @property
    def has_tenants(self) -> bool:
        """True if the slab is shared by tenants, with floors and caps."""
        return self._tenants is not None

    def usage(self, slot_bytes: int) -> TierUsage:
        """How full the slab is, with the blocks of this namespace."""
        return TierUsage(self.num_used * slot_bytes, self.num_slots * slot_bytes)

    @property
    def num_used(self) -> int:
        """Slots with a block that is readable or being written."""
        return self.num_slots - len(self._free)

    def slots_of(self, keys: Iterable[OffloadKey]) -> list[tuple[int, int]]:
        """(position in `keys`, slot) for each readable block. Any thread; the answer may be
        outdated when the caller uses it."""
        get = self.readable.get
        blocks = enumerate(map(get, keys))
        return [(position, block.block_id) for position, block in blocks if block is not None]

    # --- start ---------------------------------------------------------------------------------

    def adopt(
        self,
        keys: Sequence[OffloadKey],
        slots: Sequence[int],
        seqs: Sequence[int],
        owners: Sequence[int] | None = None,
    ) -> list[int]:
        """Take over the blocks of an earlier engine, given most recently used first. `owners`: the
        tags of their tenants. Returns the slots of blocks that are beyond their tenants' caps."""
        blocks = list(map(SlabBlock, slots, keys, seqs))
        if self._tenants is None or owners is None:
            self._adopt_run(blocks, ReqContext(""))
            return []
        dropped: list[int] = []
        of_owner: dict[int, list[SlabBlock]] = {}
        for owner, block in zip(owners, blocks, strict=True):
            of_owner.setdefault(self._tenants.index_of(owner), []).append(block)
        for index, own in of_owner.items():
            most = self._tenants.accounts[index].cap
            dropped += [block.block_id for block in own[most:]]
            self._adopt_run(own[:most], self._tenants.context_of(index))
        return dropped

    def _adopt_run(self, blocks: Sequence[SlabBlock], context: ReqContext) -> None:
        policy = self._policy
        for start in reversed(range(0, len(blocks), _ADOPTED_AT_ONCE)):
            run = blocks[start : start + _ADOPTED_AT_ONCE]
            keys = [block.key for block in run]
            policy.insert_run(keys, run, keys, context)
            policy.on_request_finished((), context)
        for block in blocks:
            block.ref_cnt = 0
        policy.unpinned(blocks)
        self.readable.update((block.key, block) for block in blocks)

    def set_free(self, first: list[int], last: list[int]) -> None:
        """Set the free slots. Those in `last` are used last: they hold blocks of other namespaces,
        which a later engine may use."""
        self._free = FreeSlots(first, last)

    # --- uses ----------------------------------------------------------------------------------

    def touch(self, keys: Collection[OffloadKey], req_context: ReqContext) -> int:
        """Record that a request uses these blocks, given in prompt order. Takes one sequence number
        for each, and returns the first number."""
        first_seq = self.next_seq
        self.next_seq += len(keys)
        self._policy.touch(keys, req_context)
        self._close_if_ended(req_context)
        return first_seq

    def note_prompt(self, keys: Collection[OffloadKey], req_context: ReqContext) -> None:
        """A request has had these blocks, in prompt order. Do what its hints say about them."""
        if self._tenants is not None:
            self._tenants.note_prompt(keys, req_context)
            self._close_if_ended(req_context)

    def on_new_request(self, req_context: ReqContext) -> None:
        self._live[req_context.req_id] = None
        if len(self._live) > _MAX_LIVE_REQUESTS:
            self.on_request_finished(ReqContext(next(iter(self._live))))

    def on_request_finished(self, req_context: ReqContext) -> None:
        if req_context.req_id in self._live:
            del self._live[req_context.req_id]
            self._policy.on_request_finished((), req_context)

    def _close_if_ended(self, req_context: ReqContext) -> None:
        # A job may be submitted after its request has ended. The policy then counts the request as
        # live again, and only this call ends it.
        if req_context.req_id not in self._live:
            self._policy.on_request_finished((), req_context)

    # --- stores --------------------------------------------------------------------------------

    def known(self, keys: Set[OffloadKey]) -> list[OffloadKey]:
        """Those of the keys whose blocks are here, or are being written."""
        readable, writing = self.readable.keys(), self.writing.keys()
        if readable.isdisjoint(keys) and writing.isdisjoint(keys):
            return []
        return [key for key in keys if key in readable or key in writing]

    def wanted(self, keys: Sequence[OffloadKey], req_context: ReqContext) -> Sequence[OffloadKey]:
        """Those of new blocks that the policy wants: the first ones. Call `make_room` next."""
        return keys[: self._policy.num_admitted(keys, len(self._free), req_context)]

    def make_room(
        self, keys: Sequence[OffloadKey], job_keys: Collection[OffloadKey], req_context: ReqContext
    ) -> list[OffloadKey]:
        """Evict blocks until there are slots for all of `keys`, or until no more blocks can be
        evicted. Blocks of the job itself (`job_keys`) are not evicted. Returns the evicted keys.
        The caller must call `place` next."""
        missing = len(keys) - len(self._free)
        # If all blocks of the job are new, none of them is here, so there is nothing to protect.
        protected = frozenset(job_keys) if len(job_keys) > len(keys) else frozenset[OffloadKey]()
        if self._tenants is not None:
            return self._make_tenants_room(keys, protected, req_context)
        if missing > 0:
            missing = min(missing, self._num_evictable_besides(protected))
        self._policy.on_store_miss(keys, req_context)
        evicted: list[OffloadKey] = []
        num = missing
        while num > 0:
            victims = self._policy.evict(num, protected)
            if victims is None:
                # The policy also protects blocks that the request used before. Try with fewer.
                num //= 2
            else:
                evicted += self._free_slots_of(key for key, _ in victims)
                missing -= num
                num = min(num, missing)
            if num > 0:
                self._policy.on_store_miss(keys, req_context)
        return evicted

    def _make_tenants_room(
        self, keys: Sequence[OffloadKey], protected: Set[OffloadKey], req_context: ReqContext
    ) -> list[OffloadKey]:
        assert self._tenants is not None
        tenants, num_free = self._tenants, len(self._free)
        kept = [block for key in protected if (block := tenants.get(key)) is not None]
        keys = keys[: tenants.room_for(req_context, kept, num_free)[0]]
        tenants.on_store_miss(keys, req_context)
        victims = tenants.make_room(len(keys) - num_free, protected)
        return self._free_slots_of(key for key, _ in victims or ())

    def _num_evictable_besides(self, protected: Collection[OffloadKey]) -> int:
        here = map(self.readable.get, protected)
        num_protected = sum(block is not None and block.ref_cnt == 0 for block in here)
        return len(self.readable) - self._num_pinned - num_protected

    def _free_slots_of(self, keys: Iterable[OffloadKey]) -> list[OffloadKey]:
        """Free the slots of blocks that the policy has evicted."""
        pop = self.readable.pop
        gone = [block for block in (pop(key, None) for key in keys) if block is not None]
        self._free.give([block.block_id for block in gone])
        return [block.key for block in gone]

    def place(self, keys: Sequence[OffloadKey], req_context: ReqContext) -> list[SlabBlock]:
        """Give slots to these blocks, or to the first of them if there are too few slots. Returns
        the blocks, now in `writing`, in ascending order of slots."""
        most = len(self._free)
        if self._tenants is not None:
            most = min(most, self._tenants.num_under_cap(req_context))
        keys = keys[:most]
        if not keys:
            self._close_if_ended(req_context)
            return []
        slots = sorted(self._free.take(len(keys)))
        self.next_seq += len(keys)
        # The head of a prompt gets the largest number, so that it is evicted last.
        last_seq = self.next_seq - 1
        blocks = list(map(SlabBlock, slots, keys, range(last_seq, last_seq - len(keys), -1)))
        try:
            self._policy.insert_run(keys, blocks, keys, req_context)
        except BaseException:  # a third party's policy may raise
            self._free.give(slots)
            raise
        self.writing.update(zip(keys, blocks, strict=True))
        try:
            self._close_if_ended(req_context)
        except BaseException:
            self.not_written(blocks)
            raise
        return blocks

    def written(self, blocks: Iterable[SlabBlock]) -> list[OffloadKey]:
        """Make written blocks readable, and return their keys. Blocks that a reset has dropped
        since they were placed are left out, and their slots are freed."""
        writing, readable = self.writing, self.readable
        ready = []
        keys = []
        for block in blocks:
            key = block.key
            if writing.get(key) is block:
                del writing[key]
                readable[key] = block
                block.ref_cnt = 0
                ready.append(block)
                keys.append(key)
            else:
                self._free.give([block.block_id])
        self._policy.unpinned(ready)
        return keys

    def not_written(self, blocks: Iterable[SlabBlock]) -> None:
        """Drop blocks that could not be written, and free their slots."""
        for block in blocks:
            if self.writing.get(block.key) is block:
                del self.writing[block.key]
                self._policy.remove(block.key)
            self._free.give([block.block_id])

    # --- loads ---------------------------------------------------------------------------------

    def pin(self, keys: Iterable[OffloadKey]) -> list[SlabBlock | None]:
        """Pin readable blocks; a key that occurs twice is pinned twice. Returns one block for each
        key, or None if the key is not readable."""
        pinned = list(map(self.readable.get, keys))
        newly = []
        for block in pinned:
            if block is not None:
                if not block.ref_cnt:
                    newly.append(block)
                block.ref_cnt += 1
        try:
            self._policy.pinned(newly)
        except BaseException:  # a third party's policy may raise
            for block in filter(None, pinned):
                block.ref_cnt -= 1
            raise
        self._num_pinned += len(newly)
        return pinned

    def unpin(self, good: Iterable[SlabBlock], bad: Iterable[SlabBlock]) -> list[OffloadKey]:
        """Unpin blocks that a load has read, and forget those in `bad`. Returns the keys that were
        forgotten."""
        idle = []
        for block in good:
            block.ref_cnt -= 1
            if not block.ref_cnt:
                if self.readable.get(block.key) is block:
                    idle.append(block)
                else:
                    self._free.give([block.block_id])
        self._num_pinned -= len(idle)
        self._policy.unpinned(idle)
        forgotten = []
        for block in bad:
            if self.readable.get(block.key) is block:
                del self.readable[block.key]
                self._policy.remove(block.key)  # while it still counts as pinned
                self._num_pinned -= 1
                forgotten.append(block.key)
            block.ref_cnt -= 1
            if not block.ref_cnt:
                self._free.give([block.block_id])
        return forgotten

    # --- reset ---------------------------------------------------------------------------------

    def reset(self, busy: Collection[int]) -> tuple[CachePolicy, dict[OffloadKey, SlabBlock]]:
        """Forget all blocks. `busy`: slots that transfers in flight use; they are freed when the
        transfers end. Returns the former policy and readable blocks, which the caller passes to the
        index flusher: freeing them here would take too long."""
        former = (self._policy, self.readable)
        self._use_policy()
        self.readable, self.writing = {}, {}
        self._num_pinned = 0
        self._free.reset(self.num_slots, busy)
        return former
