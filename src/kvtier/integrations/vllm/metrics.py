"""kvtier's metrics in vLLM's metrics endpoint: defines those of the plug-in, and reports all."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from kvtier.base import MetricDefinition, MetricKind, OffloadingManager, OffloadingStats
from kvtier.integrations.vllm import vllm_api
from kvtier.tiering.jobs import JobCount
from kvtier.tiering.metrics import tier_series

__all__ = [
    "BLOCK_BYTES",
    "DEFINITIONS",
    "FAILED_LOADS",
    "MetricReporter",
    "VllmMetrics",
    "metric_to_vllm",
]

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
    labels = tuple(label for label, _ in definition.labels)
    if definition.kind is MetricKind.COUNTER:
        return vllm_api.OffloadingCounterMetadata(definition.documentation, labels)
    if definition.kind is MetricKind.GAUGE:
        return vllm_api.OffloadingGaugeMetadata(definition.documentation, labels)
    return vllm_api.OffloadingHistogramMetadata(
        definition.documentation, labels, buckets=definition.buckets
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
        vllms: VllmMetrics | None = None,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        """`definitions`: all declared metrics; vLLM ends the engine if it gets any other.
        `constants`: gauges that never change. `vllms`: metrics of vLLM that are filled, too."""
        self._vllms = vllms
        self._manager = manager
        self._constants = constants
        self._vllm_series: dict[str, tuple[str, tuple[str, ...]] | None] = {
            series: (vllm_api.METRIC_PREFIX + name, values)
            for name, definition in definitions.items()
            for series, values in definition.series(name).items()
        }
        """vLLM's name and the label values of each series; None if the series is not declared."""
        self._unreported_counters = [
            (vllm_api.METRIC_PREFIX + name, values)
            for name, definition in definitions.items()
            if definition.kind is MetricKind.COUNTER
            for values in definition.series(name).values()
        ]
        """All counters until the first report, which contains them as 0; then empty.
        vLLM's own connector, unlike `KVTierConnector`, shows no counter before its first report."""
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
        for name, labels in self._unreported_counters:
            stats.increase_counter(name, 0, labels)
        self._unreported_counters = []
        counted, self._counted = self._counted, Counter()
        for series, increase in (ours.counters | counted).items():
            if increase and (known := self._known(series)):
                name, labels = known
                stats.increase_counter(name, increase, labels)
        last = self._last
        for series, value in (ours.gauges | self._constants).items():
            if last.get(series) != value and (known := self._known(series)):
                last[series] = value
                name, labels = known
                stats.set_gauge(name, value, labels)
        for series, observations in ours.histograms.items():
            if known := self._known(series):
                name, labels = known
                for observation in observations:
                    stats.observe_histogram(name, observation, labels)
        if self._vllms is not None:
            self._vllms.add_to(stats, ours)
        return stats

    def _known(self, series: str) -> tuple[str, tuple[str, ...]] | None:
        if series not in self._vllm_series:
            self._vllm_series[series] = None  # so that each is logged once
            logger.warning(
                "metric %r is not declared, so vLLM does not show it. Its tier has to declare it "
                "in build_metric_definitions",
                series,
            )
        return self._vllm_series[series]


# --- vLLM's own metrics ---------------------------------------------------------------------------
# vLLM's managers fill `vllm:kv_offload_*` for its own tiers, and dashboards read them. Each release
# of vLLM has some of them; those that it has are taken from it, with their documentation. Some have
# no counterpart in kvtier and stay without values: times of single lookups, which kvtier makes in
# batches, lookups in host memory, and the average latency and dropped operations of vLLM's
# back-pressure.

_PREFIX = "vllm:kv_offload_"
_COUNTERS = {
    "tiering_read_bytes": ("loaded_bytes",),
    "tiering_write_bytes": ("stored_bytes",),
    "tiering_promotion_job_failures": ("failed_load_jobs",),
    "tiering_cascade_job_failures": ("failed_store_jobs",),
    "tiering_chunk_queries": ("lookup_hits", "lookup_misses"),
    "tiering_chunk_hits": ("lookup_hits",),
    "tiering_backpressure_blocks_dropped": ("dropped_blocks",),
}
"""By vLLM's name: what kvtier counts of a tier (`tier_series`)."""
_TIMES = {"tiering_read_time": ("load_seconds",), "tiering_write_time": ("store_seconds",)}
"""Counters that are the sums of kvtier's histograms."""
_HISTOGRAMS = {"tiering_lookup_async_delay_seconds": ("lookup_seconds",)}
_GAUGES = {
    "tiering_active_promotion_jobs": ("load_jobs",),
    "tiering_active_cascade_jobs": ("store_jobs",),
}
_SHARES = {
    "tiering_primary_write_usage_perc": ("loading_blocks",),
    "tiering_primary_read_usage_perc": ("pinned_blocks",),
}
"""Gauges that are shares of the slots of host memory."""
_PLAIN_COUNTERS = {
    "tiering_promotion_allocation_failures": ("kvtier_tiering_no_room_blocks",),
    "stores_skipped": ("kvtier_cpu_filtered_blocks",),
}
_PLAIN_SHARES = {
    "cpu_cache_usage_perc": ("kvtier_cpu_writing_blocks", "kvtier_cpu_pinned_blocks"),
    "cpu_cache_write_usage_perc": ("kvtier_cpu_writing_blocks",),
    "cpu_cache_read_usage_perc": ("kvtier_cpu_pinned_blocks",),
}
_ALLOCATION_SIZE = f"{_PREFIX}cpu_allocation_size"


class _Filled(NamedTuple):
    """One series of vLLM's, and the series of kvtier's that it is the sum of."""

    name: str
    labels: tuple[str, ...]
    ours: tuple[str, ...]
    is_share: bool = False
    """A gauge: divide by the slots of host memory."""


def their_tier_label(ours: str) -> str:
    """vLLM's label of a tier: it counts host memory as tier 0."""
    position, _, tier_type = ours.partition(":")
    return f"{int(position) + 1}:{tier_type}"


class VllmMetrics:
    """Translates reports of one engine. Scheduler thread only."""

    def __init__(self, extra_config: Mapping[str, Any], tiers: Sequence[str]) -> None:
        """`extra_config`: the user's keys. `tiers`: the labels of the tiers below host memory."""
        self._known = vllm_api.own_offloading_metrics(extra_config, with_tiers=bool(tiers))
        self._counters = self._of_tiers(_COUNTERS, tiers) + self._plain(_PLAIN_COUNTERS)
        self._times = self._of_tiers(_TIMES, tiers)
        self._histograms = self._of_tiers(_HISTOGRAMS, tiers)
        self._gauges = self._of_tiers(_GAUGES, tiers)
        self._gauges += self._of_tiers(_SHARES, tiers, is_share=True)
        self._gauges += self._plain(_PLAIN_SHARES, is_share=True)
        filled = [*self._counters, *self._times, *self._histograms, *self._gauges]
        names = {_ALLOCATION_SIZE, *(one.name for one in filled)}
        self.definitions = {name: self._known[name] for name in names if name in self._known}
        """Those that this release of vLLM has and that are filled."""
        self._allocated: list[int] = []
        self._last: dict[_Filled, float] = {}

    def _of_tiers(
        self, table: Mapping[str, tuple[str, ...]], tiers: Sequence[str], *, is_share: bool = False
    ) -> list[_Filled]:
        return [
            _Filled(
                _PREFIX + name,
                (their_tier_label(tier),),
                tuple(tier_series(tier, part) for part in parts),
                is_share,
            )
            for name, parts in table.items()
            if _PREFIX + name in self._known
            for tier in tiers
        ]

    def _plain(
        self, table: Mapping[str, tuple[str, ...]], *, is_share: bool = False
    ) -> list[_Filled]:
        return [
            _Filled(_PREFIX + name, (), parts, is_share)
            for name, parts in table.items()
            if _PREFIX + name in self._known
        ]

    def zeros(self) -> vllm_api.OffloadingConnectorStats:
        """All counters, as 0."""
        stats = vllm_api.OffloadingConnectorStats()
        for one in [*self._counters, *self._times]:
            stats.increase_counter(one.name, 0, one.labels)
        return stats

    def note_allocation(self, num_blocks: int) -> None:
        """vLLM stores this many blocks in one call."""
        if _ALLOCATION_SIZE in self.definitions:
            self._allocated.append(num_blocks)

    def add_to(self, stats: vllm_api.OffloadingConnectorStats, ours: OffloadingStats) -> None:
        """Add what `ours`, the manager's report, says about vLLM's metrics."""
        for one in self._counters:
            increase = sum(ours.counters.get(series, 0) for series in one.ours)
            if increase:
                stats.increase_counter(one.name, increase, one.labels)
        for one in self._times:
            seconds = sum(sum(ours.histograms.get(series, ())) for series in one.ours)
            if seconds:
                stats.increase_counter(one.name, seconds, one.labels)
        for one in self._histograms:
            for observation in ours.histograms.get(one.ours[0], ()):
                stats.observe_histogram(one.name, observation, one.labels)
        for num_blocks in self._allocated:
            stats.observe_histogram(_ALLOCATION_SIZE, num_blocks)
        self._allocated.clear()
        self._set_gauges(stats, ours)

    def _set_gauges(self, stats: vllm_api.OffloadingConnectorStats, ours: OffloadingStats) -> None:
        slots = ours.gauges.get("kvtier_cpu_slots", 0.0)
        for one in self._gauges:
            if not slots or one.ours[0] not in ours.gauges:
                continue
            value = sum(ours.gauges.get(series, 0.0) for series in one.ours)
            value = value / slots if one.is_share else value
            if self._last.get(one) != value:
                self._last[one] = value
                stats.set_gauge(one.name, value, one.labels)
