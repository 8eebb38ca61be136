"""vLLM's description of itself, as kvtier's configuration."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvtier.config import (
    AttentionKind,
    OffloadingCacheConfig,
    OffloadingConfig,
    OffloadingGroupConfig,
    OffloadingModelConfig,
    OffloadingParallelConfig,
)
from kvtier.integrations.vllm import differences, vllm_api
from kvtier.integrations.vllm.facts import EngineFacts


def config_from_vllm(
    config: vllm_api.OffloadingConfig, users_keys: Mapping[str, Any], facts: EngineFacts | None
) -> OffloadingConfig:
    """The same in kvtier's terms, or `ConfigError`. Called while the engine starts, on every rank.

    Without `facts` the revision of the weights is not known, nor the attention kind of a group. So
    a tier that outlives the process asks for `cache_namespace`, and a miss in a tier does not end
    the search for blocks of its group. Neither matters to host memory.
    """
    parallel = config.parallel
    return OffloadingConfig(
        groups=tuple(
            _group_from_vllm(group, differences.group_id(group, place), facts)
            for place, group in enumerate(config.groups)
        ),
        worker_kv_bytes_per_block=config.worker_kv_bytes_per_block,
        engine_id=config.engine_id,
        model=_model_from_vllm(config, facts),
        cache=OffloadingCacheConfig(
            tokens_per_hash=config.cache.tokens_per_hash,
            blocks_per_chunk=config.cache.blocks_per_chunk,
        ),
        parallel=OffloadingParallelConfig(
            rank=parallel.rank,
            world_size=parallel.world_size,
            tp_size=parallel.tp_size,
            pp_size=parallel.pp_size,
            pcp_size=parallel.pcp_size,
            dcp_size=parallel.dcp_size,
            data_parallel_index=parallel.data_parallel_index,
            data_parallel_size=differences.data_parallel_size(config),
        ),
        extra_config=users_keys,
        kv_cache_layout=getattr(config, "kv_cache_layout", None),
        enable_kv_cache_events=config.enable_kv_cache_events,
    )


def _group_from_vllm(
    group: vllm_api.OffloadingGroupConfig, number: int, facts: EngineFacts | None
) -> OffloadingGroupConfig:
    # Of windows vLLM needs more than their size, depending on where the prompt ends: it decides
    # how far to look, and kvtier does not limit it.
    is_full = facts is not None and number in facts.full_attention_groups
    return OffloadingGroupConfig(
        tokens_per_block=group.tokens_per_block,
        layer_names=group.layer_names,
        group_id=number,
        kind=AttentionKind.FULL if is_full else AttentionKind.UNKNOWN,
    )


def _model_from_vllm(
    config: vllm_api.OffloadingConfig, facts: EngineFacts | None
) -> OffloadingModelConfig:
    identity = None if facts is None else facts.identity
    if identity is None:
        return OffloadingModelConfig(
            name=config.model.name,
            dtype=config.model.dtype,
            unknown_because="vLLM does not tell it to an offloading spec; use KVTierConnector",
        )
    # Either says more than a name, or a path, under which others may have the same weights.
    name = identity.revision or config.extra_config.get("cache_namespace") or config.model.name
    return OffloadingModelConfig(
        name=name,
        dtype=config.model.dtype,
        weights_revision=identity.revision,
        unknown_because=identity.unknown_because,
        variant=identity.variant,
    )
