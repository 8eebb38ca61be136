"""Argument types of the commands under `tests`: nonsense is refused, with the remedy."""

from __future__ import annotations

import math
from argparse import ArgumentTypeError
from collections.abc import Callable, Collection, Iterable
from itertools import count

__all__ = ["one_of", "positive_number", "seeds", "whole_number"]


def seeds(text: str) -> Iterable[int]:
    """`A-B`: from A to B, both included; `A` or `A-`: from A on, without an end."""
    first, _, last = text.partition("-")
    if not first.isdecimal() or not (last.isdecimal() or not last):
        raise ArgumentTypeError(f"{text!r}: give a range of seeds, such as 0-99")
    if not last:
        return count(int(first))
    if int(last) < int(first):
        raise ArgumentTypeError(f"{text!r} has no seeds: give the smaller one first")
    return range(int(first), int(last) + 1)


def whole_number(text: str) -> int:
    """1 or more."""
    if not text.isdecimal() or not int(text):
        raise ArgumentTypeError(f"{text!r}: give a whole number, 1 or more")
    return int(text)


def positive_number(text: str) -> float:
    """Above 0, and not infinite."""
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not 0 < number < math.inf:
        raise ArgumentTypeError(f"{text!r}: give a number above 0, such as 0.5 or 600")
    return number


def one_of(kind: str, names: Collection[str]) -> Callable[[str], str]:
    """One of these names. Unlike `choices`, it can be left out where an argument may repeat."""

    def known(text: str) -> str:
        if text not in names:
            raise ArgumentTypeError(f"no {kind} {text!r}: there are {', '.join(sorted(names))}")
        return text

    return known
