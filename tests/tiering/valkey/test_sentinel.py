"""Sentinel: the tier finds the primary, also after a failover and when its Sentinel has ended."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvtier.config import ConfigError
from kvtier.tiering.factory import TierStartError
from tests.tiering.patience import wait_until
from tests.tiering.valkey.sentinel import SERVICE, Guardians, SentinelProcess, guardians
from tests.tiering.valkey.server import ValkeyProcess, block_keys
from tests.tiering.valkey.serving import BLOCKS, PROMPTS, serving


@pytest.fixture
def guarded(tmp_path: Path) -> Iterator[Guardians]:
    with guardians(tmp_path) as started:
        yield started


def test_a_failover(guarded: Guardians) -> None:
    """The replica has the blocks, and they are loaded from it. The Sentinel of the URL has ended,
    so another one names the new primary."""
    first, _ = guarded.sentinels
    with serving(first.url, sentinel_service=SERVICE) as engine:
        engine.serve_until_loaded()
        with guarded.primary.client() as client:
            assert len(block_keys(client)) == len(PROMPTS) * BLOCKS
        guarded.primary.kill()
        engine.serve_all()
        wait_until(lambda: guarded.named_port() == guarded.replica.port, "the failover")
        first.kill()
        engine.serve_until_loaded()
        with guarded.replica.client() as client:
            assert len(block_keys(client)) == len(PROMPTS) * BLOCKS
            stored = client.info("commandstats")["cmdstat_set"]["calls"]
        engine.serve_until_loaded()
        with guarded.replica.client() as client:
            assert client.info("commandstats")["cmdstat_set"]["calls"] == stored


def test_a_primary_that_becomes_a_replica(guarded: Guardians) -> None:
    """It keeps its connections and refuses to store."""
    with serving(guarded.sentinels[0].url, sentinel_service=SERVICE) as engine:
        engine.serve(PROMPTS[0])
        with guarded.sentinels[1].client() as client:
            client.sentinel_failover(SERVICE)
        engine.serve_until_loaded()
        wait_until(lambda: guarded.named_port() == guarded.replica.port, "the failover")
        engine.engine.reset_cache()
        engine.serve_until_loaded()
        with guarded.replica.client() as client:
            assert client.info("replication")["role"] == "master"
            assert len(block_keys(client)) >= len(PROMPTS) * BLOCKS


def test_a_sentinel_with_the_password_of_the_server(tmp_path: Path) -> None:
    password = "the-password"
    server = ValkeyProcess(tmp_path / "server", "--requirepass", password)
    sentinel = SentinelProcess(
        tmp_path / "sentinel",
        server.port,
        f"requirepass {password}",
        f"sentinel auth-pass {SERVICE} {password}",
    )
    keys: dict[str, Any] = {"sentinel_service": SERVICE}
    try:
        with serving(sentinel.url, password=password, **keys) as engine:
            engine.serve_until_loaded()
        with pytest.raises(TierStartError, match="refused the user or the password"):
            serving(sentinel.url, password="wrong", **keys).__enter__()
        with pytest.raises(TierStartError, match="Sentinel does not know this service"):
            serving(sentinel.url, password=password, sentinel_service="other").__enter__()
        with pytest.raises(TierStartError, match="Sentinel does not know this service"):
            serving(server.url, password=password, **keys).__enter__()
        with pytest.raises(ConfigError, match="sentinel_service"):
            serving(server.unix_url, **keys).__enter__()
    finally:
        sentinel.kill()
        server.kill()
