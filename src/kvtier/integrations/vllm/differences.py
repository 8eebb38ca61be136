"""What differs between the releases of vLLM that kvtier runs in, each in one place.

Every difference is found out by looking at the vLLM that is running, never by its number: so
releases between the tested ones, and later ones, have a fair chance.

| what | 0.26 | 0.28 | 0.32 |
|---|---|---|---|
| offer new blocks only | `BLOCK_LEVEL` | `BLOCK_LEVEL` | `CHUNK_LEVEL` (since 0.30) |
| a tier's medium in events | text, `FS` for storage | enum | enum |
| which tier an event is of | cannot be told | cannot be told | `ownership` |
| a group's number | its place | its place | `group_id` (since 0.30) |
| number of replicas | not told | told | told |
| who reports what a request used | vLLM, by `touch` | vLLM, by `touch` | nobody (since 0.31) |
| position of a key in the prompt | not told | not told | told (since 0.31) |
| root of the block hashes | random without a seed | random without a seed | fixed for sha256 |
| failed load, unless one group of full attention | cannot be told | cannot be told | by request |
| where cached tokens came from | not asked | not asked | asked |
"""

from __future__ import annotations

import os
from collections.abc import Collection
from typing import Any, get_args

from kvtier.base import Medium, OffloadKey, get_offload_group_idx
from kvtier.integrations.vllm import vllm_api
from kvtier.integrations.vllm.block_hashes import HashRoot, HashSeed

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
    "CacheHitSource",
    "MEDIA",
    "REPORTS_FAILED_REQUESTS",
    "REPORTS_USE",
    "begins_prompt",
    "data_parallel_size",
    "default_hash_seed",
    "draws_hash_root",
    "group_id",
    "hash_root",
    "in_prompt_order",
    "keys_in_prompt_order",
    "owner_in_event",
]

BLOCK_LEVEL_POLICY: vllm_api.OffloadPolicy = (
    getattr(vllm_api.OffloadPolicy, "CHUNK_LEVEL", None) or vllm_api.OffloadPolicy.BLOCK_LEVEL
)
"""What kvtier calls BLOCK_LEVEL."""

MEDIA: dict[Medium, Any] = (
    # Before it had a name for storage, vLLM named the two kinds that it had.
    {Medium.CPU: "CPU", Medium.STORAGE: "FS"}
    if VllmMedium is None
    else {Medium.CPU: VllmMedium.CPU, Medium.STORAGE: VllmMedium.STORAGE}
)
"""How vLLM's events name where a block is."""

_EVENTS_NAME_TIERS = "ownership" in getattr(vllm_api.OffloadingEvent, "__dataclass_fields__", ())


def owner_in_event(tier: str | None) -> dict[str, Any]:
    """The argument of vLLM's event that names the tier below host memory; None for host memory."""
    return {"ownership": tier} if _EVENTS_NAME_TIERS else {}


REPORTS_USE = not hasattr(vllm_api.ReqContext("any"), "_offload_key_positions")
"""Whether vLLM's scheduler says which blocks a request used, those on the device included. Where
it does not, it notes the position of each of the request's keys instead."""

REPORTS_FAILED_REQUESTS = "failed_recving" in vllm_api.KVConnectorOutput.__dataclass_fields__
"""Whether a connector can say that a request is to compute its whole prompt. Every release takes
block numbers, and computes from the first of them on: that is right for full attention alone, and
only where no other group shares the numbers."""


def keys_in_prompt_order(req_context: vllm_api.ReqContext) -> list[OffloadKey]:
    """Every key of the request, by position, and by group where positions are equal. Only where
    not `REPORTS_USE`."""
    positions: dict[OffloadKey, int] = req_context._offload_key_positions
    # vLLM adds keys group by group, so that a stable sort by position keeps the groups' order.
    return sorted(positions, key=positions.__getitem__)


def begins_prompt(keys: Collection[OffloadKey], req_context: vllm_api.ReqContext) -> bool:
    """Whether the first of these keys is the prompt's first. Only where not `REPORTS_USE`."""
    positions: dict[OffloadKey, int] = req_context._offload_key_positions
    return next(iter(keys), None) == next(iter(positions), None)


def in_prompt_order(
    keys: Collection[OffloadKey], req_context: vllm_api.ReqContext
) -> list[OffloadKey]:
    """Keys of the request, likewise. vLLM gives them group by group.

    Where positions are not told, groups are taken to cover the same part of the prompt.
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


def group_id(group: vllm_api.OffloadingGroupConfig, place: int) -> int:
    """The number that a key of this group, the `place`-th that is offloaded, carries."""
    return int(getattr(group, "group_id", place))


def data_parallel_size(config: vllm_api.OffloadingConfig) -> int:
    """How many data-parallel replicas there are; of a dense model, how many at least.

    vLLM renumbers the replicas of a dense model as one of one, and older releases do not tell
    their number at all. Their index stays, and so does the end of their engine id, which tells the
    first of several from an only one.
    """
    size: int = getattr(config.parallel, "data_parallel_size", 1)
    index: int = config.parallel.data_parallel_index
    is_replica = index > 0 or config.engine_id.endswith(f"_dp{index}")
    return max(size, index + 1, 2) if is_replica else size


def default_hash_seed() -> str | None:
    """What this vLLM hashes to get the root of its block hashes while `PYTHONHASHSEED` is not set,
    for algorithms that need no secret; None: it draws a random one."""
    seed: str | None = getattr(vllm_api.kv_cache_utils, "DEFAULT_NONE_HASH_SEED", None)
    return seed


def draws_hash_root(algorithm: str | None) -> bool:
    """Whether this process's block hashes begin with something random, so that no other arrives at
    them, as far as it can be said before vLLM has made it.

    `algorithm`: vLLM's name of the one it hashes with. Without a seed, later releases draw for
    those that are not cryptographic. None: not known, and not taken for one of these.
    """
    if os.environ.get("PYTHONHASHSEED") is not None:
        return False
    if default_hash_seed() is None:
        return True
    weak: Any = getattr(vllm_api.kv_cache_utils, "_NON_CRYPTO_HASH_FUNCTIONS", ())
    return algorithm is not None and vllm_api.get_hash_fn_by_name(algorithm) in weak


def hash_root() -> HashRoot | None:
    """What this process's block hashes are chained to; None: an engine is starting, and has not
    made it yet. It has once there are requests."""
    value: bytes | None = getattr(vllm_api.kv_cache_utils, "NONE_HASH", None)
    if value is None:
        return None
    return HashRoot(
        value,
        HashSeed(os.environ.get("PYTHONHASHSEED"), default_hash_seed()),
        {
            name: vllm_api.get_hash_fn_by_name(name)
            for name in get_args(vllm_api.PrefixCachingHashAlgo)
        },
    )
