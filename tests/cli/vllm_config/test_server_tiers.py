"""Checks of valkey and obj tiers, with real servers. Nothing is written to them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvtier.cli import main
from tests.cli.vllm_config.running import answer_of, config_in, finding, run_apart
from tests.tiering.obj.server import ACCESS_KEY, BUCKET, SECRET, SeaweedProcess, seaweed
from tests.tiering.processes import free_port
from tests.tiering.valkey.server import ValkeyProcess, valkey_server

AT = "secondary_tiers[0]"


@pytest.fixture(scope="module")
def valkey(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ValkeyProcess]:
    with valkey_server(tmp_path_factory.mktemp("valkey")) as server:
        yield server


@pytest.fixture(scope="module")
def s3(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SeaweedProcess]:
    with seaweed(tmp_path_factory.mktemp("s3")) as server:
        yield server


def entry(**keys: Any) -> tuple[str, str]:
    return "--tier", json.dumps(keys)


# --- valkey --------------------------------------------------------------------------------------


def test_a_server(valkey: ValkeyProcess, capsys: pytest.CaptureFixture[str]) -> None:
    code, document = answer_of(capsys, "--valkey", valkey.url)
    assert code == 0
    assert config_in(document["flag"])["kv_connector_extra_config"]["secondary_tiers"] == [
        {"type": "valkey", "url": valkey.url}
    ]
    assert finding(document, f"{AT}.url") == {
        "name": f"{AT}.url",
        "status": "ok",
        "found": f"{valkey.url} lets this user in",
        "remedy": "",
    }
    with valkey.client() as client:
        assert client.dbsize() == 0


def test_a_server_without_limit(valkey: ValkeyProcess, capsys: pytest.CaptureFixture[str]) -> None:
    for settings, words in (
        ({"maxmemory": 0}, "has no maxmemory"),
        ({"maxmemory": "64mb", "maxmemory-policy": "noeviction"}, "evicts nothing"),
    ):
        with valkey.client() as client:
            before = {name: client.config_get(name)[name] for name in settings}
            for name, value in settings.items():
                client.config_set(name, value)
        try:
            code, document = answer_of(capsys, "--valkey", valkey.url)
        finally:
            with valkey.client() as client:
                for name, value in before.items():
                    client.config_set(name, value)
        found = finding(document, f"{AT}.maxmemory")
        assert (code, found["status"]) == (0, "warning")
        assert words in found["found"]
        assert "allkeys-lru" in found["remedy"]


def test_a_server_that_wants_a_password(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with valkey_server(tmp_path, "--requirepass", "hunter2") as server:
        monkeypatch.setenv("VALKEY_PASSWORD", "hunter3")
        code, document = answer_of(capsys, "--valkey", server.url)
        found = finding(document, f"{AT}.url")
        assert (code, found["status"]) == (1, "problem")
        assert "username and password" in found["remedy"]
        assert "hunter" not in json.dumps(document)
        monkeypatch.setenv("VALKEY_PASSWORD", "hunter2")
        code, document = answer_of(capsys, "--valkey", server.url)
        assert (code, finding(document, f"{AT}.url")["status"]) == (0, "ok")
        assert "hunter" not in json.dumps(document)


def test_a_password_in_the_flag_is_warned_of(
    valkey: ValkeyProcess, capsys: pytest.CaptureFixture[str]
) -> None:
    in_url = valkey.url.replace("://", "://:hunter2@")
    in_query = f"{valkey.url}?password=hunter2"
    as_key = entry(type="valkey", url=valkey.url, password="hunter2")
    for given in (("--valkey", in_url), ("--valkey", in_query), as_key):
        document = answer_of(capsys, *given)[1]
        found = finding(document, f"{AT}.password")
        assert found["status"] == "warning"
        assert "VALKEY_PASSWORD" in found["remedy"]
        assert "hunter2" not in json.dumps(document["checks"])


@pytest.mark.parametrize("place", ["s3://me:hunter2@bucket", "me:hunter2@bucket"])
def test_a_password_beside_a_wrong_size(capsys: pytest.CaptureFixture[str], place: str) -> None:
    assert main(["vllm-config", "--cpu", "1GiB", "--obj", f"{place}:10Q"]) == 2
    printed = "".join(capsys.readouterr())
    assert "@bucket:10Q" in printed
    assert "hunter2" not in printed


def test_a_server_that_is_not_there(capsys: pytest.CaptureFixture[str]) -> None:
    url = f"valkey://127.0.0.1:{free_port()}"
    code, document = answer_of(capsys, "--valkey", url)
    found = finding(document, f"{AT}.url")
    assert (code, found["status"]) == (0, "warning")
    assert found["found"] == (
        f"{url}: cannot connect (Connection refused); an engine would start without this tier, and "
        "try again"
    )


# --- obj -----------------------------------------------------------------------------------------


def with_credentials(monkeypatch: pytest.MonkeyPatch, secret: str = SECRET) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", ACCESS_KEY)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", secret)


def test_a_bucket(
    s3: SeaweedProcess, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with_credentials(monkeypatch)
    keys = {name: s3.keys[name] for name in ("url", "endpoint", "allow_http")}
    code, document = answer_of(capsys, *entry(type="obj", max_bytes="1GiB", **keys))
    assert (code, finding(document, f"{AT}.url")["status"]) == (0, "ok")
    assert not [check for check in document["checks"] if check["name"] == f"{AT}.room"]
    assert list(s3.store().list().collect()) == []
    document = answer_of(capsys, *entry(type="obj", **keys))[1]
    assert finding(document, f"{AT}.room")["status"] == "warning"


def test_a_wrong_secret_and_no_bucket(
    s3: SeaweedProcess, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = {name: s3.keys[name] for name in ("url", "endpoint", "allow_http")}
    with_credentials(monkeypatch, "notthesecretnotthesecret")
    code, document = answer_of(capsys, *entry(type="obj", **keys))
    found = finding(document, f"{AT}.url")
    assert (code, found["status"]) == (1, "problem")
    assert "environment's credentials" in found["remedy"]
    assert "notthesecret" not in json.dumps(document)


def test_a_service_that_is_not_there(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with_credentials(monkeypatch)
    endpoint = f"http://127.0.0.1:{free_port()}"
    given = entry(type="obj", url=f"s3://{BUCKET}/x", endpoint=endpoint, allow_http=True)
    code, document = answer_of(capsys, *given)
    found = finding(document, f"{AT}.url")
    assert (code, found["status"]) == (0, "warning")
    assert "start without this tier" in found["found"]


def test_an_endpoint_in_the_environment(
    s3: SeaweedProcess, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with_credentials(monkeypatch)
    monkeypatch.setenv("AWS_ENDPOINT_URL", s3.endpoint)
    code, document = answer_of(capsys, "--obj", f"s3://{BUCKET}/x:1GiB")
    found = finding(document, f"{AT}.endpoint")
    assert (code, found["status"]) == (1, "problem")
    assert f'"{s3.endpoint}" in AWS_ENDPOINT_URL' in found["found"]
    assert "allow_http" in found["remedy"]
    given = entry(type="obj", url=f"s3://{BUCKET}/x", max_bytes="1GiB", allow_http=True)
    code, document = answer_of(capsys, *given)
    assert (code, finding(document, f"{AT}.url")["status"]) == (0, "ok")


def test_a_directory(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    place = tmp_path / "cache"
    code, document = answer_of(capsys, "--obj", f"file://{place}:1GiB")
    found = finding(document, f"{AT}.url")
    assert (code, found["status"]) == (0, "ok")
    assert "the engine makes it" in found["found"]
    assert not place.exists()
    place.write_text("a file")
    code, document = answer_of(capsys, "--obj", f"file://{place}:1GiB")
    found = finding(document, f"{AT}.url")
    assert (code, found["status"]) == (1, "problem")
    assert "is not a directory" in found["found"]


def test_two_tiers_with_one_url(valkey: ValkeyProcess, capsys: pytest.CaptureFixture[str]) -> None:
    code, document = answer_of(capsys, "--valkey", valkey.url, "--valkey", f"{valkey.url}/")
    found = finding(document, "secondary_tiers[1]")
    assert (code, found["status"]) == (1, "problem")
    assert "is also the URL of secondary_tiers[0]" in found["found"]
    document = answer_of(capsys, "--valkey", valkey.url, "--valkey", f"{valkey.url}/1")[1]
    assert not [check for check in document["checks"] if check["name"] == "secondary_tiers[1]"]


def test_urls_with_and_without_a_size(capsys: pytest.CaptureFixture[str]) -> None:
    for text, expected in (
        ("s3://kv-cache/llama:10TiB", {"url": "s3://kv-cache/llama", "max_bytes": "10TiB"}),
        ("s3://kv-cache/llama", {"url": "s3://kv-cache/llama"}),
        ("file:///mnt/kv:1GiB", {"url": "file:///mnt/kv", "max_bytes": "1GiB"}),
    ):
        assert main(["vllm-config", "--cpu", "1GiB", "--no-check", "--obj", text]) == 0
        flag = capsys.readouterr().out
        assert flag.startswith("--shutdown-timeout")
        (tier,) = config_in(flag)["kv_connector_extra_config"]["secondary_tiers"]
        assert tier == {"type": "obj"} | expected


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (("--obj", "s3://kv-cache/llama:10TB?"), "the size follows the last colon"),
        (("--obj", "https://kv-cache/llama"), "a bucket or directory"),
        (("--obj", "s3://kv-cache/llama:16KiB"), "max_bytes"),
        (entry(type="obj", url="s3://kv-cache", endpoint="cache.example:9000"), "the whole URL"),
        (("--valkey", "valkey://cache:6379:10GiB"), "port is not a number"),
        (("--valkey", "http://cache:6379"), "a URL that begins with valkey://"),
        (("--valkey", "cache:6379"), "a URL that begins with valkey://"),
    ],
)
def test_wrong_urls(given: tuple[str, str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["vllm-config", "--cpu", "1GiB", *given]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert words in printed.err
    assert given[0] in printed.err


@pytest.mark.parametrize(
    ("given", "package", "extra"),
    [
        (("--valkey", "valkey://127.0.0.1:1"), "valkey", "kvtier[valkey]"),
        (("--obj", "file:///tmp/kv:1GiB"), "obstore", "kvtier[obj]"),
    ],
)
def test_without_the_client(
    given: tuple[str, str], package: str, extra: str, tmp_path: Path
) -> None:
    (tmp_path / package).mkdir()
    (tmp_path / package / "__init__.py").write_text("raise ImportError('not installed')")
    ended = run_apart("--cpu", "1MiB", *given, PYTHONPATH=f"{tmp_path}:src")
    assert ended.returncode == 1
    assert f"pip install '{extra}'" in ended.stderr
    assert package in ended.stderr
