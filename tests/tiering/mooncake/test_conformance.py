"""The mooncake tier passes the conformance kit: lending memory, using that of others, with a
metadata server and without, and while the master stands still."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Any, ClassVar

import pytest

from kvtier.base import OffloadingSpec
from kvtier.testing import BackingBytes, TierConformance
from kvtier.tiering.base import SecondaryTierManager
from kvtier.tiering.mooncake.manager import MooncakeSecondaryTierManager
from tests.tiering.mooncake.harness import SEGMENT_BYTES, MooncakeBacking, plain_client
from tests.tiering.mooncake.pool import Master, mooncake_master, segment
from tests.tiering.networks import Namespace


@pytest.fixture(scope="module")
def master(tmp_path_factory: pytest.TempPathFactory, network: Namespace) -> Iterator[Master]:
    with mooncake_master(tmp_path_factory.mktemp("master"), network) as process:
        yield process


@pytest.fixture(scope="module")
def lent_elsewhere(master: Master, network: Namespace) -> Iterator[None]:
    """Memory of another process, which outlives the engines."""
    with segment(master, SEGMENT_BYTES, network):
        yield


@pytest.fixture(scope="module")
def client(master: Master, network: Namespace) -> Iterator[Any]:
    with network.entered(), plain_client(master) as connected:
        yield connected


class TestMooncake(TierConformance):
    """All memory is another process's."""

    survives_restart = True
    options: ClassVar[dict[str, Any]] = {}

    @pytest.fixture(autouse=True)
    def _empty_pool(self, master: Master, client: Any, lent_elsewhere: None) -> None:
        self.master, self.client = master, client
        client.remove_all(True)

    def make_tier(self, spec: OffloadingSpec, view: memoryview) -> SecondaryTierManager:
        keys = {"master": self.master.address, "metadata": self.master.metadata_url}
        return MooncakeSecondaryTierManager(spec, view, "mooncake", **keys | self.options)

    def backing(self, tier: SecondaryTierManager) -> BackingBytes:
        return MooncakeBacking(self.client)

    def slow_backend(self, tier: SecondaryTierManager) -> AbstractContextManager[object]:
        return self.master.standing_still()
