"""Copies in streams of their own, between the device and pinned memory."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import numpy as np
import torch

from kvtier.cpu.cuda.copies import Copies, Ticket
from kvtier.cpu.cuda.copy_paths import Path, choose_path
from kvtier.cpu.cuda.descriptor_ring import DescriptorRing
from kvtier.cpu.cuda.driver import CudaDriver
from kvtier.cpu.cuda.page_kernel import DIRECT_BLOCKS, STAGING_BLOCKS, PageKernel
from kvtier.cpu.cuda.page_table import Addresses, Pages
from kvtier.cpu.lane import Lane

__all__ = ["StreamCopies"]

logger = logging.getLogger(__name__)

_RING_PAGES = 1 << 18
"""Room for so many pages of jobs under way in each direction: 6 MiB. What finds no room is copied
by the engines, which need none."""
_STAGING_BYTES = 32 << 20
"""Of each of the two buffers that a direction has on the device."""
_LOAD_PRIORITY, _STORE_PRIORITY = -1, 0
"""A request waits for a load, nobody for a store: the first is high, the second the lowest."""

Choice = Callable[[Pages], Path]


def _by_size(pages: Pages) -> Path:
    run_bytes = 0 if pages.run is None else pages.run.num_bytes
    return choose_path(pages.page_bytes, len(pages.sizes), run_bytes)


class StreamCopies(Copies):
    """Two streams for each direction, and a thread that hands jobs to the device.

    The driver takes its time, a microsecond and more for a large page: the engine's thread does
    not wait for that. It only marks in its stream what a job has to wait for.
    """

    def __init__(
        self,
        device: Any,
        driver: CudaDriver,
        kernel: PageKernel | None,
        choose: Choice | None = None,
    ) -> None:
        """`kernel`: None if it is not to be had; the copy engines do it all then. `choose`: the
        path for a job, if it is not to be the quickest."""
        self._device = device
        with torch.cuda.device(device):
            self._stores = _Direction(device, driver, kernel, is_store=True)
            self._loads = _Direction(device, driver, kernel, is_store=False)
        self._choose = choose or _by_size

    def start(self, pages: Pages, *, is_store: bool) -> Ticket:
        direction = self._stores if is_store else self._loads
        with torch.cuda.device(self._device):
            return direction.start(pages, self._choose(pages))

    def close(self) -> None:
        with ExitStack() as both:
            both.callback(self._loads.close)
            both.callback(self._stores.close)


class _StreamTicket(Ticket):
    def __init__(self, direction: _Direction, computed: Any, started: Any, ended: Any) -> None:
        self._direction = direction
        self.events = (computed, started, ended)
        self.rows: Addresses | None = None
        """Its list of pages in the ring."""
        self.is_handed_over = threading.Event()
        """Set by the thread when the device has the job, or has refused it."""
        self.error: Exception | None = None
        self.elapsed_s: float | None = None
        """None until it is known to be done."""

    def is_done(self) -> bool:
        if self.elapsed_s is None:
            self._direction.collect()
        if self.elapsed_s is not None and self.error is not None:
            raise self.error
        return self.elapsed_s is not None

    def wait(self) -> None:
        if self.elapsed_s is None:
            self.is_handed_over.wait()
            if self.error is None:
                self.events[2].synchronize()
        self.is_done()

    def seconds(self) -> float:
        assert self.elapsed_s is not None, "asked before the copy was done"
        return self.elapsed_s


class _Direction:
    """What is under way in one direction.

    The engine's thread calls `start` and `collect`; all between the mark in its stream and the
    mark at the end of a job is done by the thread of `_lane`.
    """

    def __init__(
        self, device: Any, driver: CudaDriver, kernel: PageKernel | None, *, is_store: bool
    ) -> None:
        self._device = device
        self._driver = driver
        self._kernel = kernel
        self._is_store = is_store
        priority = _STORE_PRIORITY if is_store else _LOAD_PRIORITY
        self._stream, self._second_stream = (torch.cuda.Stream(priority=priority) for _ in range(2))
        lists = torch.empty(3 * _RING_PAGES, dtype=torch.int64, pin_memory=True)
        self._ring = DescriptorRing(lists.numpy().view(np.uint64))
        self._staging: Any = None
        self._has_memory = True
        self._under_way: deque[_StreamTicket] = deque()
        self._spare_events: list[tuple[Any, Any, Any]] = []
        self._forked, self._joined = (torch.cuda.Event() for _ in range(2))
        self._filled, self._emptied = ([torch.cuda.Event() for _ in range(2)] for _ in range(2))
        self._lane = Lane("kvtier-store" if is_store else "kvtier-load")

    def start(self, pages: Pages, path: Path) -> Ticket:
        events = self._spare_events.pop() if self._spare_events else _new_events()
        ticket = _StreamTicket(self, *events)
        events[0].record()  # in the stream that is current
        if path is Path.STAGED and (pages.run is None or not self._has_staging()):
            path = Path.KERNEL
        if path in {Path.KERNEL, Path.STAGED} and not self._write_list(ticket, pages, path):
            path = Path.ENGINES
        try:
            self._lane.put(lambda: self._hand_over(ticket, pages, path))
        except BaseException:
            if ticket.rows is not None:
                self._ring.undo_take()
            raise
        self._under_way.append(ticket)
        return ticket

    def collect(self) -> None:
        """Mark what is done, and take back what it used. Raises when the device has failed."""
        while self._under_way and self._under_way[0].is_handed_over.is_set():
            ticket = self._under_way[0]
            _, started, ended = ticket.events
            if ticket.error is None:
                if not ended.query():
                    return
                ticket.elapsed_s = started.elapsed_time(ended) / 1e3
                self._spare_events.append(ticket.events)
            else:
                ticket.elapsed_s = 0.0
            self._under_way.popleft()
            if ticket.rows is not None:
                self._ring.give_back()

    def close(self) -> None:
        self._lane.close()
        self._stream.synchronize()
        self._second_stream.synchronize()

    def _has_staging(self) -> bool:
        """Whether there are buffers on the device. They are made when first needed: most engines
        have pages that are large enough without."""
        if self._staging is None and self._has_memory:
            try:
                self._staging = torch.empty(
                    2 * _STAGING_BYTES, dtype=torch.uint8, device=self._device
                )
            except torch.OutOfMemoryError:
                self._has_memory = False
                logger.warning(
                    "No %d MiB of device memory are left to collect pages in: they are copied by a "
                    "kernel that disturbs the model's more. Lower the engine's share of the memory",
                    2 * _STAGING_BYTES >> 20,
                )
        return self._staging is not None

    def _write_list(self, ticket: _StreamTicket, pages: Pages, path: Path) -> bool:
        """False: the kernel cannot do it, or not now."""
        if self._kernel is None or not pages.is_aligned:
            return False
        rows = self._ring.take(len(pages.sizes))
        if rows is None:
            return False
        rows[0], rows[1] = self._from_to(pages.device, pages.host)
        rows[2] = pages.sizes
        if path is Path.STAGED:
            # In the place of the host's addresses, where a page is in the two buffers in turn.
            offsets = _staging_offsets(pages)
            offsets += np.uint64(self._staging.data_ptr())
            rows[1 if self._is_store else 0] = offsets
        ticket.rows = rows
        return True

    def _from_to(self, device: Any, host: Any) -> tuple[Any, Any]:
        return (device, host) if self._is_store else (host, device)

    # --- the thread ---------------------------------------------------------------------------

    def _hand_over(self, ticket: _StreamTicket, pages: Pages, path: Path) -> None:
        computed, started, ended = ticket.events
        try:
            torch.cuda.set_device(self._device)
            self._stream.wait_event(computed)
            started.record(self._stream)
            self._enqueue(ticket.rows, pages, path)
            ended.record(self._stream)
        except Exception as error:  # for the thread that asks
            ticket.error = error
            self._settle()
        ticket.is_handed_over.set()

    def _settle(self) -> None:
        """Some of a failed job may be on its way, and whoever hears of it may reuse the memory."""
        try:
            self._stream.synchronize()
            self._second_stream.synchronize()
        except RuntimeError:
            return  # the device has failed: nothing is on its way

    def _enqueue(self, rows: Addresses | None, pages: Pages, path: Path) -> None:
        if path is Path.STAGED and rows is not None:
            self._enqueue_staged(rows, pages)
        elif rows is not None:
            self._launch(rows, pages.largest, self._stream, DIRECT_BLOCKS)
        else:
            self._enqueue_engines(pages, path)

    def _enqueue_engines(self, pages: Pages, path: Path) -> None:
        sources, targets = self._from_to(pages.device, pages.host)
        sizes = pages.sizes
        if path is not Path.ENGINES_TWICE:
            self._copy(sources, targets, sizes, self._stream)
            return
        half = len(sizes) // 2
        self._fork()
        self._copy(sources[half:], targets[half:], sizes[half:], self._second_stream)
        self._copy(sources[:half], targets[:half], sizes[:half], self._stream)
        self._join()

    def _enqueue_staged(self, rows: Addresses, pages: Pages) -> None:
        """A kernel moves pages between their places and a buffer on the device, where those of a
        slot lie as they do in the slot; the copy engines move whole slots. One fills a buffer while
        the other empties the other."""
        assert pages.run is not None
        per_part = _STAGING_BYTES // pages.run.num_bytes * pages.run.num_pages
        # The driver is given addresses of arrays, and knows nothing of steps between their items.
        slots = pages.host[:: pages.run.num_pages].copy()
        in_staging = rows[1 if self._is_store else 0][:: pages.run.num_pages].copy()
        sizes = np.full(len(slots), pages.run.num_bytes, np.uint64)
        sources, targets = self._from_to(in_staging, slots)
        self._fork()
        for turn, start in enumerate(range(0, rows.shape[1], per_part)):
            part = rows[:, start : start + per_part]
            runs = slice(start // pages.run.num_pages, (start + per_part) // pages.run.num_pages)
            filled, emptied = self._filled[turn % 2], self._emptied[turn % 2]
            filling, emptying = self._from_to(self._second_stream, self._stream)
            if turn >= 2:
                filling.wait_event(emptied)
            if self._is_store:
                self._launch(part, pages.largest, filling, STAGING_BLOCKS)
            else:
                self._copy(sources[runs], targets[runs], sizes[runs], filling)
            filled.record(filling)
            emptying.wait_event(filled)
            if self._is_store:
                self._copy(sources[runs], targets[runs], sizes[runs], emptying)
            else:
                self._launch(part, pages.largest, emptying, STAGING_BLOCKS)
            emptied.record(emptying)
        self._join()

    def _fork(self) -> None:
        self._forked.record(self._stream)
        self._second_stream.wait_event(self._forked)

    def _join(self) -> None:
        self._joined.record(self._second_stream)
        self._stream.wait_event(self._joined)

    def _copy(self, sources: Addresses, targets: Addresses, sizes: Addresses, stream: Any) -> None:
        self._driver.copy_batch(sources, targets, sizes, stream.cuda_stream)

    def _launch(self, rows: Addresses, largest: int, stream: Any, blocks: int) -> None:
        assert self._kernel is not None
        self._kernel.launch(rows, largest, stream.cuda_stream, blocks)


def _new_events() -> tuple[Any, Any, Any]:
    """For when a job's turn has come in the engine's stream, when it starts, and when it ends."""
    return torch.cuda.Event(), torch.cuda.Event(True), torch.cuda.Event(True)


def _staging_offsets(pages: Pages) -> Addresses:
    """Where each page is in the buffers: runs one after the other, then from the start again."""
    assert pages.run is not None
    runs, places = np.divmod(np.arange(len(pages.sizes)), pages.run.num_pages)
    parts, runs = np.divmod(runs, _STAGING_BYTES // pages.run.num_bytes)
    offsets = parts % 2 * _STAGING_BYTES
    offsets += runs * pages.run.num_bytes
    offsets += places * (pages.run.num_bytes // pages.run.num_pages)
    return offsets.astype(np.uint64)
