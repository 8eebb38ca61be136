"""One I/O thread of the disk tier, with a queue of its own at the kernel."""

from __future__ import annotations

import errno
import logging
import mmap
import threading
from collections.abc import Sequence
from typing import Protocol

from kvtier.tiering.base import PrimaryRows
from kvtier.tiering.disk.aio import AioQueue, address_of
from kvtier.tiering.disk.file import SlabFile
from kvtier.tiering.disk.layout import PAGE_BYTES, Geometry
from kvtier.tiering.disk.transfer import Piece, SlabBlock, Transfer, Unit
from kvtier.tiering.disk.work import WorkQueue

__all__ = ["Blocks", "Lane"]

logger = logging.getLogger(__name__)

_SUBMIT_BYTES = 1 << 20
"""What is ready is handed to the kernel when it is so much: small pieces together, and large ones
without waiting for the next to be sealed."""


_WOKEN_BY = 8
"""A thread is woken when so small a part of what it has under way has ended."""


class Blocks(Protocol):
    """What a lane asks of the tier. Called on I/O threads."""

    rows: PrimaryRows
    rows_address: int
    """Where the primary tier's rows lie."""

    def seal_piece(
        self, transfer: Transfer, block: SlabBlock, header: memoryview, payload: memoryview
    ) -> None:
        """Fill in the header of a block that is about to be written."""

    def stored(self, transfer: Transfer, pieces: Sequence[Piece]) -> None:
        """These blocks are in their slots."""

    def is_valid(
        self, transfer: Transfer, block: SlabBlock, header: memoryview, payload: memoryview
    ) -> bool:
        """Whether the block that was read is the right one."""

    def note_error(self, error: int, is_write: bool) -> None:
        """A read or write has failed with this error number."""


class Lane:
    """Keeps up to `depth` reads and writes under way. What has been read is verified while the
    next ones are."""

    def __init__(
        self,
        name: str,
        file: SlabFile,
        geometry: Geometry,
        work: WorkQueue,
        blocks: Blocks,
        *,
        depth: int,
        max_stores: int,
        max_pieces: int,
    ) -> None:
        """`max_stores`: how many of those under way may be writes."""
        self._file = file
        self._geometry = geometry
        self._work = work
        self._blocks = blocks
        self._depth = depth
        self._max_stores = max_stores
        self._max_pieces = max_pieces
        # A unit keeps its tag until it has been verified: by then as many others may be in flight.
        num_tags = 2 * depth
        self._queue = AioQueue(num_tags, 2 * max_pieces)
        self._free_tags = list(range(num_tags))
        self._num_stores = 0
        self._in_flight: dict[int, Unit] = {}
        # By tag. Whoever holds a row keeps the memory behind it: the kernel may write there even
        # after an engine has ended that would not wait for a dead disk.
        self._rows: list[list[memoryview]] = [[] for _ in range(num_tags)]
        self._headers = mmap.mmap(-1, num_tags * max_pieces * PAGE_BYTES)
        self._headers_address = address_of(self._headers)
        view = memoryview(self._headers)
        self._pages = [
            view[start : start + PAGE_BYTES] for start in range(0, len(view), PAGE_BYTES)
        ]
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
        try:
            while self._in_flight or not self._work.is_stopping:
                self._step()
        except Exception:
            # Nobody may wait for this thread in vain: from now on everything fails at once.
            logger.exception("%s: the disk tier stops", self._file.path)
            self._work.stop()
        finally:
            self._queue.close()  # waits: the kernel may still write into rows
            self._rows.clear()
            self._work.finish([(unit, (), unit.pieces) for unit in self._in_flight.values()])

    def _step(self) -> None:
        """Start what can be started, then handle what has ended."""
        self._fill(may_wait=not self._in_flight)
        num_under_way = len(self._in_flight)
        at_least = 1
        if self._num_stores in (0, num_under_way):  # a load must not wait for a slow store
            # Of many, a few at once: being woken costs more than what there is to do.
            at_least += num_under_way // _WOKEN_BY
        ended = self._queue.reap(at_least)
        units = [(tag, self._in_flight.pop(tag), result) for tag, result in ended]
        for _, unit, _ in units:
            self._num_stores -= not unit.transfer.job.is_promotion
        self._fill(may_wait=False)  # the disk must not wait while we verify
        self._work.finish([self._checked(*unit) for unit in units])
        for tag, _ in ended:
            self._free(tag)

    def _fill(self, may_wait: bool) -> None:
        """Start as much as may be under way."""
        while room := min(self._depth - len(self._in_flight), len(self._free_tags)):
            store_room = self._max_stores - self._num_stores
            units = self._work.take(room, store_room, may_wait)
            if not units:
                return
            self._start(units)
            may_wait = False

    def _start(self, units: Sequence[Unit]) -> None:
        ready: list[int] = []
        num_bytes = 0
        for unit in units:
            tag = self._free_tags.pop()
            try:
                self._prepare(tag, unit)
            except Exception:
                logger.exception("%s: a block could not be moved", self._file.path)
                self._free(tag)
                self._work.finish([(unit, (), unit.pieces)])
                continue
            self._in_flight[tag] = unit
            self._num_stores += not unit.transfer.job.is_promotion
            ready.append(tag)
            num_bytes += len(unit.pieces) * self._geometry.slot_bytes
            if num_bytes >= _SUBMIT_BYTES:
                self._submit(ready)
                ready, num_bytes = [], 0
        self._submit(ready)

    def _prepare(self, tag: int, unit: Unit) -> None:
        transfer, pieces = unit
        is_write = not transfer.job.is_promotion
        position = tag * self._max_pieces
        payloads = self._rows[tag] = [self._blocks.rows[row] for row, _ in pieces]
        if is_write:
            pages = self._pages[position : position + len(pieces)]
            for (_, block), page, payload in zip(pieces, pages, payloads, strict=True):
                self._blocks.seal_piece(transfer, block, page, payload)
        header = self._headers_address + position * PAGE_BYTES
        payload_bytes = self._geometry.payload_bytes
        rows = self._blocks.rows_address
        segments: list[int] = []
        for row, _ in pieces:
            segments += (header, PAGE_BYTES, rows + row * payload_bytes, payload_bytes)
            header += PAGE_BYTES
        offset = self._geometry.slot_offset(pieces[0][1].block_id)
        self._queue.prepare(tag, self._file.fd, is_write, offset, segments)

    def _submit(self, tags: Sequence[int]) -> None:
        """Hand prepared reads and writes to the kernel. What it refuses has failed."""
        while tags:
            count, error = self._queue.submit(tags)
            tags = tags[count:]
            if error:
                tag = tags[0]
                tags = tags[1:]
                unit = self._in_flight.pop(tag)
                self._free(tag)
                is_write = not unit.transfer.job.is_promotion
                self._num_stores -= is_write
                self._blocks.note_error(error, is_write)
                self._work.finish([(unit, (), unit.pieces)])

    def _free(self, tag: int) -> None:
        self._rows[tag] = []
        self._free_tags.append(tag)

    def _checked(
        self, tag: int, unit: Unit, result: int
    ) -> tuple[Unit, Sequence[Piece], Sequence[Piece]]:
        """The unit, and which of its pieces were moved and which were not."""
        transfer, pieces = unit
        is_write = not transfer.job.is_promotion
        if result != len(pieces) * self._geometry.slot_bytes:
            # Fewer bytes than asked for: the file has been cut off.
            self._blocks.note_error(-result if result < 0 else errno.ENODATA, is_write)
            return unit, (), pieces
        try:
            if is_write:
                self._blocks.stored(transfer, pieces)
                return unit, pieces, ()
            position = tag * self._max_pieces
            pages = self._pages[position : position + len(pieces)]
            done: list[Piece] = []
            failed: list[Piece] = []
            for piece, page, payload in zip(pieces, pages, self._rows[tag], strict=True):
                is_valid = self._blocks.is_valid(transfer, piece[1], page, payload)
                (done if is_valid else failed).append(piece)
        except Exception:
            logger.exception("%s: a block could not be checked", self._file.path)
            return unit, (), pieces
        return unit, done, failed
