"""What the primary tier counts, for those who export it."""

from __future__ import annotations

from kvtier.base import MetricDefinition, MetricKind

METRIC_DEFINITIONS: dict[str, MetricDefinition] = {
    "kvtier_cpu_slots": MetricDefinition(MetricKind.GAUGE, "Slots of the primary tier."),
    "kvtier_cpu_resident_blocks": MetricDefinition(
        MetricKind.GAUGE, "Blocks in the primary tier that can be read now."
    ),
    "kvtier_cpu_writing_blocks": MetricDefinition(
        MetricKind.GAUGE, "Blocks on their way from the device into the primary tier."
    ),
    "kvtier_cpu_pinned_blocks": MetricDefinition(
        MetricKind.GAUGE, "Readable blocks that cannot be evicted because they are being read."
    ),
    "kvtier_cpu_quarantined_slots": MetricDefinition(
        MetricKind.GAUGE,
        "Slots out of use: a transfer that was given up may be active.",
    ),
    "kvtier_cpu_stored_blocks": MetricDefinition(MetricKind.COUNTER, "Blocks stored."),
    "kvtier_cpu_promoted_blocks": MetricDefinition(
        MetricKind.COUNTER, "Blocks brought up from a tier below."
    ),
    "kvtier_cpu_adopted_blocks": MetricDefinition(
        MetricKind.COUNTER, "Blocks that came from a tier below after nobody waited any more."
    ),
    "kvtier_cpu_loaded_blocks": MetricDefinition(MetricKind.COUNTER, "Blocks loaded."),
    "kvtier_cpu_evicted_blocks": MetricDefinition(MetricKind.COUNTER, "Blocks evicted."),
    "kvtier_cpu_failed_stores": MetricDefinition(
        MetricKind.COUNTER, "Blocks whose copy into the primary tier failed."
    ),
    "kvtier_cpu_filtered_blocks": MetricDefinition(
        MetricKind.COUNTER, "Blocks not stored because too few requests have brought them."
    ),
    "kvtier_cpu_truncated_blocks": MetricDefinition(
        MetricKind.COUNTER, "Blocks not stored because the prompt is larger than the tier."
    ),
    "kvtier_cpu_stale_blocks": MetricDefinition(
        MetricKind.COUNTER, "Blocks not stored because they may be from before a reset."
    ),
    "kvtier_cpu_refused_blocks": MetricDefinition(
        MetricKind.COUNTER, "Blocks not stored because too few slots could be freed."
    ),
    "kvtier_cpu_misuse": MetricDefinition(
        MetricKind.COUNTER, "Calls that broke the contract and were answered safely."
    ),
}
