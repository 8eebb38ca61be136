"""Whether blocks pass through buffers or are moved as they lie: measured once, then kept.

Straight costs no copy. But where the machine is a virtual one, its disk may be twice as quick with
memory that it has used lately, and that lies in large pieces, as with rows that it has not seen for
long: 4.1 instead of 2.1 GB/s on one machine, 2.6 instead of 3.0 on another. Nothing tells
beforehand, so both ways are measured with the first blocks, in turn.
"""

from __future__ import annotations

import logging
import statistics
import threading
import time
from collections.abc import Callable
from typing import NamedTuple

__all__ = ["Route", "Routes"]

logger = logging.getLogger(__name__)

_WINDOW_BYTES = 32 << 20
"""Bytes moved for one measurement."""
_NUM_PAIRS = 9
"""Measurements of each way before one is chosen. Whatever else the machine does slows both windows
of a pair alike, so that their ratio still tells; the median leaves out pairs where it did not."""
_MARGIN = 1.2
"""Buffers are chosen if they are this many times as quick: a copy costs processor time, and chance
alone should not choose them."""
_MOST_TRIED_BYTES = 8 * _WINDOW_BYTES
"""Buffers are left if they could not be measured by then: there is too little to do."""
_BUSY = 2
"""With fewer units under way, it is not the disk that is measured."""


class Route:
    """The way of loads, or of stores. Any thread; one for all lanes of a tier.

    When the way changes, as many units as are under way have to end before anything is measured.
    What ends from then on, in whatever order, is what the disk does in that time.
    """

    def __init__(self, what: str, now: Callable[[], float] = time.perf_counter) -> None:
        """`what`: for the log."""
        self._what = what
        self._now = now
        self._lock = threading.Lock()
        self._is_chosen = False
        self._is_buffered = False
        self._pairs: list[tuple[float, float]] = []
        """Bytes per second, straight and through buffers, one right after the other."""
        self._straight_rate = 0.0
        """Measured right before buffers were taken."""
        self._num_open = 0
        self._num_to_skip = 0
        """Units that have to end before the present way is measured."""
        self._since: float | None = None
        """When what is being measured began."""
        self._num_bytes = 0
        """Moved since then."""
        self._tried_bytes = 0
        """Moved since buffers were taken to be measured."""

    def begin(self) -> bool:
        """Whether the next unit passes through buffers. `end` follows."""
        if self._is_chosen:
            return self._is_buffered
        with self._lock:
            self._num_open += 1
            return self._is_buffered

    def end(self, num_bytes: int) -> None:
        """A unit has ended, and `num_bytes` of it were moved."""
        if self._is_chosen:
            return
        with self._lock:
            if self._is_chosen:  # by another thread, just now
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
                self._go(False)

    def _measured(self, rate: float) -> None:
        if not self._is_buffered:
            self._straight_rate = rate
            self._go(True)
            return
        self._pairs.append((self._straight_rate, rate))
        if len(self._pairs) < _NUM_PAIRS:
            self._go(False)
        else:
            self._choose()

    def _choose(self) -> None:
        ratio = statistics.median(buffered / straight for straight, buffered in self._pairs)
        self._is_buffered = ratio >= _MARGIN
        self._is_chosen = True
        straight, buffered = (statistics.median(rates) for rates in zip(*self._pairs, strict=True))
        logger.info(
            "%s go %s: %.2f GB/s through buffers, %.2f GB/s straight",
            self._what,
            "through buffers" if self._is_buffered else "straight",
            buffered / 1e9,
            straight / 1e9,
        )

    def _go(self, is_buffered: bool) -> None:
        """That way from now on."""
        self._is_buffered = is_buffered
        self._num_to_skip = self._num_open
        self._since = None
        self._tried_bytes = 0


class Routes(NamedTuple):
    """Of a tier."""

    loads: Route
    stores: Route

    @classmethod
    def of(cls, where: object) -> Routes:
        """`where`: the tier's path, for the log."""
        return cls(Route(f"{where}: loads"), Route(f"{where}: stores"))
