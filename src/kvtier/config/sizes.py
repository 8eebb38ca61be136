"""Byte sizes as people write them: `8589934592`, `"8GiB"`, `"512 MiB"`, `"1.5GB"`."""

from __future__ import annotations

import re
from math import isfinite

from kvtier.config.numbers import as_int

_PREFIXES = "KMGTP"
_BINARY: dict[str, int] = {f"{p}iB": 1024**n for n, p in enumerate(_PREFIXES, start=1)}
_DECIMAL: dict[str, int] = {f"{p}B": 1000**n for n, p in enumerate(_PREFIXES, start=1)}
_UNITS = {unit.lower(): size for unit, size in (_BINARY | _DECIMAL | {"B": 1, "": 1}).items()}

# No computer addresses more; what is larger is a slip of the unit.
LARGEST_SIZE = 2**63 - 1
_SHAPE = re.compile(r"(\d{1,19})(?:\.(\d{1,18}))? *([A-Za-z]*)", re.ASCII)


class SizeError(ValueError):
    """Not a size. The message says what to write instead, as one sentence without full stop."""


def parse_size(value: object, *, may_be_zero: bool = False) -> int:
    """The number of bytes `value` stands for: a number of bytes, or a text with a unit.

    A part of a byte is left out: "1.1TiB" is meant, and so is an engine's `1.3 * 2**30`.
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
    """The shortest exact way to write `size` that `parse_size` reads."""
    for unit, scale in reversed(_BINARY.items()):
        if size and size % scale == 0:
            return f"{size // scale}{unit}"
    return f"{size}B"


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
