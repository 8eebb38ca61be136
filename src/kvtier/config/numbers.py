"""Whole numbers as engines give them, numpy's among them, turned into Python's own."""

from __future__ import annotations

import operator
from dataclasses import fields, replace
from typing import TYPE_CHECKING, Any, SupportsIndex, TypeVar

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

D = TypeVar("D", bound="DataclassInstance")


def as_int(value: object) -> int | None:
    """`value` as a plain int, or None if it is no whole number. True and 8.0 are none."""
    if isinstance(value, bool) or not isinstance(value, SupportsIndex):
        return None
    try:
        return operator.index(value)
    except TypeError:
        return None  # an array of several numbers, for one


def with_plain_ints(part: D) -> D:
    """`part` with plain ints in place of others, which overflow and which JSON does not know."""
    plain: dict[str, Any] = {}
    for field in fields(part):
        value = getattr(part, field.name)
        number = as_int(value)
        if number is not None and type(value) is not int:
            plain[field.name] = number
    return replace(part, **plain) if plain else part
