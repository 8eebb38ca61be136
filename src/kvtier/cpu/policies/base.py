"""What an eviction policy is: which block leaves first.

The manager owns slots, reference counts and events; a policy owns order. A policy author
implements `insert`, `remove`, `touch`, `evict` and `clear`; everything else has a default in
terms of those. All calls come from the scheduler thread.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Sequence, Set
from enum import Enum
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvtier.base import OffloadKey, ReqContext

WRITING = -1
"""`ref_cnt` of a slot whose block is being written."""
FREE = -2
"""`ref_cnt` of a slot that holds nothing."""
QUARANTINED = -3
"""`ref_cnt` of a slot that holds nothing, but that a transfer may still be using."""


class SlotState(Enum):
    """What a slot is at."""

    FREE = "free"
    WRITING = "writing"
    READY = "ready"
    QUARANTINED = "quarantined"


_STATES = {FREE: SlotState.FREE, WRITING: SlotState.WRITING, QUARANTINED: SlotState.QUARANTINED}


_NO_KEY: OffloadKey = b""  # type: ignore[assignment]


class BlockStatus:
    """One slot of the primary tier and the block in it.

    There is one object per slot for as long as the manager lives; `generation` grows each time
    the slot is given to another block, and is never that of another block of the same key.
    """

    __slots__ = ("block_id", "generation", "key", "place", "ref_cnt", "writer")

    def __init__(self, block_id: int) -> None:
        self.block_id = block_id
        self.ref_cnt = WRITING
        """WRITING, FREE or QUARANTINED; 0: readable and evictable; more: pinned that often."""
        self.generation = 0
        self.key: OffloadKey = _NO_KEY
        """The block in the slot, or the one that was in it last."""
        self.place: Any = None
        """Belongs to the policy: where it keeps this block."""
        self.writer: object = None
        """Belongs to the manager: who may complete the write."""

    @property
    def is_ready(self) -> bool:
        """Whether the block can be read."""
        return self.ref_cnt >= 0

    @property
    def state(self) -> SlotState:
        """The slot's state, spelled out."""
        return _STATES.get(self.ref_cnt, SlotState.READY)

    def __repr__(self) -> str:
        return f"BlockStatus({self.block_id}, ref_cnt={self.ref_cnt}, gen={self.generation})"


class CachePolicy(ABC):
    """Order of eviction over the blocks of one cache.

    Wherever several keys are given they belong to one request and are in prompt order. Within
    a request the head of the prefix is worth the most, since nothing after a missing block can
    be used: it should be the last to leave.
    """

    def __init__(self, cache_capacity: int) -> None:
        self.cache_capacity = cache_capacity
        self.blocks: dict[OffloadKey, BlockStatus] = {}
        """Every resident block. A policy that keeps its own must override `get`."""

    def get(self, key: OffloadKey) -> BlockStatus | None:
        """The block of `key`, if resident."""
        return self.blocks.get(key)

    @abstractmethod
    def insert(self, key: OffloadKey, block: BlockStatus) -> None:
        """Take in one new block. It is being written, so it cannot be evicted yet."""

    @abstractmethod
    def remove(self, key: OffloadKey) -> None:
        """Forget one block whose write failed, leaving no trace of it."""

    @abstractmethod
    def touch(self, keys: Iterable[OffloadKey], req_context: ReqContext) -> None:
        """A request uses these blocks. Keys that are not resident are ignored."""

    @abstractmethod
    def evict(
        self, n: int, protected: Set[OffloadKey]
    ) -> list[tuple[OffloadKey, BlockStatus]] | None:
        """Remove and return exactly `n` blocks with a `ref_cnt` of 0 that are not protected.

        None, and nothing changed, if there are fewer.
        """

    @abstractmethod
    def clear(self) -> None:
        """Forget everything, pinned or not, and whatever was learnt from it."""

    def mark_evictable(self, key: OffloadKey) -> None:
        """The block's `ref_cnt` has become 0."""
        return

    def mark_non_evictable(self, key: OffloadKey) -> None:
        """The block's `ref_cnt` is no longer 0."""
        return

    # What the manager calls, a whole batch at a time.

    def on_store_miss(self, keys: Sequence[OffloadKey], req_context: ReqContext) -> None:
        """A request is about to store these blocks; room is made for them next.

        Everything that the request has brought will be protected.
        """
        return

    def insert_run(
        self,
        keys: Sequence[OffloadKey],
        blocks: Sequence[BlockStatus],
        brought: Collection[OffloadKey],
        req_context: ReqContext,
    ) -> None:
        """Take in the blocks that a request stores with one call.

        `brought` is all that the request has brought until now, these keys included, in prompt
        order. The default touches all of it; override it where that takes too long.
        """
        for key, block in zip(reversed(keys), reversed(blocks), strict=True):
            self.insert(key, block)
        if len(brought) > len(keys):
            self.touch(brought, req_context)

    def on_use(
        self,
        keys: Sequence[OffloadKey],
        brought: Collection[OffloadKey],
        req_context: ReqContext,
    ) -> None:
        """A request was found to use these blocks, none of which it had used before.

        They follow, in the prompt, what it used before; `brought` is as in `insert_run`.
        """
        self.touch(brought, req_context)

    def renew(self, keys: Collection[OffloadKey], req_context: ReqContext) -> None:
        """A request still uses what it has used before. `keys` are all that it has brought, in
        prompt order, and the policy knows them in that order."""
        self.touch(keys, req_context)

    def on_request_finished(self, keys: Collection[OffloadKey], req_context: ReqContext) -> None:
        """A request has ended. `keys` are all that it has brought, in prompt order."""
        self.renew(keys, req_context)

    def pinned(self, blocks: Iterable[BlockStatus]) -> None:
        """The `ref_cnt` of these blocks is no longer 0."""
        for block in blocks:
            self.mark_non_evictable(block.key)

    def unpinned(self, blocks: Iterable[BlockStatus]) -> None:
        """The `ref_cnt` of these blocks has become 0."""
        for block in blocks:
            self.mark_evictable(block.key)
