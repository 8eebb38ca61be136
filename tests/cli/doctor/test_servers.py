"""`kvtier doctor` with real servers: sound, dead, stopped, full, and with a wrong password."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cli.doctor.running import AT, config_of, examine, finding, status_of
from tests.tiering.processes import free_port
from tests.tiering.valkey.server import ValkeyProcess, valkey_server

MIB = 1 << 20


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ValkeyProcess]:
    with valkey_server(tmp_path_factory.mktemp("valkey")) as running:
        yield running


def on(url: str) -> str:
    return config_of({"type": "valkey", "url": url}, cache_namespace="w")


def test_a_server(server: ValkeyProcess, capsys: pytest.CaptureFixture[str]) -> None:
    with server.client() as client:
        client.set("of-others", b"1")
        code, document = examine(capsys, on(server.url))
        assert (code, status_of(document, f"{AT}.canary")) == (0, "ok")
        assert document["tiers"][0]["speed"]["load_bytes_per_s"] > 0
        assert client.keys() == [b"of-others"]


def test_a_dead_server(capsys: pytest.CaptureFixture[str]) -> None:
    url = f"valkey://127.0.0.1:{free_port()}"
    code, document = examine(capsys, on(url))
    assert code == 1
    found = finding(document, f"{AT}.url")
    assert found["found"].startswith(f"{url}: cannot connect (Connection refused)")
    assert "this machine reaches it" in found["remedy"]
    assert status_of(document, f"{AT}.canary") == "problem"


def test_a_stopped_server(server: ValkeyProcess, capsys: pytest.CaptureFixture[str]) -> None:
    os.kill(server.pid, signal.SIGSTOP)
    try:
        code, document = examine(capsys, on(server.url))
    finally:
        os.kill(server.pid, signal.SIGCONT)
    assert code == 1
    found = finding(document, f"{AT}.url")
    assert "the server sent nothing for" in found["found"]
    assert found["remedy"]
    assert status_of(document, f"{AT}.canary") == "problem"


def test_a_wrong_password(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VALKEY_PASSWORD", "hunter3")
    with valkey_server(tmp_path, "--requirepass", "hunter2") as guarded:
        code, document = examine(capsys, on(guarded.url))
    found = finding(document, f"{AT}.url")
    assert (code, found["status"]) == (1, "problem")
    assert "refused the user or the password" in found["found"]
    assert "username and password" in found["remedy"]
    assert "hunter" not in str(document)


def test_a_full_server_evicts_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with (
        valkey_server(tmp_path, "--maxmemory", str(24 * MIB)) as full,
        full.client() as client,
    ):
        for number in range(18):
            client.set(f"of-others-{number}", bytes(MIB))
        before = client.dbsize()
        code, document = examine(capsys, on(full.url))
        found = finding(document, f"{AT}.canary")
        assert (code, found["status"]) == (1, "problem")
        assert f"{full.url} is full: " in found["found"]
        assert "maxmemory" in found["remedy"]
        assert document["tiers"][0]["full"] is True
        assert (client.dbsize(), client.info("stats")["evicted_keys"]) == (before, 0)


def test_a_user_who_may_not_see_how_full_it_is(
    server: ValkeyProcess, capsys: pytest.CaptureFixture[str]
) -> None:
    with server.client() as client:
        client.acl_setuser(
            "shy",
            enabled=True,
            passwords=["+p"],
            keys=["kvtier:*"],
            commands=["+@all", "-info"],
        )
    url = server.url.replace("://", "://shy:p@")
    code, document = examine(capsys, on(url))
    found = finding(document, f"{AT}.canary")
    assert (code, found["status"]) == (0, "warning")
    assert "may not ask how full the server is (INFO)" in found["found"]


def test_a_dead_object_store(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "k")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "s")
    entry = {
        "type": "obj",
        "url": "s3://bucket/kv",
        "endpoint": f"http://127.0.0.1:{free_port()}",
        "region": "here",
        "allow_http": True,
    }
    code, document = examine(capsys, config_of(entry, cache_namespace="w"))
    assert code == 1
    assert "the service cannot be reached" in finding(document, f"{AT}.url")["found"]
    assert status_of(document, f"{AT}.canary") == "problem"


def test_objects_in_a_directory(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    entry = {"type": "obj", "url": f"file://{tmp_path}/objects", "max_bytes": "1GiB"}
    code, document = examine(capsys, config_of(entry, cache_namespace="w"))
    assert (code, status_of(document, f"{AT}.canary")) == (0, "ok")
    assert list(tmp_path.iterdir()) == []
