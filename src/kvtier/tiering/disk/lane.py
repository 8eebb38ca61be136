"""One I/O thread of the disk tier, with a queue of its own at the kernel."""

from __future__ import annotations

import errno
import logging
import mmap
import threading
from collections import deque
from collections.abc import Sequence
from typing import Protocol

from kvtier.tiering.disk.aio import AioQueue, address_of
from kvtier.tiering.disk.file import SlabFile
from kvtier.tiering.disk.layout import PAGE_BYTES, Geometry
from kvtier.tiering.disk.transfer import Piece, Transfer, Unit
from kvtier.tiering.disk.work import WorkQueue

__all__ = ["Blocks", "Lane"]

logger = logging.getLogger(__name__)


class Blocks(Protocol):
    """What a lane asks of the tier. Called on I/O threads."""

    rows_address: int
    """Where the primary tier's rows lie."""

    def seal_piece(self, transfer: Transfer, piece: Piece, header: memoryview) -> None:
        """Fill in the header of a block that is about to be written."""

    def stored(self, transfer: Transfer, pieces: Sequence[Piece]) -> None:
        """These blocks are in their slots."""

    def is_valid(self, transfer: Transfer, piece: Piece, header: memoryview) -> bool:
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
        max_pieces: int,
    ) -> None:
        self._file = file
        self._geometry = geometry
        self._work = work
        self._blocks = blocks
        self._depth = depth
        self._max_pieces = max_pieces
        # A unit keeps its tag until it has been verified: by then as many others may be in flight.
        num_tags = 2 * depth
        self._queue = AioQueue(num_tags, 2 * max_pieces)
        self._free_tags = list(range(num_tags))
        self._num_stores = 0
        self._in_flight: dict[int, Unit] = {}
        self._headers = mmap.mmap(-1, num_tags * max_pieces * PAGE_BYTES)
        self._headers_view = memoryview(self._headers)
        self._headers_address = address_of(self._headers)
        # A daemon: an engine that ends without a shutdown must not wait for it.
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def join(self) -> None:
        """Wait until the thread has ended, which it does when the work queue is stopped."""
        self._thread.join()

    # --- on the thread -------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while self._step():
                pass
        finally:
            self._queue.close()

    def _step(self) -> bool:
        """Start what can be started, then handle what has ended. False: nothing is left to do."""
        self._fill()
        if not self._in_flight:
            return not self._work.is_stopping
        ended = deque(self._queue.reap(None))
        units = deque((tag, self._in_flight.pop(tag), result) for tag, result in ended)
        self._num_stores -= sum(not unit.transfer.job.is_promotion for _, unit, _ in units)
        while units:
            self._fill()  # the disk must not wait while we verify
            tag, unit, result = units.popleft()
            self._finish(tag, unit, result)
            self._free_tags.append(tag)
        return True

    def _fill(self) -> None:
        while len(self._in_flight) < self._depth and self._free_tags:
            may_store = self._num_stores < max(1, self._depth // 2)
            may_wait = not self._in_flight and len(self._free_tags) == 2 * self._depth
            unit = self._work.take(may_store, may_wait)
            if unit is None:
                return
            self._start(unit)

    def _start(self, unit: Unit) -> None:
        tag = self._free_tags.pop()
        is_write = not unit.transfer.job.is_promotion
        try:
            if is_write:
                for position, piece in enumerate(unit.pieces):
                    self._blocks.seal_piece(unit.transfer, piece, self._header(tag, position))
            error = self._submit(tag, unit, is_write)
        except Exception:
            logger.exception("%s: a block could not be moved", self._file.path)
            error = errno.EINVAL
        if error:
            self._free_tags.append(tag)
            self._blocks.note_error(error, is_write)
            self._work.finish(unit, [], list(unit.pieces))
        else:
            self._in_flight[tag] = unit
            self._num_stores += is_write

    def _submit(self, tag: int, unit: Unit, is_write: bool) -> int:
        header = self._headers_address + tag * self._max_pieces * PAGE_BYTES
        payload_bytes = self._geometry.slot_bytes - PAGE_BYTES
        rows = self._blocks.rows_address
        segments = []
        for piece in unit.pieces:
            segments.append((header, PAGE_BYTES))
            segments.append((rows + piece.row * payload_bytes, payload_bytes))
            header += PAGE_BYTES
        offset = self._geometry.slot_offset(unit.pieces[0].slot)
        return self._queue.submit(tag, self._file.fd, is_write, offset, segments)

    def _finish(self, tag: int, unit: Unit, result: int) -> None:
        is_write = not unit.transfer.job.is_promotion
        done: list[Piece] = []
        if result != len(unit.pieces) * self._geometry.slot_bytes:
            # Fewer bytes than asked for: the file has been cut off.
            self._blocks.note_error(-result if result < 0 else errno.ENODATA, is_write)
        else:
            try:
                done = self._checked(tag, unit, is_write)
            except Exception:
                logger.exception("%s: a block could not be checked", self._file.path)
        failed = [] if len(done) == len(unit.pieces) else [p for p in unit.pieces if p not in done]
        self._work.finish(unit, done, failed)

    def _checked(self, tag: int, unit: Unit, is_write: bool) -> list[Piece]:
        if is_write:
            self._blocks.stored(unit.transfer, unit.pieces)
            return list(unit.pieces)
        return [
            piece
            for position, piece in enumerate(unit.pieces)
            if self._blocks.is_valid(unit.transfer, piece, self._header(tag, position))
        ]

    def _header(self, tag: int, position: int) -> memoryview:
        start = (tag * self._max_pieces + position) * PAGE_BYTES
        return self._headers_view[start : start + PAGE_BYTES]
