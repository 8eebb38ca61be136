"""`kvtier store`, `vllm-config`, `doctor` and `bench` with a real pool."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvtier.cli import main
from kvtier.cli.doctor import bench, canary
from kvtier.testing import TierHarness
from kvtier.tiering.mooncake import admin
from kvtier.tiering.mooncake.namespaces import block_name
from kvtier.tiering.remote.manager import namespace_of
from tests.cli.doctor.running import AT, config_of, examine, finding, status_of
from tests.cli.store.slabs import run_store
from tests.cli.vllm_config.running import answer_of, config_in
from tests.tiering.mooncake.harness import (
    ROW_BYTES,
    SEGMENT_BYTES,
    mooncake_harness,
    plain_client,
)
from tests.tiering.mooncake.pool import Master, mooncake_master, segment
from tests.tiering.networks import Namespace
from tests.tiering.processes import free_port

KEYS = TierHarness.keys(6)


@pytest.fixture(scope="module")
def master(tmp_path_factory: pytest.TempPathFactory, network: Namespace) -> Iterator[Master]:
    with (
        mooncake_master(tmp_path_factory.mktemp("master"), network) as running,
        segment(running, SEGMENT_BYTES, network),
    ):
        yield running


@pytest.fixture(scope="module")
def client(master: Master, network: Namespace) -> Iterator[Any]:
    with network.entered(), plain_client(master) as connected:
        yield connected


@pytest.fixture(autouse=True)
def _empty_pool(client: Any) -> None:
    client.remove_all(True)


def location(master: Master) -> str:
    return (
        f"mooncake://{master.address}?admin={master.admin_address}&metadata={master.metadata_url}"
    )


def entry(master: Master, **keys: Any) -> dict[str, Any]:
    return {
        "type": "mooncake",
        "master": master.address,
        "metadata": master.metadata_url,
        "admin": master.admin_address,
        **keys,
    }


def fill(master: Master, *parts: tuple[str, list[Any]]) -> list[bytes]:
    """Store blocks of some namespaces. Returns their fingerprints."""
    found = []
    for namespace, keys in parts:
        with mooncake_harness(master, namespace=namespace, segment_bytes=0) as harness:
            assert harness.wait_for(harness.store(keys))[0].result.success
            found.append(harness.fingerprint)
    return found


def test_blocks_are_counted_listed_verified_and_cleared(
    master: Master, client: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    one, other = fill(master, ("these weights", KEYS[:4]), ("other weights", KEYS[4:]))
    assert client.put("session:1", b"of others") == 0
    where = location(master)
    code, stat = run_store(capsys, "stat", where)
    assert (code, stat["kind"], stat["blocks"]) == (0, "mooncake", 6)
    assert stat["bytes"] == 6 * (ROW_BYTES + 256)
    assert {space["namespace"]: space["blocks"] for space in stat["namespaces"]} == {
        namespace_of(one): 4,
        namespace_of(other): 2,
    }
    code, listed = run_store(capsys, "ls", where)
    assert {block["block_hash"] for block in listed["blocks"]} == {key[:-4].hex() for key in KEYS}

    name = block_name(namespace_of(one), KEYS[0])
    content = bytearray(client.get(name))
    content[3000:3006] = b"damage"
    assert client.upsert(name, bytes(content)) == 0
    code, verified = run_store(capsys, "verify", where)
    assert (code, verified["good"], verified["damaged"]) == (1, 5, 1)

    short = namespace_of(other)[:8]
    code, cleared = run_store(capsys, "clear", where, "--namespace", short, "--yes")
    assert (code, cleared["cleared_blocks"]) == (0, 2)
    code, cleared = run_store(capsys, "clear", where, "--yes")
    assert (code, cleared["cleared_blocks"]) == (0, 4)
    assert run_store(capsys, "stat", where)[1]["blocks"] == 0
    assert client.get("session:1") == b"of others"


def test_the_text_has_sizes_for_people(master: Master, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["store", "stat", location(master)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert f"{'pool capacity':<18}64 MiB" in lines
    assert f"{'segments':<18}1" in lines


def refusal(capsys: pytest.CaptureFixture[str], where: str) -> str:
    assert main(["store", "stat", where]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.count("\n") == 1
    return printed.err


def test_a_pool_that_is_not_there(capsys: pytest.CaptureFixture[str]) -> None:
    port = free_port()
    where = f"mooncake://127.0.0.1:{port}?admin=127.0.0.1:{port}"
    assert f"http://127.0.0.1:{port} does not answer" in refusal(capsys, where)


def test_a_master_that_stands_still(
    master: Master, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(admin.MasterAdmin.__init__, "__defaults__", (1.0,))
    with master.standing_still():
        assert "does not answer" in refusal(capsys, location(master))


@pytest.mark.parametrize(
    ("where", "words"),
    [
        ("mooncake://cache.example", "master: got"),
        ("mooncake://127.0.0.1:1?replicas=2", "there is no replicas"),
        ("mooncake://127.0.0.1:1?admin=here", "admin: got"),
    ],
)
def test_what_is_no_location(where: str, words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert words in refusal(capsys, where)


# --- vllm-config ---------------------------------------------------------------------------------


def test_the_flag_for_vllm(master: Master, capsys: pytest.CaptureFixture[str]) -> None:
    before = master.keys()
    code, document = answer_of(capsys, "--tier", json.dumps(entry(master)))
    found = finding(document, f"{AT}.master")
    assert (code, found["status"]) == (0, "ok")
    assert "1 lend 64 MiB" in found["found"]
    (tier,) = config_in(document["flag"])["kv_connector_extra_config"]["secondary_tiers"]
    assert tier == entry(master)
    assert master.keys() == before


def test_the_short_option(master: Master, capsys: pytest.CaptureFixture[str]) -> None:
    code, document = answer_of(capsys, "--mooncake", f"{master.address}:32MiB")
    (tier,) = config_in(document["flag"])["kv_connector_extra_config"]["secondary_tiers"]
    assert tier == {"type": "mooncake", "master": master.address, "segment_bytes": "32MiB"}
    assert code == 0


def test_a_pool_without_memory(
    tmp_path: Path, network: Namespace, capsys: pytest.CaptureFixture[str]
) -> None:
    with mooncake_master(tmp_path, network) as empty:
        code, document = answer_of(capsys, "--tier", json.dumps(entry(empty)))
        found = finding(document, f"{AT}.master")
        assert (code, found["status"]) == (1, "problem")
        assert "segment_bytes" in found["remedy"]


def test_a_master_that_is_not_there(capsys: pytest.CaptureFixture[str]) -> None:
    where = f"127.0.0.1:{free_port()}"
    code, document = answer_of(capsys, "--mooncake", where)
    found = finding(document, f"{AT}.master")
    assert (code, found["status"]) == (0, "warning")
    assert "would start without this tier" in found["found"]


# --- doctor and bench ----------------------------------------------------------------------------


def others_in(master: Master) -> list[str]:
    """Names of all objects but the list of namespaces, which is written a little later."""
    return [name for name in master.keys() if name != "kvtier:1:namespaces"]  # noqa: SIM118


@pytest.fixture
def _short_measurements(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(canary, "_LOADED_FOR_S", 0.05)
    monkeypatch.setattr(canary, "_TOTAL_BYTES", 16 << 20)
    monkeypatch.setattr(bench, "_LIMIT_BYTES", 64 << 20)


@pytest.mark.usefixtures("_short_measurements")
def test_the_doctor(master: Master, client: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert client.put("session:1", b"of others") == 0
    code, document = examine(capsys, config_of(entry(master), cache_namespace="w"))
    assert (code, status_of(document, f"{AT}.canary")) == (0, "ok")
    assert document["tiers"][0]["speed"]["load_bytes_per_s"] > 0
    assert others_in(master) == ["session:1"]


@pytest.mark.usefixtures("_short_measurements")
def test_the_doctor_leaves_a_full_pool_alone(
    master: Master, client: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    for number in range(SEGMENT_BYTES // (1 << 20) - 10):
        assert client.put(f"of-others-{number}", bytes(1 << 20)) == 0
    before = set(master.keys())
    code, document = examine(capsys, config_of(entry(master), cache_namespace="w"))
    found = finding(document, f"{AT}.canary")
    assert (code, found["status"]) == (1, "problem")
    assert "is full: " in found["found"]
    assert set(master.keys()) == before


@pytest.mark.usefixtures("_short_measurements")
def test_the_benchmark(master: Master, capsys: pytest.CaptureFixture[str]) -> None:
    config = config_of(entry(master), cache_namespace="w")
    small = ("--size", "2MiB", "--block", "64KiB", "--job-blocks", "8")
    assert main(["bench", "--config", config, *small, "--json"]) == 0
    (timed,) = json.loads(capsys.readouterr().out)["tiers"]
    assert timed["type"] == "mooncake"
    assert min(timed["stores"], timed["loads"], timed["lookups"], timed["one_block_s"]) > 0
    assert others_in(master) == []
