"""kvtier's figures, on their way to vLLM's metrics endpoint."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Mapping

from kvtier.base import MetricDefinition, MetricKind, OffloadingManager
from kvtier.integrations.vllm import vllm_api

__all__ = ["FigureReporter"]

logger = logging.getLogger(__name__)

_LOOK_EVERY_S = 1.0
_PEEK_EVERY_S = 0.02
"""While tiers are at work. A request that waits for them has the engine step after step, and every
microsecond of it is taken from the threads that move its blocks."""


class FigureReporter:
    """Tells vLLM what has changed. Scheduler thread only.

    vLLM asks at every step, and most steps decode: nothing is stored or loaded in them, and to say
    so must cost nothing. What is reported is sent to another process; what is the same as before
    is not.
    """

    def __init__(
        self,
        manager: OffloadingManager,
        definitions: Mapping[str, MetricDefinition],
        constants: dict[str, float],
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        """`definitions`: all figures that were declared. vLLM ends the engine over any other.
        `constants`: gauges that never change."""
        self._manager = manager
        self._constants = constants
        self._vllm_names = {name: vllm_api.METRIC_PREFIX + name for name in definitions}
        self._unseen_counters = [
            self._vllm_names[name]
            for name, definition in definitions.items()
            if definition.kind is MetricKind.COUNTER
        ]
        """Until the first report, which has them as 0: through the plain door, nothing else makes
        them visible before they count something."""
        self._undeclared: set[str] = set()
        self._last: dict[str, float] = {}
        self._counted: Counter[str] = Counter()
        self._now = now
        self._look_at = 0.0
        self._peek_at = 0.0
        self.is_quiet = False
        """Whether nothing has happened since the last report. Others set it to False."""
        self.may_change = False
        """Whether something may happen at any time that nobody tells of. Others set it."""

    def count(self, name: str, n: int) -> None:
        """Count something that the manager does not know of."""
        self._counted[name] += n
        self.is_quiet = False

    def report(self) -> vllm_api.OffloadingConnectorStats | None:
        """What has changed since the last report; None: nothing, as far as is known."""
        now = self._now()
        if now >= self._look_at:
            # All of them, once in a while: whoever began to listen later has them, too.
            self._look_at = now + _LOOK_EVERY_S
            self._last.clear()
        elif self.is_quiet and not (self.may_change and now >= self._peek_at):
            return None
        self._peek_at = now + _PEEK_EVERY_S
        self.is_quiet = True
        figures = self._manager.get_stats()
        if figures is None:
            return None
        stats = vllm_api.OffloadingConnectorStats()
        for vllm_name in self._unseen_counters:
            stats.increase_counter(vllm_name, 0)
        self._unseen_counters = []
        counted, self._counted = self._counted, Counter()
        for name, increase in (figures.counters | counted).items():
            if increase and (known_name := self._vllm_name(name)):
                stats.increase_counter(known_name, increase)
        last = self._last
        for name, value in (figures.gauges | self._constants).items():
            if last.get(name) != value and (known_name := self._vllm_name(name)):
                last[name] = value
                stats.set_gauge(known_name, value)
        for name, observations in figures.histograms.items():
            if known_name := self._vllm_name(name):
                for observation in observations:
                    stats.observe_histogram(known_name, observation)
        return stats

    def _vllm_name(self, name: str) -> str | None:
        vllm_name = self._vllm_names.get(name)
        if vllm_name is None and name not in self._undeclared:
            self._undeclared.add(name)
            logger.warning("figure %r is reported but not declared: vLLM will not see it", name)
        return vllm_name
