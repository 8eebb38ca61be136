"""How a value appears in a message: short, on one line, without secrets."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping

from kvtier.config.numbers import as_int

_LONGEST = 200
_SHORTEST_SECRET = 4
_SECRET = (
    r"pass?_?w|passphrase|pwd|secret|credential|auth|bearer|cookie|connection_?string"
    r"|(?:access|account|api|private|shared)_?key|token\b|\bsas\b|\bsig"
)
_SECRET_KEY = re.compile(_SECRET, re.IGNORECASE)
# May open something, or only sort something: what is long enough to be a secret is taken for one.
_MAYBE_SECRET_KEY = re.compile(r"key\b", re.IGNORECASE)
# A list or object that shell quoting has turned into a text.
_SECRET_IN_TEXT = re.compile(
    rf"""((?:(?:{_SECRET})\w*|key)["']*\s*[:=]\s*["']*)[^\s"',}}]+""", re.IGNORECASE
)
# Everything up to the last "@": a password may itself contain "@" or "/".
_URL_USER_INFO = re.compile(r"(?<=://)\S*@")
_HIDDEN = "***"


def describe(value: object, key: str = "") -> str:
    """`value`, given for `key`, as a message may show it."""
    text = json.dumps(_redacted(value, key), default=_unknown_to_json, ensure_ascii=False)
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}..."


def printable(text: str) -> str:
    """`text`, which may come from anybody, such as a file name or what a file says about an engine,
    on one line and without control characters: a log and a terminal show it as it is."""
    if text.isprintable():
        return text
    return "".join(
        letter if letter.isprintable() else letter.encode("unicode_escape").decode()
        for letter in text
    )


def without_secrets(text: str, options: Mapping[str, object]) -> str:
    """`text`, written by someone who has seen `options`, as a message may show it."""
    for secret in sorted(_secrets_in(options, ""), key=len, reverse=True):
        text = text.replace(secret, _HIDDEN)
    return _without_marked_secrets(text)


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
    """Whether a value protects nothing. Besides, its letters would be in every other word."""
    return isinstance(value, bool | None) or len(str(value)) < _SHORTEST_SECRET


def _without_marked_secrets(text: str) -> str:
    return _SECRET_IN_TEXT.sub(rf"\1{_HIDDEN}", _URL_USER_INFO.sub(f"{_HIDDEN}@", text))


def _unknown_to_json(value: object) -> int | str:
    number = as_int(value)
    return _without_marked_secrets(repr(value)) if number is None else number


def _redacted(value: object, key: str) -> object:
    if value is not None and _SECRET_KEY.search(key):
        return _HIDDEN
    if _MAYBE_SECRET_KEY.search(key) and not _is_too_small(value):
        return _HIDDEN
    if isinstance(value, str):
        return _without_marked_secrets(value)
    if isinstance(value, Mapping):
        return {str(name): _redacted(item, str(name)) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_redacted(item, key) for item in value]
    return value
