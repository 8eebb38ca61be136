"""A lane: one I/O thread of a tier on a server.

A lane takes one unit at a time from the work queue and lets its `BlockMover` move it. If the server
fails, the lane fails its units at once for a growing pause, so that nobody waits for a dead server.
"""

from __future__ import annotations

import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field
from typing import TypeAlias

from kvtier.base import OffloadKey
from kvtier.cpu.job_thread import prompt_turns
from kvtier.tiering.io.lane import LARGE_BLOCK_BYTES
from kvtier.tiering.io.queue import Piece, Transfer, Unit, WorkQueue
from kvtier.tiering.remote.errors import ServerErrors, ServerFailure

__all__ = ["BlockMover", "LaneSet", "Pause", "RemoteLane", "RemoteTransfer"]

_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.1, 5.0
_STUCK_AFTER_S = 4.0
"""A call that takes longer is taken to hang. It may still end."""
_WATCH_EVERY_S = 0.5
_JOIN_PATIENCE_S = 1.0

_Piece: TypeAlias = Piece[OffloadKey]


@dataclass(slots=True, eq=False)
class RemoteTransfer(Transfer[OffloadKey]):
    """A job in progress. Lanes that work on it at the same time only append to its lists."""

    namespace: str = ""
    """The namespace of the blocks."""
    stored: list[OffloadKey] = field(default_factory=list)
    """A store: the blocks that were not there before."""
    refused: list[OffloadKey] = field(default_factory=list)
    """A store: blocks for which the server had no room."""
    gone: list[OffloadKey] = field(default_factory=list)
    """A load: blocks that the server no longer had."""
    lost: list[OffloadKey] = field(default_factory=list)
    """Further blocks that the server has no longer."""


class BlockMover(ABC):
    """Moves blocks for one lane."""

    @abstractmethod
    def load(self, transfer: RemoteTransfer, pieces: Sequence[_Piece]) -> list[_Piece]:
        """Read blocks into their rows. Returns those that are there and whose seal is right. Adds
        those that the server does not have to `transfer.gone`.

        Raises `ServerFailure` if no further block can be read; the blocks read before are lost.
        """

    @abstractmethod
    def store(self, transfer: RemoteTransfer, pieces: Sequence[_Piece]) -> list[_Piece]:
        """Write blocks. Returns those that the server has now. Adds to `transfer.stored` and
        `transfer.refused`. Raises `ServerFailure` if no further block can be written."""


class Pause:
    """How long a server that has failed is not called. One thread."""

    def __init__(self, longest_s: float = _LONGEST_PAUSE_S) -> None:
        self._longest_s = longest_s
        self._next_s = _FIRST_PAUSE_S
        self._until = 0.0

    @property
    def is_over(self) -> bool:
        return time.monotonic() >= self._until

    @property
    def seconds_left(self) -> float:
        return max(self._until - time.monotonic(), 0.0)

    def begin(self) -> None:
        """The server has failed. The next pause is twice as long."""
        self._until = time.monotonic() + self._next_s
        self._next_s = min(2 * self._next_s, self._longest_s)

    def forget(self) -> None:
        """The server works."""
        self._next_s = _FIRST_PAUSE_S


class RemoteLane:
    """A thread that moves loads or stores, one unit at a time."""

    def __init__(
        self,
        *,
        name: str,
        work: WorkQueue[OffloadKey],
        mover: BlockMover,
        errors: ServerErrors,
        is_for_loads: bool,
        block_bytes: int,
    ) -> None:
        self._work = work
        self._mover = mover
        self._errors = errors
        self._is_for_loads = is_for_loads
        self._block_bytes = block_bytes
        self._pause = Pause()
        self._busy_since: float | None = None
        self._is_replaced = False
        # A daemon, so that an engine that exits without a shutdown does not wait for it.
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        self._thread.start()

    def join(self, patience_s: float | None = None) -> bool:
        """Wait for the thread, which ends when the work queue is stopped. False: it has not ended
        in time. Does nothing before `start`."""
        if self._thread.ident is not None:
            self._thread.join(patience_s)
        return not self._thread.is_alive()

    @property
    def is_stuck(self) -> bool:
        """True if its unit takes so long that the call probably hangs."""
        began = self._busy_since
        return began is not None and time.monotonic() - began > _STUCK_AFTER_S

    def end_after_this_unit(self) -> None:
        """Take no further unit, because another lane does so now."""
        self._is_replaced = True

    def _run(self) -> None:
        is_large = self._block_bytes >= LARGE_BLOCK_BYTES
        with prompt_turns if is_large else nullcontext():
            while not self._is_replaced:
                units = self._work.take(self._is_for_loads, not self._is_for_loads, True)
                if not units:
                    return
                for unit in units:
                    self._busy_since = time.monotonic()
                    self._move(unit)
                    self._busy_since = None

    def _move(self, unit: Unit[OffloadKey]) -> None:
        done: list[_Piece] = []
        try:
            if self._pause.is_over and not self._work.is_stopping:
                done = self._moved(unit)
                self._pause.forget()
        except ServerFailure as failure:
            if not self._work.is_stopping:
                self._pause.begin()
                self._errors.note(failure)
        except Exception as error:
            self._pause.begin()
            self._errors.note_unexpected(error)
        finally:
            keys = {key for _, key in done}
            failed = [piece for piece in unit.pieces if piece[1] not in keys]
            self._work.finish([(unit, done, failed)])

    def _moved(self, unit: Unit[OffloadKey]) -> list[_Piece]:
        transfer = unit.transfer
        assert isinstance(transfer, RemoteTransfer)
        if transfer.job.is_promotion:
            return self._mover.load(transfer, unit.pieces)
        return self._mover.store(transfer, unit.pieces)


class LaneSet:
    """The lanes of one tier.

    A client library that cannot be interrupted may keep a lane in a call for long. Such a lane is
    replaced: its rows stay with the call until it ends, and the other units go on. So a call that
    hangs costs a thread, and not the tier.
    """

    def __init__(
        self,
        name: str,
        open_lane: Callable[[str, int], RemoteLane],
        num_lanes: Mapping[str, int],
        most_stuck: int,
    ) -> None:
        """`open_lane`: makes a lane of a kind, with a number for its name. `num_lanes`: how many of
        each kind. `most_stuck`: how many lanes may be replaced and not have ended. 0: the calls of
        this tier always end in time."""
        self._open_lane = open_lane
        self._most_stuck = most_stuck
        self._lanes = {
            kind: [open_lane(kind, number) for number in range(count)]
            for kind, count in num_lanes.items()
        }
        self._replaced: list[RemoteLane] = []
        self._num_opened = sum(num_lanes.values())
        self._stopped = threading.Event()
        self._watch = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        for lane in self._all():
            lane.start()
        if self._most_stuck:
            self._watch.start()

    def join(self) -> bool:
        """Wait for all lanes, which end when the work queue is stopped. False: some calls still
        hang, and are left to themselves. Does nothing before `start`."""
        self._stopped.set()
        if self._watch.ident is not None:
            self._watch.join()
        if not self._most_stuck:
            ended = [lane.join() for lane in self._all()]
        else:
            until = time.monotonic() + _JOIN_PATIENCE_S
            ended = [lane.join(max(until - time.monotonic(), 0.0)) for lane in self._all()]
        return all(ended)

    def _all(self) -> list[RemoteLane]:
        return [lane for lanes in self._lanes.values() for lane in lanes] + self._replaced

    def _run(self) -> None:
        while not self._stopped.wait(_WATCH_EVERY_S):
            self._replaced = [lane for lane in self._replaced if not lane.join(0.0)]
            for kind, lanes in self._lanes.items():
                for place, lane in enumerate(lanes):
                    if lane.is_stuck and len(self._replaced) < self._most_stuck:
                        # If the machine has no thread left now, it is tried again.
                        with suppress(RuntimeError):
                            lanes[place] = self._replacement(kind, lane)

    def _replacement(self, kind: str, stuck: RemoteLane) -> RemoteLane:
        lane = self._open_lane(kind, self._num_opened)
        lane.start()
        self._num_opened += 1
        stuck.end_after_this_unit()
        self._replaced.append(stuck)
        return lane
