"""Gives the pages of jobs to the device, in two streams of one direction."""

from __future__ import annotations

import logging
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import numpy as np
import torch

from kvtier.cpu.cuda.copies import LOAD_PRIORITY, STORE_PRIORITY
from kvtier.cpu.cuda.copy_paths import Path, choose_path
from kvtier.cpu.cuda.driver import CudaDriver, CudaError
from kvtier.cpu.cuda.page_kernel import DIRECT_BLOCKS, PageKernel
from kvtier.cpu.cuda.page_lists import PageLists
from kvtier.cpu.cuda.page_table import Addresses, Pages, Run

__all__ = ["STAGING_BYTES", "Choice", "PageMover", "by_size", "may_be_staged"]

logger = logging.getLogger(__name__)

_LIST_PAGES = 1 << 14
"""Pages of one launch at most. A long list is given out in parts: the first one is on its way while
the second is written."""
STAGING_BYTES = 32 << 20
"""Of each of the two buffers that a direction has on the device."""
_FIRST_COPIES = 16
"""Pages that the copy engines are given first, so that they begin: all at once takes the driver a
microsecond and more for each."""

Choice = Callable[[Pages], Path]


def by_size(pages: Pages) -> Path:
    """The quickest path for them."""
    run_bytes = 0 if pages.run is None else pages.run.num_bytes
    return choose_path(pages.page_bytes, len(pages.sizes), run_bytes)


def may_be_staged(run: Run) -> bool:
    """Whether a large job of such runs is."""
    return choose_path(run.num_bytes / run.num_pages, sys.maxsize, run.num_bytes) is Path.STAGED


class PageMover:
    """What one direction has on the device. One thread at a time, whose device is the current one.

    A job's copies are given to the device in steps, by whoever goes on with them.
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
        """`taken`: counts what went which way."""
        self._device = device
        self._driver = driver
        self._kernel = kernel
        self._choose = choose
        self._taken = taken
        self._is_store = is_store
        priority = STORE_PRIORITY if is_store else LOAD_PRIORITY
        self.stream, self._second_stream = (
            torch.cuda.ExternalStream(driver.create_stream(priority)) for _ in range(2)
        )
        self._lists = PageLists(_LIST_PAGES)
        self._staging: Any = None
        self._num_staged = 0
        """Parts that went through a buffer so far: they take turns, in all jobs."""
        self._forked, self._joined = (torch.cuda.Event() for _ in range(2))
        self._filled, self._emptied = ([torch.cuda.Event() for _ in range(2)] for _ in range(2))

    def make_staging(self) -> None:
        """Raises `torch.OutOfMemoryError`."""
        if self._kernel is not None:
            self._staging = torch.empty(2 * STAGING_BYTES, dtype=torch.uint8, device=self._device)

    def wait_for(self, computed: Any) -> None:
        """Have the next job begin after that event."""
        self._wait(self.stream, computed)
        # It may collect pages for the next job while `stream` still has to do with the one before:
        # that one writes nothing that is read here.
        self._wait(self._second_stream, computed)

    def steps(self, parts: Iterator[Pages]) -> Iterator[bool]:
        """Have pages copied in the order of `stream`. Says after every step whether the next one
        would have to wait for the device."""
        for pages in parts:
            if not len(pages.sizes):
                continue
            path = self._possible(self._choose(pages), pages)
            self._taken[path] += 1
            if path is Path.STAGED:
                yield from self._staged(pages)
            elif path is Path.KERNEL:
                yield from self._by_kernel(pages)
            else:
                yield from self._by_engines(pages, path)

    def settle(self) -> None:
        """Return when nothing is on its way any more."""
        try:
            self.stream.synchronize()
            self._second_stream.synchronize()
        except BaseException as error:
            # The device itself has failed: nothing is on its way any more.
            logger.warning("The device does not answer: %s", error)

    def close(self) -> None:
        """Let go of what it has on the device. Raises when that has failed."""
        try:
            self.stream.synchronize()
            self._second_stream.synchronize()
        finally:
            # Whoever keeps the worker does not keep what it had on the device.
            self._lists.close()
            self._staging = None
            with suppress(CudaError):
                for stream in (self.stream, self._second_stream):
                    self._driver.destroy_stream(stream.cuda_stream)

    def _possible(self, path: Path, pages: Pages) -> Path:
        """That one, or the next best."""
        if path not in {Path.KERNEL, Path.STAGED}:
            return path
        if self._kernel is None or not pages.is_aligned:
            return Path.ENGINES
        if path is Path.STAGED and not self._has_room_for(pages.run):
            return Path.KERNEL
        return path

    def _has_room_for(self, run: Run | None) -> bool:
        return (
            self._staging is not None
            and run is not None
            and run.num_bytes <= STAGING_BYTES
            and run.num_pages <= _LIST_PAGES
        )

    def _by_engines(self, pages: Pages, path: Path) -> Iterator[bool]:
        sources, targets = self._from_to(pages.device, pages.host)

        def copy(part: slice, stream: Any, *, is_quick: bool = False) -> None:
            self._driver.copy_batch(
                sources[part],
                targets[part],
                pages.sizes[part],
                stream.cuda_stream,
                is_quick=is_quick,
            )

        copy(slice(_FIRST_COPIES), self.stream, is_quick=True)
        yield True  # to many pages the driver says no more until some are copied
        rest = range(_FIRST_COPIES, len(sources))
        if path is Path.ENGINES_TWICE:
            half = len(rest) // 2
            self._forked.record(self.stream)
            self._wait(self._second_stream, self._forked)
            copy(_slice(rest[half:]), self._second_stream)
            copy(_slice(rest[:half]), self.stream)
            self._joined.record(self._second_stream)
            self._wait(self.stream, self._joined)
        else:
            copy(_slice(rest), self.stream)

    def _by_kernel(self, pages: Pages) -> Iterator[bool]:
        sources, targets = self._from_to(pages.device, pages.host)
        for part in _parts(len(sources), _LIST_PAGES):
            listed = (sources[part], targets[part], pages.sizes[part])
            self._launch(listed, self.stream, DIRECT_BLOCKS)
            yield not self._lists.has_next

    def _staged(self, pages: Pages) -> Iterator[bool]:
        """A kernel moves pages between their places and a buffer on the device, where those of a
        slot lie as they do in the slot; the copy engines move whole slots. One fills a buffer while
        the other empties the other."""
        run = pages.run
        assert run is not None
        runs_per_part = min(STAGING_BYTES // run.num_bytes, _LIST_PAGES // run.num_pages)
        # Where pages and slots are in a buffer; the same in both, and in every part.
        slots_at = np.arange(runs_per_part, dtype=np.uint64) * np.uint64(run.num_bytes)
        pages_at = np.arange(runs_per_part * run.num_pages, dtype=np.uint64)
        pages_at *= np.uint64(run.num_bytes // run.num_pages)
        slot_sizes = np.full(runs_per_part, run.num_bytes, np.uint64)
        # The driver is given addresses of arrays, and knows nothing of steps between their items.
        slots = pages.host[:: run.num_pages].copy()
        for part in _parts(len(slots), runs_per_part):
            turn = self._num_staged % 2
            buffer = np.uint64(self._staging.data_ptr() + turn * STAGING_BYTES)
            in_part = slots[part]
            of_pages = slice(part.start * run.num_pages, part.stop * run.num_pages)
            device = pages.device[of_pages]
            collected = buffer + pages_at[: len(device)]
            in_buffer = buffer + slots_at[: len(in_part)]
            listed = (*self._from_to(device, collected), pages.sizes[of_pages])
            copied = (*self._from_to(in_buffer, in_part), slot_sizes[: len(in_part)])
            filled, emptied = self._filled[turn], self._emptied[turn]
            filling, emptying = self._second_stream, self.stream
            if self._num_staged >= 2:
                self._wait(filling, emptied)
            if self._is_store:
                self._collect(listed, filling)
            else:
                self._copy_slots(copied, filling)
            filled.record(filling)
            self._wait(emptying, filled)
            if self._is_store:
                self._copy_slots(copied, emptying)
            else:
                self._collect(listed, emptying)
            emptied.record(emptying)
            self._num_staged += 1
            yield not self._lists.has_next

    def _copy_slots(self, copied: tuple[Addresses, Addresses, Addresses], stream: Any) -> None:
        # As few as there are lists for: the driver takes them without waiting.
        self._driver.copy_batch(*copied, stream.cuda_stream, is_quick=True)

    def _collect(self, listed: tuple[Addresses, Addresses, Addresses], stream: Any) -> None:
        assert self._kernel is not None
        self._launch(listed, stream, self._kernel.num_multiprocessors)

    def _launch(
        self, listed: tuple[Addresses, Addresses, Addresses], stream: Any, blocks: int
    ) -> None:
        """`listed`: sources, targets, sizes."""
        assert self._kernel is not None
        rows = self._lists.take(len(listed[0]))
        rows[:] = listed
        self._kernel.launch(rows, int(listed[2].max()), stream.cuda_stream, blocks)
        self._lists.used_in(stream)

    def _wait(self, stream: Any, event: Any) -> None:
        self._driver.wait_event(stream.cuda_stream, event.cuda_event)

    def _from_to(self, device: Any, host: Any) -> tuple[Any, Any]:
        return (device, host) if self._is_store else (host, device)


def _parts(count: int, most: int) -> Iterator[slice]:
    for start in range(0, count, most):
        yield slice(start, min(start + most, count))


def _slice(indices: range) -> slice:
    return slice(indices.start, indices.stop)
