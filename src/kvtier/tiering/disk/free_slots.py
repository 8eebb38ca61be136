"""Slots of the slab that hold nothing the engine wants."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from itertools import islice

__all__ = ["FreeSlots"]


class FreeSlots:
    """Hands out free slots, neighbours together. Scheduler thread only.

    Starting over costs the same for any number of slots: the free ones are then counted, not
    listed.
    """

    def __init__(self, first: list[int], last: list[int]) -> None:
        """`first` are handed out before `last`, both in ascending order."""
        self._listed = last[::-1] + first[::-1]
        self._untouched: Iterator[int] = iter(())
        self._num_untouched = 0

    def start_over(self, num_slots: int, busy: Collection[int]) -> None:
        """All slots are free but these, which come back one by one."""
        self._listed = []
        self._untouched = (slot for slot in range(num_slots) if slot not in busy)
        self._num_untouched = num_slots - len(busy)

    def __len__(self) -> int:
        return len(self._listed) + self._num_untouched

    def take(self, count: int) -> list[int]:
        """So many slots, or as many as there are."""
        listed = self._listed
        taken = listed[: -count - 1 : -1]
        del listed[len(listed) - len(taken) :]
        if len(taken) < count and self._num_untouched:
            more = list(islice(self._untouched, count - len(taken)))
            self._num_untouched -= len(more)
            taken += more
        return taken

    def give(self, slots: Iterable[int]) -> None:
        """Slots are free again."""
        self._listed.extend(slots)
