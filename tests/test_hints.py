"""Which hints are read from a request, and which warnings are logged."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
import tracemalloc
from pathlib import Path
from typing import Any

import pytest

from kvtier.base import (
    Locality,
    Medium,
    ReqContext,
    TierFilter,
    TierMatcher,
    WriteHint,
    make_offload_key,
)
from kvtier.config import ConfigError
from kvtier.hints import (
    HintReader,
    PrivateNamespace,
    RequestHints,
    hints_of,
    new_context,
    proof_of,
)
from tests.config.sample import options_of

SECRET, OLD_SECRET = bytes(range(32)), bytes(range(1, 33))
RULES: dict[str, Any] = {
    "acme": {"share": "private"},
    "beta": {"share": "private"},
    "chat": {"priority": 6, "max_priority": 8, "max_retain_s": 60},
}
ACME, BETA = (f"{name}.{proof_of(name, SECRET)}" for name in ("acme", "beta"))


class Counting(HintReader):
    """Counts what it ignores."""

    def __init__(self, **keys: Any) -> None:
        super().__init__(options_of(keys))
        self.ignored: list[int] = []
        self.note_ignored = self.ignored.append


@pytest.fixture
def plain() -> Counting:
    """The reader of an engine without rules."""
    return Counting()


@pytest.fixture
def key_file(tmp_path: Path) -> Path:
    path = tmp_path / "tenants.keys"
    path.touch(mode=0o600)
    path.write_text(f"{SECRET.hex()}\n{OLD_SECRET.hex()}\n")
    return path


@pytest.fixture
def reader(key_file: Path) -> Counting:
    """The reader of an engine with `RULES`."""
    return Counting(tenants=RULES, tenant_key_file=str(key_file))


def parse_hints(params: Any) -> RequestHints:
    return HintReader(options_of({})).read(params)


NOTHING = parse_hints(None)
STORAGE = TierMatcher(Medium.STORAGE)
LOCAL_STORAGE = TierMatcher(Medium.STORAGE, Locality.LOCAL)


@pytest.mark.parametrize(
    ("given", "matchers"),
    [
        ([{"medium": "STORAGE", "locality": "LOCAL"}], [LOCAL_STORAGE]),
        ([{"medium": "storage", "locality": "Local"}], [LOCAL_STORAGE]),
        (["storage"], [STORAGE]),
        ([{"locality": "local"}], [TierMatcher(None, Locality.LOCAL)]),
        ([{}], [TierMatcher()]),
        ([], []),
        ([{"medium": "STORAGE"}] * 1000, [STORAGE]),
    ],
)
def test_tiers_are_named_in_any_case(
    given: Any, matchers: list[TierMatcher], caplog: pytest.LogCaptureFixture
) -> None:
    assert parse_hints({"kv_load_tiers": given}).load_tiers == TierFilter(tuple(matchers))
    assert caplog.messages == []


BAD_ENTRIES = [
    {"medium": "TAPE"},
    {"medium": "STORAGE", "locality": "NEAR"},
    {"mediun": "STORAGE"},
    {"medium": 3},
    "TAPE",
    None,
    3,
]


@pytest.mark.parametrize("bad", BAD_ENTRIES, ids=str)
def test_a_bad_entry_is_skipped_alone(bad: Any, caplog: pytest.LogCaptureFixture) -> None:
    read = parse_hints({"kv_load_tiers": [bad, {"medium": "STORAGE"}]})
    assert read.load_tiers == TierFilter((STORAGE,))
    (line,) = caplog.messages
    assert line.startswith("kv_transfer_params.kv_load_tiers[0] = ")
    assert " is ignored: give a list" in line


@pytest.mark.parametrize("bad", [BAD_ENTRIES, 3, "STORAGE", {"medium": "STORAGE"}], ids=str)
def test_nothing_below_host_memory_is_allowed_where_no_entry_can_be_read(
    bad: Any, caplog: pytest.LogCaptureFixture
) -> None:
    read = parse_hints({"kv_load_tiers": bad})
    assert not any(
        read.load_tiers.allows(medium, locality)
        for medium in (None, *Medium)
        for locality in (None, *Locality)
    )
    warnings = [record for record in caplog.records if record.levelno == logging.WARNING]
    assert len(warnings) == 1


@pytest.mark.parametrize("given", ["x", [{"skip": True}], 3], ids=str)
def test_what_is_no_object_is_ignored(given: Any, caplog: pytest.LogCaptureFixture) -> None:
    assert parse_hints(given) == NOTHING
    (line,) = caplog.messages
    kind = type(given).__name__
    assert line == f"kv_transfer_params = <{kind}> is ignored: give an object."


@pytest.mark.parametrize(
    ("key", "meant"),
    [
        ("Skip", "skip"),
        ("kv_load_tier", "kv_load_tiers"),
        ("load_tiers", "kv_load_tiers"),
        ("max-offload-tokens", "max_offload_tokens"),
        ("max_ofload_tokens", "max_offload_tokens"),
        ("max_load_token", "max_load_tokens"),
    ],
)
def test_a_misspelt_key_is_warned_about_once(
    key: str, meant: str, plain: Counting, caplog: pytest.LogCaptureFixture
) -> None:
    for _ in range(3):
        assert plain.read({key: True}) == NOTHING
    (line,) = caplog.messages
    assert line == f"kv_transfer_params.{key} = True is not read by kvtier: did you mean {meant}?"


def test_keys_of_tiers_and_of_other_connectors_are_not_warned_about(
    caplog: pytest.LogCaptureFixture,
) -> None:
    theirs: dict[Any, Any] = dict.fromkeys(
        (
            "do_remote_prefill",
            "remote_block_ids",
            "max_tokens",
            "session",
            "ttl_s",
            "skip" * 1000,
            7,
        )
    )
    parse_hints(theirs | {"max_load_tokens": 3})
    assert caplog.messages == []


@pytest.mark.parametrize("given", ["never", "NEVER", "through", None])
def test_a_request_says_what_tiers_get(given: Any, caplog: pytest.LogCaptureFixture) -> None:
    expected = None if given is None else WriteHint(given.lower())
    assert parse_hints({"write": given}).write is expected
    assert caplog.messages == []


@pytest.mark.parametrize("bad", ["on_evict", "", True, 0, ["never"], {"tier": "never"}], ids=str)
def test_another_write_is_ignored_with_one_warning(
    bad: Any, plain: Counting, caplog: pytest.LogCaptureFixture
) -> None:
    for _ in range(3):
        assert plain.read({"write": bad}).write is None
    (line,) = [record for record in caplog.records if record.levelno == logging.WARNING]
    assert line.getMessage().startswith(f"kv_transfer_params.write = {bad!r} is ignored: give")


@pytest.mark.parametrize("name", ["kv_load_tiers", "store_tiers"])
def test_both_lists_of_tiers_are_read_alike(name: str) -> None:
    read = parse_hints({name: [{"medium": "STORAGE", "locality": "LOCAL"}]})
    expected = TierFilter((LOCAL_STORAGE,))
    assert (read.load_tiers if name == "kv_load_tiers" else read.store_tiers) == expected
    assert (read.store_tiers if name == "kv_load_tiers" else read.load_tiers) is TierFilter.ALL


def test_a_request_without_hints_costs_no_parsing(plain: Counting) -> None:
    assert plain.read(None) is plain.read({}) is plain.read(None, None, "")


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"priority": 7}, {"priority": 7}),
        ({"priority": 0}, {"priority": 0}),
        ({"retain_s": 40}, {"retain_s": 40.0}),
        ({"retain_s": 0.5}, {"retain_s": 0.5}),
        ({"retain_s": 10**5000}, {"retain_s": 600.0}),
        ({"drop": True}, {"drop": True}),
        ({"prefetch": True}, {"prefetch": True}),
        ({"tenant": "acme"}, {}),  # nobody has configured it
        ({"tenant": "default"}, {}),
    ],
    ids=lambda value: next(iter(value), "none"),
)
def test_hints_without_rules(given: Any, expected: dict[str, Any], plain: Counting) -> None:
    read = plain.read(given)
    for name in RequestHints.__slots__:
        assert getattr(read, name) == expected.get(name, getattr(NOTHING, name))
    assert plain.ignored == []


def nested(depth: int) -> list[Any]:
    value: list[Any] = []
    for _ in range(depth):
        value = [value]
    return value


HOSTILE: list[Any] = [
    {"priority": value}
    for value in (-1, 10, 10**5000, 5.0, "5", True, None.__class__, nested(5000))
] + [
    {"retain_s": value}
    for value in (-1, float("nan"), float("inf"), -(10**5000), "40", True, nested(5000), b"40")
] + [
    {"tenant": value} for value in (3, True, nested(5000), b"acme", {"a": 1})
] + [
    {"share": value} for value in (3, "public", nested(5000), "private" * 100_000)
] + [
    {"drop": 1}, {"drop": "true"}, {"skip": nested(5000)}, {"prefetch": 0},
    {"store_tiers": nested(5000)}, {"store_tiers": "x" * 1_000_000}, {"store_tiers": 3},
    {"store_tiers": [{"medium": "x" * 1_000_000}]}, {"kv_load_tiers": [nested(5000)]},
    {"store_tiers": [{n: n for n in range(100_000)}]}, {"write": "never" * 100_000},
    {"max_offload_tokens": 10**5000 * -1},
]  # fmt: skip


@pytest.mark.parametrize("bad", HOSTILE, ids=lambda bad: next(iter(bad)))
def test_a_hostile_hint_is_ignored_counted_and_logged_short(
    bad: Any, plain: Counting, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    for _ in range(2):
        read = plain.read(bad)
        assert read.tenant is NOTHING.tenant
        assert (read.priority, read.retain_s, read.drop) == (5, 0.0, False)
        assert not read.store_tiers.matchers or read.store_tiers is TierFilter.ALL
        assert not read.load_tiers.matchers or read.load_tiers is TierFilter.ALL
    assert sum(plain.ignored) == 2
    assert [record.levelno for record in caplog.records] == [logging.WARNING, logging.DEBUG]
    assert max(map(len, caplog.messages)) < 500


def test_a_request_that_asks_for_privacy_and_cannot_have_it_uses_no_cache(
    plain: Counting, reader: Counting
) -> None:
    assert plain.read({"share": "private"}).skip
    assert reader.read({"tenant": "chat", "share": "private"}).skip
    assert reader.read({"tenant": "chat", "share": "mine"}).skip is False


def test_a_million_tenants_leave_no_state(reader: Counting) -> None:
    for name in ("warm", "up"):
        reader.read({"tenant": name, name: 1}, None, name)
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        for number in range(100_000):
            name = f"tenant-{number}"
            read = reader.read(
                {"tenant": name, f"a-very-long-unknown-key-{number}" * 2: 1}, None, name
            )
            assert read.tenant.index == 0
        after, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert after - before < 100_000


def test_only_the_first_keys_and_entries_are_looked_at(
    plain: Counting, caplog: pytest.LogCaptureFixture
) -> None:
    read = plain.read({f"x{n}": n for n in range(1000)} | {"Skip": True, "drop": True})
    assert read.drop  # a hint is found wherever it is
    assert caplog.messages == []  # what is misspelt, only near the start
    many = [{"medium": "TAPE"}] * 1_000_000 + ["STORAGE"]
    assert plain.read({"store_tiers": many}).store_tiers == TierFilter()
    assert sum(plain.ignored) == 32


# --- tenants -------------------------------------------------------------------------------------


def test_a_tenant_is_named_by_the_hint_or_by_the_salt(reader: Counting) -> None:
    for read in (reader.read({"tenant": "chat"}), reader.read(None, None, "chat")):
        assert read.tenant.name == "chat"
        assert (read.priority, read.namespace, read.skip) == (6, None, False)
    assert reader.read({"tenant": "chat"}, None, "any salt").tenant.name == "chat"
    assert reader.read({"tenant": "nobody"}, None, "chat").tenant.name == "chat"
    assert reader.read({"tenant": "nobody"}).tenant.name == "default"


def test_a_rule_bounds_what_its_tenant_asks_for(reader: Counting) -> None:
    read = reader.read({"tenant": "chat", "priority": 9, "retain_s": 3600})
    assert (read.priority, read.retain_s) == (8, 60.0)
    assert reader.read({"priority": 9}).priority == 5  # "default", where others have rules
    assert reader.read({"priority": 1}).priority == 1


def test_orders_of_the_orchestrator_take_precedence(reader: Counting) -> None:
    read = reader.read({"tenant": "chat", "priority": 1, "drop": True}, {"priority": 7})
    assert (read.tenant.name, read.priority, read.drop) == ("chat", 7, True)


def test_a_private_tenant_is_named_by_its_credential_alone(reader: Counting) -> None:
    for read in (
        reader.read({"tenant": ACME}),
        reader.read(None, None, ACME),
        reader.read({"tenant": "acme"}, None, ACME),
        reader.read({"tenant": ACME}, None, "any salt"),
        reader.read({"tenant": f"acme.{proof_of('acme', OLD_SECRET)}"}),
        reader.read({"tenant": "nobody"}, None, ACME),
        reader.read({"tenant": "chat"}, None, ACME),
    ):
        assert read.tenant.name == "acme"
        assert read.namespace is not None
        assert not read.skip


@pytest.mark.parametrize(
    ("params", "salt"),
    [
        ({"tenant": "acme"}, None),
        ({"tenant": "acme."}, None),
        (None, "acme"),
        ({"tenant": ACME[:-1]}, None),
        ({"tenant": ACME.upper()}, "acme"),
        ({"tenant": ACME + "é"}, None),
        ({"tenant": "acme.\ud800"}, None),
        (None, "acme." + "x" * 1_000_000),
        ({"tenant": ACME + "0" * 1000}, None),
        ({"tenant": "acme." + BETA.partition(".")[2]}, None),
        ({"tenant": "acme." + proof_of("acme", b"x" * 32)}, None),
        ({"tenant": "chat", "share": "private"}, None),
        ({"tenant": ACME}, BETA),
        ({"tenant": "acme"}, BETA),
        ({"tenant": "chat"}, "acme"),
    ],
    ids=str,
)
def test_who_guesses_gets_no_cache_at_all(params: Any, salt: Any, reader: Counting) -> None:
    """Not another tenant's cache, and no place to store a prompt where others find it."""
    read = reader.read(params, None, salt)
    assert read.skip
    assert read.namespace is None
    assert sum(reader.ignored) == 1


@pytest.mark.parametrize(
    "params",
    [
        {"tenant": [ACME]},
        {"tenant": {"name": ACME}},
        {"Tenant": ACME},
        {"tenants": ACME},
        json.dumps({"tenant": ACME}),
        [{"tenant": ACME}],
        {"tenant": ACME[:-1]},
        {"tenant": ACME, "share": "mine", "priority": ACME[:1]},
    ],
    ids=str,
)
def test_no_log_line_shows_a_credential(
    params: Any, reader: Counting, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    for _ in range(2):
        reader.read(params)
    assert caplog.messages or params == {"tenant": ACME, "share": "mine", "priority": ACME[:1]}
    assert not any(ACME[5:25] in line or ACME[-20:-1] in line for line in caplog.messages)


def test_a_key_with_a_line_break_is_not_logged(
    plain: Counting, caplog: pytest.LogCaptureFixture
) -> None:
    plain.read({"priority\n": 3, "\nretain_s": 3})
    assert not any("\n" in line for line in caplog.messages)


def test_a_tenant_that_cannot_be_read_may_be_a_private_one(reader: Counting) -> None:
    for unreadable in ([ACME], {"name": "acme"}, 3):
        assert reader.read({"tenant": unreadable}).skip
        assert not reader.read({"tenant": unreadable}, None, ACME).skip


def test_any_tenant_with_a_credential_may_ask_for_privacy(reader: Counting) -> None:
    chat = f"chat.{proof_of('chat', SECRET)}"
    assert reader.read({"tenant": chat}).namespace is None
    private = reader.read({"tenant": chat, "share": "private"})
    assert private.namespace is not None
    assert not private.skip


def test_a_credential_can_be_made_with_openssl() -> None:
    made = subprocess.run(
        ["openssl", "dgst", "-sha256", "-mac", "HMAC", "-macopt", f"hexkey:{SECRET.hex()}"],
        input=b"kvtier tenant acme",
        capture_output=True,
        check=True,
    )
    assert made.stdout.decode().split()[-1] == ACME.partition(".")[2]


KEY = make_offload_key(b"h" * 32, 2)


def test_keys_of_a_tenant_are_its_own_and_the_same_after_a_restart(reader: Counting) -> None:
    acme, beta = (PrivateNamespace(SECRET, name) for name in ("acme", "beta"))
    other_fleet = PrivateNamespace(OLD_SECRET, "acme")
    keys = {its.key_of(KEY) for its in (acme, beta, other_fleet)}
    assert len(keys | {KEY}) == 4
    assert all(key[-4:] == KEY[-4:] and len(key) == 36 for key in keys)
    again = reader.read({"tenant": ACME}).namespace
    assert again is not None
    assert again.key_of(KEY) == acme.key_of(KEY)


@pytest.mark.skipif(sys.platform == "win32", reason="modes of files")
def test_a_file_of_keys_that_others_may_write_is_refused(key_file: Path) -> None:
    key_file.chmod(0o666)
    with pytest.raises(ConfigError, match="tenant_key_file"):
        HintReader(options_of({"tenant_key_file": str(key_file)}))


def test_every_manager_finds_the_hints_in_the_context(reader: Counting) -> None:
    read = reader.read({"tenant": "chat", "write": "never", "prefetch": True})
    context = new_context("r", {"mine": 1}, read, num_prompt_tokens=3)
    assert hints_of(context) is read
    assert (context.write_hint, context.is_prefetch) == (WriteHint.NEVER, True)
    assert context.kv_transfer_params == {"mine": 1}
    assert hints_of(ReqContext("another")).tenant.index == 0
    assert new_context("r", [1], read).kv_transfer_params is None
