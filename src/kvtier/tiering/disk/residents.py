"""What the disk tier keeps: which block is in which slot, and which leaves first.

Scheduler thread only, but for `slots_of`. Holds no byte of a block, and does no I/O.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

from kvtier.base import OffloadKey, ReqContext
from kvtier.cpu.policies.base import CachePolicy
from kvtier.tiering.disk.free_slots import FreeSlots
from kvtier.tiering.disk.transfer import SlabBlock

__all__ = ["Residents"]

_ADOPTED_AT_ONCE = 512
_MAX_LIVE_REQUESTS = 65_536


class Residents:
    """Blocks in slots, in the order of a `CachePolicy`."""

    def __init__(self, policy_cls: type[CachePolicy], num_slots: int, first_seq: int) -> None:
        self.num_slots = num_slots
        self._policy_cls = policy_cls
        self._policy = policy_cls(num_slots)
        self.readable: dict[OffloadKey, SlabBlock] = {}
        """The blocks that can be read. For others to look into, not to change."""
        self.writing: dict[OffloadKey, SlabBlock] = {}
        """The blocks that are being written. The same."""
        self._num_read = 0
        """How many readable blocks are being read, and so cannot leave."""
        self._free = FreeSlots([], [])
        self.next_seq = first_seq
        """Larger than every number given to a block or a use of one so far."""
        self._live: dict[str, None] = {}
        """Requests that have not ended. The policy keeps a request's blocks together until then."""

    @property
    def num_used(self) -> int:
        """Slots that hold a block, or will in a moment."""
        return self.num_slots - len(self._free)

    def slots_of(self, keys: Iterable[OffloadKey]) -> list[tuple[int, int]]:
        """For each block that is here, its position among the keys and its slot. Any thread; what
        it says was true a moment ago."""
        get = self.readable.get
        blocks = enumerate(map(get, keys))
        return [(position, block.block_id) for position, block in blocks if block is not None]

    def adopt(self, keys: Sequence[OffloadKey], slots: Sequence[int], seqs: Sequence[int]) -> None:
        """Take in blocks that an earlier engine left, the most recently used ones first."""
        nobody = ReqContext("")
        policy = self._policy
        blocks = list(map(SlabBlock, slots, keys, seqs))
        for start in reversed(range(0, len(keys), _ADOPTED_AT_ONCE)):
            run = slice(start, start + _ADOPTED_AT_ONCE)
            policy.insert_run(keys[run], blocks[run], keys[run], nobody)
            policy.on_request_finished((), nobody)
        for block in blocks:
            block.ref_cnt = 0
        policy.unpinned(blocks)
        self.readable = dict(zip(keys, blocks, strict=True))

    def set_free(self, first: list[int], last: list[int]) -> None:
        """These slots hold nothing of ours. Those of `last` may be of use to someone later."""
        self._free = FreeSlots(first, last)

    # --- uses ----------------------------------------------------------------------------------

    def touch(self, keys: Collection[OffloadKey], req_context: ReqContext) -> int:
        """A request uses these blocks, in prompt order. Returns the first of the sequence numbers
        that are theirs now."""
        first_seq = self.next_seq
        self.next_seq += len(keys)
        self._policy.touch(keys, req_context)
        self._close_if_ended(req_context)
        return first_seq

    def on_new_request(self, req_context: ReqContext) -> None:
        self._live[req_context.req_id] = None
        if len(self._live) > _MAX_LIVE_REQUESTS:
            self.on_request_finished(ReqContext(next(iter(self._live))))

    def on_request_finished(self, req_context: ReqContext) -> None:
        if req_context.req_id in self._live:
            del self._live[req_context.req_id]
            self._policy.on_request_finished((), req_context)

    def _close_if_ended(self, req_context: ReqContext) -> None:
        # Jobs may come after the request has ended. Nobody would close what they open.
        if req_context.req_id not in self._live:
            self._policy.on_request_finished((), req_context)

    # --- writing -------------------------------------------------------------------------------

    def make_room(
        self, keys: Sequence[OffloadKey], brought: Collection[OffloadKey], req_context: ReqContext
    ) -> list[OffloadKey]:
        """Let blocks leave for these, of which none is there, as far as possible. Those in
        `brought` stay. Returns which have left. `place` must follow."""
        missing = len(keys) - len(self._free)
        # Where they are all new, none of them could leave.
        kept = frozenset(brought) if len(brought) > len(keys) else frozenset[OffloadKey]()
        if missing > 0:
            missing = min(missing, self._num_idle_besides(kept))
        self._policy.on_store_miss(keys, req_context)
        gone: list[OffloadKey] = []
        num = missing
        while num > 0:
            victims = self._policy.evict(num, kept)
            if victims is None:
                # The policy also keeps what the request has used before, so fewer can leave.
                num //= 2
            else:
                gone += self._let_go(key for key, _ in victims)
                missing -= num
                num = min(num, missing)
            if num > 0:
                self._policy.on_store_miss(keys, req_context)
        return gone

    def _let_go(self, keys: Iterable[OffloadKey]) -> list[OffloadKey]:
        """Free the slots of blocks that the policy has given up."""
        pop = self.readable.pop
        gone = [block for block in (pop(key, None) for key in keys) if block is not None]
        self._free.give([block.block_id for block in gone])
        return [block.key for block in gone]

    def place(self, keys: Sequence[OffloadKey], req_context: ReqContext) -> list[SlabBlock]:
        """Give slots to these blocks, or to as many of the first as there is room for. Returns the
        blocks, being written now and in ascending order of slots."""
        keys = keys[: len(self._free)]
        if not keys:
            return []
        slots = sorted(self._free.take(len(keys)))
        self.next_seq += len(keys)
        # Of one prompt, the head has the largest number: it is the last to leave.
        last_seq = self.next_seq - 1
        blocks = list(map(SlabBlock, slots, keys, range(last_seq, last_seq - len(keys), -1)))
        try:
            self._policy.insert_run(keys, blocks, keys, req_context)
        except BaseException:  # a policy of the user's own
            self._free.give(slots)
            raise
        self.writing.update(zip(keys, blocks, strict=True))
        try:
            self._close_if_ended(req_context)
        except BaseException:
            self.not_written(blocks)
            raise
        return blocks

    def _num_idle_besides(self, brought: Collection[OffloadKey]) -> int:
        """How many blocks could leave, without those."""
        here = map(self.readable.get, brought)
        num_brought = sum(block is not None and block.ref_cnt == 0 for block in here)
        return len(self.readable) - self._num_read - num_brought

    def written(self, blocks: Iterable[SlabBlock]) -> list[OffloadKey]:
        """These blocks are in their slots. Returns those that are still wanted."""
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
        """These blocks could not be written."""
        for block in blocks:
            if self.writing.get(block.key) is block:
                del self.writing[block.key]
                self._policy.remove(block.key)
            self._free.give([block.block_id])

    # --- reading -------------------------------------------------------------------------------

    def pin(self, keys: Iterable[OffloadKey]) -> list[SlabBlock | None]:
        """The blocks that can be read, None for the others. They stay until they are unpinned, as
        often as they are named here."""
        pinned = list(map(self.readable.get, keys))
        newly = []
        for block in pinned:
            if block is not None:
                if not block.ref_cnt:
                    newly.append(block)
                block.ref_cnt += 1
        try:
            self._policy.pinned(newly)
        except BaseException:  # a policy of the user's own
            for block in filter(None, pinned):
                block.ref_cnt -= 1
            raise
        self._num_read += len(newly)
        return pinned

    def unpin(self, good: Iterable[SlabBlock], bad: Iterable[SlabBlock]) -> list[OffloadKey]:
        """They have been read. The bad ones are forgotten; returns their keys."""
        idle = []
        for block in good:
            block.ref_cnt -= 1
            if not block.ref_cnt:
                if self.readable.get(block.key) is block:
                    idle.append(block)
                else:
                    self._free.give([block.block_id])
        self._num_read -= len(idle)
        self._policy.unpinned(idle)
        forgotten = []
        for block in bad:
            if self.readable.get(block.key) is block:
                del self.readable[block.key]
                self._policy.remove(block.key)  # while it counts as pinned
                self._num_read -= 1
                forgotten.append(block.key)
            block.ref_cnt -= 1
            if not block.ref_cnt:
                self._free.give([block.block_id])
        return forgotten

    # --- the end -------------------------------------------------------------------------------

    def start_over(self, busy: Collection[int]) -> tuple[CachePolicy, dict[OffloadKey, SlabBlock]]:
        """Forget everything. `busy`: slots that transfers under way still read or write; they come
        back with those. Returns the former order, and the blocks that could be read: for another
        thread to destroy, little by little, because that takes a while."""
        former = (self._policy, self.readable)
        self._policy = self._policy_cls(self.num_slots)
        self.readable, self.writing = {}, {}
        self._num_read = 0
        self._free.start_over(self.num_slots, busy)
        return former
