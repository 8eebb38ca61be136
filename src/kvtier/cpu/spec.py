"""The CPU tier alone: host memory without tiers below it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from kvtier.base import CanonicalKVCaches, MetricDefinition, MetricKind, OffloadingSpec
from kvtier.config.tenants import HOST
from kvtier.cpu.host_worker import HostOffloadingWorker
from kvtier.cpu.manager import CPUOffloadingManager
from kvtier.cpu.policies.factory import CachePolicyFactory
from kvtier.cpu.policies.tenants import Tenancy
from kvtier.cpu.prompt_log import PromptLog
from kvtier.cpu.prompt_sources import source_metric_definitions
from kvtier.cpu.shared_offload_region import SharedOffloadRegion
from kvtier.cpu.worker import SlotWorker, device_pages, is_on_cuda
from kvtier.observe.observer import IGNORED_HINTS, observe
from kvtier.observe.rollout import METRIC_DEFINITIONS as ROLLOUT_METRICS

if TYPE_CHECKING:
    from kvtier.config import OffloadingConfig
    from kvtier.cpu.gpu_worker import GPUOffloadingWorker

__all__ = ["CPUOffloadingSpec"]

METRIC_DEFINITIONS: dict[str, MetricDefinition] = {
    "kvtier_cpu_slots": MetricDefinition(MetricKind.GAUGE, "Slots of the primary tier."),
    "kvtier_cpu_resident_blocks": MetricDefinition(
        MetricKind.GAUGE, "Blocks in the primary tier that can be read now."
    ),
    "kvtier_cpu_writing_blocks": MetricDefinition(
        MetricKind.GAUGE, "Blocks that the device or a tier below is writing into the primary tier."
    ),
    "kvtier_cpu_pinned_blocks": MetricDefinition(
        MetricKind.GAUGE, "Readable blocks that cannot be evicted because they are being read."
    ),
    "kvtier_cpu_quarantined_slots": MetricDefinition(
        MetricKind.GAUGE,
        "Slots out of use: a transfer from before a reset, or one that was given up, may still be "
        "using them.",
    ),
    **{
        f"kvtier_cpu_estimated_hit_ratio{suffix}": MetricDefinition(
            MetricKind.GAUGE,
            f"Estimated share of the blocks of prompts that host memory would have {size}.",
        )
        for suffix, size in (
            ("_half", "with half its size"),
            ("", "if it evicted by LRU"),
            ("_double", "with twice its size"),
            ("_quadruple", "with four times its size"),
        )
    },
    "kvtier_cpu_recorded_requests": MetricDefinition(
        MetricKind.GAUGE, "Requests in the file of `record_trace`."
    ),
    "kvtier_cpu_unrecorded_requests": MetricDefinition(
        MetricKind.GAUGE,
        "Requests that are not in the file of `record_trace`: it is full, could not be written, or "
        "its writer was too slow.",
    ),
    "kvtier_cpu_stored_blocks": MetricDefinition(MetricKind.COUNTER, "Blocks stored."),
    "kvtier_cpu_promoted_blocks": MetricDefinition(
        MetricKind.COUNTER, "Blocks brought up from a tier below."
    ),
    "kvtier_cpu_adopted_blocks": MetricDefinition(
        MetricKind.COUNTER,
        "Blocks from a tier below that arrived after their promotion was given up.",
    ),
    "kvtier_cpu_loaded_blocks": MetricDefinition(MetricKind.COUNTER, "Blocks loaded."),
    "kvtier_cpu_evicted_blocks": MetricDefinition(MetricKind.COUNTER, "Blocks evicted."),
    "kvtier_cpu_failed_stores": MetricDefinition(
        MetricKind.COUNTER, "Blocks whose copy into the primary tier failed."
    ),
    "kvtier_cpu_filtered_blocks": MetricDefinition(
        MetricKind.COUNTER, "Blocks not stored because too few requests had them in their prompts."
    ),
    "kvtier_cpu_declined_blocks": MetricDefinition(
        MetricKind.COUNTER, "Blocks not stored because the policy would rather keep others."
    ),
    "kvtier_cpu_truncated_blocks": MetricDefinition(
        MetricKind.COUNTER,
        "Blocks not stored because the prompt is larger than the tier, or than the slots that a "
        "reset left.",
    ),
    "kvtier_cpu_stale_blocks": MetricDefinition(
        MetricKind.COUNTER, "Blocks not stored because they may be from before a reset."
    ),
    "kvtier_cpu_refused_blocks": MetricDefinition(
        MetricKind.COUNTER, "Blocks not stored because too few slots could be freed."
    ),
    IGNORED_HINTS: MetricDefinition(
        MetricKind.COUNTER, "Hints of requests that were ignored because they could not be read."
    ),
    "kvtier_cpu_misuse": MetricDefinition(
        MetricKind.COUNTER, "Calls that broke the contract and were answered safely."
    ),
}


class CPUOffloadingSpec(OffloadingSpec):
    """Makes the manager on the scheduler's side. On a rank's side, makes the worker and opens the
    region, the shared memory with the slots.

    The scheduler's side opens no region: it uses slot numbers only. The constructor raises
    `ConfigError` on either side if the eviction policy cannot be found.
    """

    def __init__(self, config: OffloadingConfig) -> None:
        super().__init__(config)
        # Checked here, not in `get_manager`, because a rank makes no manager and should fail before
        # it reserves memory.
        CachePolicyFactory.get_cache_policy_cls(
            config.options.eviction_policy, config.options.cache_policy_module_path
        )
        self._manager: CPUOffloadingManager | None = None
        self._worker: SlotWorker | None = None

    @classmethod
    def build_metric_definitions(
        cls, extra_config: Mapping[str, Any]
    ) -> dict[str, MetricDefinition]:
        return METRIC_DEFINITIONS | source_metric_definitions() | ROLLOUT_METRICS

    def get_manager(self) -> CPUOffloadingManager:
        if self._manager is None:
            options = self.config.options
            self._manager = CPUOffloadingManager(
                num_blocks=self.config.num_blocks,
                cache_policy=options.eviction_policy,
                cache_policy_module_path=options.cache_policy_module_path,
                enable_events=self.config.enable_kv_cache_events,
                store_threshold=options.store_threshold,
                max_tracker_size=options.max_tracker_size,
                tenancy=self._tenancy(),
            )
            self._manager.prompts = prompts = PromptLog(self.config)
            definitions = self.build_metric_definitions(self.config.extra_config)
            answers = {"curve": prompts.describe_curve}
            observe(self._manager, self.config, definitions, answers)
        return self._manager

    def _tenancy(self) -> Tenancy | None:
        """What each tenant may have of host memory. Raises `ConfigError`."""
        its = self.config
        return Tenancy.of(its.options, HOST, "cpu_bytes_to_use", its.num_blocks, its.row_bytes)

    def get_worker(self, kv_caches: CanonicalKVCaches) -> SlotWorker:
        """The worker for this rank's caches, with all its memory reserved.

        Raises, and leaves nothing behind, if the caches are neither in host memory nor on a CUDA
        device (`TypeError`), if they do not fit the configuration (`ValueError`), if there is no
        room (`NotEnoughMemory`), or if the NVIDIA driver is missing or too old
        (`CudaUnavailable`).
        """
        if self._worker is None:
            # Checks the caches first, so that no memory is reserved for caches that cannot be used.
            worker_cls = _worker_for(kv_caches)
            region = SharedOffloadRegion(
                self.config.engine_id,
                self.config.num_blocks,
                self.config.parallel.rank,
                self.config.row_bytes,
                self.config.cpu_page_size,
            )
            try:
                self._worker = worker_cls(kv_caches, region, self.config.cache.blocks_per_chunk)
            except BaseException:
                region.cleanup()
                raise
        return self._worker


def _worker_for(
    kv_caches: CanonicalKVCaches,
) -> type[HostOffloadingWorker] | type[GPUOffloadingWorker]:
    """The worker class for the memory that the caches are in. Raises if there is none."""
    if is_on_cuda(kv_caches):
        # Imported here, because they need torch. An engine with CUDA caches has it.
        from kvtier.cpu.cuda.driver import cuda_driver
        from kvtier.cpu.cuda.page_table import device_of, device_tensors
        from kvtier.cpu.gpu_worker import GPUOffloadingWorker

        device_of(kv_caches)
        device_tensors(kv_caches)
        cuda_driver()
        return GPUOffloadingWorker
    device_pages(kv_caches)
    return HostOffloadingWorker
