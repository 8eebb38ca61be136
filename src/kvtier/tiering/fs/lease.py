"""Room for blocks that this engine may write without asking again."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

__all__ = ["Lease", "NoRoom", "Room", "Shut"]


class NoRoom(Exception):
    """There is no room, and none can be made now."""


class Shut(Exception):
    """Nothing can be stored now, and not for lack of room: the root has failed, or we end."""


class Room(NamedTuple):
    """Room for one block: a file in the seat."""

    path: str
    is_new: bool
    """False: it is there, and as long as a block; it held one that has left."""
    charge: int
    """The bytes that are reserved for it."""


class Lease:
    """Reserved bytes, and files of blocks that have left, to be overwritten. Any I/O thread.

    Those who write take from it, and wait while there is nothing; the clerk puts in.
    """

    def __init__(
        self, charge: int, target: int, new_path: Callable[[], str], ask: Callable[[], None]
    ) -> None:
        """`charge`: what a new block costs. `target`: how many there should be room for, before
        anyone waits for it; 1: nobody asks before. `ask`: is called when there is too little."""
        self.charge = charge
        self._target = target
        self._new_path = new_path
        self._ask = ask
        self._changed = threading.Condition()
        self._bytes = 0
        self._files: deque[Room] = deque()
        self._num_waiting = 0
        self._num_refusals = 0
        self._is_closed = False
        self.is_shut = False
        self._has_failed = False
        self._out: set[str] = set()
        """Room in the hands of those who write."""

    def take(self) -> Room:
        """Room for one block. Waits for the clerk. Raises `NoRoom` or `Shut`."""
        with self._changed:
            if not self._num_available:
                self._wait()
            if self._files:
                room = self._files.popleft()
            else:
                room = Room(self._new_path(), True, self.charge)
                self._bytes -= self.charge
            self._out.add(room.path)
            if self._num_short:  # also for those whom we were quicker than
                self._ask()
            return room

    def _wait(self) -> None:
        refusals = self._num_refusals
        self._num_waiting += 1
        try:
            self._ask()
            self._changed.wait_for(
                lambda: self._num_available or self._is_over or self._num_refusals != refusals
            )
        finally:
            self._num_waiting -= 1
        if not self._num_available:
            raise Shut if self._is_closed or self._has_failed else NoRoom

    @property
    def num_wanted(self) -> int:
        """For how many blocks there should be more room."""
        with self._changed:
            return self._num_short

    @property
    def is_waited_for(self) -> bool:
        return self._num_waiting > 0

    def put(self, num_bytes: int, files: Sequence[Room]) -> None:
        """More room: reserved bytes, and files to be overwritten."""
        if num_bytes or files:
            with self._changed:
                self._bytes += num_bytes
                self._files += files
                self._changed.notify_all()

    def settle(self, rooms: Iterable[Room]) -> None:
        """This room is no longer in the hands of those who write. Once more changes nothing."""
        with self._changed:
            self._out.difference_update(room.path for room in rooms)

    @property
    def is_idle(self) -> bool:
        """Whether nobody is writing."""
        return not self._out

    def refuse(self) -> None:
        """Whoever waits gets nothing."""
        with self._changed:
            self._num_refusals += 1
            self._changed.notify_all()

    def shut(self, *, has_failed: bool) -> None:
        """Nobody gets anything, or waits, before it is opened again. `has_failed`: the root cannot
        be used; else there is no room."""
        with self._changed:
            self.is_shut = True
            self._has_failed = has_failed
            self._changed.notify_all()

    def open(self) -> None:
        with self._changed:
            self.is_shut = self._has_failed = False

    def empty(self) -> tuple[int, list[Room]]:
        """All that nobody has taken: bytes and files. It is no longer in the lease."""
        with self._changed:
            taken = self._bytes, list(self._files)
            self._bytes = 0
            self._files.clear()
        return taken

    def close(self) -> None:
        """Nobody gets anything any more."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()

    @property
    def _num_short(self) -> int:
        if self._is_over:
            return 0
        available = self._num_available
        short = self._num_waiting - available
        if self._target > 1 and available <= self._target // 2:
            short = max(short, self._target - available)
        return max(0, short)

    @property
    def _num_available(self) -> int:
        return 0 if self._is_over else len(self._files) + self._bytes // self.charge

    @property
    def _is_over(self) -> bool:
        return self._is_closed or self.is_shut
