"""Which hints are read from `kv_transfer_params`, and which warnings are logged."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from kvtier.base import Locality, Medium, TierFilter, TierMatcher, WriteHint
from kvtier.connector import request_state
from kvtier.connector.request_state import parse_hints


@pytest.fixture(autouse=True)
def nothing_said_yet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(request_state, "_warned_topics", set())


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
    assert line.startswith(f"kv_transfer_params.kv_load_tiers[0] = {bad!r} is ignored: give a list")


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
    assert parse_hints(given) == request_state.RequestHints()
    (line,) = caplog.messages
    assert line == f"kv_transfer_params = {given!r} is ignored: give an object."


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
    key: str, meant: str, caplog: pytest.LogCaptureFixture
) -> None:
    for _ in range(3):
        assert parse_hints({key: True}) == request_state.RequestHints()
    (line,) = caplog.messages
    assert line == f"kv_transfer_params.{key} = True is not read by kvtier: did you mean {meant}?"


def test_keys_of_tiers_and_of_other_connectors_are_not_warned_about(
    caplog: pytest.LogCaptureFixture,
) -> None:
    theirs: dict[Any, Any] = dict.fromkeys(
        ("do_remote_prefill", "remote_block_ids", "max_tokens", "tenant", "ttl_s", "skip" * 1000, 7)
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
    bad: Any, caplog: pytest.LogCaptureFixture
) -> None:
    for _ in range(3):
        assert parse_hints({"write": bad}).write is None
    (line,) = [record for record in caplog.records if record.levelno == logging.WARNING]
    assert line.getMessage().startswith(f"kv_transfer_params.write = {bad!r} is ignored: give")
