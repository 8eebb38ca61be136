"""Bounce buffers: their memory, the copies through them, and the decision whether to use them.

A block is moved between the file and its row, the bytes of its slot in host memory, either directly
(zero-copy) or through a buffer. Buffers can be faster: the disk of a virtual machine may be twice
as fast with memory that it has used recently and that is physically contiguous. Buffers gave 4.1
instead of 2.1 GB/s on a machine with an H200, and 2.6 instead of 3.0 GB/s on another. No property
of the machine predicts this, so each tier measures both routes with its first blocks, in turns, and
then keeps one.
"""

from __future__ import annotations

import logging
import mmap
import statistics
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Final, NamedTuple

import numpy as np

from kvtier.tiering.io.aio import address_of

__all__ = ["Payload", "Route", "Routes", "copy_bytes", "make_buffers"]

logger = logging.getLogger(__name__)

_HUGE_PAGE_BYTES = 2 << 20
_MADV_WIPEONFORK: Final = 18
"""Python's `mmap` has no constant for it."""
_RELEASE_GIL_BYTES = 256 << 10
"""Copies of this size or more release the interpreter lock. A smaller copy takes no longer than
releasing the lock and taking it back."""

_WINDOW_BYTES = 32 << 20
"""Bytes moved for one measurement."""
_NUM_PAIRS = 9
"""Number of pairs of measurements, one of each route, before a route is chosen. Other load on the
machine mostly slows both measurements of a pair equally, so their ratio stays. The median of the
ratios ignores the few pairs in which the load slowed only one of the two."""
_MARGIN = 1.2
"""Choose buffers if they are at least this many times as fast as zero-copy. More than 1, because a
copy takes processor time, and noise alone must not decide for buffers."""
_MOST_TRIED_BYTES = 8 * _WINDOW_BYTES
"""Switch back to zero-copy if buffers could not be measured within this many bytes, because the
tier is not busy enough."""
_BUSY = 2
"""Units (reads or writes, see `lane`) that must be in flight during a measurement. With fewer, the
measurement says nothing about the disk."""


def make_buffers(num_bytes: int) -> memoryview:
    """Zeroed memory, aligned to huge pages and backed by them where the kernel has some.

    With single pages scattered over memory, the disk of a virtual machine may take twice as long.
    """
    memory = mmap.mmap(
        -1, num_bytes + _HUGE_PAGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    )
    if num_bytes >= _HUGE_PAGE_BYTES:
        with suppress(OSError):  # a kernel without huge pages
            memory.madvise(mmap.MADV_HUGEPAGE)
    with suppress(OSError):  # Linux before 4.14
        # Give a forked child zeros. Otherwise parent and child would share these pages
        # copy-on-write: a write by the parent would give the parent a copy, while a transfer in
        # flight went on using the original page, which is then the child's.
        memory.madvise(_MADV_WIPEONFORK)
    start = -address_of(memory) % _HUGE_PAGE_BYTES
    return memoryview(memory)[start : start + num_bytes]


class Payload(NamedTuple):
    """The memory through which one block moves between a file and a row of the primary tier. Used
    on lane threads."""

    memory: memoryview
    """The memory that the kernel reads or writes: a buffer of the lane, or the row itself."""
    row: memoryview

    def collect(self) -> None:
        """Copy the row into `memory`, before the block is written."""
        self._copy(self.memory, self.row)

    def deliver(self) -> None:
        """Copy `memory` into the row, after the block was read and verified."""
        self._copy(self.row, self.memory)

    def _copy(self, target: memoryview, source: memoryview) -> None:
        if self.memory is not self.row:
            copy_bytes(target, source)


def copy_bytes(target: memoryview, source: memoryview) -> None:
    """Copy a block. If it is large, other threads can run Python meanwhile."""
    if len(source) < _RELEASE_GIL_BYTES:
        target[:] = source
    else:
        np.copyto(np.frombuffer(target, np.uint8), np.frombuffer(source, np.uint8))


class Route:
    """Decides whether blocks go through buffers or zero-copy. All lanes (I/O threads) of a tier
    share one object for loads and one for stores. Any thread.

    After a switch to the other route, the measurement starts when as many units have ended as were
    in flight at the switch. From then on, every unit that ends counts.
    """

    def __init__(self, name: str, now: Callable[[], float] = time.perf_counter) -> None:
        """`name`: for the log."""
        self._name = name
        self._now = now
        self._lock = threading.Lock()
        self._is_chosen = False
        self._is_buffered = False
        self._pairs: list[tuple[float, float]] = []
        """Pairs of measurements, one right after the other, in bytes per second: zero-copy, through
        buffers."""
        self._zero_copy_rate = 0.0
        """Bytes per second, measured right before the switch to buffers."""
        self._num_open = 0
        """Units for which `begin` was called and `end` was not."""
        self._num_to_skip = 0
        """Units that must still end before the measurement starts."""
        self._since: float | None = None
        """When the current measurement started; None: it has not."""
        self._num_bytes = 0
        """Bytes moved since then."""
        self._tried_bytes = 0
        """Bytes moved since the switch to buffers."""

    def begin(self) -> bool:
        """True if the next unit goes through buffers. The caller must call `end` once when that
        unit has ended."""
        if self._is_chosen:
            return self._is_buffered
        with self._lock:
            self._num_open += 1
            return self._is_buffered

    def end(self, num_bytes: int) -> None:
        """Count a unit that has ended. `num_bytes`: bytes that it moved; 0 if it failed."""
        if self._is_chosen:
            return
        with self._lock:
            if self._is_chosen:  # another thread has chosen since the first check
                return
            self._num_open -= 1
            if self._is_buffered:
                self._tried_bytes += num_bytes
            if self._num_to_skip:
                self._num_to_skip -= 1
                return
            if self._num_open < _BUSY:
                self._since = None
            elif self._since is None:
                self._since, self._num_bytes = self._now(), 0
            else:
                self._num_bytes += num_bytes
                if self._num_bytes >= _WINDOW_BYTES:
                    self._measured(self._num_bytes / max(self._now() - self._since, 1e-9))
            if self._tried_bytes >= _MOST_TRIED_BYTES:
                self._switch(False)

    def _measured(self, rate: float) -> None:
        if not self._is_buffered:
            self._zero_copy_rate = rate
            self._switch(True)
            return
        self._pairs.append((self._zero_copy_rate, rate))
        if len(self._pairs) < _NUM_PAIRS:
            self._switch(False)
        else:
            self._choose()

    def _choose(self) -> None:
        ratio = statistics.median(buffered / zero_copy for zero_copy, buffered in self._pairs)
        self._is_buffered = ratio >= _MARGIN
        self._is_chosen = True
        zero_copy, buffered = (statistics.median(rates) for rates in zip(*self._pairs, strict=True))
        logger.info(
            "%s are %s: %.2f GB/s through buffers, %.2f GB/s zero-copy",
            self._name,
            "copied through buffers" if self._is_buffered else "zero-copy",
            buffered / 1e9,
            zero_copy / 1e9,
        )

    def _switch(self, is_buffered: bool) -> None:
        """Take this route until the next switch, and start a new measurement."""
        self._is_buffered = is_buffered
        self._num_to_skip = self._num_open
        self._since = None
        self._tried_bytes = 0


class Routes(NamedTuple):
    """The decisions of a tier: one for loads, one for stores."""

    loads: Route
    stores: Route

    @classmethod
    def of(cls, where: object) -> Routes:
        """`where`: the tier's path, for the log."""
        return cls(Route(f"{where}: loads"), Route(f"{where}: stores"))
