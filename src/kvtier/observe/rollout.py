"""What an operator may change while an engine runs: stores and loads of each tier, and the share of
requests that kvtier serves. Counts the requests of both halves, so that they can be compared."""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping, Sequence
from typing import Any
from zlib import crc32

from kvtier.base import MetricDefinition, MetricKind, OffloadingStats, metric_series

__all__ = ["METRIC_DEFINITIONS", "Halves", "Switches"]

logger = logging.getLogger(__name__)

HOST = "host"
"""The label of host memory, beside those of the tiers below it."""
_HALVES = ("with", "without")
_LABELS = (("half", _HALVES),)
_SECONDS = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 50.0)
_MAX_TIMES = 4096
"""At most this many durations are kept between two reports."""

METRIC_DEFINITIONS: dict[str, MetricDefinition] = {
    "kvtier_requests": MetricDefinition(
        MetricKind.COUNTER,
        "Requests that have produced their first token, with kvtier and without it.",
        labels=_LABELS,
    ),
    "kvtier_request_prompt_tokens": MetricDefinition(
        MetricKind.COUNTER, "Prompt tokens of these requests.", labels=_LABELS
    ),
    "kvtier_first_token_seconds": MetricDefinition(
        MetricKind.HISTOGRAM,
        "Seconds from the arrival of a request to its first token, with kvtier and without it.",
        _SECONDS,
        _LABELS,
    ),
    "kvtier_share": MetricDefinition(
        MetricKind.GAUGE, "Percentage of the requests that kvtier serves."
    ),
}


class Switches:
    """Which stores and loads are on, and which requests kvtier serves.

    The scheduler's thread reads them. `change` is for the thread of the status socket: it replaces
    each value as a whole.
    """

    def __init__(self, tiers: Sequence[str] = ()) -> None:
        """`tiers`: the labels of the tiers below host memory."""
        self._tiers = (HOST, *tiers)
        self.loads_off: frozenset[str] = frozenset()
        """Labels of the tiers that new requests do not load from."""
        self.stores_off: frozenset[str] = frozenset()
        """Labels of the tiers in which nothing is stored. With host memory off, new requests store
        nothing at all, because every block passes through it."""
        self.share = 100.0
        """Percentage of the requests that kvtier serves, chosen by a hash of their ids."""

    def serves(self, req_id: str) -> bool:
        """True if the request is in the share that kvtier serves."""
        if self.share >= 100:
            return True
        # A client may choose the id, and JSON may have half of a pair of surrogates.
        return crc32(req_id.encode("utf-8", "surrogatepass")) % 10_000 < 100 * self.share

    def may_load(self, req_id: str) -> bool:
        """True if a new request may load, from whatever tier."""
        return HOST not in self.loads_off and self.serves(req_id)

    def may_store(self, req_id: str) -> bool:
        """True if a new request may store."""
        return HOST not in self.stores_off and self.serves(req_id)

    def state(self) -> dict[str, Any]:
        """The values, for a status."""
        return {
            "loads_off": sorted(self.loads_off),
            "stores_off": sorted(self.stores_off),
            "share": self.share,
        }

    def change(self, question: Mapping[str, Any]) -> dict[str, Any]:
        """Change what `question` names, and return the new state. `tiers`: labels; without them,
        all. `loads`, `stores`: true or false. `share`: 0 to 100. Raises `ValueError`."""
        tiers = question.get("tiers") or list(self._tiers)
        if not isinstance(tiers, list):
            raise ValueError(f"tiers must be a list of some of {', '.join(self._tiers)}")
        if unknown := [str(tier) for tier in tiers if tier not in self._tiers]:
            raise ValueError(
                f"it has no tier {', '.join(unknown)}. Give some of {', '.join(self._tiers)}"
            )
        share = question.get("share", self.share)
        if isinstance(share, bool) or not isinstance(share, (int, float)) or not 0 <= share <= 100:
            raise ValueError("share must be a number from 0 to 100")
        wanted = {name: question.get(name) for name in ("loads", "stores")}
        for name, on in wanted.items():
            if on is not None and not isinstance(on, bool):
                raise ValueError(f"{name} must be true or false")
        before = self.state()
        self.loads_off = _switched(self.loads_off, tiers, wanted["loads"])
        self.stores_off = _switched(self.stores_off, tiers, wanted["stores"])
        self.share = float(share)
        after = self.state()
        if after != before:
            logger.warning("Switched over the status socket: %s", _in_words(after))
        return after


def _switched(off: frozenset[str], tiers: Collection[str], on: bool | None) -> frozenset[str]:
    if on is None:
        return off
    return off - frozenset(tiers) if on else off | frozenset(tiers)


def _in_words(state: Mapping[str, Any]) -> str:
    loads, stores = (", ".join(state[name]) or "none" for name in ("loads_off", "stores_off"))
    return (
        f"loads are off for: {loads}; stores are off for: {stores}; "
        f"kvtier serves {state['share']:g} % of new requests"
    )


class Halves:
    """Counts requests that kvtier serves and those that it does not. Scheduler thread only."""

    def __init__(self) -> None:
        self._counts = dict.fromkeys(_HALVES, (0, 0))
        """Requests and their prompt tokens."""
        self._seconds: dict[str, list[float]] = {half: [] for half in _HALVES}

    def note_first_token(self, is_served: bool, num_prompt_tokens: int, seconds: float) -> None:
        """A request has produced its first token, this many seconds after it arrived."""
        half = "with" if is_served else "without"
        num_requests, num_tokens = self._counts[half]
        self._counts[half] = num_requests + 1, num_tokens + num_prompt_tokens
        if len(self._seconds[half]) < _MAX_TIMES:
            self._seconds[half].append(seconds)

    def add_to(self, stats: OffloadingStats) -> None:
        """Move what was counted into `stats`."""
        for half, (num_requests, num_tokens) in self._counts.items():
            if num_requests:
                labels = {"half": half}
                stats.counters[metric_series("kvtier_requests", labels)] = num_requests
                stats.counters[metric_series("kvtier_request_prompt_tokens", labels)] = num_tokens
                name = metric_series("kvtier_first_token_seconds", labels)
                stats.histograms[name] = self._seconds[half]
                self._counts[half] = 0, 0
                self._seconds[half] = []
