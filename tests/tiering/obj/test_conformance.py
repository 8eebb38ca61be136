"""The obj tier passes the conformance kit: with an S3 server, which sometimes stands still, and
with a directory."""

from __future__ import annotations

from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, ClassVar

import pytest
from obstore.store import LocalStore, ObjectStore

from kvtier.base import OffloadingSpec
from kvtier.testing import BackingBytes, TierConformance
from kvtier.tiering.base import SecondaryTierManager
from kvtier.tiering.obj.manager import ObjSecondaryTierManager
from tests.tiering.obj.backing import ObjBacking
from tests.tiering.obj.server import SeaweedProcess


class _ObjTier(TierConformance):
    survives_restart = True
    options: ClassVar[dict[str, Any]] = {}

    def place(self) -> tuple[dict[str, Any], ObjectStore]:
        """The keys of the tier, and a client of the test's own."""
        raise NotImplementedError

    def make_tier(self, spec: OffloadingSpec, view: memoryview) -> SecondaryTierManager:
        return ObjSecondaryTierManager(spec, view, "obj", **self.place()[0], **self.options)

    def backing(self, tier: SecondaryTierManager) -> BackingBytes:
        assert isinstance(tier, ObjSecondaryTierManager)
        return ObjBacking(tier, self.place()[1])


class TestS3(_ObjTier):
    @pytest.fixture(autouse=True)
    def _server(self, server: SeaweedProcess) -> None:
        self.server = server

    def place(self) -> tuple[dict[str, Any], ObjectStore]:
        return self.server.keys, self.server.store()

    def slow_backend(self, tier: SecondaryTierManager) -> AbstractContextManager[object]:
        return self.server.standing_still()


class TestDirectory(_ObjTier):
    options: ClassVar[dict[str, Any]] = {"concurrency": 1}

    @pytest.fixture(autouse=True)
    def _directory(self, tmp_path: Path) -> None:
        self.root = tmp_path / "objects"

    def place(self) -> tuple[dict[str, Any], ObjectStore]:
        return {"url": f"file://{self.root}"}, LocalStore(self.root, mkdir=True)


del _ObjTier
