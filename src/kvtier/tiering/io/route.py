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
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

__all__ = ["Route", "Routes", "Trial"]

logger = logging.getLogger(__name__)

_TRIAL_BYTES = 32 << 20
_FIRST_TRIALS = 3
"""Of each way, before one is preferred."""
_EVERY = 128
"""One of so many trials is for the way that was slower."""
_WEIGHT = 0.25
"""Of the newest trial."""
_WORTH = 1.1
"""So much quicker must buffers be: to copy costs the processor something."""
_BUSY = 2
"""With fewer under way, it is not the disk that is measured."""


@dataclass(slots=True, eq=False)
class Trial:
    """Units that are begun one after the other, all in one way."""

    is_buffered: bool
    num_bytes: int = 0
    num_open: int = 0
    is_full: bool = False
    is_valid: bool = True


class Route:
    """The way of loads, or of stores. Any thread; one for all lanes of a tier.

    The time of a trial is that between the end of its last unit and the end of the last one of the
    trial before. It counts if there was always enough under way.
    """

    def __init__(self, what: str, now: Callable[[], float] = time.perf_counter) -> None:
        """`what`: for the log."""
        self._what = what
        self._now = now
        self._lock = threading.Lock()
        self._rates: dict[bool, float] = {}
        self._num_measured = {False: 0, True: 0}
        self._num_trials = 0
        self._preferred: bool | None = None
        self._trials = deque([Trial(is_buffered=True)])
        """Those that are not over; the last one is still being filled."""
        self._num_open = 0
        self._since: float | None = None
        """When the last trial ended, if the disk has been busy ever since."""

    def begin(self, num_bytes: int) -> Trial:
        """The next unit, of so many bytes, goes the way of this trial."""
        with self._lock:
            trial = self._trials[-1]
            if trial.is_full:
                trial = Trial(self._next_way())
                self._trials.append(trial)
            trial.num_bytes += num_bytes
            trial.num_open += 1
            trial.is_full = trial.num_bytes >= _TRIAL_BYTES
            self._num_open += 1
            return trial

    def end(self, trial: Trial) -> None:
        """A unit of that trial has ended, well or not."""
        with self._lock:
            trial.num_open -= 1
            self._num_open -= 1
            is_busy = self._num_open >= _BUSY
            if not is_busy:
                for each in self._trials:
                    each.is_valid = False
            while self._trials[0].is_full and not self._trials[0].num_open:
                self._close(self._trials.popleft())
                if not self._trials:
                    self._trials.append(Trial(self._next_way()))
            if not is_busy:
                self._since = None

    def _close(self, trial: Trial) -> None:
        began, self._since = self._since, self._now()
        if began is None or not trial.is_valid or self._since <= began:
            return
        way = trial.is_buffered
        rate = trial.num_bytes / (self._since - began)
        before = self._rates.get(way, rate)
        self._rates[way] = before + _WEIGHT * (rate - before)
        self._num_measured[way] += 1
        self._prefer()

    def _prefer(self) -> None:
        if min(self._num_measured.values()) < _FIRST_TRIALS:
            return
        is_buffered = self._rates[True] > _WORTH * self._rates[False]
        if is_buffered is not self._preferred:
            self._preferred = is_buffered
            logger.info(
                "%s go %s: %.2f GB/s through buffers, %.2f GB/s straight",
                self._what,
                "through buffers" if is_buffered else "straight",
                self._rates[True] / 1e9,
                self._rates[False] / 1e9,
            )

    def _next_way(self) -> bool:
        self._num_trials += 1
        if self._preferred is None:
            return self._num_measured[True] <= self._num_measured[False]
        return self._preferred is (self._num_trials % _EVERY != 0)


class Routes(NamedTuple):
    """Of a tier."""

    loads: Route
    stores: Route

    @classmethod
    def of(cls, where: object) -> Routes:
        """`where`: the tier's path, for the log."""
        return cls(Route(f"{where}: loads"), Route(f"{where}: stores"))
