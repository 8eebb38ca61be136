"""What a request may ask for: `kv_transfer_params`, parsed once."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvtier.base import Locality, Medium, TierFilter, TierMatcher

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class RequestHints:
    """One request's wishes."""

    skip: bool = False
    """Neither load nor store anything for it."""
    max_offload_tokens: int | None = None
    """Store the blocks of at most so many tokens, from the start of the prompt."""
    load_tiers: TierFilter = TierFilter.ALL
    """Where it may load from, host memory aside."""


_NONE = RequestHints()


def parse_hints(params: Mapping[str, Any] | None) -> RequestHints:
    """Read the keys that kvtier knows. What cannot be read is ignored, with a warning: a request
    is not refused for a hint."""
    if not params:
        return _NONE
    if not isinstance(params, Mapping):
        _warn("", params, "an object")
        return RequestHints()
    skip = params.get("skip", False)
    if not isinstance(skip, bool):
        _warn("skip", skip, "true or false")
        skip = False
    most = params.get("max_offload_tokens")
    if most is not None and (not isinstance(most, int) or isinstance(most, bool) or most < 0):
        _warn("max_offload_tokens", most, "a whole number, 0 or more")
        most = None
    tiers = TierFilter.ALL
    if params.get("kv_load_tiers") is not None:
        try:
            tiers = _filter_of(params["kv_load_tiers"])
        except (ValueError, TypeError, AttributeError):
            _warn(
                "kv_load_tiers",
                params["kv_load_tiers"],
                'a list such as [{"medium": "STORAGE", "locality": "LOCAL"}]',
            )
    return RequestHints(skip, most, tiers)


def _filter_of(entries: object) -> TierFilter:
    if not isinstance(entries, Sequence) or isinstance(entries, str):
        raise TypeError
    return TierFilter(tuple(_matcher_of(entry) for entry in entries))


def _matcher_of(entry: object) -> TierMatcher:
    if isinstance(entry, str):
        return TierMatcher(Medium(entry))
    if not isinstance(entry, Mapping) or not set(entry) <= {"medium", "locality"}:
        raise TypeError
    medium, locality = entry.get("medium"), entry.get("locality")
    return TierMatcher(
        None if medium is None else Medium(medium),
        None if locality is None else Locality(locality),
    )


_said: set[str] = set()


def _warn(key: str, given: object, allowed: str) -> None:
    # Once for each key: a client could fill the log.
    level = logging.DEBUG if key in _said else logging.WARNING
    _said.add(key)
    logger.log(level, "kv_transfer_params.%s = %.200r is ignored: give %s.", key, given, allowed)
