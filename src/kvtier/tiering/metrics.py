"""The statistics of the orchestrator: what each one means, and the counters of one tier."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from math import isfinite
from typing import TYPE_CHECKING, NamedTuple

from kvtier.base import (
    LookupResult,
    MetricDefinition,
    MetricKind,
    OffloadingStats,
    metric_series,
)
from kvtier.config.tenants import tier_label
from kvtier.seal import SealFailure

if TYPE_CHECKING:
    from kvtier.base import OffloadKey

__all__ = [
    "COUNTED",
    "METRIC_DEFINITIONS",
    "WAIT_SECONDS",
    "ReadBack",
    "TierStats",
    "add_own_stats",
    "of_tier",
    "tier_label",
    "tier_metric_definitions",
    "tier_series",
    "with_tier",
]

_MAX_TIMES = 4096
"""At most this many durations are kept between two calls of `get_stats`."""
_MOST_MARKS = 1 << 14
"""Marks in one of the two sets of `ReadBack`. Both together take at most 4 MiB."""
_HIT, _MISS = LookupResult.HIT, LookupResult.MISS
_SECONDS = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0)

WAIT_SECONDS = "kvtier_tiering_wait_seconds"
METRIC_DEFINITIONS: dict[str, MetricDefinition] = {
    WAIT_SECONDS: MetricDefinition(
        MetricKind.HISTOGRAM,
        "Time that a request waited in the scheduler for tiers: until they knew what they have, "
        "and until its blocks were loaded.",
        _SECONDS,
    ),
    "kvtier_tiering_given_up_requests": MetricDefinition(
        MetricKind.COUNTER, "Requests whose promotion missed its deadline."
    ),
    "kvtier_tiering_trial_requests": MetricDefinition(
        MetricKind.COUNTER,
        "Requests that computed blocks a tier has, to measure the cost of computing.",
    ),
    "kvtier_tiering_left_blocks": MetricDefinition(
        MetricKind.COUNTER,
        "Blocks that requests computed instead of waiting for the load of another request.",
    ),
    "kvtier_tiering_no_room_blocks": MetricDefinition(
        MetricKind.COUNTER,
        "Lookups that found a block in a tier for which host memory has no room.",
    ),
    "kvtier_tiering_leased_blocks": MetricDefinition(
        MetricKind.GAUGE, "Promoted blocks kept for the requests that wanted them."
    ),
    "kvtier_tiering_prefill_tokens_per_s": MetricDefinition(
        MetricKind.GAUGE,
        "Estimated speed of computing prompts; 0: not known.",
    ),
}

_NOT_STORED = "kvtier_tier_not_stored_blocks"
_DECLINED = "kvtier_tier_declined_blocks"
_SEAL_FAILURES = "kvtier_tier_seal_failures"
_FAULTS = "kvtier_tier_faults"
_LATE = "kvtier_tier_late_jobs"
_LOOKUPS = "kvtier_tier_lookups"
_DECISIONS = "kvtier_tier_decisions"

_OF_A_TIER: dict[str, tuple[MetricKind, str]] = {
    _LOOKUPS: (
        MetricKind.COUNTER,
        (
            "Answers of the tier when it was asked for a block. unknown: it has to find out, and "
            "is asked again. A prompt is looked up until the first block that is missing."
        ),
    ),
    "kvtier_tier_hit_blocks": (
        MetricKind.COUNTER,
        "Blocks that requests found in the tier, promoted or declined.",
    ),
    "kvtier_tier_blocks": (MetricKind.COUNTER, "Blocks stored in the tier, or loaded from it."),
    "kvtier_tier_bytes": (
        MetricKind.COUNTER,
        "Bytes of the blocks stored in the tier, or loaded from it.",
    ),
    "kvtier_tier_read_back_blocks": (
        MetricKind.COUNTER,
        (
            "Blocks loaded from the tier that were not loaded since they were stored in it: how "
            "many of the blocks written were ever read."
        ),
    ),
    "kvtier_tier_read_back_bytes": (
        MetricKind.COUNTER,
        "Bytes of the blocks counted in kvtier_tier_read_back_blocks.",
    ),
    "kvtier_tier_failed_jobs": (
        MetricKind.COUNTER,
        "Stores and loads of which at least one block failed.",
    ),
    "kvtier_tier_failed_blocks": (
        MetricKind.COUNTER,
        "Blocks that the tier could not store, or could not load.",
    ),
    _LATE: (MetricKind.COUNTER, "Stores, loads and lookups that missed their deadline."),
    _NOT_STORED: (
        MetricKind.COUNTER,
        (
            "Blocks not stored in the tier. dropped: evicted while they waited for the tier, or "
            "dropped because another store was late or the cache was reset; switched_off: by an "
            "operator; shed: the tier is cut off; unwritten: they left host memory before they "
            "could be written; left_out: the write policy decided so; over_budget: the write "
            "budget was used up; kept_out: the request's hint or its tenant's rule; "
            "held_back: the rate of repeated stores is bounded."
        ),
    ),
    "kvtier_tier_offered_again_blocks": (
        MetricKind.COUNTER,
        "Blocks that requests used and the tier lacked, stored again.",
    ),
    _DECLINED: (
        MetricKind.COUNTER,
        (
            "Blocks not promoted because the guard chose to compute them. slower: loading takes "
            "longer than computing; late: the load would miss its deadline; unmeasured: a cost "
            "was not known yet; trial: computed to measure the cost of computing."
        ),
    ),
    _DECISIONS: (
        MetricKind.COUNTER,
        (
            "Decisions about the blocks of one request in the tier. load: all are loaded; part: "
            "only as many as arrive in time; measure: a few, to measure the tier; the others are "
            "the reasons in kvtier_tier_declined_blocks."
        ),
    ),
    _FAULTS: (
        MetricKind.COUNTER,
        (
            "Calls to the tier that raised (error) or kept the scheduler waiting (blocking_call),"
            " and answers that broke its contract (violation)."
        ),
    ),
    _SEAL_FAILURES: (MetricKind.COUNTER, "Blocks refused because of their seal."),
    "kvtier_tier_estimated_hit_ratio": (
        MetricKind.GAUGE,
        (
            "Estimated share of the blocks of prompts that the tiers down to this one would have,"
            " with this multiple of the tier's size, if they evicted by LRU."
        ),
    ),
    "kvtier_tier_breaker_state": (
        MetricKind.GAUGE,
        (
            "Whether loads from the tier and stores to it are in use (0), being tried (1), or cut"
            " off (2). A tier that is cut off for loads gets no stores either."
        ),
    ),
    "kvtier_tier_used_bytes": (
        MetricKind.GAUGE,
        "Bytes that blocks take in the tier, if it knows. A shared tier: of all engines.",
    ),
    "kvtier_tier_capacity_bytes": (
        MetricKind.GAUGE,
        "The most bytes that blocks may take in the tier, if it knows.",
    ),
    "kvtier_tier_jobs": (MetricKind.GAUGE, "Stores and loads that the tier has not ended."),
    "kvtier_tier_pinned_blocks": (MetricKind.GAUGE, "Slots that the tier's stores are reading."),
    "kvtier_tier_pin_limit_blocks": (
        MetricKind.GAUGE,
        "The most slots that the tier's stores may read at the same time.",
    ),
    "kvtier_tier_waiting_blocks": (
        MetricKind.GAUGE,
        "Blocks that wait until the tier's stores pin fewer slots.",
    ),
    "kvtier_tier_loading_blocks": (MetricKind.GAUGE, "Slots that the tier's loads are writing."),
    "kvtier_tier_seconds": (
        MetricKind.HISTOGRAM,
        "Duration of loads and stores, as the tier measured it.",
    ),
    "kvtier_tier_lookup_seconds": (
        MetricKind.HISTOGRAM,
        "Time until the tier knew whether it has a block, if it did not know at once.",
    ),
}


class _Series(NamedTuple):
    """A series of one tier: the metric, and at most one label beside `tier`."""

    metric: str
    label: str = ""
    value: str = ""


_SERIES: dict[str, _Series] = {
    "lookup_hits": _Series(_LOOKUPS, "result", "hit"),
    "lookup_misses": _Series(_LOOKUPS, "result", "miss"),
    "lookup_unknowns": _Series(_LOOKUPS, "result", "unknown"),
    "hit_blocks": _Series("kvtier_tier_hit_blocks"),
    "read_back_blocks": _Series("kvtier_tier_read_back_blocks"),
    "read_back_bytes": _Series("kvtier_tier_read_back_bytes"),
    "stored_blocks": _Series("kvtier_tier_blocks", "direction", "store"),
    "stored_bytes": _Series("kvtier_tier_bytes", "direction", "store"),
    "failed_stores": _Series("kvtier_tier_failed_blocks", "direction", "store"),
    "failed_store_jobs": _Series("kvtier_tier_failed_jobs", "direction", "store"),
    "failed_load_jobs": _Series("kvtier_tier_failed_jobs", "direction", "load"),
    "late_stores": _Series(_LATE, "kind", "store"),
    "dropped_blocks": _Series(_NOT_STORED, "reason", "dropped"),
    "shed_blocks": _Series(_NOT_STORED, "reason", "shed"),
    "unwritten_blocks": _Series(_NOT_STORED, "reason", "unwritten"),
    "left_out_blocks": _Series(_NOT_STORED, "reason", "left_out"),
    "switched_off_blocks": _Series(_NOT_STORED, "reason", "switched_off"),
    "over_budget_blocks": _Series(_NOT_STORED, "reason", "over_budget"),
    "kept_out_blocks": _Series(_NOT_STORED, "reason", "kept_out"),
    "held_back_blocks": _Series(_NOT_STORED, "reason", "held_back"),
    "offered_again_blocks": _Series("kvtier_tier_offered_again_blocks"),
    "loaded_blocks": _Series("kvtier_tier_blocks", "direction", "load"),
    "loaded_bytes": _Series("kvtier_tier_bytes", "direction", "load"),
    "failed_loads": _Series("kvtier_tier_failed_blocks", "direction", "load"),
    "late_loads": _Series(_LATE, "kind", "load"),
    "late_lookups": _Series(_LATE, "kind", "lookup"),
    "declined_slower_blocks": _Series(_DECLINED, "reason", "slower"),
    "declined_late_blocks": _Series(_DECLINED, "reason", "late"),
    "declined_unmeasured_blocks": _Series(_DECLINED, "reason", "unmeasured"),
    "declined_trial_blocks": _Series(_DECLINED, "reason", "trial"),
    "decided_load": _Series(_DECISIONS, "decision", "load"),
    "decided_part": _Series(_DECISIONS, "decision", "part"),
    "decided_measure": _Series(_DECISIONS, "decision", "measure"),
    "decided_slower": _Series(_DECISIONS, "decision", "slower"),
    "decided_late": _Series(_DECISIONS, "decision", "late"),
    "decided_unmeasured": _Series(_DECISIONS, "decision", "unmeasured"),
    "decided_trial": _Series(_DECISIONS, "decision", "trial"),
    "errors": _Series(_FAULTS, "kind", "error"),
    "blocking_calls": _Series(_FAULTS, "kind", "blocking_call"),
    "violations": _Series(_FAULTS, "kind", "violation"),
    "estimated_hit_ratio": _Series("kvtier_tier_estimated_hit_ratio", "size", "1"),
    "estimated_hit_ratio_double": _Series("kvtier_tier_estimated_hit_ratio", "size", "2"),
    "breaker_state": _Series("kvtier_tier_breaker_state", "direction", "load"),
    "store_breaker_state": _Series("kvtier_tier_breaker_state", "direction", "store"),
    "used_bytes": _Series("kvtier_tier_used_bytes"),
    "capacity_bytes": _Series("kvtier_tier_capacity_bytes"),
    "store_jobs": _Series("kvtier_tier_jobs", "direction", "store"),
    "load_jobs": _Series("kvtier_tier_jobs", "direction", "load"),
    "pinned_blocks": _Series("kvtier_tier_pinned_blocks"),
    "pin_limit_blocks": _Series("kvtier_tier_pin_limit_blocks"),
    "waiting_blocks": _Series("kvtier_tier_waiting_blocks"),
    "loading_blocks": _Series("kvtier_tier_loading_blocks"),
    "load_seconds": _Series("kvtier_tier_seconds", "direction", "load"),
    "store_seconds": _Series("kvtier_tier_seconds", "direction", "store"),
    "lookup_seconds": _Series("kvtier_tier_lookup_seconds"),
    **{f"seal_{reason}": _Series(_SEAL_FAILURES, "reason", str(reason)) for reason in SealFailure},
}
"""The series of a tier by the names that the orchestrator counts them under."""

COUNTED = tuple(_SERIES)
"""The names of `tier_series`."""


def tier_series(tier: str, name: str) -> str:
    """The series of the tier with this label that the orchestrator counts under `name`."""
    metric, label, value = _SERIES[name]
    return metric_series(metric, {"tier": tier, **({label: value} if label else {})})


def tier_metric_definitions(tiers: Iterable[str]) -> dict[str, MetricDefinition]:
    """The metrics that the orchestrator has for each of the tiers with these labels."""
    label_of_tiers = ("tier", tuple(tiers))
    definitions = {}
    for name, (kind, documentation) in _OF_A_TIER.items():
        ours = [series for series in _SERIES.values() if series.metric == name]
        others = ((ours[0].label, tuple(series.value for series in ours)),) if ours[0].label else ()
        definitions[name] = MetricDefinition(
            kind,
            documentation,
            _SECONDS if kind is MetricKind.HISTOGRAM else None,
            (label_of_tiers, *others),
        )
    return definitions


def with_tier(definition: MetricDefinition, tiers: Iterable[str]) -> MetricDefinition:
    """The definition of a tier's own metric, with the label `tier` that the orchestrator adds."""
    return replace(definition, labels=(("tier", tuple(tiers)), *definition.labels))


def of_tier(series: str, tier: str) -> str:
    """A series of a tier's own metrics, with the label `tier`."""
    name, brace, labels = series.partition("{")
    whole = metric_series(name, {"tier": tier})
    return f"{whole[:-1]},{labels}" if brace else whole


def add_own_stats(own: OffloadingStats | None, tier: str, stats: OffloadingStats) -> None:
    """Add a tier's own statistics to `stats`, with the label `tier`. None: it has none. Raises
    `TypeError` or `ValueError` for what is no number, and for a counter that goes back."""
    if own is None:
        return
    for name, value in own.counters.items():
        increase = _number(value)
        if increase < 0:
            raise ValueError(f"the counter {name} went back by {-increase:g}")
        stats.counters[of_tier(name, tier)] = increase
    for name, value in own.gauges.items():
        stats.gauges[of_tier(name, tier)] = _number(value)
    for name, values in own.histograms.items():
        stats.histograms[of_tier(name, tier)] = list(map(_number, values))


def _number(value: float) -> float:
    """The value of a tier, which may be a number of numpy, as one of Python's, which JSON has."""
    number = value if type(value) in (int, float) else float(value)
    if not isfinite(number):
        raise ValueError(f"{number} is not the value of a metric")
    return number


class ReadBack:
    """Tells the blocks that are loaded for the first time since they were stored.

    It marks the blocks that were loaded, in two sets. When the newer one is full, the older one is
    dropped: its blocks may count once more. Constant time per block; sets of keys take a third of
    the time of a table of hashes in numpy, because jobs are small.
    """

    def __init__(self) -> None:
        self._newer: set[OffloadKey] = set()
        self._older: set[OffloadKey] = set()

    def stored(self, keys: Sequence[OffloadKey]) -> None:
        """These blocks were stored: forget that they were loaded before."""
        self._newer.difference_update(keys)
        self._older.difference_update(keys)

    def loaded(self, keys: Sequence[OffloadKey]) -> int:
        """These blocks were loaded. Returns how many of them for the first time."""
        newer, older = self._newer, self._older
        new = {key for key in keys if key not in newer and key not in older}
        newer |= new
        if len(newer) >= _MOST_MARKS:
            self._newer, self._older = set(), newer
        return len(new)


class TierStats:
    """Counters and times of one tier since they were last taken. Scheduler thread only."""

    def __init__(self, tier: str) -> None:
        """`tier`: the tier's label."""
        self._series = {name: tier_series(tier, name) for name in _SERIES}
        self.counters: Counter[str] = Counter()
        """By the names of `_SERIES`."""
        self.num_hits = self.num_misses = self.num_unknown = 0
        """Answers to lookups. They are counted apart, because there is one for each block."""
        self._read_back = ReadBack()
        self._seconds: dict[str, deque[float]] = {
            name: deque(maxlen=_MAX_TIMES)
            for name in ("load_seconds", "store_seconds", "lookup_seconds")
        }

    def count(self, name: str, n: int = 1) -> None:
        """Add to a counter."""
        self.counters[name] += n

    def count_answers(self, answers: Sequence[LookupResult]) -> None:
        """The tier has answered lookups of a run of blocks."""
        num_hits = answers.count(_HIT)
        num_misses = answers.count(_MISS)
        self.num_hits += num_hits
        self.num_misses += num_misses
        self.num_unknown += len(answers) - num_hits - num_misses

    def count_late_answer(self, seconds: float) -> None:
        """The tier has answered a lookup that it could not answer at once."""
        self._seconds["lookup_seconds"].append(seconds)

    def count_load(
        self, moved: Sequence[OffloadKey], num_failed: int, block_bytes: int, seconds: float | None
    ) -> None:
        """A load has ended. `moved`: the blocks that it has loaded. `seconds`: as the tier measured
        it; None: not known."""
        self._count_job("load", num_failed, seconds)
        self.counters["loaded_blocks"] += len(moved)
        self.counters["loaded_bytes"] += len(moved) * block_bytes
        if moved:
            num_first = self._read_back.loaded(moved)
            self.counters["read_back_blocks"] += num_first
            self.counters["read_back_bytes"] += num_first * block_bytes

    def count_store(
        self, moved: Sequence[OffloadKey], num_failed: int, block_bytes: int, seconds: float | None
    ) -> None:
        """A store has ended. `moved`: the blocks that it has stored. `seconds`: as the tier
        measured it; None: not known."""
        self._count_job("store", num_failed, seconds)
        self.counters["stored_blocks"] += len(moved)
        self.counters["stored_bytes"] += len(moved) * block_bytes
        if moved:
            self._read_back.stored(moved)

    def _count_job(self, direction: str, num_failed: int, seconds: float | None) -> None:
        self.counters[f"failed_{direction}s"] += num_failed
        self.counters[f"failed_{direction}_jobs"] += num_failed > 0
        if seconds is not None:
            self._seconds[f"{direction}_seconds"].append(seconds)

    def add_to(self, stats: OffloadingStats, gauges: Mapping[str, float]) -> None:
        """Move the counters and times into `stats`, and add these gauges."""
        self.counters["lookup_hits"] += self.num_hits
        self.counters["lookup_misses"] += self.num_misses
        self.counters["lookup_unknowns"] += self.num_unknown
        self.num_hits = self.num_misses = self.num_unknown = 0
        for name, count in self.counters.items():
            if count:
                stats.counters[self._series[name]] = count
        self.counters.clear()
        for name, value in gauges.items():
            stats.gauges[self._series[name]] = value
        for name, seconds in self._seconds.items():
            if seconds:
                stats.histograms[self._series[name]] = list(seconds)
                seconds.clear()
