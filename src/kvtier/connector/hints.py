"""What a request may ask for: `kv_transfer_params`, parsed once."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from functools import lru_cache
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

_KEYS = ("skip", "max_offload_tokens", "kv_load_tiers", "max_load_tokens")
"""Hints that kvtier reads, and `max_load_tokens`, which vLLM reads itself."""
_MAX_KEY_LENGTH = 32
"""Longer keys are not compared with `_KEYS`: a client chooses them, and comparing takes time."""


def parse_hints(params: Mapping[str, Any] | None) -> RequestHints:
    """Read the keys that kvtier knows. What cannot be read is warned about, and a request is not
    refused for it. Other keys are for tiers; those that look like a misspelt one are warned about.
    """
    if not params:
        return _NONE
    if not isinstance(params, Mapping):
        _warn("", params, "is ignored: give an object.")
        return _NONE
    for key in params:
        if key not in _KEYS and (meant := _meant_by(key)):
            what = f"is not read by kvtier: did you mean {meant}?"
            _warn(f"not {meant}", params[key], what, name=key)
    skip = params.get("skip", False)
    if not isinstance(skip, bool):
        _warn("skip", skip, "is ignored: give true or false.")
        skip = False
    most = params.get("max_offload_tokens")
    if most is not None and (not isinstance(most, int) or isinstance(most, bool) or most < 0):
        _warn("max_offload_tokens", most, "is ignored: give a whole number, 0 or more.")
        most = None
    entries = params.get("kv_load_tiers")
    return RequestHints(skip, most, TierFilter.ALL if entries is None else _filter_of(entries))


@lru_cache(maxsize=256)
def _meant_by(key: object) -> str | None:
    """The hint that this key is probably a misspelling of."""
    if not isinstance(key, str) or len(key) > _MAX_KEY_LENGTH:
        return None
    plain = key.lower().replace("-", "_")
    return next(iter(get_close_matches(plain, _KEYS, n=1, cutoff=0.85)), None)


def _filter_of(entries: object) -> TierFilter:
    """What the entries that can be read allow. If none can, nothing below host memory: a request
    that asks for less must not get more."""
    allowed = 'give a list such as [{"medium": "STORAGE", "locality": "LOCAL"}].'
    if not isinstance(entries, Sequence) or isinstance(entries, str | bytes):
        _warn("kv_load_tiers", entries, f"allows host memory alone: {allowed}")
        return TierFilter()
    matchers: dict[TierMatcher, None] = {}
    for place, entry in enumerate(entries):
        try:
            matchers[_matcher_of(entry)] = None
        except (ValueError, TypeError, AttributeError):
            _warn(
                "kv_load_tiers[]",
                entry,
                f"is ignored: {allowed}",
                name=f"kv_load_tiers[{place}]",
            )
    return TierFilter(tuple(matchers))


def _matcher_of(entry: object) -> TierMatcher:
    if isinstance(entry, str):
        return TierMatcher(Medium(entry.upper()))
    if not isinstance(entry, Mapping) or not set(entry) <= {"medium", "locality"}:
        raise TypeError
    medium, locality = entry.get("medium"), entry.get("locality")
    return TierMatcher(
        None if medium is None else Medium(medium.upper()),
        None if locality is None else Locality(locality.upper()),
    )


_said: set[str] = set()


def _warn(topic: str, given: object, what: str, *, name: str | None = None) -> None:
    """Log once for each topic, of which there are few: a client could fill the log. `name`: of the
    key, if it is not the topic."""
    level = logging.DEBUG if topic in _said else logging.WARNING
    _said.add(topic)
    key = topic if name is None else name
    logger.log(level, "kv_transfer_params.%s = %.200r %s", key, given, what)
