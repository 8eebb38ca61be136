"""Gives the pages of jobs to the device, in two streams of one direction."""

from __future__ import annotations

import logging
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from typing import NamedTuple

import numpy as np

from kvtier.cpu.cuda.copies import LOAD_PRIORITY, STORE_PRIORITY
from kvtier.cpu.cuda.copy_paths import Path, choose_path
from kvtier.cpu.cuda.device_memory import DeviceMemory
from kvtier.cpu.cuda.driver import CudaDriver, CudaError
from kvtier.cpu.cuda.event import Event
from kvtier.cpu.cuda.page_kernel import (
    ENTRY_BYTES,
    Order,
    PageKernel,
    Threads,
    direct_threads,
    max_entries,
)
from kvtier.cpu.cuda.page_table import Addresses, Columns, Grid
from kvtier.cpu.cuda.window import Window

__all__ = ["STAGING_BYTES", "Choice", "PageMover", "Plan", "by_size", "by_size_if_large"]

logger = logging.getLogger(__name__)

STAGING_BYTES = 32 << 20
"""Of each of the two buffers that a direction has on the device."""
_FIRST_COPIES = 8
"""Pages that the copy engines are given first, so that they begin: all at once takes the driver a
microsecond and more for each."""
_MOST_COPIES = 512
"""Pages that the copy engines are given at a time."""
_LAUNCH_COPIES = 64
"""As many slots are in a buffer at most, and go with a launch. One without takes the device long
enough to count for as many."""

Choice = Callable[[Grid], Path]


def by_size(grid: Grid) -> Path:
    """The quickest path for its pages."""
    return choose_path(grid.columns.page_bytes, grid.num_pages, grid.run_bytes)


def by_size_if_large(columns: Columns) -> Path:
    """The same, for a large job of such blocks, if there is a kernel and room for its buffers."""
    return choose_path(columns.page_bytes, sys.maxsize, columns.run_bytes)


class Plan(NamedTuple):
    """All that is to be known of a grid before it is handed over."""

    grid: Grid
    path: Path
    entries: memoryview
    """For the kernel."""
    slots: Addresses
    """Of its slots, if they are staged."""


_NO_ENTRIES = memoryview(b"")
_NO_SLOTS = np.empty(0, np.uint64)


class PageMover:
    """What one direction has on the device. One thread at a time, whose device is the current one.

    A job's copies are given to the device in steps, by whoever goes on with them.
    """

    def __init__(
        self,
        driver: CudaDriver,
        kernel: PageKernel | None,
        choose: Choice,
        *,
        is_store: bool,
    ) -> None:
        self.taken: Counter[Path] = Counter()
        """How many grids went which way."""
        self._driver = driver
        self._kernel = kernel
        self._launcher = None if kernel is None else kernel.launcher()
        self._choose = choose
        self._is_store = is_store
        self._tables: dict[Columns, DeviceMemory] = {}
        self._staging: DeviceMemory | None = None
        self._num_staged = 0
        """Parts that went through a buffer so far: they take turns, in all jobs."""
        self._forked, self._joined = (Event(driver) for _ in range(2))
        self._filled, self._emptied = ([Event(driver) for _ in range(2)] for _ in range(2))
        self._window = Window(driver)
        self._computed: Event | None = None
        """What the job at hand has to wait for."""
        # Last of all: they are given back by `close` alone.
        priority = STORE_PRIORITY if is_store else LOAD_PRIORITY
        self.stream = driver.create_stream(priority)
        try:
            self._second_stream = driver.create_stream(priority)
        except BaseException:
            driver.destroy_stream(self.stream)
            raise

    def expect(self, columns: Sequence[Columns]) -> None:
        """Have the kernel know what blocks consist of. Before the first job."""
        if self._kernel is not None:
            for each in filter(len, columns):
                self._tables[each] = DeviceMemory.of(self._driver, each.table.data)

    def make_staging(self) -> None:
        """Raises `CudaError` if there is no room."""
        if self._kernel is not None:
            self._staging = DeviceMemory(self._driver, 2 * STAGING_BYTES)

    def free_staging(self) -> None:
        """Do without. Before the first job, or after the last."""
        if self._staging is not None:
            self._staging.free()
            self._staging = None

    def way_of_large(self, columns: Columns) -> Path:
        """How a large job of such blocks is copied. After `make_staging`, if there is to be one."""
        return self._possible(by_size_if_large(columns), columns, columns.run_bytes, 1)

    def plan(self, grid: Grid) -> Plan:
        """How it is copied. Any thread, also while another one has copies made."""
        chosen = self._choose(grid)
        path = self._possible(chosen, grid.columns, grid.run_bytes, grid.cell.blocks_per_chunk)
        is_for_kernel = path in {Path.KERNEL, Path.STAGED}
        return Plan(
            grid,
            path,
            grid.entries().data.cast("B") if is_for_kernel else _NO_ENTRIES,
            grid.slot_addresses() if path is Path.STAGED else _NO_SLOTS,
        )

    def wait_for(self, computed: Event) -> None:
        """Have the next job begin after that event."""
        computed.hold(self.stream)
        self._computed = computed

    def steps(self, plans: Iterable[Plan]) -> Iterator[bool]:
        """Have pages copied in the order of `stream`.

        Says after every step whether the next one would have to wait for the device.
        """
        plan = None
        for plan in plans:
            self.taken[plan.path] += 1
            if plan.path is Path.STAGED:
                yield from self._staged(plan)
            elif plan.path is Path.KERNEL:
                yield from self._by_kernel(plan)
            else:
                yield from self._by_engines(plan)
        if plan is None:  # a job without pages has marks in the queue, too
            self._window.await_room(0)
            self._window.add(0, self.stream)

    def settle(self) -> None:
        """Return when nothing is on its way any more."""
        try:
            self._synchronize()
            self._window.forget()
        except BaseException as error:
            # The device itself has failed: nothing is on its way any more.
            logger.warning("The device does not answer: %s", error)

    def close(self) -> None:
        """Let go of what it has on the device. Once. Raises when that has failed."""
        try:
            self._synchronize()
        finally:
            # Whoever keeps the worker does not keep what it had on the device.
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
        self, path: Path, columns: Columns, run_bytes: int, blocks_per_chunk: int
    ) -> Path:
        """That one, or the next best."""
        if path not in {Path.KERNEL, Path.STAGED}:
            return path
        if self._kernel is None or not columns.is_aligned:
            return Path.ENGINES
        has_room = (
            self._staging is not None
            and 0 < run_bytes <= STAGING_BYTES
            and max_entries(len(columns), columns.largest) >= blocks_per_chunk
        )
        return Path.KERNEL if path is Path.STAGED and not has_room else path

    def _by_engines(self, plan: Plan) -> Iterator[bool]:
        grid, is_twice = plan.grid, plan.path is Path.ENGINES_TWICE
        blocks_at_once = max(1, _MOST_COPIES // len(grid.columns))
        for part in _parts(len(grid.blocks), blocks_at_once):
            device, host, sizes = grid.pages(part.start, part.stop)
            pages = (*self._from_to(device, host), sizes)
            first, end = min(_FIRST_COPIES, len(sizes)), len(sizes)
            self._window.await_room(end)
            self._copy(pages, slice(first), self.stream, is_quick=True)
            yield True  # the rest takes the driver a while
            half = first + (end - first) // 2 if is_twice else end
            if half < end:
                self._forked.record(self.stream)
                self._forked.hold(self._second_stream)
                self._copy(pages, slice(half, end), self._second_stream)
                self._joined.record(self._second_stream)
            self._copy(pages, slice(first, half), self.stream)
            if half < end:
                self._joined.hold(self.stream)
            self._window.add(end, self.stream)

    def _by_kernel(self, plan: Plan) -> Iterator[bool]:
        cell = plan.grid.cell
        order = self._order(plan.grid, cell.address)
        threads = direct_threads(plan.grid.columns.page_bytes, is_store=self._is_store)
        for part in _parts(len(plan.grid.blocks), order.max_entries):
            self._window.await_room(_LAUNCH_COPIES)
            first_place = (plan.grid.first_place + part.start) % cell.blocks_per_chunk
            self._launch(order, _of(plan.entries, part), first_place, self.stream, threads)
            self._window.add(_LAUNCH_COPIES, self.stream)
            yield self._window.is_full(_LAUNCH_COPIES)

    def _staged(self, plan: Plan) -> Iterator[bool]:
        """A kernel moves pages between their places and a buffer on the device, where those of a
        slot lie as they do in the slot; the copy engines move whole slots. One fills a buffer while
        the other empties the other."""
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
        # The one may collect pages while the other still has to do with the job before: that one
        # writes nothing that is read here.
        assert self._computed is not None
        self._computed.hold(filling)
        for part in _parts(len(plan.slots), slots_at_once):
            self._window.await_room(_LAUNCH_COPIES)
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
            self._window.add(_LAUNCH_COPIES, emptying)
            yield self._window.is_full(_LAUNCH_COPIES)

    def _order(self, grid: Grid, base: int) -> Order:
        """`base`: of the slots; if it is not that of the host's, they lie one after the other."""
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
        """`pages`: sources, targets, sizes."""
        sources, targets, sizes = (column[part] for column in pages)
        self._driver.copy_batch(sources, targets, sizes, stream, is_quick=is_quick)

    def _from_to(self, device: Addresses, host: Addresses) -> tuple[Addresses, Addresses]:
        return (device, host) if self._is_store else (host, device)


def _of(entries: memoryview, blocks: slice) -> memoryview:
    return entries[blocks.start * ENTRY_BYTES : blocks.stop * ENTRY_BYTES]


def _parts(count: int, most: int) -> Iterator[slice]:
    for start in range(0, count, most):
        yield slice(start, min(start + most, count))
