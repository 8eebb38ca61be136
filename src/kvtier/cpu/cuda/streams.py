"""Copies in streams of their own, between the device and pinned memory."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import numpy as np
import torch

from kvtier.cpu.cuda.copies import Copies, Ticket
from kvtier.cpu.cuda.copy_paths import Path, choose_path
from kvtier.cpu.cuda.descriptor_ring import DescriptorRing
from kvtier.cpu.cuda.driver import CudaDriver
from kvtier.cpu.cuda.page_kernel import PageKernel
from kvtier.cpu.cuda.page_table import Addresses, Pages

__all__ = ["StreamCopies"]

_RING_PAGES = 1 << 18
"""Room for so many pages of jobs under way in each direction: 6 MiB. What finds no room is copied
by the engines, which need none."""
_LOAD_PRIORITY, _STORE_PRIORITY = -1, 0
"""A request waits for a load, nobody for a store: the first is high, the second the lowest."""


class StreamCopies(Copies):
    """One stream for each direction. Nothing here waits for the device, but `wait` and `close`."""

    def __init__(
        self,
        device: Any,
        driver: CudaDriver,
        kernel: PageKernel | None,
        choose: Callable[[float, int], Path] = choose_path,
    ) -> None:
        """`kernel`: None if it is not to be had; the copy engines do it all then. `choose`: the
        path for pages of a size, and so many of them."""
        self._device = device
        with torch.cuda.device(device):
            self._stores = _Direction(driver, kernel, _STORE_PRIORITY, choose)
            self._loads = _Direction(driver, kernel, _LOAD_PRIORITY, choose)

    def start(self, pages: Pages, *, is_store: bool) -> Ticket:
        with torch.cuda.device(self._device):
            if is_store:
                return self._stores.start(pages.device, pages.host, pages)
            return self._loads.start(pages.host, pages.device, pages)

    def close(self) -> None:
        self._stores.synchronize()
        self._loads.synchronize()


class _StreamTicket(Ticket):
    def __init__(self, direction: _Direction, started: Any, ended: Any, has_list: bool) -> None:
        self._direction = direction
        self.started, self.ended = started, ended
        self.has_list = has_list
        """Whether it holds a list in the ring."""
        self.elapsed_s: float | None = None
        """None until it is known to be done."""

    def is_done(self) -> bool:
        if self.elapsed_s is None:
            self._direction.collect()
        return self.elapsed_s is not None

    def wait(self) -> None:
        if self.elapsed_s is None:
            self.ended.synchronize()
            self._direction.collect()

    def seconds(self) -> float:
        assert self.elapsed_s is not None, "asked before the copy was done"
        return self.elapsed_s


class _Direction:
    """A stream, and what is under way in it."""

    def __init__(
        self,
        driver: CudaDriver,
        kernel: PageKernel | None,
        priority: int,
        choose: Callable[[float, int], Path],
    ) -> None:
        self._choose = choose
        self._driver = driver
        self._kernel = kernel
        self._stream = torch.cuda.Stream(priority=priority)
        self._second_stream = torch.cuda.Stream(priority=priority)
        lists = torch.empty(3 * _RING_PAGES, dtype=torch.int64, pin_memory=True)
        self._ring = DescriptorRing(lists.numpy().view(np.uint64))
        self._under_way: deque[_StreamTicket] = deque()
        self._spare_events: list[Any] = []
        # Recorded anew by every job: a stream that waits for one waits for the record before that.
        self._computed, self._forked, self._joined = (torch.cuda.Event() for _ in range(3))

    def start(self, sources: Addresses, targets: Addresses, pages: Pages) -> Ticket:
        started, ended = self._new_event(), self._new_event()
        self._computed.record(torch.cuda.current_stream())
        self._stream.wait_event(self._computed)
        started.record(self._stream)
        try:
            has_list = self._enqueue(sources, targets, pages)
            ended.record(self._stream)
        except BaseException:
            # Some of it may be on its way; whoever hears of the failure may reuse the memory.
            with suppress(RuntimeError):
                self.synchronize()
            raise
        ticket = _StreamTicket(self, started, ended, has_list)
        self._under_way.append(ticket)
        return ticket

    def collect(self) -> None:
        """Mark what is done, and take back what it used. Raises when the device has failed."""
        while self._under_way and self._under_way[0].ended.query():
            ticket = self._under_way.popleft()
            ticket.elapsed_s = ticket.started.elapsed_time(ticket.ended) / 1e3
            if ticket.has_list:
                self._ring.give_back()
            self._spare_events += (ticket.started, ticket.ended)

    def synchronize(self) -> None:
        self._stream.synchronize()
        self._second_stream.synchronize()

    def _enqueue(self, sources: Addresses, targets: Addresses, pages: Pages) -> bool:
        """Whether a list in the ring is in use until the job is done."""
        count, sizes = len(sources), pages.sizes
        if count == 0:
            return False
        path = self._choose(pages.page_bytes, count)
        if path is Path.KERNEL and self._launch(sources, targets, pages):
            return True
        first = count // 2 if path is Path.ENGINES_TWICE else count
        if first < count:
            self._forked.record(self._stream)
            self._second_stream.wait_event(self._forked)
            self._copy(sources[first:], targets[first:], sizes[first:], self._second_stream)
            self._joined.record(self._second_stream)
        self._copy(sources[:first], targets[:first], sizes[:first], self._stream)
        if first < count:
            self._stream.wait_event(self._joined)
        return False

    def _copy(self, sources: Addresses, targets: Addresses, sizes: Addresses, stream: Any) -> None:
        self._driver.copy_batch(sources, targets, sizes, stream.cuda_stream)

    def _launch(self, sources: Addresses, targets: Addresses, pages: Pages) -> bool:
        """False: the kernel cannot do it, or not now."""
        if self._kernel is None or not pages.is_aligned:
            return False
        rows = self._ring.take(len(sources))
        if rows is None:
            return False
        rows[0], rows[1], rows[2] = sources, targets, pages.sizes
        try:
            self._kernel.launch(rows, pages.largest, self._stream.cuda_stream)
        except BaseException:
            self._ring.undo_take()
            raise
        return True

    def _new_event(self) -> Any:
        return self._spare_events.pop() if self._spare_events else torch.cuda.Event(True)
