"""An engine with a disk tier, made from a user's configuration or with faults between them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kvtier.base import OffloadingSpec
from kvtier.testing import FaultSchedule, FaultyTier
from kvtier.tiering.disk.manager import DiskSecondaryTierManager
from tests.tiering.disk.backing import DiskBacking
from tests.tiering.disk.harness import bytes_for
from tests.tiering.engine import Engine, engine_over, engine_with

__all__ = ["configured_engine", "engine_with_faults"]


def configured_engine(
    path: Path,
    *,
    num_rows: int = 16,
    num_blocks: int = 256,
    namespace: str = "weights",
    prefill_tokens_per_s: float | None = 0,
    tenants: Mapping[str, Any] | None = None,
    **keys: Any,
) -> Engine:
    """An engine made from a user's configuration. `keys`: those of the tier."""
    entry = {"type": "disk", "path": str(path), "max_bytes": bytes_for(num_blocks), **keys}
    return engine_with(
        entry,
        num_rows=num_rows,
        namespace=namespace,
        prefill_tokens_per_s=prefill_tokens_per_s,
        **({} if tenants is None else {"tenants": tenants}),
    )


def engine_with_faults(
    path: Path, schedule: FaultSchedule, *, num_rows: int = 64, shutdown_timeout_s: float = 10.0
) -> tuple[Engine, FaultyTier]:
    """The same, with faults between the orchestrator and the tier, and short pauses."""

    def make_tier(spec: OffloadingSpec, view: memoryview) -> FaultyTier:
        tier = DiskSecondaryTierManager(
            spec, view, "disk", path=str(path), max_bytes=bytes_for(1024)
        )
        return FaultyTier(tier, schedule, backing=DiskBacking(tier))

    engine = engine_over(
        make_tier,
        lookup_timeout_s=0.05,
        num_rows=num_rows,
        shutdown_timeout_s=shutdown_timeout_s,
    )
    assert isinstance(engine.tier, FaultyTier)
    return engine, engine.tier
