"""The statistics of the orchestrator: what each one means, and the counters of one tier."""

from __future__ import annotations

import re
from collections import Counter, deque

from kvtier.base import MetricDefinition, MetricKind, OffloadingStats
from kvtier.seal import SealFailure

_MAX_TIMES = 4096
"""At most this many durations are kept between two calls of `get_stats`."""
_SECONDS = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0)

METRIC_DEFINITIONS: dict[str, MetricDefinition] = {
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

_OF_A_TIER: dict[str, MetricDefinition] = {
    "hit_blocks": MetricDefinition(
        MetricKind.COUNTER, "Blocks that requests found in the tier, promoted or declined."
    ),
    "stored_blocks": MetricDefinition(MetricKind.COUNTER, "Blocks stored in the tier."),
    "stored_bytes": MetricDefinition(MetricKind.COUNTER, "Bytes of the blocks stored in the tier."),
    "failed_stores": MetricDefinition(MetricKind.COUNTER, "Blocks the tier could not store."),
    "late_stores": MetricDefinition(MetricKind.COUNTER, "Stores that missed their deadline."),
    "dropped_blocks": MetricDefinition(
        MetricKind.COUNTER,
        "Blocks not stored: they were evicted while they waited for the tier, or dropped because "
        "another store of the tier was late or the cache was reset.",
    ),
    "shed_blocks": MetricDefinition(
        MetricKind.COUNTER, "Blocks not stored because the tier is cut off."
    ),
    "unwritten_blocks": MetricDefinition(
        MetricKind.COUNTER,
        "Blocks that left host memory before they could be written to the tier.",
    ),
    "left_out_blocks": MetricDefinition(
        MetricKind.COUNTER,
        "Blocks that left host memory and were not written, because the write policy decided so.",
    ),
    "over_budget_blocks": MetricDefinition(
        MetricKind.COUNTER, "Blocks not stored because the write budget was used up."
    ),
    "kept_out_blocks": MetricDefinition(
        MetricKind.COUNTER, 'Blocks not stored because of the hint `write: "never"`.'
    ),
    "offered_again_blocks": MetricDefinition(
        MetricKind.COUNTER, "Blocks that requests used and the tier lacked, stored again."
    ),
    "held_back_blocks": MetricDefinition(
        MetricKind.COUNTER,
        "Blocks that requests used and the tier lacked, not stored again because the rate of such "
        "stores is bounded.",
    ),
    "loaded_blocks": MetricDefinition(MetricKind.COUNTER, "Blocks loaded from the tier."),
    "loaded_bytes": MetricDefinition(
        MetricKind.COUNTER, "Bytes of the blocks loaded from the tier."
    ),
    "failed_loads": MetricDefinition(MetricKind.COUNTER, "Blocks the tier could not load."),
    "late_loads": MetricDefinition(MetricKind.COUNTER, "Promotions that missed their deadline."),
    "late_lookups": MetricDefinition(MetricKind.COUNTER, "Lookups that missed their deadline."),
    "declined_blocks": MetricDefinition(
        MetricKind.COUNTER, "Blocks not promoted because the guard chose to compute them."
    ),
    "declined_slower_blocks": MetricDefinition(
        MetricKind.COUNTER, "Of the declined blocks: loading them takes longer than computing."
    ),
    "declined_late_blocks": MetricDefinition(
        MetricKind.COUNTER, "Of the declined blocks: their load would miss its deadline."
    ),
    "declined_unmeasured_blocks": MetricDefinition(
        MetricKind.COUNTER, "Of the declined blocks: a cost was not known yet."
    ),
    "declined_trial_blocks": MetricDefinition(
        MetricKind.COUNTER, "Of the declined blocks: computed to measure the cost of computing."
    ),
    "errors": MetricDefinition(MetricKind.COUNTER, "Calls to the tier that raised."),
    "blocking_calls": MetricDefinition(
        MetricKind.COUNTER, "Calls to the tier that kept the scheduler waiting."
    ),
    "violations": MetricDefinition(
        MetricKind.COUNTER, "Answers and reports of the tier that broke its contract."
    ),
    "estimated_hit_ratio": MetricDefinition(
        MetricKind.GAUGE,
        "Estimated share of the blocks of prompts that the tiers down to this one would have if "
        "they evicted by LRU.",
    ),
    "estimated_hit_ratio_double": MetricDefinition(
        MetricKind.GAUGE, "The same if this tier had twice its size."
    ),
    "breaker_state": MetricDefinition(
        MetricKind.GAUGE, "Whether the tier is in use (0), being tried (1), or cut off (2)."
    ),
    "store_breaker_state": MetricDefinition(
        MetricKind.GAUGE,
        "Whether stores to the tier are in use (0), being tried (1), or cut off (2).",
    ),
    "pinned_blocks": MetricDefinition(MetricKind.GAUGE, "Slots that its stores are reading."),
    "waiting_blocks": MetricDefinition(
        MetricKind.GAUGE, "Blocks that wait until the tier's stores pin fewer slots."
    ),
    "loading_blocks": MetricDefinition(MetricKind.GAUGE, "Slots that its loads are writing."),
    "load_seconds": MetricDefinition(
        MetricKind.HISTOGRAM, "Duration of loads, as the tier measured it.", _SECONDS
    ),
    "store_seconds": MetricDefinition(
        MetricKind.HISTOGRAM, "Duration of stores, as the tier measured it.", _SECONDS
    ),
    **{
        f"seal_{reason}": MetricDefinition(
            MetricKind.COUNTER, f"Blocks refused because of their seal: {reason}."
        )
        for reason in SealFailure
    },
}


def tier_metric_definitions(position: int, tier_type: str) -> dict[str, MetricDefinition]:
    """The statistics of the tier at this place in lookup order."""
    prefix = metric_prefix(position, tier_type)
    return {prefix + name: definition for name, definition in _OF_A_TIER.items()}


def event_name(position: int, tier_type: str) -> str:
    """The name of a tier in events."""
    return f"tier_{position}_{re.sub('[^a-z0-9]+', '_', tier_type.lower())}"


def metric_prefix(position: int, tier_type: str) -> str:
    """What the names of a tier's statistics begin with."""
    return f"kvtier_{event_name(position, tier_type)}_"


class TierStats:
    """Counters and times of one tier since they were last taken. Scheduler thread only."""

    def __init__(self, prefix: str) -> None:
        self._prefix = prefix
        self.counters: Counter[str] = Counter()
        """By the names of `_OF_A_TIER`."""
        self._load_seconds: deque[float] = deque(maxlen=_MAX_TIMES)
        self._store_seconds: deque[float] = deque(maxlen=_MAX_TIMES)

    def count(self, name: str, n: int = 1) -> None:
        """Add to a counter."""
        self.counters[name] += n

    def count_load(
        self, num_blocks: int, num_moved: int, num_bytes: int, seconds: float | None
    ) -> None:
        """A load has ended. `seconds`: as the tier measured it; None: not known."""
        self.counters["loaded_blocks"] += num_moved
        self.counters["loaded_bytes"] += num_bytes
        self.counters["failed_loads"] += num_blocks - num_moved
        if seconds is not None:
            self._load_seconds.append(seconds)

    def count_store(
        self, num_blocks: int, num_moved: int, num_bytes: int, seconds: float | None
    ) -> None:
        """A store has ended. `seconds`: as the tier measured it; None: not known."""
        self.counters["stored_blocks"] += num_moved
        self.counters["stored_bytes"] += num_bytes
        self.counters["failed_stores"] += num_blocks - num_moved
        if seconds is not None:
            self._store_seconds.append(seconds)

    def add_to(self, stats: OffloadingStats, **gauges: float) -> None:
        """Move the counters and times into `stats`, and add these gauges."""
        for name, count in self.counters.items():
            if count:
                stats.counters[self._prefix + name] = count
        self.counters.clear()
        for name, value in gauges.items():
            stats.gauges[self._prefix + name] = value
        for name, seconds in (
            ("load_seconds", self._load_seconds),
            ("store_seconds", self._store_seconds),
        ):
            if seconds:
                stats.histograms[self._prefix + name] = list(seconds)
                seconds.clear()
