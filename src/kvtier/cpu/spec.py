"""The CPU tier alone: host memory below the device, and nothing below that."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from kvtier.base import CanonicalKVCaches, MetricDefinition, OffloadingSpec
from kvtier.cpu.device_pages import device_pages, is_on_cuda
from kvtier.cpu.host_worker import HostOffloadingWorker
from kvtier.cpu.manager import CPUOffloadingManager
from kvtier.cpu.metrics import METRIC_DEFINITIONS
from kvtier.cpu.policies.factory import CachePolicyFactory
from kvtier.cpu.shared_offload_region import SharedOffloadRegion
from kvtier.cpu.slot_worker import SlotWorker

if TYPE_CHECKING:
    from kvtier.config import OffloadingConfig
    from kvtier.cpu.gpu_worker import GPUOffloadingWorker

__all__ = ["CPUOffloadingSpec"]


class CPUOffloadingSpec(OffloadingSpec):
    """Wires the manager on the scheduler's side, the region and the worker on a rank's.

    The scheduler's side opens no region: it deals in slot numbers only. Making one raises
    `ConfigError` on either side when the eviction policy is not to be had.
    """

    def __init__(self, config: OffloadingConfig) -> None:
        super().__init__(config)
        # The manager asks again; a rank has none, and must not reserve memory under a wrong name.
        CachePolicyFactory.get_cache_policy_cls(
            config.options.eviction_policy, config.options.cache_policy_module_path
        )
        self._manager: CPUOffloadingManager | None = None
        self._worker: SlotWorker | None = None

    @classmethod
    def build_metric_definitions(
        cls, extra_config: Mapping[str, Any]
    ) -> dict[str, MetricDefinition]:
        return dict(METRIC_DEFINITIONS)

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
            )
        return self._manager

    def get_worker(self, kv_caches: CanonicalKVCaches) -> SlotWorker:
        """The worker for this rank's caches, with all its memory reserved.

        Raises, and leaves nothing behind, when the caches are neither in host memory nor on a CUDA
        device (`TypeError`), do not fit the configuration (`ValueError`), when there is no room
        (`NotEnoughMemory`), or when the NVIDIA driver is too old (`CudaUnavailable`).
        """
        if self._worker is None:
            # First of all, before gigabytes are reserved for caches that cannot be used.
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
    """By where the caches are. Raises if no worker can use them."""
    if is_on_cuda(kv_caches):
        # Here, since it needs torch; whoever has such caches has it.
        from kvtier.cpu.cuda.device_tensors import device_of, device_tensors
        from kvtier.cpu.cuda.driver import cuda_driver
        from kvtier.cpu.gpu_worker import GPUOffloadingWorker

        device_of(kv_caches)
        device_tensors(kv_caches)
        cuda_driver()
        return GPUOffloadingWorker
    device_pages(kv_caches)
    return HostOffloadingWorker
