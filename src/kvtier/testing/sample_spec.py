"""A real configuration and a spec around it, for tiers under test."""

from __future__ import annotations

from kvtier.base import CanonicalKVCaches, OffloadingManager, OffloadingSpec, OffloadingWorker
from kvtier.config import (
    OffloadingCacheConfig,
    OffloadingConfig,
    OffloadingGroupConfig,
    OffloadingModelConfig,
    OffloadingParallelConfig,
)

__all__ = ["SampleSpec", "sample_spec"]

_TOKENS_PER_BLOCK = 16


class SampleSpec(OffloadingSpec):
    """What a tier is given: a configuration. There is no engine to make the halves for."""

    def get_manager(self) -> OffloadingManager:
        raise NotImplementedError("a tier under test has no manager above it")

    def get_worker(self, kv_caches: CanonicalKVCaches) -> OffloadingWorker:
        raise NotImplementedError("a tier under test has no worker above it")


def sample_spec(row_bytes: int, num_blocks: int, namespace: str, engine_id: str) -> SampleSpec:
    """A spec with two KV-cache groups and rows of `row_bytes`, a multiple of the page size.

    `namespace` identifies the weights, so that a tier which outlives the process accepts it; two
    specs have the same fingerprint exactly if it is the same.
    """
    config = OffloadingConfig(
        groups=tuple(
            OffloadingGroupConfig(_TOKENS_PER_BLOCK, (f"layer.{group_id}",), group_id)
            for group_id in range(2)
        ),
        worker_kv_bytes_per_block=row_bytes,
        engine_id=engine_id,
        model=OffloadingModelConfig(name="sample", dtype="bfloat16"),
        cache=OffloadingCacheConfig(tokens_per_hash=_TOKENS_PER_BLOCK),
        parallel=OffloadingParallelConfig(),
        extra_config={
            "cpu_bytes_to_use": row_bytes * num_blocks,
            "cache_namespace": namespace,
        },
    )
    return SampleSpec(config)
