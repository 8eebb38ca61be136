"""Starts of an engine with a mooncake tier: what is refused, with the remedy; and what is not there
yet, and used when it is."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from kvtier.config import ConfigError
from kvtier.testing import TierHarness
from kvtier.tiering.base import TierRefused
from kvtier.tiering.mooncake.options import P2P, MooncakeOptions
from kvtier.tiering.mooncake.pool import require_master
from kvtier.tiering.remote.errors import FailureKind, ServerFailure
from tests.tiering.mooncake.harness import SEGMENT_BYTES, mooncake_harness, plain_client
from tests.tiering.mooncake.pool import Master, mooncake_master
from tests.tiering.networks import Namespace, environment_of_tests, private_network
from tests.tiering.patience import wait_until

STANDSTILL_S = 6.0
"""The client's `close` takes 12 s while the master is silent."""


@pytest.fixture(scope="module")
def master(tmp_path_factory: pytest.TempPathFactory, network: Namespace) -> Iterator[Master]:
    with mooncake_master(tmp_path_factory.mktemp("master"), network) as process:
        yield process


def uses_the_pool(harness: TierHarness) -> bool:
    keys = harness.keys(4)
    harness.wait_for(harness.store(keys))
    return harness.wait_for(harness.load(keys))[0].result.success


# --- what is refused -----------------------------------------------------------------------------


_ENGINE = """
from tests.tiering.reference import ReferenceEngine
ReferenceEngine({"type": "mooncake", "master": "127.0.0.1:1"}, namespace="weights")
"""
_COMMAND = """
import sys
from kvtier.cli import main
sys.exit(main(["store", "stat", "mooncake://127.0.0.1:1"]))
"""
PACKAGES = {
    "not installed": ("__init__.py", "raise ModuleNotFoundError", "pip install 'kvtier[mooncake]'"),
    "a library is missing": ("store.so", "no library", "apt-get install libibverbs1"),
}


@pytest.mark.parametrize("program", [_ENGINE, _COMMAND], ids=["engine", "command"])
@pytest.mark.parametrize("package", PACKAGES)
def test_the_command_that_installs_what_is_missing_is_named(
    package: str, program: str, tmp_path: Path
) -> None:
    file, content, remedy = PACKAGES[package]
    (tmp_path / "mooncake").mkdir()
    (tmp_path / "mooncake" / "__init__.py").touch()
    (tmp_path / "mooncake" / file).write_text(content)
    environment = environment_of_tests()
    ended = subprocess.run(
        [sys.executable, "-c", program],
        env=environment | {"PYTHONPATH": f"{tmp_path}:{environment['PYTHONPATH']}"},
        check=False,
        capture_output=True,
        text=True,
        timeout=120,
    )
    last_line = ended.stderr.strip().splitlines()[-1]
    assert ended.returncode != 0
    assert remedy in last_line
    if program is _ENGINE:
        assert "TierStartError: secondary_tiers[0]" in last_line
    else:
        assert "Traceback" not in ended.stderr


@pytest.mark.parametrize("address", ["8.8.8.8/32", "2606:4700::1111/128"])
def test_a_public_address(master: Master, address: str) -> None:
    """It is refused before anything is sent, because the client would listen there."""
    with private_network():
        command = ["ip", "address", "add", address, "dev", "lo"]
        subprocess.run(command, check=True, timeout=30)
        with pytest.raises(TierRefused, match='"allow_public": true') as refused:
            mooncake_harness(master)
        assert address.split("/", maxsplit=1)[0] in str(refused.value)
        with mooncake_harness(master, allow_public=True) as harness:
            assert harness.hits(harness.keys(1)) == set()


def test_more_memory_than_there_is(master: Master) -> None:
    with pytest.raises(TierRefused, match="segment_bytes asks for 100 TiB, but only"):
        mooncake_harness(master, segment_bytes="100TiB")


@pytest.mark.parametrize(
    ("keys", "key"),
    [
        ({"master": "cache.example"}, "master"),
        ({"master": "cache.example:port"}, "master"),
        ({"master": "etcd://one:2379;two"}, "master"),
        ({"master": 50051}, "master"),
        ({"master": "etcd://one:2379;two:2379", "hostname": None}, "hostname"),
        ({"metadata": "cache.example:8080"}, "metadata"),
        ({"metadata": "http://"}, "metadata"),
        ({"hostname": "two words"}, "hostname"),
        ({"hostname": "host:port"}, "hostname"),
        ({"segment_bytes": "much"}, "segment_bytes"),
        ({"segment_bytes": -1}, "segment_bytes"),
        ({"segment_bytes": "1MiB"}, "segment_bytes"),
        ({"protocol": "udp"}, "protocol"),
        ({"devices": "mlx5_0"}, "devices"),
        ({"replicas": 0}, "replicas"),
        ({"replicas": 9}, "replicas"),
        ({"connections": 0}, "connections"),
        ({"admin": "9003"}, "admin"),
        ({"allow_public": "yes"}, "allow_public"),
        ({"local_hostname": "node7"}, "local_hostname"),
        ({"global_segment_size": 1}, "global_segment_size"),
    ],
    ids=str,
)
def test_a_wrong_value(keys: dict[str, Any], key: str) -> None:
    with pytest.raises(ConfigError) as refused:
        MooncakeOptions.parse({"master": "127.0.0.1:1", **keys}).require_fitting()
    (problem,) = refused.value.problems
    assert problem.key == key
    assert problem.remedy


# --- what is not there yet -----------------------------------------------------------------------


@contextmanager
def longest_standstill() -> Iterator[list[float]]:
    """For how long at most another Python thread could not run."""
    longest, is_over = [0.0], threading.Event()

    def tick() -> None:
        before = time.monotonic()
        while not is_over.wait(0.01):
            now = time.monotonic()
            longest[0] = max(longest[0], now - before)
            before = now

    thread = threading.Thread(target=tick)
    thread.start()
    try:
        yield longest
    finally:
        is_over.set()
        thread.join()


def test_a_master_that_is_started_later(
    tmp_path: Path, network: Namespace, caplog: pytest.LogCaptureFixture
) -> None:
    with mooncake_master(tmp_path, network) as master:
        master.kill()
        with mooncake_harness(master) as harness:
            assert "The engine starts without this tier" in caplog.text
            assert not uses_the_pool(harness)
            master.start()
            wait_until(lambda: uses_the_pool(harness), "the pool is used")


def test_a_master_that_stands_still(
    tmp_path: Path, network: Namespace, caplog: pytest.LogCaptureFixture
) -> None:
    """The client is not even asked to connect: it would let no other thread run."""
    with mooncake_master(tmp_path, network) as master:
        with master.standing_still():
            with pytest.raises(ServerFailure) as failure:
                require_master(MooncakeOptions.parse({"master": master.address}))
            assert failure.value.kind is FailureKind.SILENT
            harness = mooncake_harness(master)
        with harness:
            assert "the master does not answer" in caplog.text
            wait_until(lambda: uses_the_pool(harness), "the pool is used")
            with longest_standstill() as longest, master.standing_still():
                harness.shut_down()
            assert longest[0] < STANDSTILL_S


@pytest.mark.parametrize("hostname", ["nowhere.invalid", "10.9.9.9:13000"])
def test_a_hostname_that_is_not_this_machines(
    master: Master, hostname: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Other hosts would look for its blocks there."""
    with mooncake_harness(master, metadata=P2P, hostname=hostname) as harness:
        assert f'hostname "{hostname.split(":", maxsplit=1)[0]}" is not this machine' in caplog.text
        assert not uses_the_pool(harness)
        assert master.segments() == []


def test_what_an_engine_lends_is_taken_back_at_its_end(master: Master) -> None:
    with mooncake_harness(master) as harness:
        assert len(master.segments()) == 1
        assert uses_the_pool(harness)
    assert master.segments() == []
    with plain_client(master) as client:
        assert client.put("nowhere", bytes(SEGMENT_BYTES // 64)) != 0
