"""The contract of an eviction policy, which decides which block is evicted first.

The manager owns slots, reference counts and events; a policy owns the order of blocks. A policy
must implement `insert`, `remove`, `touch`, `evict` and `clear`; all other methods have defaults.
The manager calls a policy on the scheduler thread only.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Sequence, Set
from enum import Enum
from typing import TYPE_CHECKING, Any, ClassVar

if TYPE_CHECKING:
    from kvtier.base import OffloadKey, ReqContext

WRITING = -1
"""`ref_cnt` of a slot whose block is being written."""
FREE = -2
"""`ref_cnt` of a slot that holds no block and can be taken."""
QUARANTINED = -3
"""`ref_cnt` of a slot that holds no block, but that a transfer may still be using."""


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

    Each slot has one object for as long as the manager exists. `generation` grows each time the
    slot gets another block. Two blocks of one key never have the same generation.
    """

    __slots__ = (
        "block_id",
        "charge",
        "following",
        "generation",
        "history",
        "key",
        "place",
        "ref_cnt",
        "used_at",
        "writer",
    )

    def __init__(self, block_id: int) -> None:
        self.block_id = block_id
        self.ref_cnt = WRITING
        """WRITING, FREE or QUARANTINED; 0: readable and evictable; above 0: the number of pins."""
        self.generation = 0
        self.key: OffloadKey = _NO_KEY
        """The key of the block in the slot, or of the one that was in it last."""
        self.place: Any = None
        """Where the policy keeps this block. Only the policy uses it."""
        self.charge: Any = None
        """The tenant that is charged for this block; `following`: the next block in its prompt;
        `used_at`: its last use. Only `kvtier.cpu.policies.tenants` uses them."""
        self.following: OffloadKey | None = None
        self.used_at = 0
        self.writer: object = None
        """The request or tier transfer that may complete the write. Only the manager uses it."""
        self.history: Any = None
        """What is known of the block's uses and of its copies below. Only `kvtier.tiering` uses
        it."""

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

    Keys that are passed together belong to one request and are in prompt order. No block after a
    missing one can be used, so a policy should evict the first blocks of a request last.
    """

    may_evict_newest: ClassVar[bool] = False
    """True if the blocks that were stored last may be the next to leave."""

    def __init__(self, cache_capacity: int) -> None:
        self.cache_capacity = cache_capacity
        """The most blocks that the policy may have. With tenants, it changes before evictions: a
        policy that remembers evicted blocks keeps at most as many."""
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
        """Note that a request uses these blocks. Keys that are not resident are ignored."""

    @abstractmethod
    def evict(
        self, n: int, protected: Set[OffloadKey]
    ) -> list[tuple[OffloadKey, BlockStatus]] | None:
        """Remove and return exactly `n` blocks with a `ref_cnt` of 0 that are not protected.

        Returns None and changes nothing if there are fewer.
        """

    def next_to_leave(self, n: int) -> list[tuple[OffloadKey, BlockStatus]] | None:
        """Name `n` blocks with a `ref_cnt` of 0, or all if there are fewer, in the order in which
        `evict` would remove them for blocks that are new to the cache. Changes nothing.

        The order may be a guess: blocks that are about to leave are written to lower tiers, and one
        that was not named is lost if it leaves. The default returns None: the policy cannot tell.
        Blocks are then written to all tiers as soon as they are stored.
        """
        return None

    @abstractmethod
    def clear(self) -> None:
        """Forget all blocks, pinned or not, and all statistics about them."""

    def mark_evictable(self, key: OffloadKey) -> None:
        """Called when the block's `ref_cnt` has become 0."""
        return

    def mark_non_evictable(self, key: OffloadKey) -> None:
        """Called when the block's `ref_cnt` is no longer 0."""
        return

    # The methods below get a whole batch at a time. Most of their defaults call the methods above.

    def num_admitted(
        self, keys: Sequence[OffloadKey], num_free: int, req_context: ReqContext
    ) -> int:
        """How many of these new blocks of a request are worth storing, from the first one on.

        `num_free`: blocks that fit without an eviction. By default, every block is worth storing. A
        manager may store fewer, and a tier with free slots may store more.
        """
        return len(keys)

    def admit_all(self) -> None:
        """`num_admitted` is not asked from now on: the manager stores every block, because tiers
        below get what is stored here."""
        return

    def on_store_miss(self, keys: Sequence[OffloadKey], req_context: ReqContext) -> None:
        """Called before a request stores these blocks. If too few slots are free, `evict` is called
        next; `protected` then holds the request's keys that must stay."""
        return

    def insert_run(
        self,
        keys: Sequence[OffloadKey],
        blocks: Sequence[BlockStatus],
        brought: Collection[OffloadKey],
        req_context: ReqContext,
    ) -> None:
        """Add the blocks that a request stores with one call.

        `brought`: all keys of the request so far, including `keys`, in prompt order; the disk tier
        passes only `keys`. The default touches all keys in `brought`; override this method if that
        takes too long.
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
        """Note that a request uses these blocks for the first time.

        In the prompt they follow the blocks that the request used before. `brought`: as in
        `insert_run`.
        """
        self.touch(brought, req_context)

    def renew(self, keys: Collection[OffloadKey], req_context: ReqContext) -> None:
        """Note that a request uses all its blocks again. `keys`: all keys of the request, in prompt
        order. An earlier call of `touch`, `on_use` or `insert_run` has passed the same keys in the
        same order."""
        self.touch(keys, req_context)

    def on_request_finished(self, keys: Collection[OffloadKey], req_context: ReqContext) -> None:
        """Called when a request has ended. `keys`: all its keys, in prompt order; the disk tier
        passes none."""
        self.renew(keys, req_context)

    def pinned(self, blocks: Iterable[BlockStatus]) -> None:
        """Called when the `ref_cnt` of these blocks is no longer 0."""
        for block in blocks:
            self.mark_non_evictable(block.key)

    def unpinned(self, blocks: Iterable[BlockStatus]) -> None:
        """Called when the `ref_cnt` of these blocks has become 0."""
        for block in blocks:
            self.mark_evictable(block.key)
