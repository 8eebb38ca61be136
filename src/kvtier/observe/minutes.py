"""One line in the log at the end of each minute in which an engine has worked."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping

from kvtier.base import metric_series
from kvtier.config.sizes import as_size
from kvtier.observe.totals import MetricTotals

__all__ = ["MinuteLine"]

logger = logging.getLogger(__name__)

_MINUTE_S = 60.0
_TOKENS, _SAVED = "kvtier_prompt_tokens", "kvtier_saved_prefill_seconds"
_WAITS = "kvtier_tiering_wait_seconds"
_BYTES, _READ_BACK = "kvtier_tier_bytes", "kvtier_tier_read_back_bytes"
_BREAKER = "kvtier_tier_breaker_state"
_CUT_OFF = 2
_WRONG = {
    "kvtier_tier_seal_failures": "blocks refused because of their seal",
    "kvtier_tier_failed_blocks": "blocks that failed",
    "kvtier_tier_late_jobs": "missed deadlines",
    "kvtier_tier_faults": "faults",
}
"""Counters of a tier that should not grow, and their names in the line."""


class MinuteLine:
    """Logs one line a minute, at INFO, if prompts were started or blocks moved; none when idle.

    The thread of the status socket calls `tick` about once in a second. It reads only totals, so
    the scheduler's thread is not held up.
    """

    def __init__(
        self,
        totals: MetricTotals,
        tiers: tuple[str, ...],
        elapsed: Callable[[], float] = time.monotonic,
    ) -> None:
        """`tiers`: the labels of the tiers below host memory, in the order in which they are asked.
        `elapsed`: seconds, whatever becomes of the clock."""
        self._totals, self._tiers, self._elapsed = totals, tiers, elapsed
        self._due_s = elapsed() + _MINUTE_S
        self._before = self._counters()

    def tick(self) -> None:
        """Log the line, if a minute is over."""
        now = self._elapsed()
        if now < self._due_s:
            return
        self._due_s = now + _MINUTE_S
        before, self._before = self._before, self._counters()
        grown = {
            series: value - before.get(series, 0.0)
            for series, value in self._before.items()
            if value > before.get(series, 0.0)
        }
        parts = [*self._prompts(grown), *self._moved(grown)]
        if parts:
            logger.info("Last minute: %s.", "; ".join([*parts, *self._wrong(grown)]))

    def _counters(self) -> dict[str, float]:
        waits = self._totals.histograms().get(_WAITS)
        return self._totals.counters() | {_WAITS: waits["sum"] if waits is not None else 0.0}

    def _prompts(self, grown: Mapping[str, float]) -> Iterator[str]:
        """Where the tokens of prompts came from. The hit ratio of a tier: of the tokens that were
        found neither on the device nor above it."""
        sources = ("device", "host", *self._tiers, "computed")
        tokens = {name: grown.get(metric_series(_TOKENS, {"source": name}), 0) for name in sources}
        missing = total = sum(tokens.values())
        if not total:
            return
        ratios = []
        for name in sources[:-1]:
            if missing and (name != "device" or tokens[name]):
                ratios.append(f"{name} {tokens[name] / missing:.0%}")
            missing -= tokens[name]
        yield f"{total:,.0f} prompt tokens, {tokens['computed'] / total:.0%} computed"
        yield f"hit ratio of {', '.join(ratios)}"
        saved = sum(n for series, n in grown.items() if series.startswith(_SAVED))
        if saved:
            yield f"{saved:.1f} s of prefill saved, {grown.get(_WAITS, 0.0):.1f} s waited"

    def _moved(self, grown: Mapping[str, float]) -> Iterator[str]:
        for tier in self._tiers:
            written, read = (
                grown.get(metric_series(_BYTES, {"tier": tier, "direction": direction}), 0)
                for direction in ("store", "load")
            )
            if written or read:
                first = grown.get(metric_series(_READ_BACK, {"tier": tier}), 0)
                yield (
                    f"{tier}: {as_size(written)} written, {as_size(read)} read, "
                    f"{as_size(first)} of it for the first time"
                )

    def _wrong(self, grown: Mapping[str, float]) -> Iterator[str]:
        gauges = self._totals.gauges()
        for tier in self._tiers:
            its = f'{{tier="{tier}"'
            troubles = []
            for direction, word in (("load", "cut off"), ("store", "cut off for stores")):
                state = metric_series(_BREAKER, {"tier": tier, "direction": direction})
                if gauges.get(state) == _CUT_OFF:
                    troubles.append(word)
            for metric, words in _WRONG.items():
                count = sum(n for series, n in grown.items() if series.startswith(metric + its))
                if count:
                    troubles.append(f"{count:,.0f} {words}")
            if troubles:
                yield f"wrong with {tier}: {', '.join(troubles)}"
