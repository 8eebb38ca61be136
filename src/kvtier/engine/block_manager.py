"""Allocates device blocks to requests, and finds prefixes that are already on the device."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable

from kvtier.base import Medium
from kvtier.config import AttentionKind
from kvtier.connector.common import NO_DEVICE_BLOCK
from kvtier.connector.events import BlockRemoved, BlockStored, KVCacheEvent
from kvtier.engine.cache import first_block_ids
from kvtier.engine.config import EngineConfig, LayerGroup
from kvtier.engine.request import Request

__all__ = ["BlockManager", "BlockPool"]


class BlockPool:
    """The device blocks of one KV-cache group, with reference counts. An unused block keeps its
    content until it is allocated again. Blocks that `find` cannot return are allocated first, then
    the others in the order in which they became unused."""

    def __init__(self, first_id: int, num_blocks: int, reports: bool = False) -> None:
        self._reports = reports
        self._num_users = dict.fromkeys(range(first_id, first_id + num_blocks), 0)
        self._unused: OrderedDict[int, None] = OrderedDict.fromkeys(self._num_users)
        self._block_of: dict[bytes, int] = {}
        self._hash_of: dict[int, bytes] = {}
        self.forgotten: list[bytes] = []
        """If the pool `reports`: hashes that `find` has forgotten. `BlockManager` takes them."""

    @property
    def num_unused(self) -> int:
        """Number of blocks that can be allocated."""
        return len(self._unused)

    @property
    def num_cached(self) -> int:
        """Number of blocks, used or not, that `find` can return."""
        return len(self._block_of)

    def find(self, block_hash: bytes) -> int | None:
        """Return the block with this content, or None."""
        return self._block_of.get(block_hash)

    def use(self, block: int) -> None:
        """Add a user to a block that `find` returned."""
        if not self._num_users[block]:
            del self._unused[block]
        self._num_users[block] += 1

    def allocate(self) -> int:
        """Take an unused block, give it one user, and return it. The block's earlier content can no
        longer be found. The caller makes sure that there is an unused block."""
        block, _ = self._unused.popitem(last=False)
        self._forget(block)
        self._num_users[block] = 1
        return block

    def cache(self, block: int, block_hash: bytes) -> bool:
        """Let `find` return this used block. Returns False if another block has the same
        content."""
        if block in self._hash_of or block_hash in self._block_of:
            return False
        self._block_of[block_hash] = block
        self._hash_of[block] = block_hash
        return True

    def release(self, blocks: Iterable[int]) -> None:
        """Remove one user from each block. Of the blocks that are then unused, those without a hash
        are allocated before all other unused blocks. Those with a hash are allocated after all
        others, in the order given."""
        for block in blocks:
            self._num_users[block] -= 1
            if not self._num_users[block]:
                self._unused[block] = None
                if block not in self._hash_of:
                    self._unused.move_to_end(block, last=False)

    def drop_cache(self) -> None:
        """Make `find` forget all blocks. Blocks in use stay in use."""
        if self._reports:
            self.forgotten += self._block_of
        self._block_of.clear()
        self._hash_of.clear()

    def _forget(self, block: int) -> None:
        block_hash = self._hash_of.pop(block, None)
        if block_hash is not None:
            del self._block_of[block_hash]
            if self._reports:
                self.forgotten.append(block_hash)


class BlockManager:
    """Keeps the block tables of requests. Used on the scheduler's thread only.

    A table has an entry for every block up to the request's last one. In a group with a window,
    entries before the window are `NO_DEVICE_BLOCK`.
    """

    def __init__(self, groups: tuple[LayerGroup, ...], engine: EngineConfig) -> None:
        self._groups = groups
        self._block_tokens = engine.block_tokens
        self._tokens_per_hash = engine.tokens_per_hash
        self._alignment = engine.alignment
        self._pools = [
            BlockPool(first, num, engine.device_events)
            for first, num in zip(first_block_ids(engine), engine.num_blocks, strict=True)
        ]
        self._num_blocks = engine.num_blocks
        self._allocated: list[list[int]] = [[] for _ in groups]
        self._reports = engine.device_events
        self._events: list[KVCacheEvent] = []

    @property
    def num_unused_blocks(self) -> tuple[int, ...]:
        """For each group, the number of blocks without a user."""
        return tuple(pool.num_unused for pool in self._pools)

    @property
    def num_cached_blocks(self) -> tuple[int, ...]:
        """For each group, the number of blocks, used or not, that can be found by their hash."""
        return tuple(pool.num_cached for pool in self._pools)

    def fits(self, num_tokens: int) -> bool:
        """True if a request of `num_tokens` tokens fits on the device while no other one runs."""
        return all(
            group.window is not None or -(-num_tokens // tokens) <= num
            for group, tokens, num in zip(
                self._groups, self._block_tokens, self._num_blocks, strict=True
            )
        )

    # --- prefixes -------------------------------------------------------------------------------

    def match_prefix(self, request: Request) -> int:
        """Return how many leading tokens are on the device in all groups. The request's last token
        is never counted, because the model has to compute it."""
        end = (request.num_tokens - 1) // self._alignment * self._alignment
        shorter = True
        while shorter and end:
            shorter = False
            for group_idx in range(len(self._groups)):
                matched = self._match_group(request, group_idx, end)
                shorter = shorter or matched < end
                end = matched
        return end

    def _match_group(self, request: Request, group_idx: int, end: int) -> int:
        """Return the longest prefix, of at most `end` tokens, that this group can continue from."""
        tokens, group = self._block_tokens[group_idx], self._groups[group_idx]
        if group.window is None:
            for index in range(end // tokens):
                if self._find(request, group_idx, index) is None:
                    return index * tokens // self._alignment * self._alignment
            return end
        while end:
            first = group.first_needed_token(end) // tokens
            for index in range(end // tokens - 1, first - 1, -1):
                if self._find(request, group_idx, index) is None:
                    end = index * tokens // self._alignment * self._alignment
                    break
            else:
                break
        return end

    def _find(self, request: Request, group_idx: int, index: int) -> int | None:
        return self._pools[group_idx].find(self._hash(request, group_idx, index))

    def _hash(self, request: Request, group_idx: int, index: int) -> bytes:
        per_block = self._block_tokens[group_idx] // self._tokens_per_hash
        return request.block_hashes[(index + 1) * per_block - 1]

    # --- blocks of requests ---------------------------------------------------------------------

    def start(
        self, request: Request, num_matched: int, num_loaded: int, num_scheduled: int
    ) -> bool:
        """Give a request the blocks of its matched prefix, and new ones for the tokens after it
        that are loaded or computed. If there are too few blocks, the request gets no blocks, and
        False is returned."""
        resume_at = num_matched + num_loaded
        for group_idx, (group, tokens) in enumerate(
            zip(self._groups, self._block_tokens, strict=True)
        ):
            table = request.block_tables[group_idx]
            first_needed = group.first_needed_token(resume_at) // tokens
            for index in range(num_matched // tokens):
                block = None
                if index >= first_needed:
                    block = self._find(request, group_idx, index)
                    assert block is not None
                    self._pools[group_idx].use(block)
                table.append(NO_DEVICE_BLOCK if block is None else block)
            table += [NO_DEVICE_BLOCK] * (first_needed - len(table))
        if self.grow(request, resume_at + num_scheduled):
            return True
        self.release(request)
        return False

    def grow(self, request: Request, num_tokens: int) -> bool:
        """Allocate until the request has blocks for `num_tokens`. Returns False, and allocates
        nothing, if there are not enough."""
        missing = [
            max(0, -(-num_tokens // tokens) - len(table))
            for tokens, table in zip(self._block_tokens, request.block_tables, strict=True)
        ]
        if any(pool.num_unused < n for pool, n in zip(self._pools, missing, strict=True)):
            return False
        for group_idx, num in enumerate(missing):
            blocks = [self._pools[group_idx].allocate() for _ in range(num)]
            request.block_tables[group_idx].extend(blocks)
            self._allocated[group_idx] += blocks
        return True

    def cache_computed(self, request: Request) -> None:
        """Let later requests find the blocks that are full of computed tokens."""
        for group_idx, table in enumerate(request.block_tables):
            num_full = request.num_computed_tokens // self._block_tokens[group_idx]
            for index in range(request.num_cached_blocks[group_idx], num_full):
                if table[index] != NO_DEVICE_BLOCK:
                    block_hash = self._hash(request, group_idx, index)
                    is_new = self._pools[group_idx].cache(table[index], block_hash)
                    if is_new and self._reports:
                        self._report_stored(request, group_idx, index)
            request.num_cached_blocks[group_idx] = num_full

    def leave_behind(self, request: Request) -> None:
        """Release the blocks before the attention window of the next token to compute. No later
        token attends to them either."""
        for group_idx, table in enumerate(request.block_tables):
            needed_from = self._groups[group_idx].first_needed_token(request.num_computed_tokens)
            first = needed_from // self._block_tokens[group_idx]
            left = []
            for index in range(min(first, len(table)) - 1, -1, -1):
                if table[index] == NO_DEVICE_BLOCK:
                    break
                left.append(table[index])
                table[index] = NO_DEVICE_BLOCK
            self._pools[group_idx].release(reversed(left))

    def release(self, request: Request) -> None:
        """Release all blocks of a request. Cached blocks can still be found."""
        for group_idx, table in enumerate(request.block_tables):
            # Last block first, so that the end of the prefix is allocated again before its
            # beginning, without which the rest is of no use.
            self._pools[group_idx].release(b for b in reversed(table) if b != NO_DEVICE_BLOCK)
            table.clear()
            request.num_cached_blocks[group_idx] = 0

    def take_allocated(self) -> tuple[list[int], ...]:
        """Return, for each group, the blocks allocated since the last call."""
        allocated, self._allocated = self._allocated, [[] for _ in self._groups]
        return tuple(allocated)

    def drop_cache(self) -> None:
        """Make all cached prefixes unfindable. Blocks in use stay in use."""
        for pool in self._pools:
            pool.drop_cache()

    # --- events ---------------------------------------------------------------------------------

    def take_events(self) -> list[KVCacheEvent]:
        """The blocks that requests can find, and can no longer find, since the last call. None,
        unless the configuration has `device_events`."""
        self._report_removed()
        events, self._events = self._events, []
        return events

    def _report_stored(self, request: Request, group_idx: int, index: int) -> None:
        self._report_removed()  # before the blocks that take their place
        size = self._block_tokens[group_idx]
        window = self._groups[group_idx].window
        self._events.append(
            BlockStored(
                [self._hash(request, group_idx, index)],
                [group_idx],
                Medium.GPU,
                block_size=size,
                parent_block_hash=self._hash(request, group_idx, index - 1) if index else None,
                token_ids=request.token_ids[index * size : (index + 1) * size],
                group_kind=AttentionKind.FULL if window is None else AttentionKind.SLIDING_WINDOW,
                group_window=window,
            )
        )

    def _report_removed(self) -> None:
        for group_idx, pool in enumerate(self._pools):
            hashes, pool.forgotten = pool.forgotten, []
            if hashes:
                self._events.append(BlockRemoved(hashes, [group_idx] * len(hashes), Medium.GPU))
