"""Users, passwords and rights: the rights that the document lists suffice, each is needed, what is
refused is explained, an engine lives on without them, and no secret is written anywhere."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from kvtier.cli import main
from kvtier.config import ConfigError
from kvtier.tiering.factory import TierStartError
from tests.tiering.patience import wait_until
from tests.tiering.valkey.server import ValkeyProcess, block_keys, redis_server, valkey_server
from tests.tiering.valkey.serving import BLOCKS, PROMPTS, TOKENS, serving

PAGE = (Path(__file__).parents[3] / "docs" / "valkey.md").read_text(encoding="utf-8")
USER, PASSWORD = "the-user-of-engines", "the-password/of the user:@1"
ADMIN = {"username": "the-admin", "password": "the-password-of-the-admin"}
WRONG = "not-the-password"
SECRETS = (USER, PASSWORD, "the-password", WRONG)


def documented_rights(pattern: str) -> list[str]:
    """The rights that the page lists in this place."""
    (rights,) = re.findall(pattern, PAGE, re.MULTILINE)
    assert isinstance(rights, str)
    return rights.split()


RIGHTS = documented_rights("^ACL SETUSER kvtier on >PASSWORD (.*)$")


def further_rights(purpose: str) -> list[str]:
    return documented_rights(f"`([^`]*)` (?:for|with) {purpose}")


class Guarded:
    """A server with one user beside the administrator."""

    def __init__(self, server: ValkeyProcess) -> None:
        self.server = server
        self.admin = server.client(**ADMIN)
        self.grant(RIGHTS)

    def grant(self, rights: list[str], password: str = PASSWORD) -> None:
        self.admin.execute_command("ACL", "SETUSER", USER, "reset", "on", f">{password}", *rights)

    def keys(self, password: str = PASSWORD, user: str = USER) -> dict[str, Any]:
        """The keys of a tier."""
        return {"url": self.server.url, "username": user, "password": password}


@contextmanager
def guarded_server(kind: str, directory: Path) -> Iterator[Guarded]:
    make = valkey_server if kind == "valkey" else redis_server
    admin = [ADMIN["username"], "on", f">{ADMIN['password']}", "~*", "+@all"]
    with make(directory, "--user", *admin, "--user", "default", "off") as server:
        yield Guarded(server)


@pytest.fixture(scope="module")
def guarded_once(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Guarded]:
    with guarded_server("valkey", tmp_path_factory.mktemp("guarded")) as server:
        yield server


@pytest.fixture(params=["valkey", "redis"])
def of_either_kind(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Guarded]:
    with guarded_server(request.param, tmp_path) as server:
        yield server


@pytest.fixture
def guarded(guarded_once: Guarded) -> Guarded:
    """The server without blocks."""
    guarded_once.admin.flushall()
    guarded_once.grant(RIGHTS)
    return guarded_once


@pytest.fixture(autouse=True)
def _no_secret_is_written(
    caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> Iterator[None]:
    caplog.set_level(logging.DEBUG)
    yield
    printed = capsys.readouterr()
    for text in (caplog.text, printed.out, printed.err):
        require_no_secret(text)


def require_no_secret(text: str) -> None:
    for secret in SECRETS:
        assert secret not in text


# --- the documented rights ----------------------------------------------------------------------


def test_the_documented_rights_suffice(of_either_kind: Guarded) -> None:
    guarded = of_either_kind
    with serving(**guarded.keys(), ttl_s=100) as engine, serving(**guarded.keys()) as other:
        engine.serve_until_loaded()
        other.serve_until_loaded()
        engine.step_for(0.7)  # uses are reported
        # A value that is not a block is removed.
        first, second, *_ = block_keys(guarded.admin)
        guarded.admin.delete(first, second)
        guarded.admin.rpush(first, "item")
        guarded.admin.set(second, "short")
        wait_until(
            lambda: (
                (engine.serve_all(), guarded.admin.strlen(second) > 1000)[1]
                and guarded.admin.type(first) == b"string"
            ),
            "both are stored again",
        )
        # Blocks of the private namespace expire.
        engine.engine.reset_cache()
        engine.serve_until_loaded()
        engine.step_for(0.7)
        for each in (engine, other):
            assert each.counted("failures_refused") == 0
            require_no_secret(json.dumps(each.figures))


def test_each_documented_right_is_needed(of_either_kind: Guarded) -> None:
    for right in RIGHTS:
        if not right.startswith(("+", "~")):
            continue
        of_either_kind.grant([other for other in RIGHTS if other != right])
        what = right[1:].upper() if right.startswith("+") else "GET"
        complaint = f"may not use {what} with keys kvtier:.*lists the rights"
        with pytest.raises(TierStartError, match=complaint) as refusal:
            serving(**of_either_kind.keys()).__enter__()
        require_no_secret(str(refusal.value))


def test_a_database_needs_a_right_of_its_own(guarded: Guarded) -> None:
    keys = guarded.keys() | {"url": f"{guarded.server.url}/3"}
    with pytest.raises(TierStartError, match=r"refused database 3 \(NOPERM\)"):
        serving(**keys).__enter__()
    guarded.grant(RIGHTS + further_rights("a database in the URL"))
    with serving(**keys) as engine:
        engine.serve_until_loaded()
    with guarded.server.client(**ADMIN, db=3) as client:
        assert len(block_keys(client)) == len(PROMPTS) * BLOCKS
    with pytest.raises(TierStartError, match=r"refused database 300 \(ERR\)"):
        serving(**keys | {"url": f"{guarded.server.url}/300"}).__enter__()


def test_with_a_further_right_the_limits_are_checked(
    guarded: Guarded, caplog: pytest.LogCaptureFixture
) -> None:
    guarded.admin.config_set("maxmemory-policy", "noeviction")
    try:
        with serving(**guarded.keys()):
            assert "evicts nothing" not in caplog.text
        guarded.grant(RIGHTS + further_rights("the check of the memory limit"))
        with serving(**guarded.keys()):
            assert "evicts nothing" in caplog.text
    finally:
        guarded.admin.config_set("maxmemory-policy", "allkeys-lru")


def test_the_documented_rights_for_the_command(
    guarded: Guarded, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("VALKEY_USERNAME", USER)
    monkeypatch.setenv("VALKEY_PASSWORD", PASSWORD)
    with serving(guarded.server.url) as engine:
        engine.serve_until_loaded()
    assert main(["store", "stat", guarded.server.url]) == 2
    require_no_secret(capsys.readouterr().err)
    guarded.grant(RIGHTS + further_rights("`kvtier store`,"))
    assert main(["store", "stat", guarded.server.url, "--json"]) == 0
    printed = capsys.readouterr().out
    require_no_secret(printed)
    assert json.loads(printed)["blocks"] == len(PROMPTS) * BLOCKS
    for words in (["ls"], ["verify"], ["clear", "--yes"]):
        assert main(["store", words[0], guarded.server.url, *words[1:]]) == 0
        require_no_secret(capsys.readouterr().out)
    assert guarded.admin.dbsize() == 0


# --- wrong users ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "wrong",
    [
        {"password": WRONG},
        {"username": "nobody"},
        {"username": None, "password": None},
        {"username": None, "password": None, "credentials": f"{USER}:{WRONG}@"},
    ],
    ids=["password", "user", "nothing", "in_the_url"],
)
def test_a_wrong_user_is_refused_at_the_start(guarded: Guarded, wrong: dict[str, Any]) -> None:
    wrong = dict(wrong)
    url = guarded.server.url.replace("//", "//" + wrong.pop("credentials", ""))
    keys = guarded.keys() | {"url": url} | wrong
    with pytest.raises(TierStartError, match=r"user or (the )?password") as refusal:
        serving(**{name: value for name, value in keys.items() if value}).__enter__()
    assert guarded.server.url in str(refusal.value)
    require_no_secret(str(refusal.value))


@pytest.mark.parametrize("url", ["valkey://{}:{}@{}", "valkey://{2}?username={0}&password={1}"])
def test_user_and_password_in_the_url(guarded: Guarded, url: str) -> None:
    password = "the-password%2Fof%20the%20user%3A%401"
    address = f"127.0.0.1:{guarded.server.port}"
    with serving(url.format(USER, password, address)) as engine:
        engine.serve_until_loaded()


@pytest.mark.parametrize("password", ["the-password/1", "1/the-password", "12?the-password"])
def test_a_password_in_the_url_that_is_not_encoded(guarded: Guarded, password: str) -> None:
    """Its end looks like the path or the query."""
    url = f"valkey://{USER}:{password}@127.0.0.1:{guarded.server.port}"
    with pytest.raises(ConfigError, match="Percent-encode") as refusal:
        serving(url).__enter__()
    require_no_secret(str(refusal.value))


@pytest.mark.parametrize(
    ("url", "remedy"),
    [
        ("valkey://{}/prompts", "database is not a number"),
        ("valkey://{}?retry=the-password", "what follows the question mark"),
        ("valkey://{}?db=the-password", "what follows the question mark"),
        ("unix://me:1/the-password@/run/valkey.sock", "Percent-encode"),
    ],
)
def test_an_impossible_url(server: ValkeyProcess, url: str, remedy: str) -> None:
    with pytest.raises(ConfigError) as refusal:
        serving(url.format(f"127.0.0.1:{server.port}")).__enter__()
    assert remedy in str(refusal.value)
    require_no_secret(str(refusal.value))


# --- rights that change --------------------------------------------------------------------------


@pytest.mark.parametrize("change", ["-get", "-set", "resetkeys"])
def test_rights_that_are_withdrawn_and_given_back(guarded: Guarded, change: str) -> None:
    with serving(**guarded.keys()) as engine:
        engine.serve_until_loaded()
        guarded.admin.execute_command("ACL", "SETUSER", USER, change)
        guarded.admin.flushall()
        wait_until(
            lambda: (engine.serve_all(), engine.counted("failures_refused") > 0)[1],
            "it is counted that the server refuses",
        )
        guarded.grant(RIGHTS)
        engine.serve_until_loaded()


def test_a_password_that_was_changed(guarded: Guarded, caplog: pytest.LogCaptureFixture) -> None:
    with serving(**guarded.keys()) as engine:
        engine.serve_until_loaded()
        guarded.grant(RIGHTS, password="the-password-of-tomorrow")
        assert engine.serve_all() == [TOKENS] * len(PROMPTS), "connections stay"
        guarded.admin.execute_command("CLIENT", "KILL", "USER", USER)
        wait_until(
            lambda: (engine.serve_all(), engine.counted("failures_refused") > 0)[1],
            "it is counted that the server refuses",
        )
        assert "refused the user or the password" in caplog.text
        guarded.grant(RIGHTS)
        engine.serve_until_loaded()


def test_a_user_that_was_removed(guarded: Guarded) -> None:
    with serving(**guarded.keys()) as engine:
        engine.serve_until_loaded()
        guarded.admin.execute_command("ACL", "DELUSER", USER)
        assert engine.serve_all() == [0] * len(PROMPTS)
        guarded.grant(RIGHTS)
        engine.serve_until_loaded()
