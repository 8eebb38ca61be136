"""What one engine tells about itself: totals of its metrics, and answers to questions."""

from __future__ import annotations

import json
import logging
import os
import time
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvtier.base import (
    MetricDefinition,
    OffloadingManager,
    OffloadingStats,
    OffloadKey,
    PrefixLookup,
    ReqContext,
)
from kvtier.config import StatusSocketChoice
from kvtier.config.errors import redacted
from kvtier.observe.explanation import Explainer, Place
from kvtier.observe.history import History
from kvtier.observe.journal import Journal
from kvtier.observe.minutes import MinuteLine
from kvtier.observe.rollout import HOST, Halves, Switches
from kvtier.observe.status_socket import Answer, SocketUnavailable, StatusSocket
from kvtier.observe.totals import MetricTotals

if TYPE_CHECKING:
    from kvtier.config import OffloadingConfig

__all__ = ["IGNORED_HINTS", "ObservedManager", "Observer", "observe"]

logger = logging.getLogger(__name__)

IGNORED_HINTS = "kvtier_ignored_hints"

_COLLECT_EVERY_S = 0.25
_MAX_UNREPORTED_TIMES = 4096
"""At most this many observations of a histogram are kept for an engine that does not read its
metrics."""


class Observer:
    """Collects what a manager reports, and answers questions from other processes.

    The methods are for the scheduler's thread, except where they say otherwise; none of them waits.
    A thread of `StatusSocket` answers the questions and calls the `every_second` functions.
    """

    def __init__(
        self,
        definitions: Mapping[str, MetricDefinition],
        about: Mapping[str, Any],
        switches: Switches,
        socket: StatusSocket | None = None,
    ) -> None:
        """`definitions`: all metrics of the manager. `about`: what does not change: the engine, its
        model, its configuration, its tiers. `socket`: None: nobody can ask."""
        self.totals = MetricTotals(definitions)
        self.about = dict(about)
        self.due_s = 0.0
        """Monotonic time of the next `collect`."""
        self._unreported = OffloadingStats()
        """What `collect` has taken from the manager and the engine has not been given yet."""
        self._collected_at = time.time()
        self._switches = switches
        self._socket = socket
        if socket is not None:
            socket.answer("switch", switches.change)
            history = History(self.totals)
            socket.every_second.append(history.sample)
            below = tuple(
                tier["tier"] for tier in self.about.get("tiers", ()) if tier["tier"] != HOST
            )
            socket.every_second.append(MinuteLine(self.totals, below).tick)
            socket.answer("history", history.answer)
            socket.answer("status", self._status)
            socket.start()

    def answer(self, question: str, answer: Answer) -> None:
        """Let other processes ask a question. `answer` is called on the socket's thread, with the
        object that was sent; it must not change what the scheduler's thread owns."""
        if self._socket is not None:
            self._socket.answer(question, answer)

    def every_second(self, call: Callable[[], None]) -> None:
        """Have a function called about once in a second on the socket's thread."""
        if self._socket is not None:
            self._socket.every_second.append(call)

    def explain(self, journal: Journal, explainer: Explainer) -> None:
        """Keep the journal from now on, and answer questions from it, if anybody can ask."""
        if self._socket is not None:
            journal.keep()
            self.every_second(journal.take_over)
            self.answer("explain", explainer.answer)

    def collect(self, stats: OffloadingStats, now: float) -> None:
        """Add what the manager has counted. Called at the end of a step, once `due_s` has come."""
        self.due_s = now + _COLLECT_EVERY_S
        self._add(stats)
        unreported = self._unreported
        for series, increase in stats.counters.items():
            unreported.counters[series] = unreported.counters.get(series, 0) + increase
        unreported.gauges.update(stats.gauges)
        for series, observations in stats.histograms.items():
            kept = unreported.histograms.setdefault(series, [])
            kept += observations
            del kept[:-_MAX_UNREPORTED_TIMES]

    def report(self, stats: OffloadingStats) -> OffloadingStats:
        """Add what the manager has counted. Returns all that the engine has not been given yet."""
        self._add(stats)
        unreported, self._unreported = self._unreported, OffloadingStats()
        for series, increase in unreported.counters.items():
            stats.counters[series] = stats.counters.get(series, 0) + increase
        stats.gauges = unreported.gauges | stats.gauges
        for series, observations in unreported.histograms.items():
            stats.histograms[series] = observations + stats.histograms.get(series, [])
        return stats

    def _add(self, stats: OffloadingStats) -> None:
        self.totals.add(stats)
        self._collected_at = time.time()

    def _status(self, question: Mapping[str, Any]) -> dict[str, Any]:
        """The answer to `status`. On the socket's thread."""
        return self.about | {
            "now_s": time.time(),
            "collected_s": self._collected_at,
            "switches": self._switches.state(),
            "counters": self.totals.counters(),
            "gauges": self.totals.gauges(),
            "histograms": self.totals.histograms(),
        }

    def close(self) -> None:
        """Answer no more questions. Waits for at most a second. Idempotent."""
        if self._socket is not None:
            self._socket.close()


class ObservedManager(OffloadingManager):
    """A manager whose metrics an observer collects, if it has one. Scheduler thread only."""

    observer: Observer | None = None
    """The spec sets it."""

    def __init__(self, tiers: Sequence[str] = ()) -> None:
        """`tiers`: the labels of the tiers below host memory."""
        self.switches = Switches(tiers)
        self.journal = Journal()
        """Why blocks were found or not."""
        self._halves = Halves()
        self._num_ignored_hints = 0

    def serves(self, req_id: str) -> tuple[bool, bool]:
        return self.switches.may_load(req_id), self.switches.may_store(req_id)

    def note_ignored_hints(self, num_hints: int) -> None:
        self._num_ignored_hints += num_hints

    def note_first_token(
        self, req_context: ReqContext, num_prompt_tokens: int, seconds: float
    ) -> None:
        self._halves.note_first_token(req_context.is_served, num_prompt_tokens, seconds)

    @abstractmethod
    def take_stats(self) -> OffloadingStats:
        """What has been counted since the last call."""

    def _all_stats(self) -> OffloadingStats:
        stats = self.take_stats()
        self._halves.add_to(stats)
        stats.gauges["kvtier_share"] = self.switches.share
        if self._num_ignored_hints:
            stats.counters[IGNORED_HINTS] = self._num_ignored_hints
            self._num_ignored_hints = 0
        return stats

    def get_stats(self) -> OffloadingStats:
        stats = self._all_stats()
        return stats if self.observer is None else self.observer.report(stats)

    def note_wanted(self, keys: Sequence[OffloadKey], req_context: ReqContext) -> None:
        """A request looks up blocks that follow one another in its prompt, and the first one is a
        miss. Called instead of `lookup_prefix` by an engine that has found that out alone."""
        self.answered(keys, PrefixLookup(0, is_final=True), req_context)

    def answered(
        self, keys: Sequence[OffloadKey], answer: PrefixLookup, req_context: ReqContext
    ) -> PrefixLookup:
        """Record the answer to a lookup of a prefix, and return it. `keys` must not be changed
        later."""
        record = self.journal.of(req_context)
        if record is not None:
            record.note_answer(keys, answer.num_hits, self.journal.now())
            if not record.has_looked_up:
                self.journal.note_wanted(keys, record)
        return answer

    def note_failed_load(self, req_context: ReqContext) -> None:
        self.journal.note_failed_load(req_context)

    def observe_step(self) -> None:
        """A step ends."""
        observer = self.observer
        if observer is not None and (now := time.monotonic()) >= observer.due_s:
            observer.collect(self._all_stats(), now)

    def shutdown(self) -> None:
        if self.observer is not None:
            self.observer.close()


def observe(
    manager: ObservedManager,
    config: OffloadingConfig,
    definitions: Mapping[str, MetricDefinition],
    answers: Mapping[str, Answer],
    tiers: Sequence[Mapping[str, Any]] = (),
) -> None:
    """Give a manager the observer of an engine with this configuration. `answers`: by question.
    `tiers`: those below host memory, each as in `about["tiers"]`."""
    host = {
        "tier": HOST,
        "type": "cpu",
        "medium": "CPU",
        "locality": "LOCAL",
        "capacity_blocks": config.num_blocks,
    }
    about = {
        "engine": {
            "engine_id": config.engine_id,
            "pid": os.getpid(),
            "started_s": time.time(),
            "model": config.model.served_name or config.model.name,
            "dtype": config.model.dtype,
            "namespace": json.loads(config.describe().encode()),
        },
        "block_bytes": config.row_bytes,
        "block_tokens": {
            str(group_id): tokens for group_id, tokens in config.tokens_per_chunk.items()
        },
        "tiers": [host, *tiers],
        "config": redacted(config.extra_config),
    }
    manager.observer = Observer(definitions, about, manager.switches, _socket_of(config))
    for question, answer in answers.items():
        manager.observer.answer(question, answer)
    places = [Place(HOST), *(Place(its["tier"], its["write"]) for its in tiers)]
    explainer = Explainer(manager.journal, places, config.tokens_per_chunk, config.main_group)
    manager.observer.explain(manager.journal, explainer)


def _socket_of(config: OffloadingConfig) -> StatusSocket | None:
    wanted = config.options.status_socket
    if wanted is StatusSocketChoice.OFF:
        return None
    try:
        return StatusSocket(None if wanted is StatusSocketChoice.AUTO else Path(wanted))
    except SocketUnavailable as unavailable:
        logger.warning(
            "No status socket: %s. The engine runs without it; `kvtier top` and the other commands "
            'for running engines will not find it. Set "status_socket" to another path, or "off"',
            unavailable,
        )
        return None
