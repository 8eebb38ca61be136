"""What the disk tier keeps: which block is in which slot, and which leaves first.

Scheduler thread only, but for `slot_of`. Holds no byte of a block, and does no I/O.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

from kvtier.base import OffloadKey, ReqContext
from kvtier.cpu.policies.base import FREE, WRITING, BlockStatus, CachePolicy
from kvtier.tiering.disk.free_slots import FreeSlots

__all__ = ["Residents"]

_ADOPTED_AT_ONCE = 64
_MAX_LIVE_REQUESTS = 65_536


class Residents:
    """Blocks in slots, in the order of a `CachePolicy`."""

    def __init__(self, policy_cls: type[CachePolicy], num_slots: int, first_seq: int) -> None:
        self.num_slots = num_slots
        self._policy_cls = policy_cls
        self._policy = policy_cls(num_slots)
        self._blocks: dict[OffloadKey, BlockStatus] = {}
        self._free = FreeSlots([], [])
        self.next_seq = first_seq
        """Larger than every number given to a block or a use of one so far."""
        self._num_busy = 0
        """Blocks of the policy that are being written or read, and so cannot leave."""
        self._live: dict[str, None] = {}
        """Requests that have not ended. The policy keeps a request's blocks together until then."""

    def __len__(self) -> int:
        """Blocks that are there, or being written."""
        return self.num_slots - len(self._free)

    # --- what is there -------------------------------------------------------------------------

    def ready(self, key: OffloadKey) -> bool:
        """Whether the block can be read."""
        block = self._blocks.get(key)
        return block is not None and block.ref_cnt >= 0

    def contains(self, key: OffloadKey) -> bool:
        """Whether the block can be read, or is being written."""
        return self._blocks.get(key) is not None

    def slot_of(self, key: OffloadKey) -> int | None:
        """Where a block is kept, or was a moment ago. Any thread."""
        block = self._blocks.get(key)
        return None if block is None else block.block_id

    def keys(self) -> list[OffloadKey]:
        return list(self._blocks)

    def adopt(self, keys: Sequence[OffloadKey], slots: Sequence[int], seqs: Sequence[int]) -> None:
        """Take in blocks that an earlier engine left, the most recently used ones first."""
        nobody = ReqContext("")
        blocks = list(map(BlockStatus, slots))
        for block, key, seq in zip(blocks, keys, seqs, strict=True):
            block.key = key
            block.generation = seq
        starts = range(0, len(keys), _ADOPTED_AT_ONCE)
        policy = self._policy
        for start in reversed(starts):
            run = slice(start, start + _ADOPTED_AT_ONCE)
            policy.insert_run(keys[run], blocks[run], keys[run], nobody)
            policy.on_request_finished((), nobody)
        for block in blocks:
            block.ref_cnt = 0
        policy.unpinned(blocks)
        self._blocks = dict(zip(keys, blocks, strict=True))

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
            oldest = next(iter(self._live))
            self.on_request_finished(ReqContext(oldest))

    def on_request_finished(self, req_context: ReqContext) -> None:
        if self._live.pop(req_context.req_id, req_context) is None:
            self._policy.on_request_finished((), req_context)

    def _close_if_ended(self, req_context: ReqContext) -> None:
        # Jobs may come after the request has ended. Nobody would close what they open.
        if req_context.req_id not in self._live:
            self._policy.on_request_finished((), req_context)

    # --- writing -------------------------------------------------------------------------------

    def place(
        self, keys: Sequence[OffloadKey], brought: Collection[OffloadKey], req_context: ReqContext
    ) -> tuple[list[BlockStatus], list[OffloadKey]]:
        """Give slots to these blocks, of which none is there, or to as many of the first as there
        is room for. Blocks in `brought` do not leave for them. Returns the new blocks, being
        written now, and the keys that had to leave."""
        policy = self._policy
        missing = len(keys) - len(self._free)
        evicted: list[OffloadKey] = []
        if missing > 0:
            present = sum(self._is_idle(key) for key in brought) if len(brought) > len(keys) else 0
            num_idle = len(self._blocks) - self._num_busy - present
            if missing > num_idle:
                missing = num_idle
                keys = keys[: len(self._free) + missing]
            if not keys:
                return [], []
            policy.on_store_miss(keys, req_context)
            victims = policy.evict(missing, set(brought)) if missing else []
            if victims is None:  # the policy keeps back more than it has to
                keys = keys[: len(self._free)]
                victims = []
            for key, block in victims:
                evicted.append(key)
                del self._blocks[key]
                block.ref_cnt = FREE
                self._free.give(block.block_id)
        elif keys:
            policy.on_store_miss(keys, req_context)
        slots = sorted(self._free.take(len(keys)))
        blocks = list(map(BlockStatus, slots))
        self.next_seq += len(keys)
        seq = self.next_seq
        for key, block in zip(keys, blocks, strict=True):
            seq -= 1  # of one prompt, the head is the last to leave
            block.key = key
            block.generation = seq
        self._num_busy += len(blocks)
        self._blocks.update(zip(keys, blocks, strict=True))
        policy.insert_run(keys, blocks, keys, req_context)
        self._close_if_ended(req_context)
        return blocks, evicted

    def _is_idle(self, key: OffloadKey) -> bool:
        block = self._blocks.get(key)
        return block is not None and block.ref_cnt == 0

    def written(self, blocks: Iterable[BlockStatus]) -> list[OffloadKey]:
        """These blocks are in their slots. Returns those that are still wanted."""
        ready = []
        for block in blocks:
            if self._blocks.get(block.key) is block:
                block.ref_cnt = 0
                ready.append(block)
            else:
                self._free.give(block.block_id)
        self._num_busy -= len(ready)
        self._policy.unpinned(ready)
        return [block.key for block in ready]

    def not_written(self, blocks: Iterable[BlockStatus]) -> None:
        for block in blocks:
            if self._blocks.get(block.key) is block:
                self._drop(block)
                self._num_busy -= 1
            block.ref_cnt = FREE
            self._free.give(block.block_id)

    def _drop(self, block: BlockStatus) -> None:
        del self._blocks[block.key]
        self._policy.remove(block.key)

    # --- reading -------------------------------------------------------------------------------

    def pin(self, keys: Iterable[OffloadKey]) -> dict[OffloadKey, BlockStatus]:
        """Those of the blocks that can be read. They stay until they are unpinned."""
        pinned: dict[OffloadKey, BlockStatus] = {}
        newly = []
        for key in keys:
            block = self._blocks.get(key)
            if block is None or block.ref_cnt == WRITING or key in pinned:
                continue
            if not block.ref_cnt:
                newly.append(block)
            block.ref_cnt += 1
            pinned[key] = block
        self._num_busy += len(newly)
        self._policy.pinned(newly)
        return pinned

    def unpin(self, good: Iterable[BlockStatus], bad: Iterable[BlockStatus]) -> list[OffloadKey]:
        """They have been read. The bad ones are forgotten; returns their keys."""
        idle = []
        for block in good:
            block.ref_cnt -= 1
            if not block.ref_cnt:
                if self._blocks.get(block.key) is block:
                    idle.append(block)
                else:
                    self._free.give(block.block_id)
        self._num_busy -= len(idle)
        self._policy.unpinned(idle)
        forgotten = []
        for block in bad:
            if self._blocks.get(block.key) is block:
                self._drop(block)  # while it counts as pinned
                self._num_busy -= 1
                forgotten.append(block.key)
            block.ref_cnt -= 1
            if not block.ref_cnt:
                self._free.give(block.block_id)
        return forgotten

    # --- the end -------------------------------------------------------------------------------

    def start_over(self, busy: Collection[int]) -> tuple[object, list[OffloadKey]]:
        """Forget everything. `busy`: slots that transfers under way still read or write; they come
        back with those. Returns the keys, and the old order for another thread to destroy, which
        takes a while."""
        former = (self._policy, self._blocks)
        keys = self.keys()
        self._policy = self._policy_cls(self.num_slots)
        self._blocks = {}
        self._num_busy = 0
        self._free.start_over(self.num_slots, busy)
        return former, keys
