"""The slots of a primary tier, lent to jobs, with every byte accounted for."""

from __future__ import annotations

import ctypes
import gc
import mmap
from contextlib import suppress
from random import Random

from kvtier.cpu.buffer_holders import describe_holders

__all__ = ["LentSlots"]

_POISON = bytes([0xA5, 0x5A, 0xC3, 0x3C])


class LentSlots:
    """Memory as a tier gets it: page-aligned rows in one mapping. Test's thread only.

    A slot that is not lent holds poison. So a load that brings nothing is seen, and so is whoever
    writes into a slot that is not theirs, or not theirs any more.
    """

    def __init__(self, num_slots: int, row_bytes: int, seed: int = 0) -> None:
        self.row_bytes = row_bytes
        self.is_closed = False
        self._poison = _POISON * (row_bytes // len(_POISON))
        self._mapping = mmap.mmap(-1, num_slots * row_bytes)
        self.view = memoryview(self._mapping).cast("B", (num_slots, row_bytes))
        self._free = list(range(num_slots))
        # In no order, so that a tier which takes a job's slots for neighbours is seen.
        Random(seed).shuffle(self._free)
        for slot in self._free:
            self.fill(slot, self._poison)

    @property
    def num_free(self) -> int:
        return len(self._free)

    def lend(self, count: int) -> list[int]:
        """So many slots, all poisoned."""
        if count > len(self._free):
            raise ValueError(f"{count} slots wanted, {len(self._free)} are free")
        lent, self._free = self._free[:count], self._free[count:]
        return lent

    def take_back(self, slots: list[int]) -> None:
        """The job has ended: whoever writes into these slots now is seen."""
        for slot in slots:
            self.fill(slot, self._poison)
        self._free += slots

    def take_back_all(self) -> None:
        """No job is left, reported or not."""
        self._free.clear()
        self.take_back(list(range(len(self._mapping) // self.row_bytes)))

    def touched(self) -> list[int]:
        """The free slots into which someone has written."""
        return [slot for slot in sorted(self._free) if self.content(slot) != self._poison]

    def content(self, slot: int) -> bytes:
        return self._mapping[slot * self.row_bytes : (slot + 1) * self.row_bytes]

    def is_poison(self, slot: int) -> bool:
        return self.content(slot) == self._poison

    def fill(self, slot: int, content: bytes) -> None:
        self._mapping[slot * self.row_bytes : (slot + 1) * self.row_bytes] = content

    def close(self) -> list[str]:
        """Unmap the slots. Answers who still holds a part of them; then they stay mapped."""
        self.is_closed = True
        address = ctypes.addressof(ctypes.c_char.from_buffer(self._mapping))
        with suppress(BufferError):  # an array was made of it, which keeps the mapping, too
            self.view.release()
        with suppress(BufferError):
            self._mapping.close()
            return []
        gc.collect()  # garbage in a cycle is nobody's fault
        with suppress(BufferError):
            self._mapping.close()
            return []
        return describe_holders(address, len(self._mapping)) or ["unknown holders"]
