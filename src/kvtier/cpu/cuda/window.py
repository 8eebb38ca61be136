"""How much one direction has given to the device that is not done yet."""

from __future__ import annotations

from collections import deque

from kvtier.cpu.cuda.driver import CudaDriver
from kvtier.cpu.cuda.event import Event

__all__ = ["Window"]

_MOST_ENTRIES = 2048
"""In the queues of the device. They hold more than that on an H200; when they are full, the driver
waits, and with it whoever keeps the interpreter."""
_OF_EVENTS = 8
"""Entries that a part has besides its copies, more or less."""


class Window:
    """Keeps the driver from waiting: whoever would make it do so waits here, and lets go of the
    interpreter. One thread at a time."""

    def __init__(self, driver: CudaDriver) -> None:
        self._driver = driver
        self._spare: list[Event] = []
        self._parts: deque[tuple[Event, int]] = deque()
        """Marks behind parts that may not be done yet, and how many entries these have."""
        self._num_entries = 0

    def add(self, num_copies: int, stream: int) -> None:
        """What was given to `stream` last is a part of so many copies, or launches."""
        event = self._spare.pop() if self._spare else Event(self._driver)
        event.record(stream)
        self._parts.append((event, num_copies + _OF_EVENTS))
        self._num_entries += num_copies + _OF_EVENTS

    def is_full(self, num_copies: int) -> bool:
        """Whether a part of so many would have to wait."""
        while self._num_entries + num_copies + _OF_EVENTS > _MOST_ENTRIES and self._parts:
            if not self._parts[0][0].is_reached():
                return True
            self._forget_first()
        return False

    def await_room(self, num_copies: int) -> None:
        """Have room for such a part. If there was none, for many: the device is busy with the other
        half for longer than it takes to get hold of the interpreter again."""
        if not self.is_full(num_copies):
            return
        while self._parts and self._num_entries > _MOST_ENTRIES // 2:
            self._parts[0][0].synchronize()
            self._forget_first()

    def forget(self) -> None:
        """All is done."""
        self._spare += [event for event, _ in self._parts]
        self._parts.clear()
        self._num_entries = 0

    def _forget_first(self) -> None:
        event, num_entries = self._parts.popleft()
        self._spare.append(event)
        self._num_entries -= num_entries
