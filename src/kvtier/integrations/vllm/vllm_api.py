"""Every name of vLLM that kvtier uses, and every difference between the releases of vLLM.

First come the names that all supported releases have. kvtier refuses a release that lacks one, with
a message. Then come the differences:

| what | 0.26 | 0.28 | 0.32 |
|---|---|---|---|
| offer new blocks only | `BLOCK_LEVEL` | `BLOCK_LEVEL` | `CHUNK_LEVEL` (since 0.30) |
| a tier's medium in events | text, `FS` for storage | enum | enum |
| extra keys in events | as in the hash | as in the hash | without tags |
| name of the tier in an event | no field | no field | `ownership` |
| number of a KV-cache group | its index | its index | `group_id` (since 0.30) |
| number of data-parallel replicas | unknown | in the configuration | in the configuration |
| blocks that a request used | vLLM calls `touch` | vLLM calls `touch` | no call (since 0.31) |
| position of a key in the prompt | unknown | unknown | in the context (since 0.31) |
| root of the block hashes without `PYTHONHASHSEED` | random | random | fixed for sha256 |
| failed load, except with a single full-attention group | no report | no report | by request |
| source of cached tokens | not asked for | not asked for | `get_load_source` |

kvtier detects a difference by inspecting the vLLM that is running, not by its version number, so
that releases between and after the tested ones can work.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Collection, Mapping
from typing import Any, get_args

import vllm

from kvtier.base import Medium, OffloadKey, get_offload_group_idx
from kvtier.integrations.vllm import is_supported, supported_in_words
from kvtier.integrations.vllm.identity import HashRoot, HashSeed

logger = logging.getLogger(__name__)

try:
    from vllm.config import VllmConfig, get_current_vllm_config_or_none
    from vllm.config.cache import PrefixCachingHashAlgo
    from vllm.distributed.kv_events import BlockRemoved, BlockStored
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

try:
    from vllm.v1.kv_offload.base import Medium as VllmMedium
except ImportError:
    VllmMedium = None

try:
    from vllm.v1.metrics.cache_hit_source import CacheHitSource
except ImportError:
    CacheHitSource = None

__all__ = [
    "BLOCK_LEVEL_POLICY",
    "BlockRemoved",
    "BlockStored",
    "CacheHitSource",
    "CanonicalKVCaches",
    "EVENT_MEDIA",
    "FullAttentionSpec",
    "GPULoadStoreSpec",
    "KVCacheConfig",
    "KVCacheSpec",
    "KVConnectorOutput",
    "KVConnectorRole",
    "Locality",
    "LookupResult",
    "MEDIA",
    "HINT_ACTION",
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
    "REPORTS_FAILED_REQUESTS",
    "REPORTS_USE",
    "ReqContext",
    "Request",
    "RequestOffloadingContext",
    "ScheduleEndContext",
    "SchedulerOutput",
    "SlidingWindowSpec",
    "TransferResult",
    "UniformTypeKVCacheSpecs",
    "VllmConfig",
    "begins_prompt",
    "data_parallel_size",
    "default_hash_seed",
    "draws_hash_root",
    "event_hash",
    "expected_hash_root",
    "extra_keys_of",
    "get_current_vllm_config_or_none",
    "get_hash_fn_by_name",
    "group_id",
    "has_window",
    "hash_root",
    "in_prompt_order",
    "keys_in_prompt_order",
    "kv_cache_utils",
    "may_sleep",
    "orders_in",
    "own_offloading_metrics",
    "owner_in_event",
    "warn_if_untested",
]

METRIC_PREFIX = "vllm:"
"""Prefix of every metric. vLLM shows only metrics with this prefix. When an engine ends, vLLM
unregisters only these metrics: a second engine in the same process could not register a metric of
another name again."""

_warned = False


def own_offloading_metrics(
    extra_config: Mapping[str, Any], *, with_tiers: bool
) -> dict[str, OffloadingMetricMetadata]:
    """The metrics that the managers of this vLLM have: for host memory, and for tiers. Empty for a
    vLLM that describes them in another way."""
    keys = {"store_threshold": extra_config.get("store_threshold", 0), "secondary_tiers": []}
    try:
        if with_tiers:
            from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec as TheirSpec
        else:
            from vllm.v1.kv_offload.cpu.spec import CPUOffloadingSpec as TheirSpec
        return dict(TheirSpec.build_metric_definitions(keys))
    except Exception:
        logger.warning("vLLM's own metrics of offloading stay empty", exc_info=True)
        return {}


def may_sleep() -> bool:
    """True if vLLM's sleep mode is on or kvtier cannot find out. Called in a worker while vLLM
    hands over its caches."""
    config = get_current_vllm_config_or_none()
    return True if config is None else getattr(config.model_config, "enable_sleep_mode", True)


def warn_if_untested() -> None:
    """Warn once per process if kvtier is not tested with this vLLM."""
    global _warned  # noqa: PLW0603
    if _warned or is_supported(vllm.__version__):
        return
    _warned = True
    logger.warning(
        "kvtier is tested with vLLM %s, and this is %s: it may work, or fail in ways that no test "
        "has seen. Use a tested release in production",
        supported_in_words(),
        vllm.__version__,
    )


# --- what differs between releases --------------------------------------------------------------

BLOCK_LEVEL_POLICY: OffloadPolicy = (
    getattr(OffloadPolicy, "CHUNK_LEVEL", None) or OffloadPolicy.BLOCK_LEVEL
)
"""vLLM's name for kvtier's `OffloadPolicy.BLOCK_LEVEL`: offer new blocks only."""

MEDIA: dict[Medium, Any] = (
    # Earlier releases have no enum. They name storage only by the name of their own tier, "FS".
    {Medium.CPU: "CPU", Medium.STORAGE: "FS"}
    if VllmMedium is None
    else {Medium.CPU: VllmMedium.CPU, Medium.STORAGE: VllmMedium.STORAGE}
)
"""vLLM's names for media in events."""

EVENT_MEDIA: dict[Medium, str] = {
    Medium.CPU: "CPU",
    Medium.STORAGE: "FS" if VllmMedium is None else "STORAGE",
}
"""The same in the events that vLLM publishes."""

_EVENTS_NAME_TIERS = "ownership" in getattr(BlockStored, "__struct_fields__", ())


def owner_in_event(tier: str | None) -> dict[str, Any]:
    """The keyword argument that names the tier in vLLM's events, those of a manager and those that
    are published. Empty in releases whose events do not name tiers. `tier`: None for host memory,
    and if the user wants no names."""
    return {"ownership": tier} if _EVENTS_NAME_TIERS else {}


def event_hash(block_hash: bytes) -> Any:
    """A hash as vLLM publishes it: a number of 64 bits, unless the user wants bytes."""
    return kv_cache_utils.maybe_convert_block_hash(block_hash)


def extra_keys_of(
    request: Request, start: int, end: int, block_size: int
) -> list[list[Any] | None] | None:
    """What the hashes of these blocks cover besides tokens and earlier blocks, as vLLM publishes
    it: one entry for each block. None if there is nothing. `start` and `end`: tokens."""
    has_some = (
        request.lora_request is not None
        or request.mm_features
        or request.cache_salt
        or request.prompt_embeds is not None
    )
    if not has_some:
        return None
    found = [
        kv_cache_utils.generate_block_hash_extra_keys(request, first, first + block_size, 0)[0]
        for first in range(start, end, block_size)
    ]
    # Later releases tag the keys for the hash, and publish them without the tags.
    publish = getattr(kv_cache_utils, "to_event_extra_keys", None)
    if publish is not None:
        found = publish(found) or found
    return [None if keys is None else list(keys) for keys in found]


REPORTS_USE = not hasattr(ReqContext("any"), "_offload_key_positions")
"""True if vLLM's scheduler calls `touch` with the blocks that a request used, including blocks on
the device. Later releases record the position of each key in the context instead."""

REPORTS_FAILED_REQUESTS = "failed_recving" in KVConnectorOutput.__dataclass_fields__
"""True if a connector can report requests whose load has failed; vLLM then computes their whole
prompt. Every release accepts the numbers of failed device blocks, and computes from the first of
them on. That is right only for full attention, and only if there is no other group."""


HINT_ACTION = "kvtier.hints"
"""Type of the action in an envelope of hints that is for kvtier."""
_MAX_ACTIONS = 16


def orders_in(req_context: ReqContext) -> Mapping[str, Any] | None:
    """The hints for kvtier in a request's `kv_hints`, an envelope that an orchestrator passes to
    vLLM's Python API. None in releases before 0.31, which have no such envelope. Of several
    actions, later ones take precedence."""
    envelope = getattr(req_context, "kv_hints", None)
    if envelope is None:
        return None
    orders: dict[str, Any] = {}
    for action in envelope.actions[:_MAX_ACTIONS]:
        if action.action_type == HINT_ACTION and isinstance(action.payload, Mapping):
            orders |= action.payload
    return orders


def keys_in_prompt_order(req_context: ReqContext) -> list[OffloadKey]:
    """All keys of the request, sorted by position, then by group. Call it only if `REPORTS_USE` is
    False."""
    positions: dict[OffloadKey, int] = req_context._offload_key_positions
    # vLLM adds keys group by group, so that a stable sort by position keeps the groups' order.
    return sorted(positions, key=positions.__getitem__)


def begins_prompt(keys: Collection[OffloadKey], req_context: ReqContext) -> bool:
    """True if the first of these keys is the first key of the prompt. Call it only if `REPORTS_USE`
    is False."""
    positions: dict[OffloadKey, int] = req_context._offload_key_positions
    return next(iter(keys), None) == next(iter(positions), None)


def in_prompt_order(keys: Collection[OffloadKey], req_context: ReqContext) -> list[OffloadKey]:
    """Keys of a request, which vLLM gives group by group, sorted by position in the prompt.

    In releases without positions, this assumes that all groups cover the same part of the prompt.
    """
    if not REPORTS_USE:
        positions: dict[OffloadKey, int] = req_context._offload_key_positions
        return sorted(keys, key=lambda key: positions.get(key, 0))
    by_group: dict[int, list[OffloadKey]] = {}
    for key in keys:
        by_group.setdefault(get_offload_group_idx(key), []).append(key)
    placed = [
        (place / len(group), key) for group in by_group.values() for place, key in enumerate(group)
    ]
    placed.sort(key=lambda entry: entry[0])
    return [key for _, key in placed]


def has_window(group: Any) -> bool:
    """True if a token does not need the cache of all earlier tokens in this group. `group`: its
    description in the scheduler half of vLLM's connector."""
    names = ("sliding_window_size_in_chunks", "sliding_window_size_in_blocks")
    return any(getattr(group, name, None) is not None for name in names)


def group_id(group: OffloadingGroupConfig, place: int) -> int:
    """The number that the keys of this group contain. `place`: the group's index among the
    offloaded groups, which is the number in releases without `group_id`."""
    return int(getattr(group, "group_id", place))


def data_parallel_size(config: OffloadingConfig) -> int:
    """The number of data-parallel replicas; for a dense model, a lower bound.

    vLLM gives each replica of a dense model a data-parallel size of 1, and older releases have no
    such field. So this also reads the index of the replica and the end of its engine id, which
    tells the first of several replicas from a single engine.
    """
    size: int = getattr(config.parallel, "data_parallel_size", 1)
    index: int = config.parallel.data_parallel_index
    is_replica = index > 0 or config.engine_id.endswith(f"_dp{index}")
    return max(size, index + 1, 2) if is_replica else size


def default_hash_seed() -> str | None:
    """The text that this vLLM hashes to get the root of its block hashes, if `PYTHONHASHSEED` is
    not set and the algorithm is cryptographic. None: this vLLM draws a random root."""
    seed: str | None = getattr(kv_cache_utils, "DEFAULT_NONE_HASH_SEED", None)
    return seed


def draws_hash_root(algorithm: str | None) -> bool:
    """True if the root of this process's block hashes will be random, so that no other process
    computes the same hashes. May be called before vLLM has made the root.

    `algorithm`: vLLM's name of its hash algorithm. Without `PYTHONHASHSEED`, later releases draw a
    root only for algorithms that are not cryptographic. None (not known) counts as cryptographic.
    """
    if os.environ.get("PYTHONHASHSEED") is not None:
        return False
    if default_hash_seed() is None:
        return True
    weak: Any = getattr(kv_cache_utils, "_NON_CRYPTO_HASH_FUNCTIONS", ())
    return algorithm is not None and get_hash_fn_by_name(algorithm) in weak


def expected_hash_root(algorithm: str) -> HashRoot | None:
    """The root that this process's block hashes will have, before vLLM has made it; None if it will
    be random. `algorithm`: vLLM's name of its hash algorithm."""
    seed = HashSeed(os.environ.get("PYTHONHASHSEED"), default_hash_seed())
    if draws_hash_root(algorithm) or seed.text is None:
        return None
    digest = get_hash_fn_by_name(algorithm)
    return HashRoot(digest(seed.text), seed, {algorithm: digest})


def hash_root() -> HashRoot | None:
    """The root of this process's block hashes. In the hash of a prompt's first block, it takes the
    place of the hash of the block before. None until vLLM has made the root: vLLM makes it after
    the manager and before the first request."""
    value: bytes | None = getattr(kv_cache_utils, "NONE_HASH", None)
    if value is None:
        return None
    return HashRoot(
        value,
        HashSeed(os.environ.get("PYTHONHASHSEED"), default_hash_seed()),
        {name: get_hash_fn_by_name(name) for name in get_args(PrefixCachingHashAlgo)},
    )
