"""`FigureReporter` with a manager and a clock that do as they are told."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

COUNTERS = ("loads", "failures")
OTHERS = {"room": "GAUGE", "seconds": "HISTOGRAM", "size": "GAUGE"}
SIZE = 4096.0


def reports(story: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """What is reported at every moment of a story, and all warnings.

    `at`: seconds. `counts`: what others than the manager count then. `happened`: something that
    may have changed figures. `may_change`: whether tiers are at work from then on. `counters`,
    `gauges`, `histograms`: what the manager would say, if it is asked. `knows_nothing`: it would
    say that it has no figures.
    """
    from kvtier.base import MetricDefinition, MetricKind, OffloadingStats
    from kvtier.integrations.vllm import figures

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
    figures.logger.addHandler(handler)
    manager: Any = Manager()
    kinds = dict.fromkeys(COUNTERS, "COUNTER") | OTHERS
    definitions = {name: MetricDefinition(MetricKind[kind], name) for name, kind in kinds.items()}
    reporter = figures.FigureReporter(manager, definitions, {"size": SIZE}, lambda: moment["at"])
    told = []
    for moment in story:
        if moment.get("happened"):
            reporter.is_quiet = False
        reporter.may_change = moment.get("may_change", reporter.may_change)
        for name, n in moment.get("counts", {}).items():
            reporter.count(name, n)
        stats = reporter.report()
        told.append(None if stats is None else stats.reduce())
    figures.logger.removeHandler(handler)
    return {"told": told, "warnings": warnings, "num_asked": manager.num_asked}
