"""A lane: one I/O thread of a tier, with its own queue of asynchronous reads and writes.

A lane takes units from the work queue; a unit is one read or write. The tier's `Mover` prepares the
unit, the lane submits it to the kernel, and when it has ended, the mover verifies and finishes it.
"""

from __future__ import annotations

import errno
import logging
import threading
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from typing import Generic, NamedTuple, Protocol, TypeVar

from kvtier.cpu.job_thread import prompt_turns
from kvtier.tiering.base import PrimaryRows
from kvtier.tiering.io.aio import AioQueue, address_of
from kvtier.tiering.io.buffers import Payload, Route, Routes, make_buffers
from kvtier.tiering.io.page import PAGE_BYTES
from kvtier.tiering.io.queue import Unit, WorkQueue

__all__ = [
    "LARGE_BLOCK_BYTES",
    "CannotBegin",
    "Ended",
    "Lane",
    "Mover",
    "depth_for",
    "may_have_buffers",
]

logger = logging.getLogger(__name__)

B = TypeVar("B")

_SUBMIT_BYTES = 8 << 20
"""Prepared stores are submitted when they reach this size. Loads need no preparation, so all that
were taken are submitted with one call. Few calls, because each one releases the interpreter lock
and then waits for it."""
LARGE_BLOCK_BYTES = 512 << 10
"""With blocks of this size or more, a lane asks for the interpreter lock after 0.1 ms instead of 5
(`prompt_turns`), because it needs the lock rarely and briefly. With smaller blocks it needs the
lock so often that this would delay the scheduler."""
_TAGS_PER_UNIT = 2
"""Tags for each unit that may be in flight. A tag is the number of a read or write in `AioQueue`,
and has header pages and buffers of its own. Two, because a unit keeps its tag while it is verified,
and the next unit is in flight meanwhile."""
_WAKE_FRACTION = 4
"""Wait until about a fourth of the units in flight have ended."""
_STORES_BESIDE_LOADS = 1
"""Stores that a lane keeps in flight while a load waits or is under way. With more, stores would
take half of the disk's bandwidth from loads. With none, stores would never end if new loads kept
coming."""
_MOST_BUFFER_BYTES = 256 << 20
"""Limit on the bounce buffers of all lanes of a tier together."""
_LEAST_DEPTH, _MOST_DEPTH = 2, 32


def depth_for(in_flight_bytes: int, unit_bytes: int) -> int:
    """Number of units of `unit_bytes` that make up `in_flight_bytes`, within fixed limits."""
    return min(max(in_flight_bytes // unit_bytes, _LEAST_DEPTH), _MOST_DEPTH)


def may_have_buffers(sum_of_depths: int, unit_bytes: int) -> bool:
    """True if bounce buffers for all lanes of a tier stay within the limit. Otherwise every unit is
    moved zero-copy. `sum_of_depths`: units in flight in all lanes together."""
    return _TAGS_PER_UNIT * sum_of_depths * unit_bytes <= _MOST_BUFFER_BYTES


class CannotBegin(Exception):
    """Raised by `Mover.begin` for a unit that cannot or need not be moved, after the mover itself
    has counted the reason. The lane logs nothing."""


class Ended(NamedTuple, Generic[B]):
    """A unit whose read or write has ended."""

    unit: Unit[B]
    fd: int
    """The descriptor that `Mover.begin` returned."""
    pages: Sequence[memoryview]
    """The header page of each piece."""
    payloads: Sequence[Payload]
    """The bytes of each piece."""
    error: int
    """Error number; 0: every byte was moved."""


class Mover(Protocol[B]):
    """The tier's part of moving a unit. Each lane calls these methods on its own thread, so several
    calls may run at the same time.

    Pages and payloads of a unit are valid from `begin` until `end` returns; then the lane reuses
    them.
    """

    rows: PrimaryRows
    rows_address: int
    """Address of the primary tier's first row."""

    @property
    def where(self) -> object:
        """The tier's path, for log lines."""

    def begin(
        self, unit: Unit[B], pages: Sequence[memoryview], payloads: Sequence[Payload]
    ) -> tuple[int, int]:
        """Return the file descriptor and the offset at which the unit is read or written. For a
        store, also fill in the header pages and payloads. If this raises, the lane fails the unit
        (unless this method has finished it), does not pass it to `end`, and logs the exception
        unless it is `CannotBegin`."""

    def end(self, ended: Sequence[Ended[B]]) -> None:
        """Finish units that have ended, were refused by the kernel, or were given up by the lane.
        Called once for each unit that was begun. For a load, deliver the payloads that pass
        verification. Call `WorkQueue.finish` for each unit, here or later. If this raises, the
        units that are not finished fail."""

    def note_error(self, error: int, is_write: bool) -> None:
        """Count a failed read or write. `error`: its error number. Called before `end`."""


class Lane(Generic[B]):
    """Keeps up to `depth` reads and writes in flight. Blocks are verified while the next ones are
    being read."""

    def __init__(
        self,
        *,
        name: str,
        work: WorkQueue[B],
        mover: Mover[B],
        routes: Routes,
        depth: int,
        max_loads: int,
        max_stores: int,
        max_pieces: int,
        payload_bytes: int,
        has_buffers: bool,
    ) -> None:
        """`depth`: limit on units in flight. `max_loads`, `max_stores`: limits on the reads and the
        writes among them; one of these may be 0. `payload_bytes`: size of a row. `has_buffers`: see
        `may_have_buffers`."""
        self._work = work
        self._mover = mover
        self._routes = routes
        self._depth = depth
        self._max_loads = max_loads
        self._max_stores = max_stores
        self._max_pieces = max_pieces
        self._payload_bytes = payload_bytes
        self._piece_bytes = PAGE_BYTES + payload_bytes
        num_tags = _TAGS_PER_UNIT * depth
        self._free_tags = list(range(num_tags))
        # Units prepared or submitted, and the stores among them.
        self._num_in_flight = 0
        self._num_stores = 0
        # Units taken from the work queue that the mover has not begun yet.
        self._taken: list[Unit[B]] = []
        # Units that the mover has begun, by tag, in the form in which `Mover.end` gets them. Their
        # `error` is 0 until they have ended. They keep the memory of their rows alive: if an engine
        # ends without waiting for a dead disk, the kernel may still write there.
        self._begun: dict[int, Ended[B]] = {}
        self._has_buffers = has_buffers
        # One header page for each piece. With buffers, each page is followed by a buffer for the
        # payload, as in the file.
        self._stride = self._piece_bytes if self._has_buffers else PAGE_BYTES
        view = make_buffers(num_tags * max_pieces * self._stride)
        self._buffers_address = address_of(view)
        starts = range(0, len(view), self._stride)
        self._pages = [view[start : start + PAGE_BYTES] for start in starts]
        self._payload_buffers = [
            view[start + PAGE_BYTES : start + self._stride] for start in starts
        ]
        self._queue = AioQueue(num_tags, 2 * max_pieces)
        # A daemon, so that an engine that exits without a shutdown does not wait for it.
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        try:
            self._thread.start()
        except BaseException:
            self._queue.close()
            raise

    def join(self) -> None:
        """Wait for the thread, which ends when the work queue is stopped."""
        self._thread.join()

    # --- lane thread ---------------------------------------------------------------------------

    def _run(self) -> None:
        is_large = self._payload_bytes >= LARGE_BLOCK_BYTES
        with prompt_turns if is_large else nullcontext():
            self._work_on()

    def _work_on(self) -> None:
        try:
            while self._begun or not self._work.is_stopping:
                self._step()
        except Exception:
            # Fail all later transfers at once, so that no caller waits for this thread.
            logger.exception(
                "%s: an I/O thread failed; the tier stores and loads nothing until the engine is "
                "restarted",
                self._mover.where,
            )
            self._work.stop()
        finally:
            self._queue.close()  # waits, because the kernel may still write into rows
            self._end(list(self._begun), dict.fromkeys(self._begun, errno.ECANCELED))
            self._fail(self._taken)
            # Free the buffers even if something still refers to the stopped tier.
            self._pages.clear()
            self._payload_buffers.clear()

    def _step(self) -> None:
        """Submit as many units as allowed, then wait for some to end and finish those."""
        self._fill(may_wait=not self._begun)
        at_least = 1
        if self._num_stores in (0, self._num_in_flight):
            # Waking up takes longer than finishing one unit, so wait for several. If loads and
            # stores are in flight together, wait for one: a load must not wait for a slow store.
            at_least += self._num_in_flight // _WAKE_FRACTION
        tags: list[int] = []
        errors: dict[int, int] = {}
        for tag, result in self._queue.reap(at_least):
            transfer, pieces = self._begun[tag].unit
            is_write = not transfer.job.is_promotion
            self._num_in_flight -= 1
            self._num_stores -= is_write
            if result != len(pieces) * self._piece_bytes:
                # Fewer bytes than requested: the file was truncated.
                errors[tag] = -result if result < 0 else errno.ENODATA
                self._mover.note_error(errors[tag], is_write)
            tags.append(tag)
        self._fill(may_wait=False)  # keep the disk busy during verification
        self._end(tags, errors)

    def _fill(self, may_wait: bool) -> None:
        """Take units from the work queue and submit them, until the limits are reached or the queue
        has none for this lane. `may_wait`: wait for the first unit."""
        while room := min(self._depth - self._num_in_flight, len(self._free_tags)):
            num_loads = self._num_in_flight - self._num_stores
            max_stores = self._max_stores
            if self._work.is_loading:
                max_stores = min(max_stores, _STORES_BESIDE_LOADS)
            self._taken = self._work.take(
                min(room, self._max_loads - num_loads),
                min(room, max_stores - self._num_stores),
                may_wait,
            )
            if not self._taken:
                return
            self._start()
            may_wait = False

    def _start(self) -> None:
        """Begin and submit the units in `_taken`."""
        self._taken.reverse()
        ready: list[int] = []
        num_bytes = 0
        while self._taken:
            unit = self._taken[-1]
            tag = self._begin(unit)
            self._taken.pop()
            if tag is None:
                continue
            ready.append(tag)
            if not unit.transfer.job.is_promotion:
                num_bytes += len(unit.pieces) * self._piece_bytes
            if num_bytes >= _SUBMIT_BYTES:
                self._submit(ready)
                ready, num_bytes = [], 0
        self._submit(ready)

    def _begin(self, unit: Unit[B]) -> int | None:
        """Prepare a unit for submission. Returns its tag, or None if it has failed."""
        pieces = unit.pieces
        is_write = not unit.transfer.job.is_promotion
        tag = self._free_tags.pop()
        is_buffered = self._has_buffers and self._route(is_write).begin()
        position = tag * self._max_pieces
        pages = self._pages[position : position + len(pieces)]
        try:
            payloads = self._payloads(unit, position, is_buffered)
            fd, offset = self._mover.begin(unit, pages, payloads)
        except Exception as error:
            if not isinstance(error, CannotBegin):
                logger.exception("%s: a block could not be moved", self._mover.where)
            self._release(tag, is_write, 0)
            self._fail([unit])
            return None
        self._begun[tag] = Ended(unit, fd, pages, payloads, 0)
        segments = self._segments(unit, position, is_buffered)
        try:
            self._queue.prepare(tag, fd, is_write, offset, segments)
        except Exception:  # the mover returned an impossible descriptor or offset
            logger.exception("%s: a block could not be moved", self._mover.where)
            self._end([tag], {tag: errno.EINVAL})
            return None
        self._num_in_flight += 1
        self._num_stores += is_write
        return tag

    def _payloads(self, unit: Unit[B], position: int, is_buffered: bool) -> list[Payload]:
        rows = [self._mover.rows[row] for row, _ in unit.pieces]
        memory = rows
        if is_buffered:
            memory = self._payload_buffers[position : position + len(rows)]
        return [Payload(*each) for each in zip(memory, rows, strict=True)]

    def _segments(self, unit: Unit[B], position: int, is_buffered: bool) -> list[int]:
        """Address, length, address, length, ... of the unit's memory, in file order."""
        header = self._buffers_address + position * self._stride
        if is_buffered:
            return [header, len(unit.pieces) * self._stride]
        payload_bytes = self._payload_bytes
        rows = self._mover.rows_address
        segments: list[int] = []
        for row, _ in unit.pieces:
            segments += (header, PAGE_BYTES, rows + row * payload_bytes, payload_bytes)
            header += self._stride
        return segments

    def _submit(self, tags: Sequence[int]) -> None:
        """Submit prepared reads and writes to the kernel. Those that it refuses fail."""
        while tags:
            count, error = self._queue.submit(tags)
            tags = tags[count:]
            if error:
                tag = tags[0]
                tags = tags[1:]
                is_write = not self._begun[tag].unit.transfer.job.is_promotion
                self._num_in_flight -= 1
                self._num_stores -= is_write
                self._mover.note_error(error, is_write)
                self._end([tag], {tag: error})

    def _end(self, tags: Sequence[int], errors: Mapping[int, int]) -> None:
        """Pass ended units to the mover, and release their tags. `errors`: error numbers of the
        failed units, by tag."""
        if not tags:
            return
        ended = [self._begun.pop(tag) for tag in tags]
        if errors:
            with_errors = zip(tags, ended, strict=True)
            ended = [each._replace(error=errors.get(tag, 0)) for tag, each in with_errors]
        try:
            self._mover.end(ended)
        except Exception:
            logger.exception(
                "%s: reads or writes could not be finished, and their blocks fail",
                self._mover.where,
            )
            self._fail([each.unit for each in ended])
        for tag, (unit, _, _, _, error) in zip(tags, ended, strict=True):
            is_write = not unit.transfer.job.is_promotion
            self._release(tag, is_write, 0 if error else len(unit.pieces) * self._piece_bytes)

    def _release(self, tag: int, is_write: bool, num_bytes: int) -> None:
        """Make a tag available again. `num_bytes`: bytes moved for its unit."""
        if self._has_buffers:
            self._route(is_write).end(num_bytes)
        self._free_tags.append(tag)

    def _route(self, is_write: bool) -> Route:
        return self._routes.stores if is_write else self._routes.loads

    def _fail(self, units: Sequence[Unit[B]]) -> None:
        self._work.finish([(unit, (), unit.pieces) for unit in units])
