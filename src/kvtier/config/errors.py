"""Errors of a configuration, in messages that tell the operator what to do and that hold no secret.

`describe`, `printable` and `without_secrets` make text from outside safe for messages and logs;
`redacted` does so with a whole configuration.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from kvtier.config.sizes import as_int

_LONGEST = 200
_SHORTEST_SECRET = 4
_SECRET = (
    r"pass?_?w|passphrase|pwd|secret|credential|auth|bearer|cookie|connection_?string"
    r"|(?:access|account|api|private|shared)_?key|token\b|\bsas\b|\bsig"
)
_SECRET_KEY = re.compile(_SECRET, re.IGNORECASE)
# "key" may name a password or a sort key. Its value is hidden if it is long enough for a secret.
_MAYBE_SECRET_KEY = re.compile(r"key\b", re.IGNORECASE)
# Secrets inside a text, for example in a JSON object that shell quoting has turned into a string.
# "valkey:" begins a URL.
_SECRET_IN_TEXT = re.compile(
    rf"""((?:(?:{_SECRET})\w*|(?<!val)key)["']*\s*[:=]\s*["']*)[^\s"',}}]+""", re.IGNORECASE
)
# Everything up to the last "@": a password may itself contain "@" or "/".
_URL_USER_INFO = re.compile(r"(?<=://)\S*@")
# The same where the scheme was forgotten. A colon tells it from an address of mail.
_USER_INFO = re.compile(r"""(?<![^\s"'(),=])(?![^\s"']*://)[^\s"':]+:[^\s"']*@""")
HIDDEN = "***"
"""What stands in place of a secret."""


@dataclass(frozen=True, slots=True)
class Problem:
    """One refused value, and what to write instead."""

    key: str
    """The path of the key, such as `secondary_tiers[1].type`."""
    given: str
    """The value as `describe` shows it: without passwords."""
    allowed: str
    remedy: str
    """One sentence, without its full stop; or a question."""

    def __str__(self) -> str:
        end = "" if self.remedy.endswith("?") else "."
        return f"{self.key}: got {self.given}; allowed: {self.allowed}. {self.remedy}{end}"


class ConfigError(ValueError):
    """The configuration cannot be used.

    Carries every problem that was found, so that a user can correct them together. Raised before
    anything is allocated or opened, with one exception: a tier checks the values of its own keys
    when it starts. If it refuses them, the tier leaves nothing open.
    """

    def __init__(self, *problems: Problem) -> None:
        super().__init__(*problems)
        self.problems = problems

    def __str__(self) -> str:
        if len(self.problems) == 1:
            return str(self.problems[0])
        lines = "".join(f"\n- {problem}" for problem in self.problems)
        return f"{len(self.problems)} problems in the configuration:{lines}"


def redacted(value: object) -> object:
    """A copy of a user's object without its secrets, which JSON can express."""
    return json.loads(json.dumps(_redacted(value, ""), default=_unknown_to_json))


def describe(value: object, key: str = "") -> str:
    """Return the value of `key` as text for a message: short, on one line, without secrets."""
    text = json.dumps(_redacted(value, key), default=_unknown_to_json, ensure_ascii=False)
    text = printable(text)
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}..."


def printable(text: str) -> str:
    """Return `text` on one line, with control characters escaped. Used for text from outside, such
    as a file name or an engine's name in a file, before it goes to a log or a terminal."""
    if text.isprintable():
        return text
    return "".join(
        letter if letter.isprintable() else letter.encode("unicode_escape").decode()
        for letter in text
    )


def without_secrets(text: str, options: Mapping[str, object]) -> str:
    """Return `text`, a tier's message, without the secrets of `options` that it may quote."""
    for secret in sorted(_secrets_in(options, ""), key=len, reverse=True):
        text = text.replace(secret, HIDDEN)
    return _without_marked_secrets(text)


def without_user_info(text: str) -> str:
    """Return `text` without the users and passwords of URLs in it."""
    return _USER_INFO.sub(f"{HIDDEN}@", _URL_USER_INFO.sub(f"{HIDDEN}@", text))


def _secrets_in(value: object, key: str) -> Iterator[str]:
    if isinstance(value, Mapping):
        for name, item in value.items():
            yield from _secrets_in(item, f"{key} {name}" if _may_name_secret(key) else str(name))
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _secrets_in(item, key)
    elif _may_name_secret(key):
        if not _is_too_small(value):
            yield str(value)
    elif isinstance(value, str):
        for user_info in _URL_USER_INFO.findall(value):
            password = user_info[:-1].partition(":")[2]
            if len(password) >= _SHORTEST_SECRET:
                yield password


def _may_name_secret(key: str) -> bool:
    return bool(_SECRET_KEY.search(key) or _MAYBE_SECRET_KEY.search(key))


def _is_too_small(value: object) -> bool:
    """True for values too short to be secrets. Hiding them would also hide parts of other words."""
    return isinstance(value, bool | None) or len(str(value)) < _SHORTEST_SECRET


def _without_marked_secrets(text: str) -> str:
    return _SECRET_IN_TEXT.sub(rf"\1{HIDDEN}", without_user_info(text))


def _unknown_to_json(value: object) -> int | str:
    number = as_int(value)
    return _without_marked_secrets(repr(value)) if number is None else number


def _redacted(value: object, key: str) -> object:
    if value is not None and _SECRET_KEY.search(key):
        return HIDDEN
    if _MAYBE_SECRET_KEY.search(key) and not _is_too_small(value):
        return HIDDEN
    if isinstance(value, str):
        return _without_marked_secrets(value)
    if isinstance(value, Mapping):
        return {str(name): _redacted(item, str(name)) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_redacted(item, key) for item in value]
    return value
