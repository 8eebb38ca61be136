"""The disk tier passes the conformance kit: with much and little space, with a disk that is silent
or frozen, with and without O_DIRECT."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, ClassVar

import pytest

from kvtier.base import OffloadingSpec
from kvtier.testing import BackingBytes, TierConformance
from kvtier.tiering.base import SecondaryTierManager
from kvtier.tiering.disk.layout import Geometry
from kvtier.tiering.disk.manager import DiskSecondaryTierManager
from tests.tiering.disk.backing import DiskBacking
from tests.tiering.disk.harness import silent_disk
from tests.tiering.disk.small_disk import LoopDisk, loop_disk


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

    def slow_backend(self, tier: SecondaryTierManager) -> AbstractContextManager[object]:
        return silent_disk(tier)


class TestDisk(_DiskTier):
    pass


class TestFullDisk(_DiskTier):
    capacity_blocks = 12
    num_slots = 12


class TestDiskWithARC(_DiskTier):
    capacity_blocks = 12
    num_slots = 12
    options: ClassVar[dict[str, Any]] = {"eviction_policy": "arc"}


class TestDiskWithDensity(_DiskTier):
    capacity_blocks = 12
    num_slots = 12
    options: ClassVar[dict[str, Any]] = {"eviction_policy": "density"}


class TestDiskThroughThePageCache(_DiskTier):
    capacity_blocks = 40
    num_slots = 40
    options: ClassVar[dict[str, Any]] = {"use_o_direct": False, "io_threads": 1}


@pytest.fixture(scope="module")
def freezing_disk(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LoopDisk]:
    with loop_disk(tmp_path_factory.mktemp("freezing"), 8 << 20) as disk:
        yield disk


class TestDiskThatFreezes(_DiskTier):
    """A file system that blocks writes for a while."""

    capacity_blocks = 40
    num_slots = 40

    @pytest.fixture(autouse=True)
    def _place(self, _directory: None, freezing_disk: LoopDisk) -> Iterator[None]:
        self.disk = freezing_disk
        self.path = freezing_disk.root / "kv.slab"
        yield
        self.path.unlink()

    def slow_backend(self, tier: SecondaryTierManager) -> AbstractContextManager[object]:
        return self.disk.frozen()
