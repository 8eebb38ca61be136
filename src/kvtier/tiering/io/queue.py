"""The queue between a tier's scheduler thread and its I/O threads.

The scheduler thread submits one `Transfer` for each job. I/O threads take `Unit`s of it, each of
which is one read or write, and finish them. When all units of a transfer have ended, the scheduler
thread gets it back from `take_ended`.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Generic, NamedTuple, TypeAlias, TypeVar

from kvtier.base import OffloadKey
from kvtier.tiering.base import TransferJob

__all__ = ["Piece", "Transfer", "Unit", "WorkQueue"]

B = TypeVar("B")
"""The tier's own description of a block."""

Piece: TypeAlias = tuple[int, B]
"""One block of a job: its row in the primary tier, and the tier's description of it."""

_MOST_AT_ONCE = 8
"""Limit on the units that a thread takes with one call. Low, so that other threads get some, and a
new load does not wait for many stores."""


class Unit(NamedTuple, Generic[B]):
    """Pieces that are adjacent in the file: one read or write."""

    transfer: Transfer[B]
    pieces: Sequence[Piece[B]]


@dataclass(slots=True, eq=False)
class Transfer(Generic[B]):
    """A job in progress. The scheduler thread makes it and gets it back. While it is in the work
    queue, only a thread that holds the queue's lock may change it."""

    job: TransferJob
    pieces: list[Piece[B]]
    """The blocks to move, in the order in which they are taken."""
    here: list[OffloadKey] = field(default_factory=list)
    """Stores only: blocks that the tier has already."""
    done: list[Piece[B]] = field(default_factory=list)
    """Pieces that were moved."""
    failed: list[Piece[B]] = field(default_factory=list)
    """Pieces that could not be moved, or failed verification."""
    num_taken: int = 0
    """Number of pieces that I/O threads have taken."""
    started: float | None = None
    """When the first piece was taken (`time.perf_counter`). None: none was."""
    ended: float = 0.0
    """When the last piece ended."""

    def take_unit(self, max_pieces: int) -> Unit[B]:
        """Take the next pieces, which one read or write moves. Call it only if `has_more`."""
        if self.started is None:
            self.started = time.perf_counter()
        first = self.num_taken
        self.num_taken = self._unit_end(first, min(len(self.pieces), first + max_pieces))
        return Unit(self, self.pieces[first : self.num_taken])

    def _unit_end(self, first: int, last: int) -> int:
        """Index after the last piece of the unit that begins with piece `first`; at most `last`. A
        tier overrides this to end a unit where the next piece is not adjacent in the file."""
        return last

    @property
    def has_more(self) -> bool:
        """True if there are pieces that no I/O thread has taken."""
        return self.num_taken < len(self.pieces)

    @property
    def has_ended(self) -> bool:
        return len(self.done) + len(self.failed) == len(self.pieces)

    def give_up(self) -> None:
        """Fail all pieces that have not been taken."""
        self.failed += self.pieces[self.num_taken :]
        self.num_taken = len(self.pieces)

    @property
    def seconds(self) -> float | None:
        """Seconds from the first piece taken to the last one ended. None: none was taken."""
        return None if self.started is None else self.ended - self.started


class WorkQueue(Generic[B]):
    """Transfers that wait, and those that have ended. Loads are taken before stores. The headings
    below say which threads normally call a method; any thread may.

    One lock protects all state. No thread holds it during I/O, so `submit` never waits for a disk.
    """

    def __init__(self, max_pieces: int) -> None:
        """`max_pieces`: limit on the pieces of one read or write."""
        self._max_pieces = max_pieces
        self._lock = threading.Lock()
        # Conditions on which I/O threads wait for work, by (takes loads, takes stores).
        self._to_do = {
            kinds: threading.Condition(self._lock)
            for kinds in ((True, False), (False, True), (True, True))
        }
        self._idle = threading.Condition(self._lock)
        self._loads: deque[Transfer[B]] = deque()
        self._stores: deque[Transfer[B]] = deque()
        # Identities of the units that were taken and are not finished. The thread that finishes a
        # unit keeps it alive, so its identity is not reused meanwhile.
        self._in_hand: set[int] = set()
        self._num_open = 0
        self._num_open_loads = 0
        self._ended: list[Transfer[B]] = []
        self.is_stopping = False
        self._is_abandoned = False

    # --- scheduler thread ----------------------------------------------------------------------

    def submit(self, transfer: Transfer[B]) -> None:
        """Queue a transfer. After `stop`, the transfer ends at once, and all its pieces fail."""
        with self._lock:
            if self.is_stopping or not transfer.pieces:
                transfer.give_up()
                self._ended.append(transfer)
                return
            is_load = transfer.job.is_promotion
            (self._loads if is_load else self._stores).append(transfer)
            self._num_open += 1
            self._num_open_loads += is_load
            for (takes_loads, takes_stores), waiting in self._to_do.items():
                if takes_loads if is_load else takes_stores:
                    waiting.notify(len(transfer.pieces))

    def take_ended(self) -> list[Transfer[B]]:
        """The transfers that have ended since the last call; each is returned once."""
        if not self._ended:
            return []
        with self._lock:
            ended, self._ended = self._ended, []
        return ended

    def wait_until_idle(self) -> None:
        """Wait until all transfers have ended."""
        with self._lock:
            self._idle.wait_for(lambda: not self._num_open or self._is_abandoned)

    def stop(self) -> None:
        """Fail all pieces that have not been taken. I/O threads end after the units they have
        taken."""
        with self._lock:
            self.is_stopping = True
            for queue in (self._loads, self._stores):
                while queue:
                    transfer = queue.popleft()
                    transfer.give_up()
                    self._note(transfer)
            for waiting in self._to_do.values():
                waiting.notify_all()

    def stop_waiting(self) -> None:
        """End `wait_until_idle`: the units that are left hang, and nobody waits for them. Called
        after `stop`."""
        with self._lock:
            self._is_abandoned = True
            self._idle.notify_all()

    # --- I/O threads ---------------------------------------------------------------------------

    @property
    def is_loading(self) -> bool:
        """True while a load waits or is under way: stores then yield to it."""
        return self._num_open_loads > 0

    def take(self, max_loads: int, max_stores: int, may_wait: bool) -> list[Unit[B]]:
        """Take up to `max_loads` units of loads, then up to `max_stores` units of stores. In all,
        takes at most the larger of the two numbers, and at most `_MOST_AT_ONCE`. With `may_wait`,
        waits for work; an empty list then means that the queue is stopping."""
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
        """Record for each unit the pieces that were moved and those that failed. A second call for
        a unit does nothing, so after an error a thread may fail units that are finished already."""
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
            self._num_open_loads -= transfer.job.is_promotion
            if not self._num_open:
                self._idle.notify_all()
