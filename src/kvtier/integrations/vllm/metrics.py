"""kvtier's metrics in vLLM's metrics endpoint: defines those of the plug-in, and reports all."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Mapping

from kvtier.base import MetricDefinition, MetricKind, OffloadingManager, OffloadingStats
from kvtier.integrations.vllm import vllm_api
from kvtier.tiering.jobs import JobCount

__all__ = ["BLOCK_BYTES", "DEFINITIONS", "FAILED_LOADS", "MetricReporter", "metric_to_vllm"]

logger = logging.getLogger(__name__)

BLOCK_BYTES = "kvtier_block_bytes"
FAILED_LOADS = "kvtier_failed_loads"

DEFINITIONS = {
    BLOCK_BYTES: MetricDefinition(
        MetricKind.GAUGE, "Bytes of one offloaded block in host memory, all ranks together."
    ),
    FAILED_LOADS: MetricDefinition(
        MetricKind.COUNTER,
        "Loads from host memory to the device that failed; vLLM computed the blocks instead.",
    ),
}

_REPORT_ALL_EVERY_S = 1.0
_POLL_TIERS_EVERY_S = 0.02
"""Least number of seconds between two reports if nothing is known to have changed, but tiers have
jobs. An engine whose requests wait for tiers keeps stepping, and each report would take interpreter
time from the threads that move the blocks."""


def metric_to_vllm(definition: MetricDefinition) -> vllm_api.OffloadingMetricMetadata:
    """The definition in vLLM's type."""
    if definition.kind is MetricKind.COUNTER:
        return vllm_api.OffloadingCounterMetadata(definition.documentation)
    if definition.kind is MetricKind.GAUGE:
        return vllm_api.OffloadingGaugeMetadata(definition.documentation)
    return vllm_api.OffloadingHistogramMetadata(
        definition.documentation, buckets=definition.buckets
    )


class MetricReporter:
    """Reports changes of metrics to vLLM. Scheduler thread only.

    vLLM calls `report` at every step. In most steps nothing is stored or loaded, and then `report`
    must take hardly any time. vLLM sends reports to another process, so they leave out values that
    have not changed.
    """

    def __init__(
        self,
        manager: OffloadingManager,
        definitions: Mapping[str, MetricDefinition],
        constants: dict[str, float],
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        """`definitions`: all declared metrics; vLLM ends the engine if it gets any other.
        `constants`: gauges that never change."""
        self._manager = manager
        self._constants = constants
        self._vllm_names = {name: vllm_api.METRIC_PREFIX + name for name in definitions}
        self._unreported_counters = [
            self._vllm_names[name]
            for name, definition in definitions.items()
            if definition.kind is MetricKind.COUNTER
        ]
        """All counters until the first report, which contains them as 0; then empty.
        vLLM's own connector, unlike `KVTierConnector`, shows no counter before its first report."""
        self._undeclared: set[str] = set()
        self._last: dict[str, float] = {}
        """The last reported value of each gauge."""
        self._counted: Counter[str] = Counter()
        self._now = now
        self._report_all_at = 0.0
        self._poll_tiers_at = 0.0
        self._tier_jobs = JobCount(0, 0, 0)
        """Jobs of tiers at the last `note_tier_jobs`."""
        self.has_news = True
        """True if metrics may have changed since the last report. `ManagerAdapter` sets this
        flag, too."""
        self.tiers_are_busy = False
        """True while tiers have jobs: metrics may then change between two calls of vLLM."""

    def count(self, name: str, n: int) -> None:
        """Increase a counter of the plug-in (`DEFINITIONS`)."""
        self._counted[name] += n
        self.has_news = True

    def note_tier_jobs(self, jobs: JobCount) -> None:
        """Note how many jobs tiers have. Called at the end of every step if there are tiers."""
        if jobs != self._tier_jobs:
            self._tier_jobs = jobs
            self.has_news = True
            self.tiers_are_busy = jobs.num_open > 0

    def lacks(self, jobs: JobCount) -> bool:
        """True if the jobs of tiers have changed since they were last noted."""
        return jobs != self._tier_jobs

    def report(self) -> vllm_api.OffloadingConnectorStats | None:
        """All changes since the last report; None if nothing is known to have changed."""
        now = self._now()
        if now >= self._report_all_at:
            # Report all gauges once per second, so that a newly connected listener gets them.
            self._report_all_at = now + _REPORT_ALL_EVERY_S
            self._last.clear()
        elif not self.has_news and not (self.tiers_are_busy and now >= self._poll_tiers_at):
            return None
        self._poll_tiers_at = now + _POLL_TIERS_EVERY_S
        self.has_news = False
        stats = self._manager.get_stats()
        return None if stats is None else self._to_vllm(stats)

    def _to_vllm(self, ours: OffloadingStats) -> vllm_api.OffloadingConnectorStats:
        stats = vllm_api.OffloadingConnectorStats()
        for vllm_name in self._unreported_counters:
            stats.increase_counter(vllm_name, 0)
        self._unreported_counters = []
        counted, self._counted = self._counted, Counter()
        for name, increase in (ours.counters | counted).items():
            if increase and (known_name := self._vllm_name(name)):
                stats.increase_counter(known_name, increase)
        last = self._last
        for name, value in (ours.gauges | self._constants).items():
            if last.get(name) != value and (known_name := self._vllm_name(name)):
                last[name] = value
                stats.set_gauge(known_name, value)
        for name, observations in ours.histograms.items():
            if known_name := self._vllm_name(name):
                for observation in observations:
                    stats.observe_histogram(known_name, observation)
        return stats

    def _vllm_name(self, name: str) -> str | None:
        vllm_name = self._vllm_names.get(name)
        if vllm_name is None and name not in self._undeclared:
            self._undeclared.add(name)
            logger.warning(
                "metric %r is not declared, so vLLM does not show it. Its tier has to declare it "
                "in build_metric_definitions",
                name,
            )
        return vllm_name
