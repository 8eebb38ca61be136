"""Where the tokens of prompts come from, and the time that loading them saves."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import TYPE_CHECKING, Any

from kvtier.base import MetricDefinition, MetricKind, OffloadingStats, metric_series

if TYPE_CHECKING:
    from kvtier.base import OffloadKey

__all__ = ["COMPUTED", "DEVICE", "HOST", "PromptSources", "source_metric_definitions"]

DEVICE, HOST, COMPUTED = "device", "host", "computed"
"""The label `source`, besides those of the tiers below host memory."""
_TOKENS = "kvtier_prompt_tokens"
_SAVED = "kvtier_saved_prefill_seconds"
_NONE: Mapping[OffloadKey, object] = {}


def source_metric_definitions(tiers: Iterable[str] = ()) -> dict[str, MetricDefinition]:
    """The metrics of `PromptSources`. `tiers`: the labels of those below host memory."""
    loaded = (HOST, *tiers)
    return {
        _TOKENS: MetricDefinition(
            MetricKind.COUNTER,
            "Prompt tokens of the requests that have started, by where they came from. A tier: "
            "loaded from there for this request. host: were in host memory already.",
            labels=(("source", (DEVICE, *loaded, COMPUTED)),),
        ),
        _SAVED: MetricDefinition(
            MetricKind.COUNTER,
            "Estimated seconds that the device would have taken to compute the tokens that were "
            "loaded, if the cost of computing is known.",
            labels=(("source", loaded),),
        ),
    }


class PromptSources:
    """Counts the tokens of prompts by source. Scheduler thread only.

    The manager reports each load, and right after it the engine reports the start of the request.
    """

    def __init__(
        self,
        labels: Mapping[Any, str] | None = None,
        seconds_for: Callable[[int, float], float | None] | None = None,
    ) -> None:
        """`labels`: of the tiers below. `seconds_for`: the seconds to compute a number of tokens
        around a position; None where they are not known."""
        self._labels: Mapping[Any, str] = {} if labels is None else labels
        self._seconds_for = seconds_for
        self._counters: defaultdict[str, float] = defaultdict(float)
        self._loaded: Collection[OffloadKey] = ()
        self._brought_up: Mapping[OffloadKey, object] = _NONE

    def note_load(
        self, keys: Collection[OffloadKey], brought_up: Mapping[OffloadKey, object]
    ) -> None:
        """A request loads these blocks. `brought_up`: those that tiers have loaded for it, and the
        tier that each came from."""
        self._loaded, self._brought_up = keys, brought_up

    def note_start(self, num_prompt: int, num_on_device: int, num_loaded: int) -> Mapping[str, int]:
        """A request starts, with tokens of these sources. If it loads, `note_load` came before.
        Returns the blocks that it loads, by source."""
        keys, brought_up = self._loaded, self._brought_up
        self._loaded, self._brought_up = (), _NONE
        counters = self._counters
        num_on_device = min(num_on_device, num_prompt)
        num_loaded = min(num_loaded, num_prompt - num_on_device)
        counters[_series(_TOKENS, DEVICE)] += num_on_device
        counters[_series(_TOKENS, COMPUTED)] += num_prompt - num_on_device - num_loaded
        if num_loaded <= 0:
            return {}
        # With several KV-cache groups, the share of the blocks stands for the share of the tokens.
        blocks = Counter(map(brought_up.get, keys)) if brought_up else Counter({None: 1})
        num_blocks = sum(blocks.values())
        seconds = None
        if self._seconds_for is not None:
            seconds = self._seconds_for(num_loaded, num_on_device + num_loaded / 2)
        for tier, count in blocks.items():
            source = self._labels.get(tier, HOST)
            counters[_series(_TOKENS, source)] += num_loaded * count / num_blocks
            if seconds is not None:
                counters[_series(_SAVED, source)] += seconds * count / num_blocks
        return {self._labels.get(tier, HOST): count for tier, count in blocks.items()}

    def add_to(self, stats: OffloadingStats) -> OffloadingStats:
        """Move the counters into `stats`, and return it."""
        for series, count in self._counters.items():
            if count:
                stats.counters[series] = count
        self._counters.clear()
        return stats


def _series(metric: str, source: str) -> str:
    return metric_series(metric, {"source": source})
