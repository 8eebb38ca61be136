"""From the engine's own configuration to a connector."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from hashlib import blake2b
from typing import Any

from kvtier.config import (
    AttentionKind,
    OffloadingCacheConfig,
    OffloadingConfig,
    OffloadingGroupConfig,
    OffloadingModelConfig,
    OffloadingParallelConfig,
)
from kvtier.connector.scheduler import OffloadingConnectorScheduler
from kvtier.connector.worker import OffloadingConnectorWorker
from kvtier.engine.cache import array_page_bytes
from kvtier.engine.config import EngineConfig, ModelConfig
from kvtier.engine.hooks import Connector
from kvtier.factory import OffloadingSpecFactory

__all__ = ["make_connector", "offloading_config"]


def offloading_config(
    model: ModelConfig,
    engine: EngineConfig,
    extra_config: Mapping[str, Any],
    engine_id: str,
    *,
    enable_kv_cache_events: bool = False,
) -> OffloadingConfig:
    """What this engine says about itself, joined with what the user set. For rank 0."""
    engine.check_against(model)
    return OffloadingConfig(
        groups=tuple(
            OffloadingGroupConfig(
                tokens_per_block=tokens,
                layer_names=tuple(f"layers.{layer}" for layer in group.layers),
                group_id=group_idx,
                kind=AttentionKind.FULL if group.window is None else AttentionKind.SLIDING_WINDOW,
                window_tokens=group.window,
            )
            for group_idx, (group, tokens) in enumerate(
                zip(model.groups, engine.block_tokens, strict=True)
            )
        ),
        worker_kv_bytes_per_block=sum(array_page_bytes(model, engine)),
        engine_id=engine_id,
        model=OffloadingModelConfig(
            name="kvtier-reference", dtype="float32", weights_revision=_revision(model)
        ),
        cache=OffloadingCacheConfig(tokens_per_hash=engine.tokens_per_hash),
        parallel=OffloadingParallelConfig(world_size=engine.world_size, tp_size=engine.world_size),
        extra_config=extra_config,
        enable_kv_cache_events=enable_kv_cache_events,
    )


def _revision(model: ModelConfig) -> str:
    """The configuration is all that the weights are made of."""
    return blake2b(repr(model).encode(), digest_size=16).hexdigest()


def make_connector(config: OffloadingConfig) -> Connector:
    """Both halves, for all ranks in this process. An engine shuts them down.

    Raises as the spec does when a tier cannot start or when there is no room.
    """
    ranks = range(config.parallel.world_size)
    scheduler_spec, *worker_specs = [
        OffloadingSpecFactory.create_spec(
            replace(config, parallel=replace(config.parallel, rank=rank))
        )
        for rank in (0, *ranks)
    ]
    return Connector(
        scheduler=OffloadingConnectorScheduler(scheduler_spec),
        workers=[OffloadingConnectorWorker(spec) for spec in worker_specs],
    )
