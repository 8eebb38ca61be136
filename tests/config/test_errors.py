"""Messages show the configuration, but no secrets."""

from __future__ import annotations

import json
from typing import Any

import pytest

from kvtier.config import ConfigError, OptionReader
from kvtier.config.errors import without_secrets
from kvtier.config.fields import TEXT
from tests.config.sample import make_config, refusal_of

HIDDEN = "hunter2"


@pytest.mark.parametrize(
    "extra",
    [
        {"secondary_tiers": {"type": "valkey", "password": HIDDEN}},
        {"secondary_tiers": json.dumps([{"type": "valkey", "password": HIDDEN}])},
        {"secondary_tiers": {"type": "obj", "secret_access_key": HIDDEN, "access_key_id": HIDDEN}},
        {"secondary_tiers": {"type": "valkey", "url": f"valkey://me:a/b@{HIDDEN}@host:6379/0"}},
        {"secondary_tiers": {"type": "valkey", "url": f"me:{HIDDEN}@host:6379/0"}},
        {"secondary_tiers": {"type": "valkey", "url": f"valkey:/me:a/b@{HIDDEN}@host"}},
        {"secondary_tiers": [[{"session_token": [HIDDEN]}]]},
        {"secondary_tiers": [json.dumps({"type": "valkey", "password": HIDDEN})]},
        {"pasword": HIDDEN},
        {"api_key": HIDDEN},
        {"encryption_key": HIDDEN},
        {"secondary_tiers": json.dumps([{"type": "x", "encryption_key": HIDDEN}])},
        {"authorization": f"Bearer {HIDDEN}"},
        {"account_key": HIDDEN},
        {"connection_string": HIDDEN},
        {"passphrase": HIDDEN},
        {"sas": HIDDEN},
        {"secondary_tiers": f"https://host/container?sv=1&sig={HIDDEN}"},
    ],
)
def test_messages_hide_secrets(extra: dict[str, Any]) -> None:
    message = str(refusal_of(extra))
    assert "***" in message
    assert HIDDEN not in message


def test_a_misspelled_secret_of_a_tier_is_hidden_too() -> None:
    reader = OptionReader({"pass_word": HIDDEN, "password ": HIDDEN}, at="secondary_tiers[1]")
    reader.optional("password", TEXT)
    reader.refuse_unread("Remove it")
    with pytest.raises(ConfigError) as refused:
        reader.raise_problems()
    assert HIDDEN not in str(refused.value)
    assert [p.key for p in refused.value.problems] == [
        "secondary_tiers[1].pass_word",
        "secondary_tiers[1].password ",
    ]


def test_what_is_no_secret_is_shown() -> None:
    assert "16" in str(refusal_of({"tokens": 16}))
    for text in ("valkey://host:6379: refused", "at 12:30 to me@host", "host:6379 is full"):
        assert without_secrets(text, {}) == text


@pytest.mark.parametrize("key", ["key", "my_key", "my key", "sortKey", "monkey"])
def test_a_key_that_may_be_a_secret_shows_only_what_protects_nothing(key: str) -> None:
    for harmless, shown in ((1, "1"), (True, "true"), (None, "null"), ("abc", '"abc"')):
        assert str(refusal_of({key: harmless})).startswith(f"{key}: got {shown}; ")
    for secret in (HIDDEN, 20221224, [HIDDEN], {"bytes": HIDDEN}):
        assert str(refusal_of({key: secret})).startswith(f'{key}: got "***"; ')


def test_a_configuration_shown_in_a_log_hides_the_tiers_own_keys() -> None:
    tier = {"type": "valkey", "password": HIDDEN}
    config = make_config({"secondary_tiers": [tier], "engine_config": {"key": HIDDEN}})
    assert "valkey" in repr(config)
    assert HIDDEN not in repr(config)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"password": HIDDEN}, f"the server does not like {HIDDEN!r}"),
        ({"encryption_key": HIDDEN}, f"{HIDDEN} is no key"),
        ({"encryption_key": {"of": "me", "is": HIDDEN}}, f"{HIDDEN} is no key"),
        ({}, f"encryption_key={HIDDEN} does not fit"),
        ({"password": 20221224}, "the server does not like 20221224"),
        ({"auth": {"user": "me", "tokens": [HIDDEN]}}, f"[{HIDDEN}] is too short"),
        ({"url": f"valkey://me:{HIDDEN}@host"}, f"{HIDDEN} is wrong"),
        ({"urls": [f"https://{HIDDEN}:@host", f"https://a:{HIDDEN}@b"]}, f"{HIDDEN} is wrong"),
        ({}, f"valkey://me:{HIDDEN}@host does not answer"),
        ({}, f"password={HIDDEN} does not fit"),
    ],
)
def test_what_others_say_about_a_configuration_hides_secrets(
    options: dict[str, Any], text: str
) -> None:
    shown = without_secrets(text, options)
    assert "***" in shown
    assert HIDDEN not in shown
    assert "20221224" not in shown


def test_what_others_say_is_otherwise_left_alone() -> None:
    options = {"root_dir": "/mnt/kv", "password": "or", "auth": True, "secret": None}
    text = "True or None: /mnt/kv is a file"
    assert without_secrets(text, options) == text


def test_a_long_value_is_cut() -> None:
    assert len(str(refusal_of({"reset_scope": "x" * 10_000}))) < 400


@pytest.mark.parametrize("letter", ["\x9b", "\u2028", "\u202e", "\x7f", "\n"])
def test_a_value_is_shown_on_one_line_without_control_characters(letter: str) -> None:
    assert str(refusal_of({"reset_scope": f"pri{letter}mary"})).isprintable()
