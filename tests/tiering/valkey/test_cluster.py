"""A cluster of three: slots that move, servers that end, failover, and a wrong configuration."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvtier.cli import main
from kvtier.tiering.factory import TierStartError
from tests.tiering.proxy import proxy_to
from tests.tiering.valkey.cluster import ClusterOfServers, cluster_of
from tests.tiering.valkey.server import ValkeyProcess, block_keys
from tests.tiering.valkey.serving import BLOCKS, PROMPTS, TOKENS, serving
from tests.tiering.valkey.test_rights import RIGHTS, further_rights

NUM_BLOCKS = len(PROMPTS) * BLOCKS


@pytest.fixture(scope="module")
def running_cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ClusterOfServers]:
    with cluster_of(tmp_path_factory.mktemp("cluster")) as cluster:
        yield cluster


@pytest.fixture
def cluster(running_cluster: ClusterOfServers) -> ClusterOfServers:
    """The cluster without blocks."""
    for server in running_cluster.servers:
        with server.client() as client:
            client.flushall()
    return running_cluster


def sizes(cluster: ClusterOfServers) -> list[int]:
    found = []
    for server in cluster.servers:
        with server.client() as client:
            found.append(len(block_keys(client)))
    return found


def test_every_server_has_some_blocks(cluster: ClusterOfServers) -> None:
    with serving(cluster.servers[1].url, cluster=True) as engine:
        engine.serve_until_loaded()
        assert sum(sizes(cluster)) == NUM_BLOCKS
        assert 0 not in sizes(cluster)
        assert engine.counted("failures_refused") == 0


def test_the_documented_rights_suffice(
    cluster: ClusterOfServers, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    user = ["engines", "reset", "on", ">the-password"]

    def grant(rights: list[str]) -> None:
        for server in cluster.servers:
            with server.client() as client:
                client.execute_command("ACL", "SETUSER", *user, *rights)

    monkeypatch.setenv("VALKEY_USERNAME", "engines")
    monkeypatch.setenv("VALKEY_PASSWORD", "the-password")
    url = cluster.servers[0].url
    grant(RIGHTS)
    with pytest.raises(TierStartError, match=r"may not do this \(NOPERM\)"):
        serving(url, cluster=True).__enter__()
    grant(RIGHTS + further_rights("`cluster`"))
    with serving(url, cluster=True) as engine:
        engine.serve_until_loaded()
        engine.engine.reset_cache()
        engine.serve_until_loaded()
        assert engine.counted("failures_refused") == 0
    command = further_rights("`kvtier store`,") + further_rights("`kvtier store` of")
    grant(RIGHTS + command)
    assert main(["store", "verify", url]) == 0
    assert main(["store", "clear", url, "--yes"]) == 0
    assert sizes(cluster) == [0, 0, 0]
    assert "the-password" not in capsys.readouterr().out


@pytest.mark.parametrize("keys", [{"cluster": True, "password": "wrong"}, {"cluster": True}])
def test_wrong_users(cluster: ClusterOfServers, keys: dict[str, Any]) -> None:
    for server in cluster.servers:
        with server.client() as client:
            client.execute_command("ACL", "SETUSER", "default", "resetpass", ">right")
    try:
        with pytest.raises(TierStartError, match=r"user or (the )?password"):
            serving(cluster.servers[0].url, **keys).__enter__()
    finally:
        for server in cluster.servers:
            with server.client(password="right") as client:
                client.execute_command("ACL", "SETUSER", "default", "nopass")


def test_a_cluster_that_is_not_announced(cluster: ClusterOfServers) -> None:
    with pytest.raises(TierStartError, match=r'belongs to a cluster\. Set "cluster": true'):
        serving(cluster.servers[0].url).__enter__()


def test_a_server_of_no_cluster(server: ValkeyProcess) -> None:
    with pytest.raises(TierStartError, match=r"belongs to no cluster\. Remove cluster"):
        serving(server.url, cluster=True).__enter__()


def test_slots_that_move(cluster: ClusterOfServers) -> None:
    """Blocks are found on their new server."""
    first, second, _ = cluster.servers
    with serving(first.url, cluster=True) as engine:
        engine.serve_until_loaded()
        cluster.move_slots(second, first)
        try:
            engine.serve_until_loaded()
            assert sizes(cluster)[1] == 0
        finally:
            cluster.give_back_slots()
        engine.serve_until_loaded()
        assert sum(sizes(cluster)) == NUM_BLOCKS


def test_a_server_that_stands_still(cluster: ClusterOfServers) -> None:
    with serving(cluster.servers[0].url, cluster=True) as engine:
        engine.serve_until_loaded()
        with cluster.servers[2].standing_still():
            assert sum(engine.serve_all()) < len(PROMPTS) * TOKENS
        engine.serve_until_loaded()


def test_a_server_that_ends_and_comes_back_empty(cluster: ClusterOfServers) -> None:
    with serving(cluster.servers[0].url, cluster=True) as engine:
        engine.serve_until_loaded()
        cluster.servers[2].kill()
        try:
            assert sum(engine.serve_all()) < len(PROMPTS) * TOKENS
        finally:
            cluster.servers[2].start()
        engine.serve_until_loaded()


def test_a_replica_takes_over(tmp_path: Path) -> None:
    with cluster_of(tmp_path) as cluster:
        cluster.add_replica()
        first, second, *_ = cluster.servers
        with serving(second.url, cluster=True) as engine:
            engine.serve_until_loaded()
            first.kill()
            engine.serve_until_loaded()


def test_the_server_of_the_url_ends(cluster: ClusterOfServers) -> None:
    """The others are asked where blocks are."""
    with (
        proxy_to(cluster.servers[0].port) as proxy,
        serving(f"valkey://127.0.0.1:{proxy.port}", cluster=True) as engine,
    ):
        engine.serve_until_loaded()
        proxy.close()
        cluster.move_slots(cluster.servers[1], cluster.servers[2])
        try:
            assert sizes(cluster)[1] == 0
            engine.serve_until_loaded()
            assert sizes(cluster)[1] == 0
        finally:
            cluster.give_back_slots()
