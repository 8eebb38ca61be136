"""The metrics of one engine since its start, for readers on other threads."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping
from typing import Any

from kvtier.base import MetricDefinition, OffloadingStats

__all__ = ["MetricTotals"]

_DEFAULT_BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)


class _Histogram:
    """Observations, counted by bucket."""

    __slots__ = ("bounds", "counts", "sum")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        """One more than there are bounds: for observations above the last one."""
        self.sum = 0.0

    def add(self, value: float) -> None:
        self.counts[bisect_left(self.bounds, value)] += 1
        self.sum += value


class MetricTotals:
    """Sums what the managers of one engine report.

    `add` is for the scheduler's thread. Any thread may read: it sees each series before or after a
    report, but two series may be from different reports. There are at most as many series as the
    definitions have.
    """

    def __init__(self, definitions: Mapping[str, MetricDefinition]) -> None:
        self.definitions = dict(definitions)
        self._bounds = {
            series: definition.buckets or _DEFAULT_BUCKETS
            for name, definition in definitions.items()
            for series in definition.series(name)
        }
        self._counters: dict[str, float] = {}
        self._gauges: dict[str, float] = {}
        self._histograms: dict[str, _Histogram] = {}

    def add(self, stats: OffloadingStats) -> None:
        """Add what a manager has counted since its last report. Series that are not defined are
        left out."""
        known = self._bounds
        counters = self._counters
        for series, increase in stats.counters.items():
            if series in known:
                counters[series] = counters.get(series, 0) + increase
        for series, value in stats.gauges.items():
            if series in known:
                self._gauges[series] = value
        for series, observations in stats.histograms.items():
            if series in known:
                histogram = self._histograms.get(series)
                if histogram is None:
                    histogram = self._histograms[series] = _Histogram(known[series])
                for value in observations:
                    histogram.add(value)

    def counters(self) -> dict[str, float]:
        """Counters since the start, by series. One that was never increased may be missing."""
        return dict(self._counters)

    def gauges(self) -> dict[str, float]:
        """The last values, by series."""
        return dict(self._gauges)

    def histograms(self) -> dict[str, dict[str, Any]]:
        """By series: upper bounds of the buckets, how many observations each has (one more: those
        above the last bound), and the sum of all observations."""
        return {
            series: {
                "bounds": list(histogram.bounds),
                "counts": list(histogram.counts),
                "sum": histogram.sum,
            }
            for series, histogram in dict(self._histograms).items()
        }
