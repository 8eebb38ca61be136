"""Everything that kvtier uses of vLLM and that is the same in all releases, under one roof.

What is not the same is in `differences`. A release that lacks one of these names is refused with a
message that says so.
"""

from __future__ import annotations

import logging

import vllm

from kvtier.integrations.vllm.releases import is_supported, supported_in_words

logger = logging.getLogger(__name__)

try:
    from vllm.config import VllmConfig, get_current_vllm_config_or_none
    from vllm.config.cache import PrefixCachingHashAlgo
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
    from vllm.distributed.kv_transfer.kv_connector.v1.offloading.common import (
        OffloadingConnectorMetadata,
    )
    from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import (
        OffloadingConnectorStats,
    )
    from vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector import (
        OffloadingConnector,
    )
    from vllm.utils.hashing import get_hash_fn_by_name
    from vllm.v1.core import kv_cache_utils
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import (
        FullAttentionSpec,
        KVCacheConfig,
        KVCacheSpec,
        SlidingWindowSpec,
        UniformTypeKVCacheSpecs,
    )
    from vllm.v1.kv_offload.base import (
        CanonicalKVCaches,
        GPULoadStoreSpec,
        Locality,
        LookupResult,
        OffloadingCounterMetadata,
        OffloadingEvent,
        OffloadingGaugeMetadata,
        OffloadingHistogramMetadata,
        OffloadingManager,
        OffloadingMetricMetadata,
        OffloadingSpec,
        OffloadingWorker,
        OffloadPolicy,
        PrepareStoreOutput,
        ReqContext,
        RequestOffloadingContext,
        ScheduleEndContext,
        TransferResult,
    )
    from vllm.v1.kv_offload.config import OffloadingConfig, OffloadingGroupConfig
    from vllm.v1.kv_offload.factory import OffloadingSpecFactory
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request
except ImportError as error:
    raise ImportError(
        f"kvtier's plug-in cannot run in vLLM {vllm.__version__}: {error}. "
        f"It is made for vLLM {supported_in_words()}: install one of these, or a kvtier that "
        "knows this release"
    ) from error

__all__ = [
    "CanonicalKVCaches",
    "FullAttentionSpec",
    "GPULoadStoreSpec",
    "KVCacheConfig",
    "KVCacheSpec",
    "KVConnectorOutput",
    "KVConnectorRole",
    "Locality",
    "LookupResult",
    "METRIC_PREFIX",
    "OffloadPolicy",
    "OffloadingConfig",
    "OffloadingConnector",
    "OffloadingConnectorMetadata",
    "OffloadingConnectorStats",
    "OffloadingCounterMetadata",
    "OffloadingEvent",
    "OffloadingGaugeMetadata",
    "OffloadingGroupConfig",
    "OffloadingHistogramMetadata",
    "OffloadingManager",
    "OffloadingMetricMetadata",
    "OffloadingSpec",
    "OffloadingSpecFactory",
    "OffloadingWorker",
    "PrefixCachingHashAlgo",
    "PrepareStoreOutput",
    "ReqContext",
    "Request",
    "RequestOffloadingContext",
    "ScheduleEndContext",
    "SchedulerOutput",
    "SlidingWindowSpec",
    "TransferResult",
    "UniformTypeKVCacheSpecs",
    "VllmConfig",
    "get_current_vllm_config_or_none",
    "get_hash_fn_by_name",
    "kv_cache_utils",
    "may_sleep",
    "warn_if_untested",
]

METRIC_PREFIX = "vllm:"
"""Only names that begin like this are shown by vLLM, and removed when an engine is replaced; a
second engine in the same process would fail over any other."""

_warned = False


def may_sleep() -> bool:
    """Whether this engine may be told to sleep, as far as vLLM says so where this is asked: in a
    worker, while its caches are made known. True if it does not."""
    config = get_current_vllm_config_or_none()
    return True if config is None else getattr(config.model_config, "enable_sleep_mode", True)


def warn_if_untested() -> None:
    """Say once per process that this vLLM is not one that kvtier is tested with."""
    global _warned  # noqa: PLW0603
    if _warned or is_supported(vllm.__version__):
        return
    _warned = True
    logger.warning(
        "kvtier is tested with vLLM %s, this is %s: it may work, or fail in ways not seen before",
        supported_in_words(),
        vllm.__version__,
    )
