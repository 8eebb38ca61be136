"""One I/O thread of a tier, with a queue of its own at the kernel."""

from __future__ import annotations

import errno
import logging
import threading
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from typing import Generic, NamedTuple, Protocol, TypeVar

from kvtier.cpu.prompt_turns import prompt_turns
from kvtier.tiering.base import PrimaryRows
from kvtier.tiering.io.aio import AioQueue, address_of
from kvtier.tiering.io.buffers import make_buffers
from kvtier.tiering.io.page import PAGE_BYTES
from kvtier.tiering.io.payload import Payload
from kvtier.tiering.io.route import Route, Routes
from kvtier.tiering.io.transfer import Unit
from kvtier.tiering.io.work import WorkQueue

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

_SUBMIT_BYTES = 1 << 20
"""Stores that are ready are handed to the kernel when they are so much: small pieces together, and
large ones without waiting for the next to be sealed. Loads are ready at once, and go together: each
call lets other threads have the interpreter, and waits to get it back."""


LARGE_BLOCK_BYTES = 512 << 10
"""With such blocks a thread has little to do and the disk much: it gets its turns soon. With small
ones it has so much to do that the scheduler would wait for it."""
_TAGS_PER_UNIT = 2
"""A unit keeps its tag until it has been verified: by then as many others may be in flight."""
_WOKEN_BY = 4
"""A thread is woken when such a part of what it has under way has ended: a quarter."""
_MOST_BUFFER_BYTES = 256 << 20
"""Of all lanes of a tier together."""
_LEAST_DEPTH, _MOST_DEPTH = 2, 32


def depth_for(in_flight_bytes: int, unit_bytes: int) -> int:
    """How many units a lane keeps under way that is to have so many bytes under way."""
    return min(max(in_flight_bytes // unit_bytes, _LEAST_DEPTH), _MOST_DEPTH)


def may_have_buffers(sum_of_depths: int, unit_bytes: int) -> bool:
    """Whether the lanes of a tier may, with so much under way in all of them, in units of so many
    bytes. If not, all units are moved as they lie."""
    return _TAGS_PER_UNIT * sum_of_depths * unit_bytes <= _MOST_BUFFER_BYTES


class CannotBegin(Exception):
    """A unit cannot be moved, or need not be, for a reason that the mover has counted itself.
    Nothing is logged."""


class Ended(NamedTuple, Generic[B]):
    """A unit that the kernel is done with."""

    unit: Unit[B]
    fd: int
    """What `Mover.begin` has said."""
    pages: Sequence[memoryview]
    """The header page of each piece."""
    payloads: Sequence[Payload]
    """The bytes of each piece."""
    error: int
    """0: every byte was moved."""


class Mover(Protocol[B]):
    """What a lane asks of the tier. Called on the lanes' threads, on several at once.

    Pages and payloads are lent: they are used for something else when the call has returned.
    """

    rows: PrimaryRows
    rows_address: int
    """Where the primary tier's rows lie."""

    @property
    def where(self) -> object:
        """For log lines: the path."""

    def begin(
        self, unit: Unit[B], pages: Sequence[memoryview], payloads: Sequence[Payload]
    ) -> tuple[int, int]:
        """The descriptor of the file that the unit is read from or written to, and the offset
        there. A store: fills in header pages and payloads, too. Whatever is raised, the unit is not
        passed to `end`, and has failed unless it was finished here. All but `CannotBegin` is
        logged."""

    def end(self, ended: Sequence[Ended[B]]) -> None:
        """Comes once for every unit that was begun, also if it was refused by the kernel or given
        up. A load: delivers payloads that are what they should be. Sees to it that each unit is
        finished at the work queue, now or later. Must not raise: those not finished by then
        fail."""

    def note_error(self, error: int, is_write: bool) -> None:
        """A read or write has failed with this error number; `end` follows."""


class Lane(Generic[B]):
    """Keeps up to `depth` reads and writes under way. What has been read is verified while the
    next ones are."""

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
        """`max_loads`, `max_stores`: how many of those under way may be reads, and writes. One of
        them may be 0. `payload_bytes`: of one piece, which is as long as a row. `has_buffers`:
        whether units may pass through buffers, see `may_have_buffers`."""
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
        # Prepared, or at the kernel; and how many of those are writes.
        self._num_under_way = 0
        self._num_stores = 0
        # Taken from the work queue, and on their way to the mover.
        self._taken: list[Unit[B]] = []
        # By tag: what the mover has begun, as it will be told of the end if all goes well. Whoever
        # holds a row keeps the memory behind it: the kernel may write there even after an engine
        # has ended that would not wait for a dead disk.
        self._begun: dict[int, Ended[B]] = {}
        self._has_buffers = has_buffers
        # Of each piece the header page, and behind it, as in the file, room for its payload.
        self._stride = self._piece_bytes if self._has_buffers else PAGE_BYTES
        view = make_buffers(num_tags * max_pieces * self._stride)
        self._buffers_address = address_of(view)
        starts = range(0, len(view), self._stride)
        self._pages = [view[start : start + PAGE_BYTES] for start in starts]
        self._payload_buffers = [
            view[start + PAGE_BYTES : start + self._stride] for start in starts
        ]
        self._queue = AioQueue(num_tags, 2 * max_pieces)
        # A daemon: an engine that ends without a shutdown must not wait for it.
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        try:
            self._thread.start()
        except BaseException:
            self._queue.close()
            raise

    def join(self) -> None:
        """Wait until the thread has ended, which it does when the work queue is stopped."""
        self._thread.join()

    # --- on the thread -------------------------------------------------------------------------

    def _run(self) -> None:
        is_large = self._payload_bytes >= LARGE_BLOCK_BYTES
        with prompt_turns if is_large else nullcontext():
            self._work_on()

    def _work_on(self) -> None:
        try:
            while self._begun or not self._work.is_stopping:
                self._step()
        except Exception:
            # Nobody may wait for this thread in vain: from now on everything fails at once.
            logger.exception("%s: the tier stops", self._mover.where)
            self._work.stop()
        finally:
            self._queue.close()  # waits: the kernel may still write into rows
            self._end(list(self._begun), dict.fromkeys(self._begun, errno.ECANCELED))
            self._fail(self._taken)
            # Whoever keeps the tier does not keep its memory.
            self._pages.clear()
            self._payload_buffers.clear()

    def _step(self) -> None:
        """Start what can be started, then handle what has ended."""
        self._fill(may_wait=not self._begun)
        at_least = 1
        if self._num_stores in (0, self._num_under_way):  # a load must not wait for a slow store
            # Of many, a few at once: being woken costs more than what there is to do.
            at_least += self._num_under_way // _WOKEN_BY
        tags: list[int] = []
        errors: dict[int, int] = {}
        for tag, result in self._queue.reap(at_least):
            transfer, pieces = self._begun[tag].unit
            is_write = not transfer.job.is_promotion
            self._num_under_way -= 1
            self._num_stores -= is_write
            if result != len(pieces) * self._piece_bytes:
                # Fewer bytes than asked for: the file has been cut off.
                errors[tag] = -result if result < 0 else errno.ENODATA
                self._mover.note_error(errors[tag], is_write)
            tags.append(tag)
        self._fill(may_wait=False)  # the disk must not wait while we verify
        self._end(tags, errors)

    def _fill(self, may_wait: bool) -> None:
        """Start as much as may be under way."""
        while room := min(self._depth - self._num_under_way, len(self._free_tags)):
            num_loads = self._num_under_way - self._num_stores
            self._taken = self._work.take(
                min(room, self._max_loads - num_loads),
                min(room, self._max_stores - self._num_stores),
                may_wait,
            )
            if not self._taken:
                return
            self._start()
            may_wait = False

    def _start(self) -> None:
        """Begin what was taken."""
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
        """The tag that the unit is prepared under. None: it has failed."""
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
        except Exception:  # no such file or place can be
            logger.exception("%s: a block could not be moved", self._mover.where)
            self._end([tag], {tag: errno.EINVAL})
            return None
        self._num_under_way += 1
        self._num_stores += is_write
        return tag

    def _payloads(self, unit: Unit[B], position: int, is_buffered: bool) -> list[Payload]:
        rows = [self._mover.rows[row] for row, _ in unit.pieces]
        memory = rows
        if is_buffered:
            memory = self._payload_buffers[position : position + len(rows)]
        return [Payload(*each) for each in zip(memory, rows, strict=True)]

    def _segments(self, unit: Unit[B], position: int, is_buffered: bool) -> list[int]:
        """Addresses and lengths of what the kernel moves, in the order of the file."""
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
        """Hand prepared reads and writes to the kernel. What it refuses has failed."""
        while tags:
            count, error = self._queue.submit(tags)
            tags = tags[count:]
            if error:
                tag = tags[0]
                tags = tags[1:]
                is_write = not self._begun[tag].unit.transfer.job.is_promotion
                self._num_under_way -= 1
                self._num_stores -= is_write
                self._mover.note_error(error, is_write)
                self._end([tag], {tag: error})

    def _end(self, tags: Sequence[int], errors: Mapping[int, int]) -> None:
        """Tell the mover of units that the kernel is done with. `errors`: of those that failed."""
        if not tags:
            return
        ended = [self._begun.pop(tag) for tag in tags]
        if errors:
            with_errors = zip(tags, ended, strict=True)
            ended = [each._replace(error=errors.get(tag, 0)) for tag, each in with_errors]
        try:
            self._mover.end(ended)
        except Exception:
            logger.exception("%s: blocks could not be checked", self._mover.where)
            self._fail([each.unit for each in ended])
        for tag, (unit, _, _, _, error) in zip(tags, ended, strict=True):
            is_write = not unit.transfer.job.is_promotion
            self._release(tag, is_write, 0 if error else len(unit.pieces) * self._piece_bytes)

    def _release(self, tag: int, is_write: bool, num_bytes: int) -> None:
        """A tag can be used again; of its unit, so many bytes were moved."""
        if self._has_buffers:
            self._route(is_write).end(num_bytes)
        self._free_tags.append(tag)

    def _route(self, is_write: bool) -> Route:
        return self._routes.stores if is_write else self._routes.loads

    def _fail(self, units: Sequence[Unit[B]]) -> None:
        self._work.finish([(unit, (), unit.pieces) for unit in units])
