"""The class that vLLM loads by name: it makes a kvtier spec and hands out its two halves."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvtier.base import MetricDefinition, MetricKind, OffloadingManager
from kvtier.cpu.spec import CPUOffloadingSpec
from kvtier.integrations.vllm import vllm_api
from kvtier.integrations.vllm.block_hashes import lasting_tiers
from kvtier.integrations.vllm.config import config_from_vllm
from kvtier.integrations.vllm.manager import ManagerAdapter
from kvtier.integrations.vllm.worker import WorkerAdapter, kv_caches_from_vllm
from kvtier.tiering.manager import TieringOffloadingManager
from kvtier.tiering.spec import TieringOffloadingSpec


def metric_to_vllm(definition: MetricDefinition) -> vllm_api.OffloadingMetricMetadata:
    """The same figure as vLLM's metrics endpoint wants it described."""
    if definition.kind is MetricKind.COUNTER:
        return vllm_api.OffloadingCounterMetadata(definition.documentation)
    if definition.kind is MetricKind.GAUGE:
        return vllm_api.OffloadingGaugeMetadata(definition.documentation)
    return vllm_api.OffloadingHistogramMetadata(
        definition.documentation, buckets=definition.buckets
    )


def kvtier_spec_cls(extra_config: Mapping[str, Any]) -> type[CPUOffloadingSpec]:
    """What the user's keys ask for. `spec_name`, which says it elsewhere, is vLLM's here."""
    return TieringOffloadingSpec if extra_config.get("secondary_tiers") else CPUOffloadingSpec


class KVTierOffloadingSpec(vllm_api.OffloadingSpec):
    """kvtier's CPU tier inside vLLM, with the tiers below it.

    vLLM makes one on the scheduler side and calls `get_manager`, and one in every worker and calls
    `get_worker`; where engine and worker are one process, there are still two.
    """

    @classmethod
    def build_metric_definitions(
        cls, extra_config: Mapping[str, Any]
    ) -> dict[str, vllm_api.OffloadingMetricMetadata]:
        """Called by whoever exports vLLM's metrics, maybe without any spec being made."""
        definitions = kvtier_spec_cls(extra_config).build_metric_definitions(extra_config)
        return {
            vllm_api.METRIC_PREFIX + name: metric_to_vllm(definition)
            for name, definition in definitions.items()
        }

    def __init__(self, config: vllm_api.OffloadingConfig) -> None:
        super().__init__(config)
        vllm_api.warn_if_untested()
        self.kvtier_config = config_from_vllm(config)
        self._spec = kvtier_spec_cls(config.extra_config)(self.kvtier_config)
        self._manager: ManagerAdapter | None = None
        self._worker: WorkerAdapter | None = None

    def get_manager(self) -> ManagerAdapter:
        if self._manager is None:
            manager: OffloadingManager = self._spec.get_manager()
            tiers = manager.secondary_tiers if isinstance(manager, TieringOffloadingManager) else ()
            self._manager = ManagerAdapter(
                manager,
                self._spec.build_metric_definitions(self.extra_config),
                has_groups=len(self.kvtier_config.groups) > 1,
                lasting_tiers=lasting_tiers(tiers),
            )
        return self._manager

    def get_worker(self, kv_caches: vllm_api.CanonicalKVCaches) -> WorkerAdapter:
        if self._worker is None:
            self._worker = WorkerAdapter(self._spec.get_worker(kv_caches_from_vllm(kv_caches)))
        return self._worker
