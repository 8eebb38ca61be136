"""The mooncake tier passes the conformance kit: with memory of other processes and with its own,
with a metadata server and without, with one copy and with two, and while the master stands still.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack
from typing import Any, ClassVar

import pytest

from kvtier.base import OffloadingSpec
from kvtier.testing import BackingBytes, TierConformance
from kvtier.tiering.base import SecondaryTierManager
from kvtier.tiering.mooncake.manager import MooncakeSecondaryTierManager
from kvtier.tiering.mooncake.options import P2P
from tests.tiering.mooncake.harness import SEGMENT_BYTES, MooncakeBacking, plain_client
from tests.tiering.mooncake.pool import Master, mooncake_master, segment
from tests.tiering.networks import Namespace


class _MooncakeTier(TierConformance):
    metadata: ClassVar[str | None] = None
    """In place of the master's metadata server."""
    num_lenders: ClassVar[int] = 1
    """Other processes that lend memory, and outlive the engines."""
    options: ClassVar[dict[str, Any]] = {}

    @pytest.fixture(scope="class")
    @classmethod
    def running(
        cls, tmp_path_factory: pytest.TempPathFactory, network: Namespace
    ) -> Iterator[tuple[Master, Any]]:
        """A master, and a client of its pool."""
        with ExitStack() as stack:
            master = stack.enter_context(
                mooncake_master(tmp_path_factory.mktemp("master"), network)
            )
            for _ in range(cls.num_lenders):
                lent = segment(master, SEGMENT_BYTES, network, metadata=cls.metadata)
                stack.enter_context(lent)
            with network.entered():
                yield master, stack.enter_context(plain_client(master, metadata=cls.metadata))

    @pytest.fixture(autouse=True)
    def _empty_pool(self, running: tuple[Master, Any]) -> None:
        self.master, self.client = running
        self.client.remove_all(True)

    def make_tier(self, spec: OffloadingSpec, view: memoryview) -> SecondaryTierManager:
        keys = {
            "master": self.master.address,
            "metadata": self.metadata or self.master.metadata_url,
        }
        return MooncakeSecondaryTierManager(spec, view, "mooncake", **keys | self.options)

    def backing(self, tier: SecondaryTierManager) -> BackingBytes:
        return MooncakeBacking(self.client, self.options.get("replicas", 1))

    def slow_backend(self, tier: SecondaryTierManager) -> AbstractContextManager[object]:
        return self.master.standing_still()


class TestMooncake(_MooncakeTier):
    """All memory is another process's."""

    survives_restart = True


@pytest.mark.soak  # a client takes two seconds to leave
class TestMooncakeWithOwnMemory(_MooncakeTier):
    """All memory is the engine's, and gone with it."""

    survives_restart = False
    num_lenders = 0
    options: ClassVar[dict[str, Any]] = {"segment_bytes": SEGMENT_BYTES, "connections": 1}


@pytest.mark.soak
class TestMooncakeWithoutMetadataServer(_MooncakeTier):
    """And with two copies of large blocks."""

    survives_restart = True
    metadata = P2P
    num_lenders = 2
    options: ClassVar[dict[str, Any]] = {"replicas": 2}
    row_bytes = 1 << 15


del _MooncakeTier
