"""`MetricReporter` with a scripted manager and a simulated clock."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

COUNTERS = ("loads", "failures")
OTHERS = {"room": "GAUGE", "seconds": "HISTOGRAM", "size": "GAUGE"}
SIZE = 4096.0


def reports(story: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The report at every moment of a story, and all warnings.

    `at`: seconds. `counts`: increases of the plug-in's own counters. `happened`: metrics may have
    changed. `tiers_are_busy`: whether tiers are busy from then on. `counters`, `gauges`,
    `histograms`: the manager's answer, if it is asked. `knows_nothing`: its answer is None.
    """
    from kvtier.base import MetricDefinition, MetricKind, OffloadingStats
    from kvtier.integrations.vllm import metrics

    moment: Mapping[str, Any] = {}

    class Manager:
        num_asked = 0

        def get_stats(self) -> OffloadingStats | None:
            self.num_asked += 1
            if moment.get("knows_nothing"):
                return None
            return OffloadingStats(
                *(dict(moment.get(kind, {})) for kind in ("counters", "gauges", "histograms"))
            )

    warnings: list[str] = []

    class Warnings(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            warnings.append(record.getMessage())

    handler = Warnings(logging.WARNING)
    metrics.logger.addHandler(handler)
    manager: Any = Manager()
    kinds = dict.fromkeys(COUNTERS, "COUNTER") | OTHERS
    definitions = {name: MetricDefinition(MetricKind[kind], name) for name, kind in kinds.items()}
    reporter = metrics.MetricReporter(
        manager, definitions, {"size": SIZE}, now=lambda: moment["at"]
    )
    told = []
    for moment in story:
        if moment.get("happened"):
            reporter.has_news = True
        reporter.tiers_are_busy = moment.get("tiers_are_busy", reporter.tiers_are_busy)
        for name, n in moment.get("counts", {}).items():
            reporter.count(name, n)
        stats = reporter.report()
        told.append(None if stats is None else stats.reduce())
    metrics.logger.removeHandler(handler)
    return {"told": told, "warnings": warnings, "num_asked": manager.num_asked}
