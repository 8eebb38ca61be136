"""The figures of a tier, from their names and what they say."""

from __future__ import annotations

from collections.abc import Mapping

from kvtier.base import MetricDefinition, MetricKind

__all__ = ["definitions"]


def definitions(
    gauges: Mapping[str, str], counters: Mapping[str, str]
) -> dict[str, MetricDefinition]:
    """What `build_metric_definitions` answers."""
    return {
        **{name: MetricDefinition(MetricKind.GAUGE, text) for name, text in gauges.items()},
        **{name: MetricDefinition(MetricKind.COUNTER, text) for name, text in counters.items()},
    }
