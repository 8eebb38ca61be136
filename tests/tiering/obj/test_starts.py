"""Starts of an engine whose object store cannot be used: a clear error or a warning, without
secrets."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvtier.cli import main
from kvtier.config import ConfigError
from kvtier.tiering.base import TierRefused
from kvtier.tiering.factory import TierStartError
from kvtier.tiering.obj.options import ObjOptions
from tests.tiering.obj.front import Answer, Asked, Authority, Front, error
from tests.tiering.obj.server import (
    ACCESS_KEY,
    BUCKET,
    READER,
    READERS_SECRET,
    SECRET,
    SECRETS,
    TOKEN,
    SeaweedProcess,
)
from tests.tiering.patience import wait_until
from tests.tiering.processes import free_port
from tests.tiering.proxy import Direction, proxy_to
from tests.tiering.reference import ReferenceEngine, prompts

PROMPTS = prompts(2)


def started(keys: dict[str, Any], **further: Any) -> ReferenceEngine:
    return ReferenceEngine({"type": "obj", **keys, **further})


def check_refusal(keys: dict[str, Any], *words: str) -> None:
    with pytest.raises((TierStartError, ConfigError)) as refusal:
        started(keys)
    message = str(refusal.value)
    assert all(word in message for word in words), message
    assert not [secret for secret in SECRETS if secret in message]


# --- credentials and rights ----------------------------------------------------------------------


def test_a_wrong_secret(server: SeaweedProcess) -> None:
    keys = {**server.keys, "secret_access_key": f"not {SECRET}"}
    check_refusal(keys, "may not write to it", "does not accept the credentials")


def test_an_unknown_access_key(server: SeaweedProcess) -> None:
    keys = {**server.keys, "access_key_id": "nobody"}
    check_refusal(keys, "may not write to it", "does not accept the credentials")


def test_a_user_who_may_only_read(server: SeaweedProcess) -> None:
    keys = {**server.keys, "access_key_id": READER, "secret_access_key": READERS_SECRET}
    check_refusal(keys, "may not write to it", "get, put, list and delete")


def on(method: str, path: str, answer: Answer) -> Callable[[Asked], Answer | None]:
    return lambda asked: answer if asked.method == method and path in asked.path else None


def may_not_delete(asked: Asked) -> Answer | None:
    """As Amazon says it: in an answer of status 200, for each object."""
    if asked.method != "POST":
        return None
    keys = re.findall(b"<Key>.*?</Key>", asked.content)
    errors = [
        b"<Error>%b<Code>AccessDenied</Code><Message>no</Message></Error>" % key for key in keys
    ]
    return Answer(200, b"<DeleteResult>%b</DeleteResult>" % b"".join(errors))


REFUSALS: dict[str, tuple[Callable[[Asked], Answer | None], str]] = {
    "expired token": (lambda asked: error(403, "ExpiredToken", TOKEN), "accept the credentials"),
    "expired token, as Amazon says it": (
        on("PUT", "", error(400, "ExpiredToken", TOKEN)),
        "accept the credentials",
    ),
    "no such bucket": (on("PUT", "", error(404, "NoSuchBucket")), "there is no such bucket"),
    "another region": (lambda asked: Answer(301), "in another region"),
    "may not read": (on("GET", "/engines/", error(403, "AccessDenied")), "may not read from it"),
    "may not list": (on("GET", "list-type=2", error(403, "AccessDenied")), "may not list"),
    "may not delete": (may_not_delete, "may not remove from it"),
}


@pytest.mark.parametrize("refusal", REFUSALS)
def test_what_a_service_refuses(server: SeaweedProcess, front: Front, refusal: str) -> None:
    front.answer, words = REFUSALS[refusal]
    check_refusal({**server.keys, "endpoint": front.endpoint}, words)


def test_credentials_of_the_environment_are_used_together(
    server: SeaweedProcess, front: Front, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A session token belongs to its key, and not to one of the configuration."""
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", ACCESS_KEY)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)
    monkeypatch.setenv("AWS_SESSION_TOKEN", TOKEN)
    keys = {**server.keys, "endpoint": front.endpoint}
    with started(keys):
        assert not [asked for asked in front.asked if TOKEN in asked.headers.values()]
    del keys["access_key_id"], keys["secret_access_key"]
    front.asked.clear()
    front.answer = lambda asked: error(403, "ExpiredToken", TOKEN)
    check_refusal(keys, "does not accept the credentials")
    assert [asked for asked in front.asked if TOKEN in asked.headers.values()]


# --- the way there -------------------------------------------------------------------------------


def test_a_service_that_cannot_be_reached_is_used_when_it_is_back(
    server: SeaweedProcess, caplog: pytest.LogCaptureFixture
) -> None:
    with proxy_to(server.port) as proxy:
        proxy.cut(Direction.FROM_SERVER)
        with started({**server.keys, "endpoint": f"http://127.0.0.1:{proxy.port}"}) as engine:
            assert "The engine starts without this tier" in caplog.text
            engine.serve(PROMPTS)
            proxy.heal()

            def is_used() -> bool:
                loaded = engine.serve_from_tiers(PROMPTS)
                engine.settle()
                return loaded > 0

            wait_until(is_used, "blocks are loaded")


@pytest.fixture(scope="module")
def authorities(tmp_path_factory: pytest.TempPathFactory) -> list[Authority]:
    directory = tmp_path_factory.mktemp("authorities")
    return [Authority(directory / name) for name in ("right", "wrong")]


def test_a_service_with_a_certificate_of_ones_own_authority(
    server: SeaweedProcess, authorities: list[Authority]
) -> None:
    authority, _ = authorities
    with Front(server.port, authority) as front:
        keys = {**server.keys, "endpoint": front.endpoint, "ca_bundle": str(authority.bundle)}
        with started(keys, allow_http=False) as engine:
            engine.serve(PROMPTS)
            engine.settle()
            wait_until(lambda: engine.serve_from_tiers(PROMPTS) > 0, "blocks are loaded")


@pytest.mark.parametrize("given", ["another authority", "none"])
def test_a_certificate_that_is_not_accepted(
    server: SeaweedProcess,
    authorities: list[Authority],
    given: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    right, wrong = authorities
    with Front(server.port, right) as front:
        keys = {**server.keys, "endpoint": front.endpoint, "allow_http": False}
        if given == "another authority":
            keys["ca_bundle"] = str(wrong.bundle)
        with started(keys) as engine:
            engine.serve(PROMPTS)
            engine.settle()
            assert engine.serve_from_tiers(PROMPTS) == 0
        assert "its certificate is not accepted: check ca_bundle" in caplog.text
        assert not front.asked, "it has sent a request"


@pytest.mark.parametrize("content", [None, b"", b"not a certificate", b"\xff\x00"])
def test_a_file_that_has_no_certificates(
    server: SeaweedProcess, tmp_path: Path, content: bytes | None
) -> None:
    path = tmp_path / "ca.pem"
    if content is not None:
        path.write_bytes(content)
    check_refusal({**server.keys, "ca_bundle": str(path)}, "ca_bundle", str(path))


def test_a_password_in_the_endpoint_is_not_shown(server: SeaweedProcess) -> None:
    endpoint = f"http://somebody:{SECRET}@127.0.0.1:{server.port}"
    check_refusal({**server.keys, "endpoint": endpoint, "allow_http": False}, "https://")


def test_an_endpoint_is_not_part_of_a_repr() -> None:
    assert SECRET not in repr(ObjOptions("s3://bucket", endpoint=f"https://me:{SECRET}@host"))


def test_a_directory_that_cannot_be_made(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    check_refusal({"url": f"file://{file}/below"}, "url", "make the directory")


# --- the client, and the command line -----------------------------------------------------------

_WITHOUT_CLIENT = """
import sys
sys.modules["obstore"] = None
from kvtier.tiering.factory import TierStartError
from tests.tiering.reference import ReferenceEngine
try:
    ReferenceEngine({"type": "obj", "url": "s3://bucket/prefix"})
except TierStartError as refusal:
    print(type(refusal.__cause__).__name__, refusal)
"""


def test_without_the_client_the_error_says_how_to_install_it() -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    ended = subprocess.run(
        [sys.executable, "-c", _WITHOUT_CLIENT],
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert ended.stdout.startswith(TierRefused.__name__)
    assert "pip install 'kvtier[obj]'" in ended.stdout


@pytest.mark.parametrize("what", ["right", "wrong secret", "unreachable", "expired token"])
@pytest.mark.parametrize("command", ["stat", "verify"])
def test_the_command_line_shows_no_secret(
    server: SeaweedProcess,
    front: Front,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    what: str,
    command: str,
) -> None:
    with started(server.keys) as engine:
        engine.serve(PROMPTS)
        engine.settle()
    endpoint = f"http://127.0.0.1:{free_port()}" if what == "unreachable" else front.endpoint
    if what == "expired token":
        front.answer = lambda asked: error(400, "ExpiredToken", f"{TOKEN} {asked.headers}")
    monkeypatch.setenv("AWS_ENDPOINT_URL", endpoint)
    monkeypatch.setenv("AWS_REGION", "us-east-1")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", ACCESS_KEY)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", f"not {SECRET}" if "wrong" in what else SECRET)
    if what == "expired token":
        monkeypatch.setenv("AWS_SESSION_TOKEN", TOKEN)
    code = main(["store", command, f"s3://{BUCKET}/cache", "--json"])
    printed = capfd.readouterr()
    assert code == (0 if what == "right" else 2)
    if what == "right":
        assert json.loads(printed.out)
    assert not [secret for secret in SECRETS if secret in printed.out + printed.err]
