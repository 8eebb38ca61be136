"""Follows running engines: asks each for its status, its history and its last requests."""

from __future__ import annotations

import re
import socket
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvtier.observe.client import (
    FOREIGN,
    EngineNotFound,
    EngineSocket,
    NoAnswer,
    ask,
    find_engine,
    find_engines,
)

__all__ = ["Followed", "FollowedEngines", "Sample", "labels_of"]

_RATES_OVER_S = 5.0
"""Rates are taken over at least this time."""
_KEPT_S = 30.0
_HOUR_SAMPLES = 360
_NUM_REQUESTS = 12
_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')
_UNESCAPED = {r"\\": "\\", r"\"": '"', r"\n": "\n"}


def labels_of(series: str) -> tuple[str, dict[str, str]]:
    """The metric's name and the labels of a series."""
    name, _, labels = series.partition("{")
    return name, {
        label: re.sub(r"\\.", lambda escape: _UNESCAPED.get(escape[0], escape[0]), value)
        for label, value in _LABEL.findall(labels)
    }


@dataclass(frozen=True, slots=True)
class Sample:
    """The values of an engine at one time, by series."""

    when_s: float
    values: Mapping[str, float]
    is_whole: bool = True
    """True if a series that is missing was 0: not in a history, which records some."""


class Followed:
    """One engine."""

    def __init__(self, at: EngineSocket) -> None:
        self.at = at
        self.status: Mapping[str, Any] = {}
        """Its last status."""
        self.requests: Sequence[Mapping[str, Any]] | None = None
        """Its last requests, newest first. None: it does not tell."""
        self.problem: str | None = None
        """Why it has not answered; None: it has."""
        self.is_gone = False
        """True if nothing listens on its socket any more."""
        self.hour: deque[Sample] = deque(maxlen=_HOUR_SAMPLES)
        """The samples of its history, oldest first."""
        self._recent: deque[Sample] = deque()
        """What its own status has said of late."""
        self._num_samples = 0

    def ask(self) -> None:
        """Ask for everything. Sets `problem` and `is_gone`."""
        try:
            status = ask(self.at, "status")
            if self.status and status["engine"] != self.status["engine"]:
                self._forget()  # another engine has taken its path
            self.status = status
            self._keep(Sample(status["now_s"], _flat(status)))
            self._ask_history()
            self._ask_requests()
            self.problem, self.is_gone = None, False
        except NoAnswer as problem:
            self.problem = str(problem)
            self.is_gone = _is_gone(self.at.path)
        except (KeyError, TypeError, AttributeError):
            self.problem = f"{self.at.path}: {FOREIGN}"

    def _forget(self) -> None:
        self.hour.clear()
        self._recent.clear()
        self._num_samples = 0

    def _keep(self, sample: Sample) -> None:
        recent = self._recent
        recent.append(sample)
        while recent[0].when_s < sample.when_s - _KEPT_S:
            recent.popleft()

    def _ask_history(self) -> None:
        for _ in range(_HOUR_SAMPLES):
            answer = ask(self.at, "history", after=self._num_samples)
            columns = answer["series"].items()
            for at, when_s in enumerate(answer["times"]):
                values = {series: v for series, column in columns if (v := column[at]) is not None}
                self.hour.append(Sample(when_s, values, is_whole=False))
            self._num_samples = answer["after"]
            if not answer["has_more"]:
                break

    def _ask_requests(self) -> None:
        try:
            answer = ask(self.at, "explain", last=_NUM_REQUESTS)
        except NoAnswer:  # it keeps no journal
            self.requests = None
        else:
            self.requests = answer["requests"]

    def earlier(self) -> Sample:
        """What rates are counted from: the newest sample that is old enough, or the start."""
        newest = self._recent[-1].when_s
        old = [its for its in (*self.hour, *self._recent) if its.when_s <= newest - _RATES_OVER_S]
        return max(reversed(old), key=lambda its: its.when_s, default=Sample(self._started_s, {}))

    @property
    def now(self) -> Sample:
        """Its last status, with the count and the sum of each histogram."""
        return self._recent[-1]

    @property
    def _started_s(self) -> float:
        started: float = self.status["engine"]["started_s"]
        return started


class FollowedEngines:
    """The engines that a command follows: one, or all of this user. Not for several threads."""

    def __init__(self, name: str | None, all_of_them: bool) -> None:
        """`name`: a process id, the path of a socket, or None for the only engine that runs."""
        self._name, self._all = name, all_of_them
        self.engines: list[Followed] = []
        self.problem: str | None = None
        """Why there is no engine to follow."""

    @property
    def may_return(self) -> bool:
        """True if an engine that starts later would be followed: a process id never comes back."""
        return self._name is None or not self._name.isdecimal()

    def find(self) -> None:
        """Look for the engines. Raises `EngineNotFound`."""
        found = find_engines() if self._all else [find_engine(self._name)]
        if not found:
            find_engine()  # says why there is none
        known = {(its.at.path, its.at.pid): its for its in self.engines}
        self.engines = [known.get((at.path, at.pid)) or Followed(at) for at in found]
        self.problem = None

    def ask(self) -> None:
        """Ask each engine, and look for others if one has gone. Engines that have gone stay until
        there is another one."""
        if self._all or not self.engines or any(its.is_gone for its in self.engines):
            try:
                self.find()
            except EngineNotFound as problem:
                self.problem = str(problem)
        for its in self.engines:
            its.ask()

    @property
    def answering(self) -> list[Followed]:
        """Those with a status: of all that have answered, or else the last one of those that have
        gone."""
        known = [its for its in self.engines if its.status]
        return [its for its in known if not its.is_gone] or known


def _flat(status: Mapping[str, Any]) -> dict[str, float]:
    """Counters, gauges, and the count and sum of each histogram, named as in a history."""
    values: dict[str, float] = status["counters"] | status["gauges"]
    for series, its in status["histograms"].items():
        name, brace, labels = series.partition("{")
        values[f"{name}_count{brace}{labels}"] = sum(its["counts"])
        values[f"{name}_sum{brace}{labels}"] = its["sum"]
    return values


def _is_gone(path: Path) -> bool:
    """True if no engine listens at the path. One that is stopped or too busy still does."""
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
            probe.settimeout(1.0)
            probe.connect(str(path))
    except (ConnectionRefusedError, FileNotFoundError):
        return True
    except OSError:
        return False
    return False
