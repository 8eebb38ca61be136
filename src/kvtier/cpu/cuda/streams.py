"""Copies in streams of their own, between the device and pinned memory."""

from __future__ import annotations

import logging
import sys
import threading
from collections import Counter, deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from typing import Any

import numpy as np
import torch

from kvtier.cpu.cuda.copies import LOAD_PRIORITY, STORE_PRIORITY, Copies, Ticket
from kvtier.cpu.cuda.copy_paths import Path, choose_path
from kvtier.cpu.cuda.driver import CudaDriver, CudaError
from kvtier.cpu.cuda.page_kernel import DIRECT_BLOCKS, PageKernel
from kvtier.cpu.cuda.page_lists import PageLists
from kvtier.cpu.cuda.page_table import Addresses, Pages, Run
from kvtier.cpu.lane import Lane

__all__ = ["StreamCopies"]

logger = logging.getLogger(__name__)

_LIST_PAGES = 1 << 14
"""Pages of one launch at most. A long list is given out in parts: the first one is on its way while
the second is written."""
_STAGING_BYTES = 32 << 20
"""Of each of the two buffers that a direction has on the device."""

Choice = Callable[[Pages], Path]


def _by_size(pages: Pages) -> Path:
    run_bytes = 0 if pages.run is None else pages.run.num_bytes
    return choose_path(pages.page_bytes, len(pages.sizes), run_bytes)


def _may_be_staged(run: Run) -> bool:
    """Whether a large job of such runs is."""
    return choose_path(run.num_bytes / run.num_pages, sys.maxsize, run.num_bytes) is Path.STAGED


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
        self._is_by_size = choose is None
        choose = choose or _by_size
        self.taken: Counter[Path] = Counter()
        """How many jobs went which way."""
        with torch.cuda.device(device):
            self._stores, self._loads = (
                _Direction(device, driver, kernel, choose, self.taken, is_store=is_store)
                for is_store in (True, False)
            )

    def expect_runs(self, run: Run) -> None:
        if self._is_by_size and not _may_be_staged(run):
            return
        with torch.cuda.device(self._device):
            try:
                self._stores.make_staging()
                self._loads.make_staging()
            except torch.OutOfMemoryError:
                logger.warning(
                    "No %d MiB of device memory are left to collect pages in: they are copied by a "
                    "kernel that disturbs the model's more. Lower the engine's share of the memory",
                    4 * _STAGING_BYTES >> 20,
                )
            # Whoever had that memory before may still be using it, in a stream of its own.
            torch.cuda.current_stream().synchronize()

    def start(self, pages: Callable[[], Pages], *, is_store: bool) -> Ticket:
        direction = self._stores if is_store else self._loads
        with torch.cuda.device(self._device):
            return direction.start(pages)

    def flush(self) -> None:
        self._stores.flush()
        self._loads.flush()

    def close(self) -> None:
        with ExitStack() as both:
            both.callback(self._loads.close)
            both.callback(self._stores.close)


class _StreamTicket(Ticket):
    def __init__(self, direction: _Direction, computed: Any, started: Any, ended: Any) -> None:
        self._direction = direction
        self.events = (computed, started, ended)
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
        self,
        device: Any,
        driver: CudaDriver,
        kernel: PageKernel | None,
        choose: Choice,
        taken: Counter[Path],
        *,
        is_store: bool,
    ) -> None:
        self._device = device
        self._driver = driver
        self._kernel = kernel
        self._choose = choose
        self._taken = taken
        self._is_store = is_store
        priority = STORE_PRIORITY if is_store else LOAD_PRIORITY
        self._stream, self._second_stream = (
            torch.cuda.ExternalStream(driver.create_stream(priority)) for _ in range(2)
        )
        self._lists = PageLists(_LIST_PAGES)
        self._staging: Any = None
        self._under_way: deque[_StreamTicket] = deque()
        self._spare_events: list[tuple[Any, Any, Any]] = []
        self._forked, self._joined = (torch.cuda.Event() for _ in range(2))
        self._filled, self._emptied = ([torch.cuda.Event() for _ in range(2)] for _ in range(2))
        self._lane = Lane("kvtier-store" if is_store else "kvtier-load")

    def make_staging(self) -> None:
        """Raises `torch.OutOfMemoryError`."""
        if self._kernel is not None:
            self._staging = torch.empty(2 * _STAGING_BYTES, dtype=torch.uint8, device=self._device)

    def start(self, pages: Callable[[], Pages]) -> Ticket:
        events = self._spare_events.pop() if self._spare_events else _new_events()
        ticket = _StreamTicket(self, *events)
        events[0].record()  # in the stream that is current
        self._lane.put(lambda: self._hand_over(ticket, pages))
        self._under_way.append(ticket)
        return ticket

    def collect(self) -> None:
        """Mark what is done. Raises when the device has failed."""
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

    def flush(self) -> None:
        self._lane.flush()

    def close(self) -> None:
        self._lane.close()
        try:
            self._stream.synchronize()
            self._second_stream.synchronize()
        finally:
            # Whoever keeps the worker does not keep what it had on the device.
            self._lists.close()
            self._staging = None
            self._spare_events.clear()
            with suppress(CudaError):
                for stream in (self._stream, self._second_stream):
                    self._driver.destroy_stream(stream.cuda_stream)

    # --- the thread ---------------------------------------------------------------------------

    def _hand_over(self, ticket: _StreamTicket, pages: Callable[[], Pages]) -> None:
        computed, started, ended = ticket.events
        try:
            torch.cuda.set_device(self._device)
            self._stream.wait_event(computed)
            started.record(self._stream)
            self._enqueue(pages())
            ended.record(self._stream)
        except BaseException as error:  # for the thread that asks
            ticket.error = error if isinstance(error, Exception) else RuntimeError(repr(error))
            self._settle()
        finally:
            ticket.is_handed_over.set()

    def _settle(self) -> None:
        """Some of a failed job may be on its way, and whoever hears of it may reuse the memory."""
        try:
            self._stream.synchronize()
            self._second_stream.synchronize()
        except BaseException as error:
            # The device itself has failed: nothing is on its way any more.
            logger.warning("The device does not answer: %s", error)

    def _enqueue(self, pages: Pages) -> None:
        if not len(pages.sizes):
            return
        path = self._possible(self._choose(pages), pages)
        self._taken[path] += 1
        if path is Path.STAGED:
            self._enqueue_staged(pages)
        elif path is Path.KERNEL:
            sources, targets = self._from_to(pages.device, pages.host)
            for part in _parts(len(sources), _LIST_PAGES):
                self._launch(
                    (sources[part], targets[part], pages.sizes[part]), self._stream, DIRECT_BLOCKS
                )
        else:
            self._enqueue_engines(pages, path)

    def _possible(self, path: Path, pages: Pages) -> Path:
        """That one, or the next best."""
        if path not in {Path.KERNEL, Path.STAGED}:
            return path
        if self._kernel is None or not pages.is_aligned:
            return Path.ENGINES
        has_room = self._staging is not None
        if path is Path.STAGED and (
            pages.run is None or pages.run.num_bytes > _STAGING_BYTES or not has_room
        ):
            return Path.KERNEL
        return path

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

    def _enqueue_staged(self, pages: Pages) -> None:
        """A kernel moves pages between their places and a buffer on the device, where those of a
        slot lie as they do in the slot; the copy engines move whole slots. One fills a buffer while
        the other empties the other."""
        run = pages.run
        assert run is not None
        runs_per_part = max(1, min(_STAGING_BYTES // run.num_bytes, _LIST_PAGES // run.num_pages))
        # Where pages and slots are in a buffer; the same in both, and in every part.
        slots_at = np.arange(runs_per_part, dtype=np.uint64) * np.uint64(run.num_bytes)
        pages_at = np.arange(runs_per_part * run.num_pages, dtype=np.uint64)
        pages_at *= np.uint64(run.num_bytes // run.num_pages)
        slot_sizes = np.full(runs_per_part, run.num_bytes, np.uint64)
        # The driver is given addresses of arrays, and knows nothing of steps between their items.
        slots = pages.host[:: run.num_pages].copy()
        self._fork()
        for turn, part in enumerate(_parts(len(slots), runs_per_part)):
            buffer = np.uint64(self._staging.data_ptr() + turn % 2 * _STAGING_BYTES)
            in_part = slots[part]
            of_pages = slice(part.start * run.num_pages, part.stop * run.num_pages)
            device = pages.device[of_pages]
            sizes = pages.sizes[of_pages]
            collected = buffer + pages_at[: len(device)]
            in_buffer = buffer + slots_at[: len(in_part)]
            listed = (*self._from_to(device, collected), sizes)
            copied = (*self._from_to(in_buffer, in_part), slot_sizes[: len(in_part)])
            filled, emptied = self._filled[turn % 2], self._emptied[turn % 2]
            filling, emptying = self._from_to(self._second_stream, self._stream)
            if turn >= 2:
                filling.wait_event(emptied)
            if self._is_store:
                self._collect_pages(listed, filling)
            else:
                self._copy(*copied, filling)
            filled.record(filling)
            emptying.wait_event(filled)
            if self._is_store:
                self._copy(*copied, emptying)
            else:
                self._collect_pages(listed, emptying)
            emptied.record(emptying)
        self._join()

    def _fork(self) -> None:
        self._forked.record(self._stream)
        self._second_stream.wait_event(self._forked)

    def _join(self) -> None:
        self._joined.record(self._second_stream)
        self._stream.wait_event(self._joined)

    def _from_to(self, device: Any, host: Any) -> tuple[Any, Any]:
        return (device, host) if self._is_store else (host, device)

    def _copy(self, sources: Addresses, targets: Addresses, sizes: Addresses, stream: Any) -> None:
        self._driver.copy_batch(sources, targets, sizes, stream.cuda_stream)

    def _collect_pages(self, listed: tuple[Addresses, Addresses, Addresses], stream: Any) -> None:
        assert self._kernel is not None
        self._launch(listed, stream, self._kernel.num_multiprocessors)

    def _launch(
        self, listed: tuple[Addresses, Addresses, Addresses], stream: Any, blocks: int
    ) -> None:
        """`listed`: sources, targets, sizes."""
        assert self._kernel is not None
        rows = self._lists.take(len(listed[0]))
        rows[:] = listed
        self._kernel.launch(rows, int(rows[2].max()), stream.cuda_stream, blocks)
        self._lists.used_in(stream)


def _new_events() -> tuple[Any, Any, Any]:
    """For when a job's turn has come in the engine's stream, when it starts, and when it ends."""
    return torch.cuda.Event(), torch.cuda.Event(True), torch.cuda.Event(True)


def _parts(count: int, most: int) -> Iterator[slice]:
    for start in range(0, count, most):
        yield slice(start, min(start + most, count))
