"""Copies in streams of their own, between the device and pinned memory."""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter, deque
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import torch

from kvtier.cpu.cuda.copies import Copies, Ticket
from kvtier.cpu.cuda.copy_paths import Path
from kvtier.cpu.cuda.driver import CudaDriver
from kvtier.cpu.cuda.page_kernel import PageKernel
from kvtier.cpu.cuda.page_mover import STAGING_BYTES, Choice, PageMover, by_size, may_be_staged
from kvtier.cpu.cuda.page_table import Pages, Run
from kvtier.cpu.lane import Lane

__all__ = ["StreamCopies"]

logger = logging.getLogger(__name__)

_AT_ONCE_S = 40e-6
"""How long the engine's thread goes on with a job that finds its direction idle."""


class StreamCopies(Copies):
    """Two streams for each direction, and a thread that hands jobs to the device.

    The driver takes its time, a microsecond and more for a large page: the engine's thread does
    not wait for that. It marks in its stream what a job has to wait for, and if nothing else is
    under way it also hands over the first pages, so that the device need not wait for a thread.
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
        self.taken: Counter[Path] = Counter()
        """How many jobs went which way; of a large one, each of its parts counts."""
        with torch.cuda.device(device):
            self._stores, self._loads = (
                _Direction(
                    PageMover(
                        device,
                        driver,
                        kernel,
                        choose or by_size,
                        self.taken,
                        is_store=is_store,
                    ),
                    device,
                    Lane("kvtier-store" if is_store else "kvtier-load"),
                )
                for is_store in (True, False)
            )

    def expect_runs(self, run: Run) -> None:
        if self._is_by_size and not may_be_staged(run):
            return
        with torch.cuda.device(self._device):
            try:
                self._stores.mover.make_staging()
                self._loads.mover.make_staging()
            except torch.OutOfMemoryError:
                logger.warning(
                    "No %d MiB of device memory are left to collect pages in: they are copied by a "
                    "kernel that disturbs the model's more. Lower the engine's share of the memory",
                    4 * STAGING_BYTES >> 20,
                )
            # Whoever had that memory before may still be using it, in a stream of its own.
            torch.cuda.current_stream().synchronize()

    def start(self, parts: Iterator[Pages], *, is_store: bool) -> Ticket:
        direction = self._stores if is_store else self._loads
        with torch.cuda.device(self._device):
            return direction.start(parts)

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
        """Set when the device has all of the job, or has refused it."""
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

    The engine's thread calls all but what is marked. A job is handed over by one thread at a time:
    by the engine's only while all jobs before it are done, and then by that of `lane`.
    """

    def __init__(self, mover: PageMover, device: Any, lane: Lane) -> None:
        self.mover = mover
        self._device = device
        self._lane = lane
        self._under_way: deque[_StreamTicket] = deque()
        self._spare_events: list[tuple[Any, Any, Any]] = []

    def start(self, parts: Iterator[Pages]) -> Ticket:
        events = self._spare_events.pop() if self._spare_events else _new_events()
        ticket = _StreamTicket(self, *events)
        events[0].record()  # in the stream that is current
        steps = self._steps(ticket, parts)
        if self._under_way:
            self._lane.put(lambda: self._finish(ticket, steps))
        else:
            self._begin(ticket, steps)
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
        self._spare_events.clear()
        self.mover.close()

    def _begin(self, ticket: _StreamTicket, steps: Iterator[bool]) -> None:
        """Hand over what takes no time, and leave the rest to the thread."""
        until = time.perf_counter() + _AT_ONCE_S
        try:
            for would_wait in steps:
                if would_wait or time.perf_counter() > until:
                    self._lane.put(lambda: self._finish(ticket, steps))
                    return
        except Exception as error:
            failure = error
            try:
                self._lane.put(lambda: self._fail(ticket, failure))
            except RuntimeError:  # there is no thread
                self._fail(ticket, failure)
        else:
            ticket.is_handed_over.set()

    def _steps(self, ticket: _StreamTicket, parts: Iterator[Pages]) -> Iterator[bool]:
        """Any one thread at a time."""
        computed, started, ended = ticket.events
        self.mover.wait_for(computed)
        started.record(self.mover.stream)
        yield from self.mover.steps(parts)
        ended.record(self.mover.stream)

    # --- the thread ---------------------------------------------------------------------------

    def _finish(self, ticket: _StreamTicket, steps: Iterator[bool]) -> None:
        try:
            torch.cuda.set_device(self._device)
            for _ in steps:
                pass
        except BaseException as error:
            self._fail(ticket, error)
        else:
            ticket.is_handed_over.set()

    def _fail(self, ticket: _StreamTicket, error: BaseException) -> None:
        """Some of a failed job may be on its way, and whoever hears of it may reuse the memory."""
        # For the thread that asks.
        ticket.error = error if isinstance(error, Exception) else RuntimeError(repr(error))
        self.mover.settle()
        ticket.is_handed_over.set()


def _new_events() -> tuple[Any, Any, Any]:
    """For when a job's turn has come in the engine's stream, when it starts, and when it ends."""
    return torch.cuda.Event(), torch.cuda.Event(True), torch.cuda.Event(True)
