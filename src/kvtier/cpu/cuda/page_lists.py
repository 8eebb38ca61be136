"""Lists of pages in pinned memory, where a kernel finds them."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from kvtier.cpu.cuda.page_table import Addresses

__all__ = ["PageLists"]

_NUM_LISTS = 8


class PageLists:
    """A few buffers, used in turns. One thread.

    Nothing is allocated after the start: pinning memory can stop the device. If all are in use,
    `take` waits until the device has read the oldest.
    """

    def __init__(self, max_pages: int) -> None:
        self._memory = torch.empty(_NUM_LISTS, 3, max_pages, dtype=torch.int64, pin_memory=True)
        self._lists: Any = self._memory.numpy().view(np.uint64)
        self._read = [torch.cuda.Event() for _ in range(_NUM_LISTS)]
        self._turn = 0

    @property
    def has_next(self) -> bool:
        """Whether `take` would not wait."""
        return bool(self._read[self._turn].query())

    def take(self, num_pages: int) -> Addresses:
        """Rows (sources, targets, sizes) to be filled in, for at most `max_pages` pages."""
        self._read[self._turn].synchronize()  # at once, if it was never recorded
        rows: Addresses = self._lists[self._turn, :, :num_pages]
        return rows

    def used_in(self, stream: Any) -> None:
        """What was launched last in this stream reads what `take` has given out."""
        self._read[self._turn].record(stream)
        self._turn = (self._turn + 1) % _NUM_LISTS

    def close(self) -> None:
        """Let go of the memory. Nobody reads it any more."""
        self._lists = self._memory = None
