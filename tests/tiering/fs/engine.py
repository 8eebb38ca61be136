"""An engine without a device over an fs tier, as a user configures it, or with faults between."""

from __future__ import annotations

import uuid
from pathlib import Path
from typing import Any

from kvtier.config import (
    OffloadingCacheConfig,
    OffloadingConfig,
    OffloadingGroupConfig,
    OffloadingModelConfig,
    OffloadingParallelConfig,
    new_epoch,
)
from kvtier.cpu.shared_offload_region import SharedOffloadRegion
from kvtier.testing import FaultSchedule, FaultyTier
from kvtier.tiering.fs.manager import FsSecondaryTierManager
from kvtier.tiering.health import BreakerSettings, TierSettings
from kvtier.tiering.manager import CPUPrimaryTierOffloadingManager, TieringOffloadingManager
from kvtier.tiering.spec import TieringOffloadingSpec
from tests.tiering.disk.engine import Engine
from tests.tiering.fs.backing import FsBacking
from tests.tiering.fs.rig import PATIENCE_S, ROW_BYTES, bytes_for

__all__ = ["configured_engine", "engine_with_faults"]


def _config(num_rows: int, namespace: str, **extra: Any) -> OffloadingConfig:
    return OffloadingConfig(
        groups=(OffloadingGroupConfig(16, ("layer.0",)),),
        worker_kv_bytes_per_block=ROW_BYTES,
        engine_id=uuid.uuid4().hex,
        model=OffloadingModelConfig(name="model", dtype="bfloat16"),
        cache=OffloadingCacheConfig(tokens_per_hash=16),
        parallel=OffloadingParallelConfig(),
        extra_config={
            "cpu_bytes_to_use": num_rows * ROW_BYTES,
            "cache_namespace": namespace,
            "prefill_tokens_per_s": 0,
            **extra,
        },
        enable_kv_cache_events=True,
    )


def configured_engine(
    root: Path,
    *,
    num_rows: int = 16,
    num_blocks: int = 256,
    namespace: str = "weights",
    **keys: Any,
) -> Engine:
    """As a user's configuration makes it."""
    tier = {
        "type": "fs",
        "root_dir": str(root),
        "max_bytes": bytes_for(num_blocks),
        "enable_kv_events": True,
        "max_pinned_share": 1,
        "load_timeout_ms": 1000 * PATIENCE_S,
        "lookup_timeout_ms": 1000 * PATIENCE_S,
        **keys,
    }
    config = _config(num_rows, namespace, secondary_tiers=[tier])
    manager = TieringOffloadingSpec(config).get_manager()
    return Engine(manager, manager.secondary_tiers[0])


def engine_with_faults(
    root: Path, schedule: FaultSchedule, *, num_rows: int = 64, shutdown_timeout_s: float = 10.0
) -> tuple[Engine, FaultyTier]:
    """The same with faults between the orchestrator and the fs tier, and short pauses."""
    config = _config(num_rows, "weights")
    region = SharedOffloadRegion(
        config.engine_id, config.num_blocks, None, config.row_bytes, config.cpu_page_size
    )
    primary = CPUPrimaryTierOffloadingManager(config.num_blocks, region)
    fs = FsSecondaryTierManager(
        TieringOffloadingSpec(config),
        primary.get_kv_memoryview(),
        "fs",
        root_dir=str(root),
        max_bytes=bytes_for(1024),
    )
    tier = FaultyTier(fs, schedule, backing=FsBacking(fs))
    pauses = BreakerSettings(first_pause_s=0.01, longest_pause_s=0.02)
    manager = TieringOffloadingManager(
        primary,
        [tier],
        settings=[
            TierSettings(
                lookup_timeout_s=0.1, load_timeout_s=0.2, store_timeout_s=0.5, breaker=pauses
            )
        ],
        new_fingerprint=lambda: config.fingerprint(new_epoch()),
        prefill_tokens_per_s=0,
        shutdown_timeout_s=shutdown_timeout_s,
    )
    return Engine(manager, tier), tier
