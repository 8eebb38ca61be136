"""How a value of the configuration appears in a message: as JSON, short, without secrets."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping

from kvtier.config.numbers import as_int

_LONGEST = 200
_SECRET = (
    r"pass?_?w|passphrase|pwd|secret|credential|auth|bearer|cookie|connection_?string"
    r"|(?:access|account|api|private|shared)_?key|\bkey\b|token\b|\bsas\b|\bsig"
)
_SECRET_KEY = re.compile(_SECRET, re.IGNORECASE)
# A list or object that shell quoting has turned into a text.
_SECRET_IN_TEXT = re.compile(
    rf"""((?:{_SECRET})\w*["']*\s*[:=]\s*["']*)[^\s"',}}]+""", re.IGNORECASE
)
# Everything up to the last "@": a password may itself contain "@" or "/".
_URL_USER_INFO = re.compile(r"(?<=://)\S*@")
_HIDDEN = "***"


def describe(value: object, key: str = "") -> str:
    """`value`, given for `key`, as a message may show it."""
    text = json.dumps(_redacted(value, key), default=_unknown_to_json, ensure_ascii=False)
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}..."


def _unknown_to_json(value: object) -> int | str:
    number = as_int(value)
    return repr(value) if number is None else number


def _redacted(value: object, key: str) -> object:
    if _SECRET_KEY.search(key) and value is not None:
        return _HIDDEN
    if isinstance(value, str):
        return _SECRET_IN_TEXT.sub(rf"\1{_HIDDEN}", _URL_USER_INFO.sub(f"{_HIDDEN}@", value))
    if isinstance(value, Mapping):
        return {str(name): _redacted(item, str(name)) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_redacted(item, key) for item in value]
    return value
