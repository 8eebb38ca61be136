"""Parts of the ring never overlap, and there is always one where there is room."""

from __future__ import annotations

from collections import deque

import numpy as np
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from numpy.typing import NDArray

from kvtier.cpu.cuda.descriptor_ring import DescriptorRing


class RingMachine(RuleBasedStateMachine):
    """Every part is filled with a number of its own, which must still be there later."""

    def __init__(self) -> None:
        super().__init__()
        self.parts: deque[tuple[int, int, NDArray[np.uint64]]] = deque()
        self.next_number = 1

    @initialize(size=st.integers(3, 60))
    def start(self, size: int) -> None:
        self.memory = np.zeros(size, np.uint64)
        self.ring = DescriptorRing(self.memory)

    @rule(num_pages=st.integers(1, 12))
    def take(self, num_pages: int) -> None:
        part = self.ring.take(num_pages)
        if part is None:
            assert not self.has_room(3 * num_pages)
            return
        assert part.shape == (3, num_pages)
        part[:] = self.next_number
        start = (part.ctypes.data - self.memory.ctypes.data) // 8
        self.parts.append((start, self.next_number, part))
        self.next_number += 1

    @precondition(lambda self: self.parts)
    @rule()
    def give_back(self) -> None:
        self.ring.give_back()
        self.parts.popleft()

    @precondition(lambda self: self.parts)
    @rule()
    def undo_take(self) -> None:
        self.ring.undo_take()
        self.parts.pop()

    @invariant()
    def parts_are_as_they_were_left(self) -> None:
        for _, number, part in self.parts:
            assert (part == number).all()

    def has_room(self, size: int) -> bool:
        """Behind the part that was taken last, or at the start if that is behind all others."""
        if not self.parts:
            return size <= len(self.memory)
        first = self.parts[0][0]
        last_start, _, last = self.parts[-1]
        end = last_start + last.size
        if last_start < first:
            return first - end >= size
        return len(self.memory) - end >= size or first >= size


TestDescriptorRing = RingMachine.TestCase


def test_a_full_ring_has_room_again_when_its_first_part_is_given_back() -> None:
    ring = DescriptorRing(np.zeros(30, np.uint64))
    parts = [ring.take(5), ring.take(5)]
    assert all(part is not None for part in parts)
    assert ring.take(1) is None
    ring.give_back()
    assert ring.take(6) is None
    again = ring.take(5)
    assert again is not None
    assert parts[0] is not None
    assert again.ctypes.data == parts[0].ctypes.data
    assert ring.take(1) is None


def test_more_than_the_ring_has_is_never_given() -> None:
    ring = DescriptorRing(np.zeros(30, np.uint64))
    assert ring.take(11) is None
    assert ring.take(10) is not None
