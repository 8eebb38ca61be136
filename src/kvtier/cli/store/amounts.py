"""Sizes and times as people read them."""

from __future__ import annotations

import math
from datetime import UTC, datetime

__all__ = ["as_age", "as_size", "as_time"]

_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")
_AGES = ((86_400, "d"), (3_600, "h"), (60, "min"), (1, "s"))


def as_size(num_bytes: float) -> str:
    """With three digits or a little more: "62.5 MiB". Rounded down: of what is free or allowed,
    people are not told more than there is."""
    amount, power = float(num_bytes), 0
    while amount >= 1000 and power + 1 < len(_UNITS):
        amount /= 1024
        power += 1
    places = 0 if not power or amount >= 100 else 1 if amount >= 10 else 2
    digits = f"{math.floor(amount * 10**places) / 10**places:.{places}f}"
    if places:
        digits = digits.rstrip("0").rstrip(".")
    return f"{digits} {_UNITS[power]}"


def as_age(seconds: float) -> str:
    """In the largest unit of which there are two or more: "47 h"."""
    for length, unit in _AGES:
        if seconds >= 2 * length:
            return f"{int(seconds // length)} {unit}"
    return f"{max(0, int(seconds))} s"


def as_time(time_ns: int) -> str:
    """ISO 8601, in UTC, to the millisecond."""
    try:
        moment = datetime.fromtimestamp(time_ns / 1e9, UTC)
    except (OverflowError, ValueError, OSError):  # a time that nobody has written in earnest
        return f"{time_ns} ns"
    return moment.isoformat(timespec="milliseconds").replace("+00:00", "Z")
