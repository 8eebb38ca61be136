"""Whether blocks pass through buffers or are moved as they lie: whichever is quicker here.

Straight costs no copy. But where the machine is a virtual one, its disk may be twice as quick with
memory that it has used lately, and that lies in large pieces, as with rows that it has not seen for
long: 4.1 instead of 2.1 GB/s on one machine, 2.6 instead of 3.0 on another. Nothing tells
beforehand, so both are tried now and then.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import NamedTuple

__all__ = ["Route", "Routes"]

logger = logging.getLogger(__name__)

_WINDOW_BYTES = 32 << 20
"""So much is moved for one measurement."""
_FIRST_WINDOWS = 3
"""Of each way, before one is preferred."""
_EVERY = 128
"""After so many measurements, one of the way that was a little slower."""
_RARELY, _MOST_RARELY = 8, 64
"""So many times rarer, if it was twice as slow, and in proportion: to try it costs more then, and
it is less likely to be the quicker one now. So many times at most."""
_MOST_TRIED_BYTES = 8 * _WINDOW_BYTES
"""What is tried is given up if there was no measurement by then: there is too little to do."""
_WEIGHT = 0.25
"""Of the newest measurement."""
_TO_BUFFERS, _TO_STRAIGHT = 1.1, 1.0
"""What buffers are taken from, as often as quick as straight, and what they are left below: to copy
costs the processor something, and chance alone should change nothing."""
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
        self._rates: dict[bool, float] = {}
        self._num_measured = {False: 0, True: 0}
        self._preferred: bool | None = None
        """Whether buffers are. None: not known yet."""
        self._is_buffered = False
        self._num_open = 0
        self._num_to_skip = 0
        """Units that have to end before the way of today is measured."""
        self._since: float | None = None
        """When what is being measured began."""
        self._num_bytes = 0
        """That were moved since then."""
        self._num_since_other = 0
        """Measurements since the other way was tried."""
        self._tried_bytes = 0
        """Moved since a way that is not preferred, or not yet, was taken."""

    def begin(self) -> bool:
        """Whether the next unit passes through buffers. `end` follows."""
        with self._lock:
            self._num_open += 1
            return self._is_buffered

    def end(self, num_bytes: int) -> None:
        """A unit has ended, and so many bytes of it were moved."""
        with self._lock:
            self._num_open -= 1
            if self._is_buffered is not self._preferred:
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
                    self._measured(self._num_bytes, self._since, self._now())
            if self._tried_bytes >= _MOST_TRIED_BYTES:
                self._go(self._preferred or False)

    def _measured(self, num_bytes: int, began: float, ended: float) -> None:
        self._since, self._num_bytes = ended, 0
        way = self._is_buffered
        rate = num_bytes / max(ended - began, 1e-9)
        before = self._rates.get(way, rate)
        self._rates[way] = before + _WEIGHT * (rate - before)
        self._num_measured[way] += 1
        self._num_since_other += 1
        if min(self._num_measured.values()) < _FIRST_WINDOWS:
            self._go(not way)
            return
        is_buffered = self._prefer()
        if way is not is_buffered and rate > _TO_BUFFERS * self._rates[is_buffered]:
            return  # it has become the quicker one, or it was chance: the next ones will tell
        slowness = self._rates[is_buffered] / self._rates[not is_buffered] - 1
        rarely = min(max(_RARELY * slowness, 1), _MOST_RARELY)
        self._go(is_buffered is not (self._num_since_other >= _EVERY * rarely))

    def _prefer(self) -> bool:
        """Whether buffers are preferred by all that is known now."""
        ratio = self._rates[True] / self._rates[False]
        is_buffered = ratio > (_TO_STRAIGHT if self._preferred else _TO_BUFFERS)
        if is_buffered is not self._preferred:
            self._preferred = is_buffered
            logger.info(
                "%s go %s: %.2f GB/s through buffers, %.2f GB/s straight",
                self._what,
                "through buffers" if is_buffered else "straight",
                self._rates[True] / 1e9,
                self._rates[False] / 1e9,
            )
        return is_buffered

    def _go(self, is_buffered: bool) -> None:
        """That way from now on."""
        self._tried_bytes = 0
        if is_buffered is not self._is_buffered:
            self._is_buffered = is_buffered
            self._num_to_skip = self._num_open
            self._since = None
            self._num_since_other = 0


class Routes(NamedTuple):
    """Of a tier."""

    loads: Route
    stores: Route

    @classmethod
    def of(cls, where: object) -> Routes:
        """`where`: the tier's path, for the log."""
        return cls(Route(f"{where}: loads"), Route(f"{where}: stores"))
