"""What the scheduler's thread hands to the I/O threads, and gets back from them."""

from __future__ import annotations

import threading
import time
from collections import deque

from kvtier.tiering.disk.transfer import Piece, Transfer, Unit

__all__ = ["WorkQueue"]


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
        self._stopping = False

    # --- the scheduler's side ------------------------------------------------------------------

    def submit(self, transfer: Transfer) -> None:
        """Have a transfer carried out. After `stop` it fails."""
        with self._lock:
            if self._stopping or not transfer.pieces:
                transfer.give_up()
                self._ended.append(transfer)
                return
            (self._loads if transfer.job.is_promotion else self._stores).append(transfer)
            self._num_open += 1
            self._to_do.notify()

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
            self._stopping = True
            for queue in (self._loads, self._stores):
                while queue:
                    transfer = queue.popleft()
                    transfer.give_up()
                    self._note(transfer)
            self._to_do.notify_all()

    # --- the I/O threads' side -----------------------------------------------------------------

    def take(self, may_store: bool, may_wait: bool) -> Unit | None:
        """The next thing to do; None: nothing now, or nothing any more. Waits if `may_wait`."""
        with self._lock:
            while True:
                if self._loads:
                    return self._take_from(self._loads)
                if self._stores and may_store:
                    return self._take_from(self._stores)
                if self._stopping or not may_wait:
                    return None
                self._to_do.wait()

    def _take_from(self, queue: deque[Transfer]) -> Unit:
        transfer = queue[0]
        unit = transfer.take_unit(self._max_pieces)
        if not transfer.has_more:
            queue.popleft()
        if queue:
            self._to_do.notify()  # one thread is woken per transfer, and there is more to do
        return unit

    def finish(self, unit: Unit, done: list[Piece], failed: list[Piece]) -> None:
        """These pieces of a unit were moved, and those were not."""
        with self._lock:
            unit.transfer.done += done
            unit.transfer.failed += failed
            self._note(unit.transfer)

    def _note(self, transfer: Transfer) -> None:
        if transfer.has_ended:
            transfer.ended = time.perf_counter()
            self._ended.append(transfer)
            self._num_open -= 1
            if not self._num_open:
                self._idle.notify_all()

    @property
    def is_stopping(self) -> bool:
        return self._stopping
