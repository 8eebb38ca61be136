"""A metrics endpoint for engines that are not vLLM, with the package prometheus-client.

vLLM has an endpoint of its own, and shows kvtier's metrics there.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from itertools import accumulate
from typing import TYPE_CHECKING, Any

from kvtier.base import MetricKind
from kvtier.observe.totals import MetricTotals

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry

__all__ = ["Exporter", "registry_of"]

_REMEDY = (
    "kvtier's metrics endpoint needs the package prometheus-client: pip install 'kvtier[metrics]'"
)


class _Collector:
    """Translates totals for prometheus-client, when it is asked for them. Any thread."""

    def __init__(self, totals: MetricTotals) -> None:
        self._totals = totals

    def describe(self) -> Iterable[Any]:
        return ()  # so that registering does not collect

    def collect(self) -> Iterable[Any]:
        from prometheus_client.core import (
            CounterMetricFamily,
            GaugeMetricFamily,
            HistogramMetricFamily,
        )

        counters, gauges = self._totals.counters(), self._totals.gauges()
        histograms = self._totals.histograms()
        for name, definition in self._totals.definitions.items():
            labels = [label for label, _ in definition.labels]
            text = definition.documentation
            family: Any
            if definition.kind is MetricKind.COUNTER:
                family = CounterMetricFamily(name, text, labels=labels)
                for series, values in definition.series(name).items():
                    family.add_metric(values, counters.get(series, 0.0))
            elif definition.kind is MetricKind.GAUGE:
                family = GaugeMetricFamily(name, text, labels=labels)
                for series, values in definition.series(name).items():
                    if series in gauges:
                        family.add_metric(values, gauges[series])
            else:
                family = HistogramMetricFamily(name, text, labels=labels)
                for series, values in definition.series(name).items():
                    if series in histograms:
                        found = histograms[series]
                        buckets = _cumulative(found["bounds"], found["counts"])
                        family.add_metric(values, buckets, found["sum"])
            yield family


def _cumulative(bounds: Sequence[float], counts: Sequence[int]) -> list[tuple[str, float]]:
    names = [*map(str, bounds), "+Inf"]
    return list(zip(names, accumulate(counts), strict=True))


def registry_of(totals: MetricTotals) -> CollectorRegistry:
    """A registry with all metrics of an engine, for an engine that has an endpoint of its own.

    Counters are there from the start, as 0; gauges and histograms once they have a value. Raises
    `ImportError` with the remedy without prometheus-client.
    """
    try:
        from prometheus_client import CollectorRegistry
    except ImportError as error:
        raise ImportError(_REMEDY) from error
    registry = CollectorRegistry()
    registry.register(_Collector(totals))
    return registry


class Exporter:
    """Serves the metrics of an engine at `http://address:port/metrics`, on threads of its own."""

    def __init__(self, totals: MetricTotals, port: int, address: str = "127.0.0.1") -> None:
        """`port`: 0: one that is free. Raises `ImportError` without prometheus-client, and
        `OSError` if the port is taken."""
        registry = registry_of(totals)
        from prometheus_client import start_http_server

        self._server: Any
        self._thread: threading.Thread
        self._server, self._thread = start_http_server(port, address, registry)
        self.port: int = self._server.server_port

    def close(self) -> None:
        """End it. Waits until requests under way are answered."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
