"""An engine with an fs tier, as a user configures it, or with injected faults."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from kvtier.base import OffloadingSpec
from kvtier.testing import FaultSchedule, FaultyTier
from kvtier.tiering.fs.manager import FsSecondaryTierManager
from tests.tiering.engine import Engine, engine_over, engine_with
from tests.tiering.fs.backing import FsBacking
from tests.tiering.fs.harness import bytes_for

__all__ = ["configured_engine", "engine_with_faults"]


def configured_engine(
    root: Path,
    *,
    num_rows: int = 16,
    num_blocks: int = 256,
    namespace: str = "weights",
    **keys: Any,
) -> Engine:
    """An engine made from a user's configuration."""
    entry = {"type": "fs", "root_dir": str(root), "max_bytes": bytes_for(num_blocks), **keys}
    return engine_with(entry, num_rows=num_rows, namespace=namespace)


def engine_with_faults(
    root: Path, schedule: FaultSchedule, *, num_rows: int = 64, shutdown_timeout_s: float = 10.0
) -> tuple[Engine, FaultyTier]:
    """The same with faults injected between the orchestrator and the tier, and short timeouts."""

    def make_tier(spec: OffloadingSpec, view: memoryview) -> FaultyTier:
        tier = FsSecondaryTierManager(
            spec, view, "fs", root_dir=str(root), max_bytes=bytes_for(1024)
        )
        return FaultyTier(tier, schedule, backing=FsBacking(tier))

    engine = engine_over(
        make_tier,
        lookup_timeout_s=0.1,
        num_rows=num_rows,
        shutdown_timeout_s=shutdown_timeout_s,
    )
    assert isinstance(engine.tier, FaultyTier)
    return engine, engine.tier
