"""The valkey tier passes the conformance kit: over TCP, over a unix socket, and while the server
stands still."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, ClassVar

import pytest

from kvtier.base import OffloadingSpec
from kvtier.testing import BackingBytes, TierConformance
from kvtier.tiering.base import SecondaryTierManager
from kvtier.tiering.valkey.manager import ValkeySecondaryTierManager
from tests.tiering.valkey.backing import ValkeyBacking
from tests.tiering.valkey.server import ValkeyProcess


class _ValkeyTier(TierConformance):
    survives_restart = True
    options: ClassVar[dict[str, Any]] = {}

    @pytest.fixture(autouse=True)
    def _empty_server(self, server: ValkeyProcess) -> None:
        self.server = server

    def url(self) -> str:
        return self.server.url

    def make_tier(self, spec: OffloadingSpec, view: memoryview) -> SecondaryTierManager:
        return ValkeySecondaryTierManager(spec, view, "valkey", url=self.url(), **self.options)

    def backing(self, tier: SecondaryTierManager) -> BackingBytes:
        return ValkeyBacking(self.server)

    def slow_backend(self, tier: SecondaryTierManager) -> AbstractContextManager[object]:
        return _still(self.server)


@contextmanager
def _still(server: ValkeyProcess) -> Iterator[None]:
    server.stop()
    try:
        yield
    finally:
        server.go_on()


class TestValkey(_ValkeyTier):
    pass


class TestValkeyOverAUnixSocket(_ValkeyTier):
    def url(self) -> str:
        return self.server.unix_url


class TestValkeyWithOneConnectionAndTtl(_ValkeyTier):
    options: ClassVar[dict[str, Any]] = {"connections": 1, "ttl_s": 600}


class TestValkeyWithLargeBlocks(_ValkeyTier):
    row_bytes = 1 << 16


del _ValkeyTier
