"""Lists of pages in pinned memory, where a kernel finds them."""

from __future__ import annotations

from collections import deque

import numpy as np
from numpy.typing import NDArray

__all__ = ["DescriptorRing"]


class DescriptorRing:
    """Gives out parts of one buffer in turn; they are given back in the order in which they were
    taken. Nothing is allocated after the start: pinning memory can stop the device."""

    def __init__(self, memory: NDArray[np.uint64]) -> None:
        """`memory`: flat, and pinned if the device is to read it."""
        self._memory = memory
        self._taken: deque[tuple[int, int]] = deque()

    def take(self, num_pages: int) -> NDArray[np.uint64] | None:
        """An array (3, num_pages), or None if there is no room now."""
        size = 3 * num_pages
        start = self._find(size)
        if start is None:
            return None
        self._taken.append((start, start + size))
        return self._memory[start : start + size].reshape(3, num_pages)

    def give_back(self) -> None:
        """The part that was taken first is not needed any more."""
        self._taken.popleft()

    def undo_take(self) -> None:
        """The part that was taken last was not needed."""
        self._taken.pop()

    def _find(self, size: int) -> int | None:
        if not self._taken:
            return 0 if size <= len(self._memory) else None
        first, end = self._taken[0][0], self._taken[-1][1]
        if end > first:  # what is taken is in one piece
            if len(self._memory) - end >= size:
                return end
            return 0 if first >= size else None
        return end if first - end >= size else None
