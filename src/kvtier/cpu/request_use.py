"""What the primary tier remembers of one request, for as long as it lives."""

from __future__ import annotations

from itertools import islice
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvtier.base import OffloadKey, ReqContext


class RequestUse:
    """What one request has done with the tier so far."""

    __slots__ = (
        "all_here",
        "announced",
        "brought",
        "context",
        "fills_tier_since",
        "finished",
        "first_withheld",
        "fresh",
        "has_loaded",
        "is_stale",
        "keys",
        "loading",
        "num_writing",
        "out_of_order",
        "seen_at",
    )

    def __init__(self, context: ReqContext) -> None:
        self.context = context
        self.keys: dict[OffloadKey, int] = {}
        """What it has brought, in prompt order, with the generation of the block in which it used
        or stored it; 0 if there was none."""
        self.seen_at = -1
        """The generation of the tier in which the keys above were last held against what is in it:
        while that is the generation, no block of theirs has come or left."""
        self.all_here = False
        """Whether all of them had a block then."""
        self.fresh: list[OffloadKey] = []
        """Uses that the policy has not been told of."""
        self.out_of_order = False
        """Whether one of those may be in front of an earlier one."""
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
        self.first_withheld: OffloadKey | None = None
        """The first of the keys that it offered while it was stale."""
        self.fills_tier_since = -1
        """The generation in which it was found to leave no room for itself."""

    def bring(self, keys: dict[OffloadKey, int]) -> bool:
        """Take in keys of a later call, given in prompt order, each with 0.

        Returns whether all of them come behind what was brought before.

        If all that was brought before is among them, their order is the right one. Otherwise,
        what was brought before stays in front of, or behind, the first key that is in both. If
        there is no such key, what is given comes later in the prompt.
        """
        known = self.keys
        if known.keys().isdisjoint(keys):
            known.update(keys)
            self.seen_at = -1
            return True
        if len(known) <= len(keys) and known.keys() <= keys.keys():
            self.keys = {**keys, **known}
            if len(known) < len(keys):
                self.seen_at = -1
        elif not keys.keys() <= known.keys():
            front: dict[OffloadKey, int] = {}
            for key in known:
                if key in keys:
                    break
                front[key] = 0
            self.keys = {**front, **keys, **known}
            self.seen_at = -1
        return False

    def is_known_to_have(self, keys: list[OffloadKey], generation: int) -> bool:
        """Whether it has used a block of each of these keys, from its first one on, and in this
        generation of the tier all of those are still there."""
        if self.seen_at != generation or not self.all_here:
            return False
        return keys == list(islice(self.keys, len(keys)))

    def has_used_behind(self, key: OffloadKey) -> bool:
        """Whether the request has used a block that comes after `key` in its prompt."""
        for other, generation in reversed(self.keys.items()):
            if generation:
                return True
            if other == key:
                return False
        return False
