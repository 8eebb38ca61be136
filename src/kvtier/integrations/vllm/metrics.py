"""The figures that the plug-in itself adds to those of kvtier's managers."""

from __future__ import annotations

from kvtier.base import MetricDefinition, MetricKind
from kvtier.integrations.vllm import vllm_api

__all__ = ["BLOCK_BYTES", "DEFINITIONS", "FAILED_LOADS", "metric_to_vllm"]

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


def metric_to_vllm(definition: MetricDefinition) -> vllm_api.OffloadingMetricMetadata:
    """The same figure as vLLM's metrics endpoint wants it described."""
    if definition.kind is MetricKind.COUNTER:
        return vllm_api.OffloadingCounterMetadata(definition.documentation)
    if definition.kind is MetricKind.GAUGE:
        return vllm_api.OffloadingGaugeMetadata(definition.documentation)
    return vllm_api.OffloadingHistogramMetadata(
        definition.documentation, buckets=definition.buckets
    )
