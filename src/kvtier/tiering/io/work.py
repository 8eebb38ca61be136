"""What the scheduler's thread hands to the I/O threads, and gets back from them."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Iterable, Sequence
from typing import Generic, TypeVar

from kvtier.tiering.io.transfer import Piece, Transfer, Unit

__all__ = ["WorkQueue"]

B = TypeVar("B")

_MOST_AT_ONCE = 8
"""Units that a thread takes at once. Few: then others get some, and loads come first soon."""


class WorkQueue(Generic[B]):
    """Transfers that wait, loads before stores, and those that have ended. Any thread.

    The lock is held to look into the queues, never during I/O: whoever submits waits for nobody.
    """

    def __init__(self, max_pieces: int) -> None:
        """`max_pieces`: of one read or write."""
        self._max_pieces = max_pieces
        self._lock = threading.Lock()
        # Those who wait, by whether they take loads and stores.
        self._to_do = {
            kinds: threading.Condition(self._lock)
            for kinds in ((True, False), (False, True), (True, True))
        }
        self._idle = threading.Condition(self._lock)
        self._loads: deque[Transfer[B]] = deque()
        self._stores: deque[Transfer[B]] = deque()
        # By identity, what was taken and not yet finished: whoever can finish it keeps it alive.
        self._in_hand: set[int] = set()
        self._num_open = 0
        self._ended: list[Transfer[B]] = []
        self.is_stopping = False

    # --- the scheduler's side ------------------------------------------------------------------

    def submit(self, transfer: Transfer[B]) -> None:
        """Have a transfer carried out. After `stop` it fails."""
        with self._lock:
            if self.is_stopping or not transfer.pieces:
                transfer.give_up()
                self._ended.append(transfer)
                return
            is_load = transfer.job.is_promotion
            (self._loads if is_load else self._stores).append(transfer)
            self._num_open += 1
            for (takes_loads, takes_stores), someone in self._to_do.items():
                if takes_loads if is_load else takes_stores:
                    someone.notify(len(transfer.pieces))

    def take_ended(self) -> list[Transfer[B]]:
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
            for someone in self._to_do.values():
                someone.notify_all()

    # --- the I/O threads' side -----------------------------------------------------------------

    def take(self, max_loads: int, max_stores: int, may_wait: bool) -> list[Unit[B]]:
        """The next things to do: so many loads at most, then so many stores at most, and no more
        together than the larger of both numbers. None: nothing now, or nothing any more. Waits for
        something to do if `may_wait`."""
        with self._lock:
            while may_wait and not self.is_stopping:
                if (self._loads and max_loads > 0) or (self._stores and max_stores > 0):
                    break
                self._to_do[max_loads > 0, max_stores > 0].wait()
            max_units = min(max(max_loads, max_stores), _MOST_AT_ONCE)
            units = self._take_from(self._loads, min(max_units, max_loads))
            units += self._take_from(self._stores, min(max_units - len(units), max_stores))
            self._in_hand.update(map(id, units))
        return units

    def _take_from(self, queue: deque[Transfer[B]], max_units: int) -> list[Unit[B]]:
        units: list[Unit[B]] = []
        while queue and len(units) < max_units:
            transfer = queue[0]
            units.append(transfer.take_unit(self._max_pieces))
            if not transfer.has_more:
                queue.popleft()
        return units

    def finish(
        self, moved: Iterable[tuple[Unit[B], Sequence[Piece[B]], Sequence[Piece[B]]]]
    ) -> None:
        """Of each unit, these pieces were moved, and those were not. What is said first counts:
        whoever cleans up after a failure need not know what was finished before it."""
        with self._lock:
            for unit, done, failed in moved:
                if (identity := id(unit)) not in self._in_hand:
                    continue
                self._in_hand.remove(identity)
                transfer = unit.transfer
                transfer.done += done
                transfer.failed += failed
                self._note(transfer)

    def _note(self, transfer: Transfer[B]) -> None:
        if transfer.has_ended:
            transfer.ended = time.perf_counter()
            self._ended.append(transfer)
            self._num_open -= 1
            if not self._num_open:
                self._idle.notify_all()
