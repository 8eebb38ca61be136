"""A small tier around lanes: numbered blocks in one plain file, with injectable faults."""

from __future__ import annotations

import mmap
import os
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from kvtier.base import OffloadKey, ReqContext
from kvtier.tiering.base import PrimaryRows, TransferJob
from kvtier.tiering.io.aio import address_of
from kvtier.tiering.io.buffers import Payload, Routes
from kvtier.tiering.io.lane import Ended, Lane
from kvtier.tiering.io.page import PAGE_BYTES, close_page, is_intact
from kvtier.tiering.io.queue import Transfer, Unit, WorkQueue

ROW_BYTES = 4096
PIECE_BYTES = PAGE_BYTES + ROW_BYTES
NUM_ROWS = 64
_NUMBER_BYTES = 8


class FileMover:
    """Block `n` is at `n * PIECE_BYTES`. Records the lanes' calls and injects faults."""

    def __init__(self, path: Path, max_pieces: int = 1) -> None:
        self.where = path
        self.fd = os.open(path, os.O_RDWR | os.O_CREAT)
        self.memory = mmap.mmap(-1, NUM_ROWS * ROW_BYTES)
        self.rows_address = address_of(self.memory)
        self.rows = PrimaryRows(memoryview(self.memory).cast("B", (NUM_ROWS, ROW_BYTES)))
        self.max_pieces = max_pieces
        self.work: WorkQueue[int] = WorkQueue(max_pieces)
        self.routes = Routes.of(path)
        self.has_buffers = True
        self.went_through_buffers: Counter[bool] = Counter()
        self.lanes: list[Lane[int]] = []
        self.lock = threading.Lock()
        self.begun: list[Unit[int]] = []
        self.ended: list[tuple[Unit[int], int]] = []
        self.noted: Counter[tuple[int, bool]] = Counter()
        # Faults, by the number of the first block.
        self.cannot_begin: dict[int, Callable[[], Exception]] = {}
        self.places: dict[int, tuple[int, int]] = {}
        self.cannot_end: set[int] = set()
        self.finished_later: set[int] = set()

    def start(self, *, depth: int = 4, max_loads: int = 4, max_stores: int = 4) -> Lane[int]:
        lane: Lane[int] = Lane(
            name=f"lane-{len(self.lanes)}",
            work=self.work,
            mover=self,
            routes=self.routes,
            depth=depth,
            max_loads=max_loads,
            max_stores=max_stores,
            max_pieces=self.max_pieces,
            payload_bytes=ROW_BYTES,
            has_buffers=self.has_buffers,
        )
        self.lanes.append(lane)
        return lane

    def stop(self) -> None:
        self.work.stop()
        for lane in self.lanes:
            lane.join()

    def close(self) -> None:
        """Further calls do nothing."""
        self.stop()
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1
        self.rows.release()

    def check_rows_are_free(self) -> None:
        """Check that no reference to a row is left. Not for tests that log exceptions: pytest keeps
        those, with the objects on their stack."""
        self.memory.close()

    # --- jobs ----------------------------------------------------------------------------------

    def submit(self, numbers: Sequence[int], rows: Sequence[int], is_load: bool) -> Transfer[int]:
        keys = [OffloadKey(b"%d" % number) for number in numbers]
        job = TransferJob(1, keys, np.array(rows, np.int64), is_load, ReqContext("request"))
        transfer = Transfer(job, list(zip(rows, numbers, strict=True)))
        self.work.submit(transfer)
        return transfer

    def store(self, *numbers: int) -> Transfer[int]:
        """Store blocks from the rows with the same numbers."""
        return self.submit(numbers, numbers, is_load=False)

    def load(self, *numbers: int) -> Transfer[int]:
        """Load blocks into the rows with the same numbers."""
        return self.submit(numbers, numbers, is_load=True)

    # --- what lanes ask ------------------------------------------------------------------------

    def begin(
        self, unit: Unit[int], pages: Sequence[memoryview], payloads: Sequence[Payload]
    ) -> tuple[int, int]:
        first = unit.pieces[0][1]
        if (make_error := self.cannot_begin.get(first)) is not None:
            raise make_error()
        if not unit.transfer.job.is_promotion:
            for (_, number), page, payload in zip(unit.pieces, pages, payloads, strict=True):
                payload.collect()
                page[:_NUMBER_BYTES] = number.to_bytes(_NUMBER_BYTES)
                close_page(page)
        with self.lock:
            self.begun.append(unit)
            for payload in payloads:
                self.went_through_buffers[payload.memory is not payload.row] += 1
        return self.places.get(first, (self.fd, first * PIECE_BYTES))

    def end(self, ended: Sequence[Ended[int]]) -> None:
        assert ended
        with self.lock:
            self.ended += [(each.unit, each.error) for each in ended]
        firsts = {each.unit.pieces[0][1] for each in ended}
        if firsts & self.cannot_end:
            raise RuntimeError("this mover cannot end")
        for unit, _, pages, payloads, error in ended:
            if unit.pieces[0][1] in self.finished_later:
                continue
            done = []
            if not error:
                for piece, page, payload in zip(unit.pieces, pages, payloads, strict=True):
                    if _number_in(page) == piece[1]:
                        if unit.transfer.job.is_promotion:
                            payload.deliver()
                        done.append(piece)
            failed = [piece for piece in unit.pieces if piece not in done]
            self.work.finish([(unit, done, failed)])

    def note_error(self, error: int, is_write: bool) -> None:
        with self.lock:
            self.noted[error, is_write] += 1

    # --- what was seen -------------------------------------------------------------------------

    def errors_of(self, transfer: Transfer[int]) -> list[int]:
        """Error numbers with which the units of a transfer ended, in the order of their pieces."""
        ended = [(u.pieces[0][1], error) for u, error in self.ended if u.transfer is transfer]
        return [error for _, error in sorted(ended)]

    def check_ends(self) -> None:
        """Check that every unit that was begun has ended once."""
        assert Counter(map(id, self.begun)) == Counter(id(unit) for unit, _ in self.ended)
        assert [route._num_open for route in self.routes] == [0, 0]
        assert all(count == 1 for count in Counter(map(id, self.begun)).values())


def _number_in(page: memoryview) -> int | None:
    return int.from_bytes(page[:_NUMBER_BYTES]) if is_intact(page) else None
