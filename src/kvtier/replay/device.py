"""The engine's own prefix cache in device memory: what it holds is not asked of tiers."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvtier.base import OffloadKey

__all__ = ["DeviceCache"]


class DeviceCache:
    """Blocks of prompts in device memory, as vLLM keeps them.

    A running request holds its blocks. When it has ended, they stay until others need their room:
    the least recently used leave first, and of one prompt the tail before the head. Blocks for
    which there is no room, because running requests hold all of it, are not kept.
    """

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.num_evicted = 0
        self._holders: dict[OffloadKey, int] = {}
        """How many running requests hold a block."""
        self._idle: OrderedDict[OffloadKey, None] = OrderedDict()
        """Blocks that no request holds. The first to leave comes first."""

    def num_hits(self, keys: Sequence[OffloadKey]) -> int:
        """How many blocks at the start of a prompt are here."""
        holders, idle = self._holders, self._idle
        for number, key in enumerate(keys):
            if key not in holders and key not in idle:
                return number
        return len(keys)

    def hold(self, keys: Sequence[OffloadKey]) -> list[OffloadKey]:
        """A running request has found or computed these blocks. Returns those that it holds now;
        the caller ends that with `release`."""
        holders, idle = self._holders, self._idle
        held = []
        for key in keys:
            if key in holders:
                holders[key] += 1
            elif key in idle:
                del idle[key]
                holders[key] = 1
            elif self._make_room():
                holders[key] = 1
            else:
                continue
            held.append(key)
        return held

    def release(self, keys: Sequence[OffloadKey]) -> None:
        """A request has ended, and held these blocks, in prompt order."""
        holders = self._holders
        for key in reversed(keys):
            holders[key] -= 1
            if not holders[key]:
                del holders[key]
                self._idle[key] = None

    def _make_room(self) -> bool:
        if len(self._holders) + len(self._idle) < self.num_blocks:
            return True
        if not self._idle:
            return False
        self._idle.popitem(last=False)
        self.num_evicted += 1
        return True
