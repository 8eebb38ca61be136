"""What the orchestrator counts, for those who export it."""

from __future__ import annotations

from kvtier.base import MetricDefinition, MetricKind
from kvtier.seal import SealFailure
from kvtier.tiering.link import metric_prefix

_SECONDS = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0)

METRIC_DEFINITIONS: dict[str, MetricDefinition] = {
    "kvtier_tiering_given_up_requests": MetricDefinition(
        MetricKind.COUNTER, "Requests that did not wait any longer for a tier."
    ),
    "kvtier_tiering_trial_requests": MetricDefinition(
        MetricKind.COUNTER, "Requests let compute what could be loaded, to see how long it takes."
    ),
    "kvtier_tiering_no_room_blocks": MetricDefinition(
        MetricKind.COUNTER, "Blocks found below that do not fit into the primary tier."
    ),
    "kvtier_tiering_leased_blocks": MetricDefinition(
        MetricKind.GAUGE, "Promoted blocks kept for the requests that wanted them."
    ),
    "kvtier_tiering_prefill_tokens_per_s": MetricDefinition(
        MetricKind.GAUGE,
        "How fast prompts are taken to be computed; 0: not known, so every promotion is made.",
    ),
}

_OF_A_TIER: dict[str, MetricDefinition] = {
    "hit_blocks": MetricDefinition(
        MetricKind.COUNTER, "Blocks that requests found in the tier, to be brought up or declined."
    ),
    "stored_blocks": MetricDefinition(MetricKind.COUNTER, "Blocks stored in the tier."),
    "stored_bytes": MetricDefinition(MetricKind.COUNTER, "Bytes of the blocks stored in the tier."),
    "failed_stores": MetricDefinition(MetricKind.COUNTER, "Blocks the tier could not store."),
    "late_stores": MetricDefinition(MetricKind.COUNTER, "Stores that missed their deadline."),
    "dropped_blocks": MetricDefinition(
        MetricKind.COUNTER,
        "Blocks not stored: while its stores pinned their share of the slots, they left host "
        "memory, or it ended no store.",
    ),
    "shed_blocks": MetricDefinition(
        MetricKind.COUNTER, "Blocks not stored because the tier is cut off."
    ),
    "offered_again_blocks": MetricDefinition(
        MetricKind.COUNTER, "Blocks that requests used and the tier lacked, sent to it again."
    ),
    "held_back_blocks": MetricDefinition(
        MetricKind.COUNTER,
        "Blocks that requests used and the tier lacked, not sent to it again: such stores have a "
        "bounded rate, and wait for others.",
    ),
    "loaded_blocks": MetricDefinition(MetricKind.COUNTER, "Blocks loaded from the tier."),
    "loaded_bytes": MetricDefinition(
        MetricKind.COUNTER, "Bytes of the blocks loaded from the tier."
    ),
    "failed_loads": MetricDefinition(MetricKind.COUNTER, "Blocks the tier could not load."),
    "late_loads": MetricDefinition(MetricKind.COUNTER, "Promotions that missed their deadline."),
    "late_lookups": MetricDefinition(MetricKind.COUNTER, "Lookups that missed their deadline."),
    "declined_blocks": MetricDefinition(
        MetricKind.COUNTER, "Blocks not promoted because computing them is faster."
    ),
    "errors": MetricDefinition(MetricKind.COUNTER, "Calls to the tier that raised."),
    "blocking_calls": MetricDefinition(
        MetricKind.COUNTER, "Calls to the tier that kept the scheduler waiting."
    ),
    "violations": MetricDefinition(
        MetricKind.COUNTER, "Answers and reports of the tier that break its contract."
    ),
    "breaker_state": MetricDefinition(
        MetricKind.GAUGE, "Whether the tier is used (0), being tried (1), or cut off (2)."
    ),
    "store_breaker_state": MetricDefinition(
        MetricKind.GAUGE, "The same for its stores: 0, 1 or 2."
    ),
    "pinned_blocks": MetricDefinition(MetricKind.GAUGE, "Slots that its stores are reading."),
    "waiting_blocks": MetricDefinition(
        MetricKind.GAUGE, "Blocks to be stored when its stores pin less than their share."
    ),
    "loading_blocks": MetricDefinition(MetricKind.GAUGE, "Slots that its loads are writing."),
    "load_seconds": MetricDefinition(
        MetricKind.HISTOGRAM, "How long its loads took, as the tier measured it.", _SECONDS
    ),
    "store_seconds": MetricDefinition(
        MetricKind.HISTOGRAM, "How long its stores took, as the tier measured it.", _SECONDS
    ),
    **{
        f"seal_{reason}": MetricDefinition(
            MetricKind.COUNTER, f"Blocks refused because of their seal: {reason}."
        )
        for reason in SealFailure
    },
}


def tier_metric_definitions(position: int, tier_type: str) -> dict[str, MetricDefinition]:
    """What is counted of the tier at this place in lookup order."""
    prefix = metric_prefix(position, tier_type)
    return {prefix + name: definition for name, definition in _OF_A_TIER.items()}
