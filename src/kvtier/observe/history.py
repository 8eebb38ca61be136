"""The last hour of an engine: a sample of its main metrics every ten seconds."""

from __future__ import annotations

import time
from array import array
from collections.abc import Callable, Mapping
from math import isnan, nan
from typing import Any

from kvtier.base import MetricKind
from kvtier.observe.totals import MetricTotals

__all__ = ["EVERY_S", "History", "records"]

EVERY_S = 10.0
_NUM_SAMPLES = 360
_MAX_SERIES = 384
"""With 8 bytes for each value, a history takes at most 1.1 MiB."""
_MAX_ANSWERED = 60
"""Samples in one answer. Encoding keeps the scheduler's thread from Python's lock, so a long answer
would be felt: this many take less than a millisecond with two tiers."""
_ENDS = (
    "_loaded_blocks",
    "_stored_blocks",
    "_evicted_blocks",
    "_queued_blocks",
)
"""The ends of the names of metrics that managers and tiers have for themselves."""
_NAMES = frozenset(
    {
        "kvtier_first_token_seconds",
        "kvtier_cpu_resident_blocks",
        "kvtier_prompt_tokens",
        "kvtier_requests",
        "kvtier_saved_prefill_seconds",
        "kvtier_tiering_wait_seconds",
        "kvtier_tier_blocks",
        "kvtier_tier_bytes",
        "kvtier_tier_capacity_bytes",
        "kvtier_tier_hit_blocks",
        "kvtier_tier_lookups",
        "kvtier_tier_read_back_bytes",
        "kvtier_tier_seconds",
        "kvtier_tier_used_bytes",
        "kvtier_tier_waiting_blocks",
    }
)


def records(metric: str) -> bool:
    """True if a history has this metric."""
    return metric in _NAMES or metric.endswith(_ENDS)


class History:
    """Samples of the totals of one engine. The thread of the status socket calls the methods."""

    def __init__(
        self,
        totals: MetricTotals,
        now: Callable[[], float] = time.time,
        elapsed: Callable[[], float] = time.monotonic,
    ) -> None:
        """`now`: seconds since the epoch. `elapsed`: seconds, whatever becomes of the clock."""
        self._totals = totals
        self._now, self._elapsed = now, elapsed
        self._due_s = elapsed()
        self._num_samples = 0
        """Taken since the start. Sample n is at n modulo `_NUM_SAMPLES`."""
        self._times = array("d")
        self._columns: dict[str, array[float]] = {}
        """Values by series. NaN: the series had none."""
        self._kinds: dict[str, MetricKind] = {
            series: definition.kind
            for name, definition in totals.definitions.items()
            if records(name)
            for series in definition.series(name)
        }

    def sample(self) -> None:
        """Take a sample if one is due. To be called about once in a second."""
        elapsed = self._elapsed()
        if elapsed < self._due_s:
            return
        self._due_s = max(self._due_s + EVERY_S, elapsed)
        at = self._num_samples % _NUM_SAMPLES
        values = self._values()
        _put(self._times, at, self._now())
        for series in values.keys() - self._columns.keys():
            if len(self._columns) < _MAX_SERIES:
                self._columns[series] = array("d", [nan]) * min(self._num_samples, _NUM_SAMPLES)
        for series, column in self._columns.items():
            _put(column, at, values.get(series, nan))
        self._num_samples += 1

    def _values(self) -> dict[str, float]:
        kinds = self._kinds
        values = {
            series: value
            for series, value in (self._totals.counters() | self._totals.gauges()).items()
            if series in kinds
        }
        for series, its in self._totals.histograms().items():
            if series in kinds:
                name, brace, labels = series.partition("{")
                values[f"{name}_count{brace}{labels}"] = sum(its["counts"])
                values[f"{name}_sum{brace}{labels}"] = its["sum"]
        return values

    def answer(self, question: Mapping[str, Any]) -> dict[str, Any]:
        """The answer to `{"ask": "history", "after": N}`: the samples after the first N of this
        engine, oldest first, as far as they are kept; without `after`, all. If `has_more`, ask
        again with `after` as it is in the answer. A histogram is two series, the count and the sum
        of its observations."""
        after = question.get("after", 0)
        if not isinstance(after, int) or after < 0:
            raise ValueError(f"after={after!r}: give a number of samples")
        first = max(after, self._num_samples - _NUM_SAMPLES)
        end = min(self._num_samples, first + _MAX_ANSWERED)
        places = [number % _NUM_SAMPLES for number in range(first, end)]
        return {
            "now_s": self._now(),
            "every_s": EVERY_S,
            "times": [self._times[at] for at in places],
            "series": {
                series: [_number(column[at]) for at in places]
                for series, column in self._columns.items()
            },
            "after": max(first, end),
            "has_more": end < self._num_samples,
        }


def _put(column: array[float], at: int, value: float) -> None:
    if at < len(column):
        column[at] = value
    else:
        column.append(value)


def _number(value: float) -> float | None:
    """As it is sent: whole numbers without a fraction, which is shorter."""
    if isnan(value):
        return None
    return int(value) if value.is_integer() else value
