"""What the scheduler's thread hands to the I/O threads, and gets back from them."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Iterable, Sequence

from kvtier.tiering.disk.transfer import Piece, Transfer, Unit

__all__ = ["WorkQueue"]

_MOST_AT_ONCE = 8
"""Units that a thread takes at once. Few: then others get some, and loads come first soon."""


class WorkQueue:
    """Transfers that wait, loads before stores, and those that have ended. Any thread.

    The lock is held to look into the queues, never during I/O: whoever submits waits for nobody.
    """

    def __init__(self, max_pieces: int) -> None:
        """`max_pieces`: of one read or write."""
        self._max_pieces = max_pieces
        self._lock = threading.Lock()
        self._to_do = threading.Condition(self._lock)
        self._idle = threading.Condition(self._lock)
        self._loads: deque[Transfer] = deque()
        self._stores: deque[Transfer] = deque()
        self._num_open = 0
        self._ended: list[Transfer] = []
        self.is_stopping = False

    # --- the scheduler's side ------------------------------------------------------------------

    def submit(self, transfer: Transfer) -> None:
        """Have a transfer carried out. After `stop` it fails."""
        with self._lock:
            if self.is_stopping or not transfer.pieces:
                transfer.give_up()
                self._ended.append(transfer)
                return
            (self._loads if transfer.job.is_promotion else self._stores).append(transfer)
            self._num_open += 1
            self._to_do.notify_all()  # not every thread takes stores

    def take_ended(self) -> list[Transfer]:
        """The transfers that have ended since the last call; each is handed out once."""
        if not self._ended:
            return []
        with self._lock:
            ended, self._ended = self._ended, []
        return ended

    def wait_until_idle(self) -> None:
        """Wait for all transfers."""
        with self._lock:
            self._idle.wait_for(lambda: not self._num_open)

    def stop(self) -> None:
        """Let the threads end after what they have in hand; the rest fails."""
        with self._lock:
            self.is_stopping = True
            for queue in (self._loads, self._stores):
                while queue:
                    transfer = queue.popleft()
                    transfer.give_up()
                    self._note(transfer)
            self._to_do.notify_all()

    # --- the I/O threads' side -----------------------------------------------------------------

    def take(self, max_units: int, max_stores: int, may_wait: bool) -> list[Unit]:
        """The next things to do, so many of them stores at most. None: nothing now, or nothing any
        more. Waits for something to do if `may_wait`."""
        with self._lock:
            while may_wait and not self.is_stopping:
                if self._loads or (self._stores and max_stores > 0):
                    break
                self._to_do.wait()
            max_units = min(max_units, _MOST_AT_ONCE)
            units = self._take_from(self._loads, max_units)
            units += self._take_from(self._stores, min(max_units - len(units), max_stores))
        return units

    def _take_from(self, queue: deque[Transfer], max_units: int) -> list[Unit]:
        units: list[Unit] = []
        while queue and len(units) < max_units:
            transfer = queue[0]
            units.append(transfer.take_unit(self._max_pieces))
            if not transfer.has_more:
                queue.popleft()
        return units

    def finish(self, moved: Iterable[tuple[Unit, Sequence[Piece], Sequence[Piece]]]) -> None:
        """Of each unit, these pieces were moved, and those were not."""
        with self._lock:
            for unit, done, failed in moved:
                transfer = unit.transfer
                transfer.done += done
                transfer.failed += failed
                self._note(transfer)

    def _note(self, transfer: Transfer) -> None:
        if transfer.has_ended:
            transfer.ended = time.perf_counter()
            self._ended.append(transfer)
            self._num_open -= 1
            if not self._num_open:
                self._idle.notify_all()
