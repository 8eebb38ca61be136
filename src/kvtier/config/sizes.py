"""Byte sizes as users write them: `8589934592`, `"8GiB"`, `"512 MiB"`, `"1.5GB"`."""

from __future__ import annotations

import operator
import re
from math import floor, isfinite
from typing import SupportsIndex

_PREFIXES = "KMGTP"
_BINARY: dict[str, int] = {f"{p}iB": 1024**n for n, p in enumerate(_PREFIXES, start=1)}
_DECIMAL: dict[str, int] = {f"{p}B": 1000**n for n, p in enumerate(_PREFIXES, start=1)}
_SHOWN = ("KiB", "MiB", "GiB", "TiB")
_UNITS = {unit.lower(): size for unit, size in (_BINARY | _DECIMAL | {"B": 1, "": 1}).items()}

LARGEST_SIZE = 2**63 - 1
"""Largest accepted size, in bytes. No computer addresses more memory than this, so a larger size
probably has the wrong unit."""
_SHAPE = re.compile(r"(\d{1,19})(?:\.(\d{1,18}))? *([A-Za-z]*)", re.ASCII)


class SizeError(ValueError):
    """The value is not a size. The message says what to write instead, without a full stop."""


def as_int(value: object) -> int | None:
    """Return `value` as a plain int, or None if it is not a whole number. True and 8.0 do not count
    as whole numbers; numpy's integers do."""
    if isinstance(value, bool) or not isinstance(value, SupportsIndex):
        return None
    try:
        return operator.index(value)
    except TypeError:
        return None  # an array of several numbers, for example


def parse_size(value: object, *, may_be_zero: bool = False) -> int:
    """Return the number of bytes in `value`, which is a number of bytes or a text with a unit.

    Fractions of a byte are dropped, so that "1.1TiB" and an engine's `1.3 * 2**30` are accepted.
    """
    if isinstance(value, str):
        size = _parse_text(value)
    elif isinstance(value, float) and isfinite(value):
        size = int(value)
    elif (number := as_int(value)) is not None:
        size = number
    else:
        raise SizeError('Write a number of bytes, or a text such as "8GiB"')
    if size < 0 or (size == 0 and not may_be_zero):
        raise SizeError("Write 0, or a size above 0" if may_be_zero else "Write a size above 0")
    if size > LARGEST_SIZE:
        raise SizeError(f"Write at most {LARGEST_SIZE} bytes; is the unit right?")
    return size


def format_size(size: int) -> str:
    """Return `size` as an exact text that `parse_size` can read, in the largest binary unit that
    divides it."""
    for unit, scale in reversed(_BINARY.items()):
        if size and size % scale == 0:
            return f"{size // scale}{unit}"
    return f"{size}B"


def as_size(num_bytes: float, digits: int = 3) -> str:
    """Return a size as text for a message, such as "62.5 MiB". It is rounded down to about `digits`
    digits, so that free space and limits are never overstated."""
    amount, unit = float(num_bytes), "B"
    for larger in _SHOWN:
        if amount < 1000:
            break
        amount, unit = amount / 1024, larger
    places = 0 if unit == "B" else max(0, digits - len(str(int(amount))))
    text = f"{floor(amount * 10**places) / 10**places:.{places}f}"
    if places:
        text = text.rstrip("0").rstrip(".")
    return f"{text} {unit}"


def _parse_text(text: str) -> int:
    match = _SHAPE.fullmatch(text.strip())
    if match is None:
        raise SizeError('Write a number and a unit, such as "8GiB", "512 MiB" or "1.5GB"')
    whole, fraction, unit = match[1], match[2] or "", match[3]
    if unit.lower() not in _UNITS:
        raise SizeError(_which_unit(text.strip()[: -len(unit)].rstrip(), unit))
    scale: int = 10 ** len(fraction)
    return int(whole + fraction) * _UNITS[unit.lower()] // scale


def _which_unit(number: str, unit: str) -> str:
    prefix = unit[0].upper()
    if prefix in _PREFIXES:
        return (
            f'Write "{number}{prefix}iB" for powers of 1024, "{number}{prefix}B" for powers of 1000'
        )
    return f"Use one of the units {', '.join(['B', *_DECIMAL, *_BINARY])}"
