"""Lengths of time as people write them: `90m`, `12h`, `7d`."""

from __future__ import annotations

import re

__all__ = ["DurationError", "parse_duration"]

_UNITS = {"s": 1, "m": 60, "h": 3_600, "d": 86_400, "w": 604_800}
_SHAPE = re.compile(r"(\d{1,9}) ?([a-z])", re.ASCII)


class DurationError(ValueError):
    """Not a length of time. The message says what to write instead."""


def parse_duration(text: str) -> int:
    """Seconds."""
    match = _SHAPE.fullmatch(text.strip().lower())
    if match is None or match[2] not in _UNITS:
        raise DurationError(
            f"Write a whole number and one of {', '.join(_UNITS)}, such as 90m, 12h or 7d"
        )
    return int(match[1]) * _UNITS[match[2]]
