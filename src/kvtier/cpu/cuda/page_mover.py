"""Puts the copies of jobs on the two streams of one direction."""

from __future__ import annotations

import logging
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from typing import NamedTuple

import numpy as np

from kvtier.cpu.cuda.copies import LOAD_PRIORITY, STORE_PRIORITY, CopyPath, choose_path
from kvtier.cpu.cuda.driver import CudaDriver, CudaError
from kvtier.cpu.cuda.page_kernel import (
    ENTRY_BYTES,
    Order,
    PageKernel,
    Threads,
    direct_threads,
    max_entries,
)
from kvtier.cpu.cuda.page_table import Addresses, Columns, Grid
from kvtier.cpu.cuda.resources import DeviceMemory, Event, QueueRoom

__all__ = ["STAGING_BYTES", "Choice", "PageMover", "Plan", "by_size", "by_size_if_large"]

logger = logging.getLogger(__name__)

STAGING_BYTES = 32 << 20
"""Size in bytes of each of the two buffers that a direction has on the device."""
_FIRST_COPIES = 8
"""Pages in the first call for the copy engines. They are few, so that the copy engines begin early:
the driver takes a microsecond or more per page."""
_MOST_COPIES = 512
"""Largest number of pages in one call for the copy engines, unless one block has more."""
_LAUNCH_COPIES = 64
"""Number of queue entries counted for one launch of the kernel. For a copy through a buffer, it
covers the launch and the copies of all slots in the buffer. So a buffer takes at most this many
slots."""

Choice = Callable[[Grid], CopyPath]
"""Chooses the path for a grid."""


def by_size(grid: Grid) -> CopyPath:
    """The fastest path for the pages of a grid."""
    return choose_path(grid.columns.page_bytes, grid.num_pages, grid.run_bytes)


def by_size_if_large(columns: Columns) -> CopyPath:
    """The fastest path for a large job, if a kernel and buffers are available."""
    return choose_path(columns.page_bytes, sys.maxsize, columns.run_bytes)


class Plan(NamedTuple):
    """A grid, ready to be put on the streams."""

    grid: Grid
    path: CopyPath
    entries: memoryview
    """Blocks and slots, in the kernel's format; empty if the path uses no kernel."""
    slots: Addresses
    """Addresses of the slots; empty if they are not copied through a buffer."""


_NO_ENTRIES = memoryview(b"")
_NO_SLOTS = np.empty(0, np.uint64)


class PageMover:
    """The streams, buffers and events of one direction. Used by one thread at a time. The current
    CUDA device of that thread must be the one that the streams belong to.

    The copies of a job are put on the streams in steps, between which another thread can
    take over.
    """

    def __init__(
        self,
        driver: CudaDriver,
        kernel: PageKernel | None,
        choose: Choice,
        *,
        is_store: bool,
    ) -> None:
        self.taken: Counter[CopyPath] = Counter()
        """Grids copied by each path."""
        self._driver = driver
        self._kernel = kernel
        self._launcher = None if kernel is None else kernel.launcher()
        self._choose = choose
        self._is_store = is_store
        self._tables: dict[Columns, DeviceMemory] = {}
        self._staging: DeviceMemory | None = None
        self._num_staged = 0
        """Number of parts copied through a buffer so far. It selects the buffer: parts of all jobs
        alternate between the two."""
        self._forked, self._joined = (Event(driver) for _ in range(2))
        self._filled, self._emptied = ([Event(driver) for _ in range(2)] for _ in range(2))
        self._room = QueueRoom(driver)
        self._computed: Event | None = None
        """The event that the current job waits for."""
        # Streams are made last, because only `close` destroys them: no error may follow.
        priority = STORE_PRIORITY if is_store else LOAD_PRIORITY
        self.stream = driver.create_stream(priority)
        try:
            self._second_stream = driver.create_stream(priority)
        except BaseException:
            driver.destroy_stream(self.stream)
            raise

    def expect(self, columns: Sequence[Columns]) -> None:
        """Copy the tables of columns to the device, for the kernel. Called before the first job."""
        if self._kernel is not None:
            for each in filter(len, columns):
                self._tables[each] = DeviceMemory.of(self._driver, each.table.data)

    def make_staging(self) -> None:
        """Allocate the buffers. Raises `CudaError` if there is no room."""
        if self._kernel is not None:
            self._staging = DeviceMemory(self._driver, 2 * STAGING_BYTES)

    def free_staging(self) -> None:
        """Free the buffers. Called before the first job, or after the last one."""
        if self._staging is not None:
            self._staging.free()
            self._staging = None

    def way_of_large(self, columns: Columns) -> CopyPath:
        """The path of a large job with these columns. Call it after `make_staging`."""
        return self._possible(by_size_if_large(columns), columns, columns.run_bytes, 1)

    def plan(self, grid: Grid) -> Plan:
        """Plan the copy of a grid. Any thread may call it, even while another runs `steps`."""
        chosen = self._choose(grid)
        path = self._possible(chosen, grid.columns, grid.run_bytes, grid.cell.blocks_per_chunk)
        is_for_kernel = path in {CopyPath.KERNEL, CopyPath.STAGED}
        return Plan(
            grid,
            path,
            grid.entries().data.cast("B") if is_for_kernel else _NO_ENTRIES,
            grid.slot_addresses() if path is CopyPath.STAGED else _NO_SLOTS,
        )

    def wait_for(self, computed: Event) -> None:
        """Make the next job begin after this event."""
        computed.hold(self.stream)
        self._computed = computed

    def steps(self, plans: Iterable[Plan]) -> Iterator[bool]:
        """Put the copies of a job on the streams. Later work on `stream` waits for all of them.

        Yields after every step: True if the next one may take long or wait for the device.
        """
        plan = None
        for plan in plans:
            self.taken[plan.path] += 1
            if plan.path is CopyPath.STAGED:
                yield from self._staged(plan)
            elif plan.path is CopyPath.KERNEL:
                yield from self._by_kernel(plan)
            else:
                yield from self._by_engines(plan)
        if plan is None:  # a job without pages still puts its events in the queue
            self._room.await_room(0)
            self._room.add(0, self.stream)

    def settle(self) -> None:
        """Wait until no copy is under way. Does not raise."""
        try:
            self._synchronize()
            self._room.forget()
        except BaseException as error:
            # The device itself has failed, so no copy is under way.
            logger.warning("The CUDA device has failed, and all copies with it: %s", error)

    def close(self) -> None:
        """Wait for all copies, and release everything on the device. Call it once. Raises if the
        device has failed."""
        try:
            self._synchronize()
        finally:
            # Freed explicitly, so that a reference to the worker keeps no device memory.
            self.free_staging()
            for table in self._tables.values():
                table.free()
            self._tables.clear()
            with suppress(CudaError):
                for stream in (self.stream, self._second_stream):
                    self._driver.destroy_stream(stream)

    def _synchronize(self) -> None:
        try:
            self._driver.synchronize_stream(self.stream)
        finally:
            self._driver.synchronize_stream(self._second_stream)

    def _possible(
        self, path: CopyPath, columns: Columns, run_bytes: int, blocks_per_chunk: int
    ) -> CopyPath:
        """Return `path`, or the next best path if that one cannot be used."""
        if path not in {CopyPath.KERNEL, CopyPath.STAGED}:
            return path
        if self._kernel is None or not columns.is_aligned:
            return CopyPath.ENGINES
        has_room = (
            self._staging is not None
            and 0 < run_bytes <= STAGING_BYTES
            and max_entries(len(columns), columns.largest) >= blocks_per_chunk
        )
        return CopyPath.KERNEL if path is CopyPath.STAGED and not has_room else path

    def _by_engines(self, plan: Plan) -> Iterator[bool]:
        grid, is_twice = plan.grid, plan.path is CopyPath.ENGINES_TWICE
        blocks_at_once = max(1, _MOST_COPIES // len(grid.columns))
        for part in _parts(len(grid.blocks), blocks_at_once):
            device, host, sizes = grid.pages(part.start, part.stop)
            pages = (*self._from_to(device, host), sizes)
            first, end = min(_FIRST_COPIES, len(sizes)), len(sizes)
            self._room.await_room(end)
            self._copy(pages, slice(first), self.stream, is_quick=True)
            yield True  # the driver takes a while for the rest
            half = first + (end - first) // 2 if is_twice else end
            if half < end:
                self._forked.record(self.stream)
                self._forked.hold(self._second_stream)
                self._copy(pages, slice(half, end), self._second_stream)
                self._joined.record(self._second_stream)
            self._copy(pages, slice(first, half), self.stream)
            if half < end:
                self._joined.hold(self.stream)
            self._room.add(end, self.stream)

    def _by_kernel(self, plan: Plan) -> Iterator[bool]:
        cell = plan.grid.cell
        order = self._order(plan.grid, cell.address)
        threads = direct_threads(plan.grid.columns.page_bytes, is_store=self._is_store)
        for part in _parts(len(plan.grid.blocks), order.max_entries):
            self._room.await_room(_LAUNCH_COPIES)
            first_place = (plan.grid.first_place + part.start) % cell.blocks_per_chunk
            self._launch(order, _of(plan.entries, part), first_place, self.stream, threads)
            self._room.add(_LAUNCH_COPIES, self.stream)
            yield self._room.is_full(_LAUNCH_COPIES)

    def _staged(self, plan: Plan) -> Iterator[bool]:
        """Copy through the buffers. In a buffer, cells have the same layout as in their slots.

        In a store, the kernel fills a buffer and the copy engines empty it; in a load, the copy
        engines fill it and the kernel empties it. One buffer is filled while the other is emptied.
        """
        run_bytes, chunk = plan.grid.run_bytes, plan.grid.cell.blocks_per_chunk
        assert self._kernel is not None
        assert self._staging is not None
        buffers = [self._staging.address + turn * STAGING_BYTES for turn in range(2)]
        orders = [self._order(plan.grid, base) for base in buffers]
        slots_at_once = min(
            STAGING_BYTES // run_bytes, _LAUNCH_COPIES, orders[0].max_entries // chunk
        )
        offsets = np.arange(slots_at_once, dtype=np.uint64) * np.uint64(run_bytes)
        in_buffer = [offsets + np.uint64(base) for base in buffers]
        sizes = np.full(slots_at_once, run_bytes, np.uint64)
        filling, emptying = self._second_stream, self.stream
        # `filling` may start while `emptying` still runs the previous job, because the previous job
        # writes nothing that this job reads on `filling`.
        assert self._computed is not None
        self._computed.hold(filling)
        for part in _parts(len(plan.slots), slots_at_once):
            self._room.await_room(_LAUNCH_COPIES)
            turn = self._num_staged % 2
            count = part.stop - part.start
            slots = (
                *self._from_to(in_buffer[turn][:count], plan.slots[part]),
                sizes[:count],
            )
            blocks = _of(plan.entries, slice(part.start * chunk, part.stop * chunk))
            self._emptied[turn].hold(filling)
            if self._is_store:
                self._launch(orders[turn], blocks, 0, filling, self._kernel.all_threads)
            else:
                self._copy(slots, slice(count), filling, is_quick=True)
            self._filled[turn].record(filling)
            self._filled[turn].hold(emptying)
            if self._is_store:
                self._copy(slots, slice(count), emptying, is_quick=True)
            else:
                self._launch(orders[turn], blocks, 0, emptying, self._kernel.all_threads)
            self._emptied[turn].record(emptying)
            self._num_staged += 1
            self._room.add(_LAUNCH_COPIES, emptying)
            yield self._room.is_full(_LAUNCH_COPIES)

    def _order(self, grid: Grid, base: int) -> Order:
        """The parameters of a launch. `base`: address of the first cell in host memory, or of a
        buffer, in which cells are adjacent."""
        cell, columns = grid.cell, grid.columns
        is_packed = base != cell.address
        row_bytes = grid.run_bytes if is_packed else cell.row_bytes
        return Order(
            self._tables[columns].address,
            len(columns),
            columns.largest,
            base,
            row_bytes,
            cell.blocks_per_chunk,
            self._is_store,
            is_packed,
        )

    def _launch(
        self, order: Order, entries: memoryview, first_place: int, stream: int, threads: Threads
    ) -> None:
        assert self._launcher is not None
        self._launcher.launch(order, entries, first_place, stream, threads)

    def _copy(
        self,
        pages: tuple[Addresses, Addresses, Addresses],
        part: slice,
        stream: int,
        *,
        is_quick: bool = False,
    ) -> None:
        """Copy a part of `pages` (sources, targets, sizes) with the copy engines."""
        sources, targets, sizes = (column[part] for column in pages)
        self._driver.copy_batch(sources, targets, sizes, stream, is_quick=is_quick)

    def _from_to(self, device: Addresses, host: Addresses) -> tuple[Addresses, Addresses]:
        return (device, host) if self._is_store else (host, device)


def _of(entries: memoryview, blocks: slice) -> memoryview:
    return entries[blocks.start * ENTRY_BYTES : blocks.stop * ENTRY_BYTES]


def _parts(count: int, most: int) -> Iterator[slice]:
    for start in range(0, count, most):
        yield slice(start, min(start + most, count))
