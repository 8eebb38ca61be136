"""The disk tier passes the conformance kit: roomy and full, with and without O_DIRECT."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

import pytest

from kvtier.base import OffloadingSpec
from kvtier.testing import BackingBytes, TierConformance
from kvtier.tiering.base import SecondaryTierManager
from kvtier.tiering.disk.layout import Geometry
from kvtier.tiering.disk.manager import DiskSecondaryTierManager
from tests.tiering.disk.backing import DiskBacking


class _DiskTier(TierConformance):
    survives_restart = True
    options: ClassVar[dict[str, Any]] = {}
    num_slots: ClassVar[int] = 1100

    @pytest.fixture(autouse=True)
    def _directory(self, tmp_path: Path) -> None:
        self.path = tmp_path / "kv.slab"

    def make_tier(self, spec: OffloadingSpec, view: memoryview) -> SecondaryTierManager:
        max_bytes = Geometry(self.row_bytes, self.num_slots).needed_bytes
        return DiskSecondaryTierManager(
            spec, view, "disk", path=str(self.path), max_bytes=max_bytes, **self.options
        )

    def backing(self, tier: SecondaryTierManager) -> BackingBytes:
        assert isinstance(tier, DiskSecondaryTierManager)
        return DiskBacking(tier)


class TestDisk(_DiskTier):
    pass


class TestFullDisk(_DiskTier):
    capacity_blocks = 12
    num_slots = 12


class TestDiskWithARC(_DiskTier):
    capacity_blocks = 12
    num_slots = 12
    options: ClassVar[dict[str, Any]] = {"eviction_policy": "arc"}


class TestDiskThroughThePageCache(_DiskTier):
    capacity_blocks = 40
    num_slots = 40
    options: ClassVar[dict[str, Any]] = {"use_o_direct": False, "io_threads": 1}
