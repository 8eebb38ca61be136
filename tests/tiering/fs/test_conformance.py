"""The fs tier passes the conformance kit: roomy and full, silent, and through the page cache."""

from __future__ import annotations

from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, ClassVar

import pytest

from kvtier.base import OffloadingSpec
from kvtier.testing import BackingBytes, TierConformance
from kvtier.tiering.base import SecondaryTierManager
from kvtier.tiering.fs import manager
from kvtier.tiering.fs.manager import FsSecondaryTierManager
from tests.tiering.fs.backing import FsBacking
from tests.tiering.fs.harness import bytes_for, silent_files


class _FsTier(TierConformance):
    survives_restart = True
    options: ClassVar[dict[str, Any]] = {}

    @pytest.fixture(autouse=True)
    def _directory(self, tmp_path: Path) -> None:
        self.root = tmp_path / "root"

    def make_tier(self, spec: OffloadingSpec, view: memoryview) -> SecondaryTierManager:
        options = {"max_bytes": bytes_for(1100, self.row_bytes)} | self.options
        return FsSecondaryTierManager(spec, view, "fs", root_dir=str(self.root), **options)

    def backing(self, tier: SecondaryTierManager) -> BackingBytes:
        assert isinstance(tier, FsSecondaryTierManager)
        return FsBacking(tier)

    def slow_backend(self, tier: SecondaryTierManager) -> AbstractContextManager[object]:
        return silent_files(tier)


class TestFs(_FsTier):
    pass


class TestFsWithOneThreadEach(_FsTier):
    options: ClassVar[dict[str, Any]] = {"n_read_threads": 1, "n_write_threads": 1}


class TestFullFs(_FsTier):
    row_bytes = 1 << 19
    capacity_blocks = 12
    options: ClassVar[dict[str, Any]] = {"max_bytes": 12 * (row_bytes + 8448) + (1900 << 10)}


class TestFsThroughThePageCache(_FsTier):
    @pytest.fixture(autouse=True)
    def _no_o_direct(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(manager, "allows_o_direct", lambda _session: False)
