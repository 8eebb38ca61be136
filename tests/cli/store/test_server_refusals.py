"""What `kvtier store` says of servers that it cannot use, without secrets."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvtier.cli import main
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
    "location", ["valkey://", "valkey://host:port", "s3://", "unix://", "s3://bucket?versionId=1"]
)
def test_what_is_no_url(location: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert _refusal(capsys, location).startswith("kvtier store: ")
