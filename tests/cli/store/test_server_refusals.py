"""What `kvtier store` says of servers that it cannot use, without secrets."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from kvtier.cli import main
from kvtier.tiering.valkey import inspector
from tests.tiering.obj.front import Answer, Front
from tests.tiering.obj.server import BUCKET, seaweed
from tests.tiering.processes import free_port
from tests.tiering.valkey.server import valkey_server

SECRET = "not-the-password"


def _refusal(capsys: pytest.CaptureFixture[str], location: str) -> str:
    assert main(["store", "stat", location]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.count("\n") == 1
    assert SECRET not in printed.err
    return printed.err


def test_a_server_that_is_not_there(capsys: pytest.CaptureFixture[str]) -> None:
    url = f"valkey://127.0.0.1:{free_port()}"
    assert f"{url}: cannot connect" in _refusal(capsys, url)


def test_a_wrong_password(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with valkey_server(tmp_path, "--requirepass", "right") as server:
        refusal = _refusal(capsys, f"valkey://:{SECRET}@127.0.0.1:{server.port}")
        assert "refused the user or the password" in refusal


def test_a_wrong_password_in_the_environment(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with valkey_server(tmp_path, "--requirepass", "right") as server:
        monkeypatch.setenv("VALKEY_PASSWORD", SECRET)
        assert "refused the user or the password" in _refusal(capsys, server.url)
        monkeypatch.setenv("VALKEY_PASSWORD", "right")
        assert main(["store", "stat", server.url]) == 0


@pytest.mark.parametrize("scheme", ["vlakey://", "VALKEY://", "http://", "s3:/", ""])
def test_a_password_behind_a_wrong_scheme(capsys: pytest.CaptureFixture[str], scheme: str) -> None:
    assert "@host" in _refusal(capsys, f"{scheme}me:{SECRET}@host/0")


def test_a_wrong_secret_of_a_bucket(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with seaweed(tmp_path) as server:
        monkeypatch.setenv("AWS_ENDPOINT_URL", server.endpoint)
        monkeypatch.setenv("AWS_REGION", "us-east-1")
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", "nobody")
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)
        refusal = _refusal(capsys, f"s3://{BUCKET}/cache")
        assert "does not accept the credentials" in refusal


@pytest.mark.parametrize(
    ("location", "words"),
    [
        ("valkey://host:port", "port is not a number"),
        (f"valkey://{SECRET}:1/2@host:1", 'an "@" after the address'),
        (f"valkey://user:{SECRET}@host:1/one", "database is not a number"),
        (f"valkey://127.0.0.1:1?{SECRET}=1", "without a query"),
        ("unix://", "unix://"),
        ("s3://", "without a bucket"),
        (f"s3://user:{SECRET}@bucket/x", "with a user"),
        (f"s3://bucket?versionId={SECRET}", "with a query"),
        ("file://here", "with a host"),
    ],
)
def test_what_is_no_url(location: str, words: str, capsys: pytest.CaptureFixture[str]) -> None:
    refusal = _refusal(capsys, location)
    assert refusal.startswith("kvtier store: url: got ")
    assert words in refusal


@pytest.mark.parametrize("endpoint", ["cache.example:9000", "http://", "ftp://cache.example"])
def test_an_endpoint_that_is_no_url(
    endpoint: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", endpoint)
    refusal = _refusal(capsys, f"s3://{BUCKET}/cache")
    assert f'got "{endpoint}" in AWS_ENDPOINT_URL' in refusal


@pytest.mark.parametrize("endpoint", [f"https://u:{SECRET}@host", f"https://host?token={SECRET}"])
def test_an_endpoint_with_a_secret(
    endpoint: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", endpoint)
    assert "without user and query" in _refusal(capsys, f"s3://{BUCKET}/cache")


def test_no_credentials(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{free_port()}")
    monkeypatch.setenv("AWS_METADATA_ENDPOINT", f"http://127.0.0.1:{free_port()}")
    refusal = _refusal(capsys, f"s3://{BUCKET}/cache")
    assert "neither the configuration nor the environment has credentials" in refusal
    with Front(free_port()) as machine:
        machine.answer = lambda asked: Answer(404)
        monkeypatch.setenv("AWS_METADATA_ENDPOINT", machine.endpoint)
        assert "metadata service gives none" in _refusal(capsys, f"s3://{BUCKET}/cache")


def test_a_directory_is_not_made(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    place = tmp_path / "cache"
    assert f"there is no directory {place}" in _refusal(capsys, f"file://{place}")
    assert not place.exists()


@pytest.mark.parametrize("url", ["valkey://127.0.0.1:1", f"s3://{BUCKET}/cache"])
def test_init_is_not_needed(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["store", "init", url]) == 2
    assert "needs no init" in capsys.readouterr().err


def test_gc_is_not_needed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["store", "gc", "valkey://127.0.0.1:1"]) == 2
    assert "needs no gc" in capsys.readouterr().err


def test_a_server_that_speaks_no_tls_is_not_waited_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(inspector, "_TIMEOUT_S", 3600.0)  # of commands, not of the first answer
    with valkey_server(tmp_path) as server:
        assert "did not answer" in _refusal(capsys, f"valkeys://127.0.0.1:{server.port}")


def test_a_server_that_hangs_is_not_waited_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(inspector, "_TIMEOUT_S", 3600.0)
    with valkey_server(tmp_path) as server, server.standing_still():
        assert "sent nothing" in _refusal(capsys, server.url)


def test_a_database_that_is_not_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with valkey_server(tmp_path) as server:
        assert "refused database 99" in _refusal(capsys, f"{server.url}/99")


def test_sizes_of_a_server_are_for_people(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with valkey_server(tmp_path) as server:
        assert main(["store", "stat", server.url]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert f"{'maxmemory':<18}256 MiB" in lines
    assert f"{'maxmemory policy':<18}allkeys-lru" in lines
