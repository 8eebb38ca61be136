"""Everything that kvtier uses of vLLM, under one roof: what changes with its version changes here.

Made for, and tested with, the releases in `SUPPORTED`. Any other release is tried, with one
warning; one that lacks a name used here is refused with a message that says so.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Collection
from typing import get_args

import vllm

from kvtier.base import OffloadKey
from kvtier.integrations.vllm.block_hashes import HashRoot, HashSeed

logger = logging.getLogger(__name__)

SUPPORTED = ((0, 32),)


def _release() -> tuple[int, ...]:
    """Major and minor version of the vLLM that is running."""
    return tuple(int(part) for part in vllm.__version__.split(".")[:2] if part.isdecimal())


def _supported_in_words() -> str:
    return ", ".join(".".join(map(str, release)) for release in SUPPORTED)


try:
    from vllm.config.cache import PrefixCachingHashAlgo
    from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import (
        OffloadingConnectorStats,
    )
    from vllm.utils.hashing import get_hash_fn_by_name
    from vllm.v1.core import kv_cache_utils
    from vllm.v1.kv_offload.base import (
        CanonicalKVCaches,
        GPULoadStoreSpec,
        Locality,
        LookupResult,
        Medium,
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
        TierFilter,
        TransferResult,
    )
    from vllm.v1.kv_offload.config import OffloadingConfig
    from vllm.v1.metrics.cache_hit_source import CacheHitSource
except ImportError as error:
    raise ImportError(
        f"kvtier's plug-in cannot run in vLLM {vllm.__version__}: {error}. "
        f"It is made for vLLM {_supported_in_words()}: install one of these, or a kvtier that "
        "knows this release"
    ) from error

__all__ = [
    "BLOCK_LEVEL_POLICY",
    "CacheHitSource",
    "CanonicalKVCaches",
    "GPULoadStoreSpec",
    "Locality",
    "LookupResult",
    "METRIC_PREFIX",
    "Medium",
    "OffloadPolicy",
    "OffloadingConfig",
    "OffloadingConnectorStats",
    "OffloadingCounterMetadata",
    "OffloadingEvent",
    "OffloadingGaugeMetadata",
    "OffloadingHistogramMetadata",
    "OffloadingManager",
    "OffloadingMetricMetadata",
    "OffloadingSpec",
    "OffloadingWorker",
    "PrepareStoreOutput",
    "ReqContext",
    "RequestOffloadingContext",
    "SUPPORTED",
    "ScheduleEndContext",
    "TierFilter",
    "TransferResult",
    "data_parallel_size",
    "hash_root",
    "in_prompt_order",
    "keys_in_prompt_order",
    "warn_if_untested",
]

BLOCK_LEVEL_POLICY = OffloadPolicy.CHUNK_LEVEL
"""What kvtier calls BLOCK_LEVEL; vLLM renamed it in 0.30."""

METRIC_PREFIX = "vllm:"
"""Only names that begin like this are shown by vLLM, and removed when an engine is replaced; a
second engine in the same process would fail over any other."""


def keys_in_prompt_order(req_context: ReqContext) -> list[OffloadKey]:
    """Every key of the request, by position, and by group where positions are equal.

    Since 0.31 vLLM's scheduler does not say which blocks a request used, but it notes the
    position of each of the request's keys, also of those it found on the device.
    """
    positions: dict[OffloadKey, int] = req_context._offload_key_positions
    # vLLM adds keys group by group, so that a stable sort by position keeps the groups' order.
    return sorted(positions, key=positions.__getitem__)


def in_prompt_order(keys: Collection[OffloadKey], req_context: ReqContext) -> list[OffloadKey]:
    """Keys of the request, likewise. vLLM gives them group by group."""
    positions: dict[OffloadKey, int] = req_context._offload_key_positions
    return sorted(keys, key=lambda key: positions.get(key, 0))


def data_parallel_size(config: OffloadingConfig) -> int:
    """How many data-parallel replicas there are; of a dense model, how many at least.

    vLLM renumbers the replicas of a dense model as one of one. Their index stays, and so does the
    end of their engine id, which tells the first of several from an only one.
    """
    size: int = config.parallel.data_parallel_size
    index: int = config.parallel.data_parallel_index
    is_replica = index > 0 or config.engine_id.endswith(f"_dp{index}")
    return max(size, index + 1, 2) if is_replica else size


def hash_root() -> HashRoot | None:
    """What this process's block hashes are chained to; None: an engine is starting, and has not
    made it yet. It has once there are requests.

    Earlier releases have no seed of their own: there the root is random unless `PYTHONHASHSEED` is
    set. 0.32 has one for those algorithms that need no secret.
    """
    value: bytes | None = getattr(kv_cache_utils, "NONE_HASH", None)
    if value is None:
        return None
    default: str | None = getattr(kv_cache_utils, "DEFAULT_NONE_HASH_SEED", None)
    return HashRoot(
        value,
        HashSeed(os.environ.get("PYTHONHASHSEED"), default),
        {name: get_hash_fn_by_name(name) for name in get_args(PrefixCachingHashAlgo)},
    )


_warned = False


def warn_if_untested() -> None:
    """Say once per process that this vLLM is not one that kvtier is tested with."""
    global _warned  # noqa: PLW0603
    if _warned or _release() in SUPPORTED:
        return
    _warned = True
    logger.warning(
        "kvtier is tested with vLLM %s, this is %s: it may work, or fail in ways not seen before",
        _supported_in_words(),
        vllm.__version__,
    )
