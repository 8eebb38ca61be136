"""vLLM's description of itself, as kvtier's configuration."""

from __future__ import annotations

from kvtier.config import (
    AttentionKind,
    OffloadingCacheConfig,
    OffloadingConfig,
    OffloadingGroupConfig,
    OffloadingModelConfig,
    OffloadingParallelConfig,
)
from kvtier.integrations.vllm import vllm_api


def config_from_vllm(config: vllm_api.OffloadingConfig) -> OffloadingConfig:
    """The same in kvtier's terms, or `ConfigError`. Called while the engine starts, on every rank.

    A vLLM spec is not told the revision of the weights, nor the attention kind of a group. So a
    tier that outlives the process asks for `cache_namespace`, and a miss in a tier does not end the
    search for blocks of its group. Neither matters to host memory.
    """
    parallel = config.parallel
    return OffloadingConfig(
        groups=tuple(
            OffloadingGroupConfig(
                tokens_per_block=group.tokens_per_block,
                layer_names=group.layer_names,
                group_id=group.group_id,
                kind=AttentionKind.UNKNOWN,
            )
            for group in config.groups
        ),
        worker_kv_bytes_per_block=config.worker_kv_bytes_per_block,
        engine_id=config.engine_id,
        model=OffloadingModelConfig(name=config.model.name, dtype=config.model.dtype),
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
            data_parallel_size=vllm_api.data_parallel_size(config),
        ),
        extra_config=config.extra_config,
        kv_cache_layout=config.kv_cache_layout,
        enable_kv_cache_events=config.enable_kv_cache_events,
    )
