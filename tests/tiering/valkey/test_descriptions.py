"""What the namespaces on a server are made of, and what an engine says that finds nothing there."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvtier.config import NamespaceDescription
from kvtier.testing import TierHarness
from kvtier.tiering.valkey import namespaces
from kvtier.tiering.valkey.manager import ValkeySecondaryTierManager
from kvtier.tiering.valkey.servers import description_key
from tests.tiering.cold_starts import (
    DIFFERENCES,
    KEYS,
    Change,
    engines,
    levels,
    line_of_a_start,
    lines,
    other_model,
    served,
    store,
    with_root,
)
from tests.tiering.patience import wait_until
from tests.tiering.valkey.cluster import cluster_of
from tests.tiering.valkey.harness import valkey_harness
from tests.tiering.valkey.server import ValkeyProcess


def described(url: str) -> dict[str, NamespaceDescription]:
    inspector = ValkeySecondaryTierManager.open_inspector(url)
    assert inspector is not None
    with inspector:
        inspector.figures()
        return dict(inspector.descriptions())


def fill(url: str, change: Change = served, **keys: Any) -> str:
    """Store blocks, and wait for the description. Returns the name of the namespace."""
    with engines(change), valkey_harness(url, **keys) as harness:
        store(harness)
        name = harness.fingerprint.hex()
        own = harness.tier.describe_namespace()
        wait_until(lambda: described(url).get(name) == own, "the namespace is described")
        return name


def opening(url: str, **keys: Any) -> Callable[[], TierHarness]:
    return lambda: valkey_harness(url, **keys)


@pytest.mark.parametrize("what", ["length", "weights", "ranks"])
def test_a_cold_start_names_what_differs(
    what: str, server: ValkeyProcess, caplog: pytest.LogCaptureFixture
) -> None:
    fill(server.url, other_model)
    fill(server.url)
    change, text = DIFFERENCES[what]
    line = line_of_a_start(opening(server.url), change, caplog)
    assert "holds 5 blocks of another namespace of the model org/llama: " in line
    assert text in line
    assert levels(caplog) == [logging.WARNING]


def test_a_warm_start_says_nothing_but_other_hash_roots_are_named(
    server: ValkeyProcess, caplog: pytest.LogCaptureFixture
) -> None:
    fill(server.url, with_root("1a2b (sha256)"))
    with caplog.at_level(logging.INFO):
        fill(server.url, with_root("1a2b (sha256)"))
    assert lines(caplog) == []
    line = line_of_a_start(opening(server.url), with_root("3c4d (sha256)"), caplog)
    assert "5 blocks of this engine's namespace" in line
    assert "1a2b (sha256), now 3c4d (sha256)" in line


def test_of_many_keys_only_some_are_looked_at(
    server: ValkeyProcess, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    name = fill(server.url)
    with server.client() as client:
        for number in range(2000):
            client.set(f"kvtier:1:{name}:{number}", b"")
    monkeypatch.setattr(namespaces, "_KEYS_AT_ONCE", 100)
    monkeypatch.setattr(namespaces, "_MOST_CALLS", 3)
    line = line_of_a_start(opening(server.url), other_model, caplog)
    assert "holds at least" in line


@pytest.mark.parametrize("content", [b"", b"{}", b"x" * 100_000, b"\r\n$7\r\n"])
def test_damage_is_ignored_and_replaced(
    server: ValkeyProcess, content: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    name = fill(server.url)
    with server.client() as client:
        client.set(description_key(name), content)
    assert described(server.url) == {}
    line = line_of_a_start(opening(server.url), other_model, caplog)
    assert f"another namespace, {name[:8]}, and none of this engine's. There is no desc" in line
    assert fill(server.url) == name


def test_a_list_in_its_place_is_no_description(
    server: ValkeyProcess, caplog: pytest.LogCaptureFixture
) -> None:
    name = fill(server.url)
    with server.client() as client:
        client.delete(description_key(name))
        client.lpush(description_key(name), b"x")
    line = line_of_a_start(opening(server.url), other_model, caplog)
    assert "There is no description" in line


def test_keys_with_ends_of_lines_are_counted(
    server: ValkeyProcess, caplog: pytest.LogCaptureFixture
) -> None:
    name = fill(server.url)
    with server.client() as client:
        client.set(b"kvtier:1:%b:\r\n$3\r\n" % name.encode(), b"")
    line = line_of_a_start(opening(server.url), other_model, caplog)
    assert "holds 6 blocks" in line


def test_a_description_outlives_blocks_that_expire(server: ValkeyProcess) -> None:
    name = fill(server.url, ttl_s=100)
    with server.client() as client:
        assert client.ttl(description_key(name)) > 100 + 1800
    fill(server.url)
    with server.client() as client:
        assert client.ttl(description_key(name)) == -1


def test_it_leaves_with_the_blocks_that_are_cleared(server: ValkeyProcess) -> None:
    name, other = fill(server.url), fill(server.url, other_model)
    inspector = ValkeySecondaryTierManager.open_inspector(server.url)
    assert inspector is not None
    with inspector:
        inspector.clear(name, 10.0, lambda _done, _total: None)
    assert described(server.url).keys() == {other}
    with server.client() as client:
        assert not client.exists(description_key(name))


def test_blocks_after_a_reset_change_no_description(server: ValkeyProcess) -> None:
    name = fill(server.url)
    with engines(), valkey_harness(server.url) as harness:
        harness.begin_epoch(harness.spec.config.fingerprint(b"epoch"))
        store(harness)
    assert described(server.url).keys() == {name}


def test_without_the_right_to_scan_the_tier_works(
    server: ValkeyProcess, caplog: pytest.LogCaptureFixture
) -> None:
    fill(server.url)
    with server.client() as client:
        client.execute_command("ACL", "SETUSER", "default", "-scan")
    try:
        with caplog.at_level(logging.INFO), engines(), valkey_harness(server.url) as harness:
            assert harness.hits(KEYS) == set(KEYS)
            store(harness, harness.keys(3, start=50))
        assert lines(caplog) == []
    finally:
        with server.client() as client:
            client.execute_command("ACL", "SETUSER", "default", "+scan")


def test_a_cluster(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with cluster_of(tmp_path) as cluster:
        fill(cluster.servers[0].url, cluster=True)
        line = line_of_a_start(
            opening(cluster.servers[0].url, cluster=True), DIFFERENCES["length"][0], caplog
        )
        assert "holds 5 blocks of another namespace of the model org/llama: " in line
