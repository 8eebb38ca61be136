"""Copies within host memory instead of a device's, at once or when a test says so."""

from __future__ import annotations

import ctypes
import time
from collections import deque
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

from kvtier.cpu.cuda.copies import Copies, FindGrids, Ticket
from kvtier.cpu.cuda.page_table import Grid
from kvtier.cpu.shared_offload_region import SharedOffloadRegion


class MemmoveCopies(Copies):
    """Copies every page, in order, each direction separately. Like a device, it needs no further
    calls: it copies at once or, with `is_held`, when a test says so or a thread waits."""

    def __init__(self, *, is_held: bool = False) -> None:
        self.is_held = is_held
        self.refusal: Exception | None = None
        """Raised by `start`, which then starts nothing."""
        self.failure: Exception | None = None
        """Raised by every query and every wait: the device has failed."""
        self.is_closed = False
        self._under_way: dict[bool, deque[MemmoveTicket]] = {True: deque(), False: deque()}

    def open(self, device: Any, region: SharedOffloadRegion, undo: ExitStack) -> MemmoveCopies:
        """The `open_copies` of a worker."""
        undo.callback(self.close)
        return self

    def make_zeros(self, num_bytes: int) -> int:
        self._zeros = ctypes.create_string_buffer(num_bytes)
        return ctypes.addressof(self._zeros)

    def start(self, find: FindGrids, num_pages: int, *, is_store: bool) -> Ticket:
        assert not self.is_closed
        if self.refusal is not None:
            raise self.refusal
        ticket = MemmoveTicket(self, find(), is_store)
        self._under_way[is_store].append(ticket)
        if not self.is_held:
            self.copy_until(ticket)
        return ticket

    def flush(self) -> None:
        pass

    def close(self) -> None:
        if self.failure is not None:
            raise self.failure
        for tickets in self._under_way.values():
            while tickets:
                tickets.popleft().copy()
        self.is_closed = True

    def num_under_way(self, *, is_store: bool) -> int:
        return len(self._under_way[is_store])

    def copy_next(self, *, is_store: bool) -> None:
        """Run the oldest job of a direction."""
        self._under_way[is_store].popleft().copy()

    def copy_until(self, ticket: MemmoveTicket) -> None:
        while not ticket.is_copied:
            self.copy_next(is_store=ticket.is_store)


class MemmoveTicket(Ticket):
    def __init__(self, copies: MemmoveCopies, grids: Sequence[Grid], is_store: bool) -> None:
        self.is_store = is_store
        self.is_copied = False
        self._copies = copies
        self._grids = grids
        self._seconds = 0.0

    def copy(self) -> None:
        began = time.perf_counter_ns()
        for grid in self._grids:
            pages = grid.pages(0, len(grid.blocks))
            for device, host, size in zip(*(column.tolist() for column in pages), strict=True):
                source, target = (device, host) if self.is_store else (host, device)
                ctypes.memmove(target, source, size)
        self._seconds = (time.perf_counter_ns() - began + 1) / 1e9
        self.is_copied = True

    def is_done(self) -> bool:
        if self._copies.failure is not None:
            raise self._copies.failure
        return self.is_copied

    def wait(self) -> None:
        if self._copies.failure is not None:
            raise self._copies.failure
        self._copies.copy_until(self)

    def seconds(self) -> float:
        assert self.is_copied
        return self._seconds
