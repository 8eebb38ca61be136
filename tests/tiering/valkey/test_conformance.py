"""The valkey tier passes the conformance kit: over TCP, over a unix socket, with a cluster, with
Redis over TLS, and while the server stands still."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any, ClassVar

import pytest
import valkey

from kvtier.base import OffloadingSpec
from kvtier.testing import BackingBytes, TierConformance
from kvtier.tiering.base import SecondaryTierManager
from kvtier.tiering.valkey.manager import ValkeySecondaryTierManager
from tests.tiering.processes import free_port
from tests.tiering.valkey.backing import ValkeyBacking
from tests.tiering.valkey.certificates import Authority, tls_arguments
from tests.tiering.valkey.cluster import ClusterOfServers, cluster_of
from tests.tiering.valkey.server import ValkeyProcess, redis_server


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
        return ValkeyBacking(self.server.client)

    def slow_backend(self, tier: SecondaryTierManager) -> AbstractContextManager[object]:
        return self.server.standing_still()


class TestValkey(_ValkeyTier):
    pass


class TestValkeyOverAUnixSocket(_ValkeyTier):
    def url(self) -> str:
        return self.server.unix_url


class TestValkeyWithOneConnectionAndTtl(_ValkeyTier):
    options: ClassVar[dict[str, Any]] = {"connections": 1, "ttl_s": 600}


class TestValkeyWithLargeBlocks(_ValkeyTier):
    row_bytes = 1 << 16


@pytest.fixture(scope="module")
def redis_over_tls(
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[tuple[ValkeyProcess, dict[str, Any]]]:
    """A server, and the keys of its tier."""
    directory, port = tmp_path_factory.mktemp("redis"), free_port()
    authority = Authority(directory / "authority", "authority")
    certificate = authority.certificate("server", "IP:127.0.0.1")
    keys = {"url": f"valkeys://127.0.0.1:{port}", "ca_bundle": str(authority.path)}
    with redis_server(directory / "server", *tls_arguments(port, certificate)) as server:
        yield server, keys


class TestRedisOverTls(_ValkeyTier):
    @pytest.fixture(autouse=True)
    def _empty_server(self, redis_over_tls: tuple[ValkeyProcess, dict[str, Any]]) -> None:
        self.server, self.keys = redis_over_tls
        with self.server.client() as client:
            client.flushall()

    def make_tier(self, spec: OffloadingSpec, view: memoryview) -> SecondaryTierManager:
        return ValkeySecondaryTierManager(spec, view, "valkey", **self.keys)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ClusterOfServers]:
    with cluster_of(tmp_path_factory.mktemp("cluster")) as servers:
        yield servers


class TestValkeyCluster(_ValkeyTier):
    options: ClassVar[dict[str, Any]] = {"cluster": True}

    @pytest.fixture(autouse=True)
    def _empty_server(self, cluster: ClusterOfServers) -> None:
        self.servers = cluster.servers
        self.server = self.servers[0]
        for server in self.servers:
            with server.client() as client:
                client.flushall()

    def backing(self, tier: SecondaryTierManager) -> BackingBytes:
        return ValkeyBacking(lambda: valkey.ValkeyCluster("127.0.0.1", self.server.port))

    @contextmanager
    def slow_backend(self, tier: SecondaryTierManager) -> Iterator[None]:
        with ExitStack() as still:
            for server in self.servers:
                still.enter_context(server.standing_still())
            yield


del _ValkeyTier
