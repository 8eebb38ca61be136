"""The device blocks of one KV-cache group: who uses them, and what can be found in them."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable

__all__ = ["BlockPool"]


class BlockPool:
    """Blocks with reference counts. A block that nobody uses keeps its content until it is reused;
    the one that has been unused for the longest time is reused first."""

    def __init__(self, first_id: int, num_blocks: int) -> None:
        self._num_users = dict.fromkeys(range(first_id, first_id + num_blocks), 0)
        self._unused: OrderedDict[int, None] = OrderedDict.fromkeys(self._num_users)
        self._block_of: dict[bytes, int] = {}
        self._hash_of: dict[int, bytes] = {}

    @property
    def num_unused(self) -> int:
        """Blocks that could be allocated."""
        return len(self._unused)

    @property
    def num_cached(self) -> int:
        """Blocks that can be found by their hash, used or not."""
        return len(self._block_of)

    def find(self, block_hash: bytes) -> int | None:
        """The block with this content."""
        return self._block_of.get(block_hash)

    def use(self, block: int) -> None:
        """One user more, of a block found."""
        if not self._num_users[block]:
            del self._unused[block]
        self._num_users[block] += 1

    def allocate(self) -> int:
        """A block to be written, with one user. There must be an unused one."""
        block, _ = self._unused.popitem(last=False)
        self._forget(block)
        self._num_users[block] = 1
        return block

    def cache(self, block: int, block_hash: bytes) -> None:
        """From now on a used block can be found. If another has the same content, that one is."""
        if block not in self._hash_of and block_hash not in self._block_of:
            self._block_of[block_hash] = block
            self._hash_of[block] = block_hash

    def release(self, blocks: Iterable[int]) -> None:
        """One user less, of each. Those given first are reused first."""
        for block in blocks:
            self._num_users[block] -= 1
            if not self._num_users[block]:
                self._unused[block] = None
                if block not in self._hash_of:
                    self._unused.move_to_end(block, last=False)

    def drop_cache(self) -> None:
        """No block can be found any more. Those in use stay in use."""
        self._block_of.clear()
        self._hash_of.clear()

    def _forget(self, block: int) -> None:
        block_hash = self._hash_of.pop(block, None)
        if block_hash is not None:
            del self._block_of[block_hash]
