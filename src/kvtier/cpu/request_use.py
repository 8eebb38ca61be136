"""What the primary tier remembers of one request, for as long as it lives."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvtier.base import OffloadKey, ReqContext


class RequestUse:
    """What one request has done with the tier so far."""

    __slots__ = (
        "announced",
        "brought",
        "context",
        "finished",
        "fresh",
        "has_loaded",
        "is_stale",
        "keys",
        "loading",
        "num_writing",
    )

    def __init__(self, context: ReqContext) -> None:
        self.context = context
        self.keys: dict[OffloadKey, None] = {}
        """Blocks it used or stored, in prompt order."""
        self.fresh: list[OffloadKey] = []
        """Those that the policy has not been told of."""
        self.brought: set[OffloadKey] = set()
        """Keys the reuse filter has counted for it."""
        self.loading: dict[OffloadKey, int] = {}
        """How many loads of each block it has under way."""
        self.num_writing = 0
        """How many blocks it has under way into the tier."""
        self.announced = False
        self.finished = False
        self.has_loaded = False
        """Whether it holds blocks on the device that it loaded."""
        self.is_stale = False
        """Whether it may hold blocks on the device that are from before a reset."""


def merge_in_prompt_order(
    known: dict[OffloadKey, None], given: dict[OffloadKey, None]
) -> dict[OffloadKey, None]:
    """Both sets of keys of one request, each in prompt order, as one.

    What is known only stays in front of, or behind, the first key that is in both. If there is
    no such key, what is given comes later in the prompt.
    """
    if len(given) >= len(known) and known.keys() <= given.keys():
        return given
    front: dict[OffloadKey, None] = {}
    for key in known:
        if key in given:
            break
        front[key] = None
    return {**front, **given, **known}


def comes_first(key: OffloadKey, other: OffloadKey, keys: Iterable[OffloadKey]) -> bool:
    """Whether `key` is before `other` in `keys`; at least one of them is there."""
    return next(candidate for candidate in keys if candidate in (key, other)) == key
