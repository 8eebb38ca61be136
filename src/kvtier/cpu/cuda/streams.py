"""Copies pages between the device and pinned host memory, on streams of its own."""

from __future__ import annotations

import logging
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from typing import Any, NamedTuple

import torch

from kvtier.cpu.cuda.copies import Copies, CopyPath, FindGrids, Ticket
from kvtier.cpu.cuda.driver import CudaDriver, CudaError
from kvtier.cpu.cuda.page_kernel import PageKernel
from kvtier.cpu.cuda.page_mover import (
    STAGING_BYTES,
    Choice,
    PageMover,
    Plan,
    by_size,
    by_size_if_large,
)
from kvtier.cpu.cuda.page_table import Columns
from kvtier.cpu.cuda.resources import DeviceMemory, Event
from kvtier.cpu.job_thread import JobThread
from kvtier.cpu.worker import TransferRefused

__all__ = ["StreamCopies"]

logger = logging.getLogger(__name__)

_SMALL_JOB_PAGES = 512
"""Largest job, in pages, that the job thread plans. Planning it on the engine's thread would only
delay that thread: no other thread could run meanwhile, because numpy does not release the
interpreter lock for arrays this short."""
_AT_ONCE_S, _AT_ONCE_S_PER_PAGE, _MOST_AT_ONCE_S = 20e-6, 20e-9, 300e-6
"""Seconds that the engine's thread spends on beginning a job whose direction is idle: a constant,
an addition per page, and the limit. The copies that it begins keep the device busy until the job
thread gets the interpreter lock, which takes a while beside a busy engine."""


class StreamCopies(Copies):
    """Two streams and a job thread for each direction.

    The driver takes a microsecond or more per large page, so the job thread makes most calls to it.
    For every job, the engine's thread records an event that the job waits for. For a job of more
    than `_SMALL_JOB_PAGES` pages, the engine's thread also plans the copies and, if the direction
    is idle, starts the first of them, so that the device need not wait for the job thread.
    """

    def __init__(
        self,
        device: Any,
        driver: CudaDriver,
        kernel: PageKernel | None,
        choose: Choice | None = None,
    ) -> None:
        """`kernel`: if None, the copy engines copy everything. `choose`: returns the `CopyPath` of
        a `Grid` of pages; by default the fastest path."""
        self._device = device
        self._driver = driver
        self._zeros: DeviceMemory | None = None
        self._is_by_size = choose is None
        with torch.cuda.device(device), ExitStack() as undo:
            movers = []
            for is_store in (True, False):
                mover = PageMover(driver, kernel, choose or by_size, is_store=is_store)
                undo.callback(mover.close)
                movers.append(mover)
            undo.pop_all()
        self._stores, self._loads = (
            _Direction(mover, driver, device, JobThread(name))
            for mover, name in zip(movers, ("kvtier-store", "kvtier-load"), strict=True)
        )

    @property
    def taken(self) -> Counter[CopyPath]:
        """Grids copied by each path."""
        return self._stores.mover.taken + self._loads.mover.taken

    def make_zeros(self, num_bytes: int) -> int:
        self._zeros = DeviceMemory.zeros(self._driver, self._device, num_bytes)
        return self._zeros.address

    def expect(self, columns: Sequence[Columns]) -> None:
        in_runs = [each for each in columns if each.run_bytes]
        with torch.cuda.device(self._device):
            for direction in (self._stores, self._loads):
                direction.mover.expect(columns)
            if any(not self._is_by_size or _is_staged(each) for each in in_runs):
                self._make_staging()
        for each in columns:
            if not each.are_zeros:
                logger.info(
                    "Blocks of %d pages of %.1f KiB are copied from and to %s, large jobs by: %s",
                    len(each),
                    each.page_bytes / 2**10,
                    self._device,
                    self._loads.mover.way_of_large(each).words,
                )

    def _make_staging(self) -> None:
        try:
            for direction in (self._stores, self._loads):
                direction.mover.make_staging()
        except CudaError as error:
            logger.warning(
                "%d MiB of device memory for buffers cannot be allocated. Pages are copied by a "
                "kernel that slows the model more. Lower the engine's share of device memory: %s",
                4 * STAGING_BYTES >> 20,
                error,
            )
            for direction in (self._stores, self._loads):
                direction.mover.free_staging()

    def start(self, find: FindGrids, num_pages: int, *, is_store: bool) -> Ticket:
        direction = self._stores if is_store else self._loads
        # Torch's compiler uses these private calls, too. The public calls in `torch.cuda` may
        # take some 50 us.
        index = self._device.index
        stream = torch._C._cuda_getCurrentRawStream(index)
        if torch._C._cuda_getDevice() == index:  # the usual case
            return direction.start(find, num_pages, stream)
        with torch.cuda.device(self._device):
            return direction.start(find, num_pages, stream)

    def flush(self) -> None:
        self._stores.flush()
        self._loads.flush()

    def close(self) -> None:
        with ExitStack() as undo:
            if self._zeros is not None:
                undo.callback(self._zeros.free)
            undo.callback(self._loads.close)
            undo.callback(self._stores.close)


class _Events(NamedTuple):
    """The events of a job."""

    computed: Event
    """Recorded on the engine's stream when the job was submitted."""
    started: Event
    ended: Event


class _StreamTicket(Ticket):
    def __init__(self, direction: _Direction, events: _Events) -> None:
        self._direction = direction
        self.events = events
        self.is_handed_over = False
        """True once the whole job is on the streams, or has failed. The thread that puts the job on
        the streams sets this last."""
        self.error: Exception | None = None
        self.elapsed_s: float | None = None
        """Seconds that the copy took; None until the job is known to have ended."""

    def is_done(self) -> bool:
        if self.elapsed_s is None:
            self._direction.collect()
        if self.elapsed_s is not None and self.error is not None:
            raise self.error
        return self.elapsed_s is not None

    def wait(self) -> None:
        if self.elapsed_s is None:
            if not self.is_handed_over:
                self._direction.await_thread()
            if self.error is None:
                self.events.ended.synchronize()
        self.is_done()

    def seconds(self) -> float:
        assert self.elapsed_s is not None, "asked before the copy was done"
        return self.elapsed_s


class _Direction:
    """The jobs under way in one direction.

    The engine's thread calls the methods before the heading "the job thread", and the job thread
    the methods after it, except where noted. One thread at a time puts jobs on the streams: the
    engine's thread begins a job only if all jobs before it have ended, and the job thread does
    everything else.
    """

    def __init__(
        self, mover: PageMover, driver: CudaDriver, device: Any, thread: JobThread
    ) -> None:
        self.mover = mover
        self._driver = driver
        self._device = device
        self._thread = thread
        self._under_way: deque[_StreamTicket] = deque()
        self._spare_events: list[_Events] = []
        self._is_flushed = False
        """True once the engine has called `flush`. vLLM with sleep mode does so at the end of every
        step, and must not wait until the step is computed."""
        self._is_closed = False

    def start(self, find: FindGrids, num_pages: int, engines_stream: int) -> Ticket:
        self._driver.require_no_capture(engines_stream)
        events = self._spare_events.pop() if self._spare_events else _new_events(self._driver)
        ticket = _StreamTicket(self, events)
        events.computed.record(engines_stream)
        is_small = num_pages <= _SMALL_JOB_PAGES
        planned = None if is_small else self._plans(find)
        steps = self._steps(ticket, lambda: self._plans(find) if planned is None else planned)
        is_idle = not self._under_way
        try:
            self._under_way.append(ticket)
            if is_small or not is_idle:
                self._thread.put(lambda: self._finish(ticket, steps, is_small=is_small))
            else:
                self._begin(ticket, steps, num_pages)
        except RuntimeError as error:  # the thread cannot be started
            self._fail(ticket, error)
        except BaseException as error:  # an interrupt: `wait` must not wait for this job forever
            self.await_thread()
            self._fail(ticket, error)
            raise
        return ticket

    def collect(self) -> None:
        """Mark the jobs that have ended. Raises if the device has failed."""
        while self._under_way and self._under_way[0].is_handed_over:
            ticket = self._under_way[0]
            _, started, ended = ticket.events
            has_failed = ticket.error is not None
            if not has_failed and not ended.is_reached():
                return
            ticket.elapsed_s = 0.0 if has_failed else ended.seconds_since(started)
            self._under_way.popleft()
            if not has_failed:
                # Done last, so that no two jobs get the same events if this is interrupted.
                self._spare_events.append(ticket.events)

    def flush(self) -> None:
        self._is_flushed = True
        self.await_thread()

    def await_thread(self) -> None:
        """Return when the job thread has put all jobs on the streams."""
        self._thread.flush()

    def close(self) -> None:
        self._thread.close()
        if not self._is_closed:
            self._is_closed = True
            self._spare_events.clear()
            self.mover.close()

    def _begin(self, ticket: _StreamTicket, steps: Iterator[bool], num_pages: int) -> None:
        """Do the first steps, for a bounded time, and leave the rest to the job thread. Do only one
        step if the job's blocks are not computed yet."""
        share = min(_AT_ONCE_S + num_pages * _AT_ONCE_S_PER_PAGE, _MOST_AT_ONCE_S)
        until = time.perf_counter() + share
        try:
            for would_wait in steps:
                is_computed = ticket.events.computed.is_reached()
                if would_wait or not is_computed or time.perf_counter() > until:
                    self._thread.put(lambda: self._finish(ticket, steps))
                    return
        except Exception as error:
            # Called on the job thread, because `_fail` waits for the copies that are under way.
            failure = error
            self._thread.put(lambda: self._fail(ticket, failure))
        else:
            ticket.is_handed_over = True

    def _plans(self, find: FindGrids) -> list[Plan]:
        """Plan the copies of a job. Called by either thread."""
        return [self.mover.plan(grid) for grid in find()]

    def _steps(self, ticket: _StreamTicket, find_plans: Callable[[], list[Plan]]) -> Iterator[bool]:
        """Put a job on the streams. Yields after each step, as `PageMover.steps` does. Run by one
        thread at a time."""
        try:
            plans = find_plans()
        except TransferRefused as refusal:
            # The traceback's frames would keep the job's memory alive.
            raise refusal.with_traceback(None) from None
        computed, started, ended = ticket.events
        self.mover.wait_for(computed)
        started.record(self.mover.stream)
        yield from self.mover.steps(plans)
        ended.record(self.mover.stream)

    # --- the job thread ---------------------------------------------------------------------------

    def _finish(
        self, ticket: _StreamTicket, steps: Iterator[bool], *, is_small: bool = False
    ) -> None:
        """Put the rest of a job on the streams. A large job waits until its blocks are computed.

        Until then no copy can run, and all of them would stay in the device's queues, which may
        have less room than `QueueRoom` expects: streams share queues, and the engine's own launches
        are in them. The driver would block this thread, which holds the interpreter lock, until the
        engine's step has been computed.
        """
        try:
            torch.cuda.set_device(self._device)
            if not (is_small or self._is_flushed):
                ticket.events.computed.synchronize()
            for _ in steps:
                pass
        except BaseException as error:
            self._fail(ticket, error)
        else:
            ticket.is_handed_over = True

    def _fail(self, ticket: _StreamTicket, error: BaseException) -> None:
        """End a job with an error. First waits until none of its copies is under way and all jobs
        before it have ended, because the caller may then reuse the memory. `start` also calls this,
        on the engine's thread, if the job thread cannot be started or on an interrupt."""
        # The ticket raises it in the submitting thread.
        ticket.error = error if isinstance(error, Exception) else RuntimeError(repr(error))
        try:
            self.mover.settle()
        finally:
            ticket.is_handed_over = True


def _is_staged(columns: Columns) -> bool:
    return by_size_if_large(columns) is CopyPath.STAGED


def _new_events(driver: CudaDriver) -> _Events:
    return _Events(Event(driver), Event(driver, is_timed=True), Event(driver, is_timed=True))
