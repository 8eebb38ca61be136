"""The contract of an eviction policy: it decides which block leaves first.

The manager owns slots, reference counts and events; a policy owns the order of blocks. A policy
author implements `insert`, `remove`, `touch`, `evict` and `clear`; all other methods have defaults
that call those. All calls come from the scheduler thread.
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
    """The state of a slot."""

    FREE = "free"
    WRITING = "writing"
    READY = "ready"
    QUARANTINED = "quarantined"


_STATES = {FREE: SlotState.FREE, WRITING: SlotState.WRITING, QUARANTINED: SlotState.QUARANTINED}


_NO_KEY: OffloadKey = b""  # type: ignore[assignment]


class BlockStatus:
    """One slot of the primary tier and the block in it.

    There is one object per slot for as long as the manager lives. `generation` grows each time
    the slot gets another block. Two blocks of one key never have the same generation.
    """

    __slots__ = ("block_id", "generation", "key", "place", "ref_cnt", "writer")

    def __init__(self, block_id: int) -> None:
        self.block_id = block_id
        self.ref_cnt = WRITING
        """WRITING, FREE or QUARANTINED; 0: readable and evictable; above 0: the number of pins."""
        self.generation = 0
        self.key: OffloadKey = _NO_KEY
        """The key of the block in the slot, or of the one that was in it last."""
        self.place: Any = None
        """For the policy alone: where it keeps this block."""
        self.writer: object = None
        """For the manager alone: the request or tier transfer that may complete the write."""

    @property
    def is_ready(self) -> bool:
        """True if the block can be read."""
        return self.ref_cnt >= 0

    @property
    def state(self) -> SlotState:
        """The state that `ref_cnt` stands for."""
        return _STATES.get(self.ref_cnt, SlotState.READY)

    def __repr__(self) -> str:
        return f"BlockStatus({self.block_id}, ref_cnt={self.ref_cnt}, gen={self.generation})"


class CachePolicy(ABC):
    """The order of eviction of the blocks of one cache.

    Keys that are passed together belong to one request and are in prompt order. Within a request
    the head of the prefix is worth the most, because no block after a missing one can be used. So
    the head should leave last.
    """

    def __init__(self, cache_capacity: int) -> None:
        self.cache_capacity = cache_capacity
        self.blocks: dict[OffloadKey, BlockStatus] = {}
        """Every resident block. A policy that keeps them elsewhere must override `get`."""

    def get(self, key: OffloadKey) -> BlockStatus | None:
        """The block of `key`, if resident."""
        return self.blocks.get(key)

    @abstractmethod
    def insert(self, key: OffloadKey, block: BlockStatus) -> None:
        """Add one new block. It is being written, so it cannot be evicted yet."""

    @abstractmethod
    def remove(self, key: OffloadKey) -> None:
        """Forget one block whose write failed, as if it had never been added."""

    @abstractmethod
    def touch(self, keys: Iterable[OffloadKey], req_context: ReqContext) -> None:
        """A request uses these blocks. Keys that are not resident are ignored."""

    @abstractmethod
    def evict(
        self, n: int, protected: Set[OffloadKey]
    ) -> list[tuple[OffloadKey, BlockStatus]] | None:
        """Remove and return exactly `n` blocks with a `ref_cnt` of 0 that are not protected.

        Returns None and changes nothing if there are fewer.
        """

    @abstractmethod
    def clear(self) -> None:
        """Forget all blocks, pinned or not, and everything learnt from them."""

    def mark_evictable(self, key: OffloadKey) -> None:
        """The block's `ref_cnt` has become 0."""
        return

    def mark_non_evictable(self, key: OffloadKey) -> None:
        """The block's `ref_cnt` is no longer 0."""
        return

    # The manager calls the methods below with a whole batch at a time.

    def on_store_miss(self, keys: Sequence[OffloadKey], req_context: ReqContext) -> None:
        """A request is about to store these blocks. `evict` follows if there are too few slots; its
        `protected` keys are then all keys of the request."""
        return

    def insert_run(
        self,
        keys: Sequence[OffloadKey],
        blocks: Sequence[BlockStatus],
        brought: Collection[OffloadKey],
        req_context: ReqContext,
    ) -> None:
        """Add the blocks that a request stores with one call.

        `brought`: all keys of the request so far, including these, in prompt order. The default
        touches all of them; override it if that takes too long.
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
        """A request uses these blocks for the first time.

        In its prompt they follow the blocks that it used before; `brought` is as in `insert_run`.
        """
        self.touch(brought, req_context)

    def renew(self, keys: Collection[OffloadKey], req_context: ReqContext) -> None:
        """A request uses its blocks again. `keys`: all keys of the request, in prompt order. An
        earlier call has passed the same keys in the same order."""
        self.touch(keys, req_context)

    def on_request_finished(self, keys: Collection[OffloadKey], req_context: ReqContext) -> None:
        """A request has ended. `keys`: all keys of the request, in prompt order."""
        self.renew(keys, req_context)

    def pinned(self, blocks: Iterable[BlockStatus]) -> None:
        """The `ref_cnt` of these blocks is no longer 0."""
        for block in blocks:
            self.mark_non_evictable(block.key)

    def unpinned(self, blocks: Iterable[BlockStatus]) -> None:
        """The `ref_cnt` of these blocks has become 0."""
        for block in blocks:
            self.mark_evictable(block.key)
