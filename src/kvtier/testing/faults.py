"""Kinds of faults, and a schedule that decides which call has which fault. Needs no pytest."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from random import Random
from typing import TypeVar

from kvtier.testing.damage import Damage

__all__ = ["FAULTS_OF", "Fault", "FaultKind", "FaultSchedule", "InjectedFault"]

Name = TypeVar("Name", bound=StrEnum)


class InjectedFault(Exception):
    """The exception that a faulty tier raises."""


class FaultKind(StrEnum):
    """What goes wrong. A tier that has only DELAY and REORDER still keeps the contract."""

    DELAY = "delay"
    """A job is carried out at once and reported late. For a lookup: one key is answered RETRY."""
    REORDER = "reorder"
    """One call of `get_finished_jobs` returns its results in another order."""
    DROP = "drop"
    """A job is carried out (late, if the fault has a delay) and never reported."""
    DUPLICATE = "duplicate"
    """A job is reported twice, the second time late if the fault has a delay."""
    FAIL = "fail"
    """A job is carried out and reported as failed. A load leaves random bytes in its slots."""
    PARTIAL = "partial"
    """Some of the job's blocks fail as with FAIL. A job of one block fails as a whole."""
    LATE_WRITE = "late_write"
    """A job is accepted, and carried out and reported only after the delay of the fault."""
    HANG = "hang"
    """A job is accepted, but neither carried out nor reported before `FaultyTier.recover`.
    `shutdown` returns only after `recover`, and `drain_jobs` only after `recover` or `shutdown`."""
    RAISE = "raise"
    """The call raises and has no effect, except that `shutdown` still shuts the tier down."""
    RAISE_AFTER = "raise_after"
    """The submission raises, but the job is carried out and reported."""
    UNKNOWN_JOB = "unknown_job"
    """A job is reported that was never submitted."""
    GARBAGE = "garbage"
    """The call returns a value of a wrong type, a list that contains such a value, or (only
    `lookup_batch`) a list with one answer too many. Results of jobs are not lost, but may come
    later."""
    CORRUPT = "corrupt"
    """A stored block is damaged before the load reads it."""


_JOB_FAULTS = frozenset(
    {
        FaultKind.DELAY,
        FaultKind.DROP,
        FaultKind.DUPLICATE,
        FaultKind.FAIL,
        FaultKind.PARTIAL,
        FaultKind.LATE_WRITE,
        FaultKind.HANG,
        FaultKind.RAISE,
        FaultKind.RAISE_AFTER,
    }
)
_LOOKUP_FAULTS = frozenset({FaultKind.DELAY, FaultKind.RAISE, FaultKind.GARBAGE})
_ANSWER_FAULTS = frozenset({FaultKind.RAISE, FaultKind.GARBAGE})
_RAISE = frozenset({FaultKind.RAISE})
_END_FAULTS = frozenset({FaultKind.RAISE, FaultKind.HANG})

FAULTS_OF: dict[str, frozenset[FaultKind]] = {
    "lookup": _LOOKUP_FAULTS,
    "lookup_batch": _LOOKUP_FAULTS,
    "submit_store": _JOB_FAULTS,
    "submit_load": _JOB_FAULTS | {FaultKind.CORRUPT},
    "get_finished_jobs": _ANSWER_FAULTS | {FaultKind.REORDER, FaultKind.UNKNOWN_JOB},
    "drain_jobs": _END_FAULTS,
    "touch": _RAISE,
    "drop": _RAISE,
    "missing": _ANSWER_FAULTS,
    "on_new_request": _ANSWER_FAULTS,
    "on_request_finished": _RAISE,
    "on_schedule_end": _RAISE,
    "has_pending_work": _ANSWER_FAULTS,
    "take_events": _ANSWER_FAULTS,
    "has_announcements": _ANSWER_FAULTS,
    "get_stats": _ANSWER_FAULTS,
    "usage": _ANSWER_FAULTS,
    "begin_epoch": _RAISE,
    "take_seal_failures": _ANSWER_FAULTS,
    "shutdown": _END_FAULTS,
}
"""The faults that each method of a tier can have."""


@dataclass(frozen=True, slots=True)
class Fault:
    """One fault of one call of one method."""

    method: str
    call: int
    """Number of the call of this method, counted from 0."""
    kind: FaultKind
    """A member of `FaultKind`. The constructor also takes its value, a string."""
    polls: int = 0
    """Delay in calls of `get_finished_jobs`."""
    seconds: float = 0.0
    """Delay in seconds of the schedule's clock. A late job or result waits for both delays."""
    damage: Damage = Damage.FLIP
    """How a fault of kind CORRUPT damages the block."""

    def __post_init__(self) -> None:
        # Kinds are compared with `is`, which a string with the same value would not pass.
        object.__setattr__(self, "kind", _member(FaultKind, "kind", self.kind))
        object.__setattr__(self, "damage", _member(Damage, "damage", self.damage))
        allowed = FAULTS_OF.get(self.method)
        if allowed is None:
            raise ValueError(f"method {self.method!r}: choose one of {', '.join(FAULTS_OF)}")
        if self.kind not in allowed:
            raise ValueError(
                f"{self.method} cannot have a fault of kind {str(self.kind)!r}: choose one of "
                f"{', '.join(sorted(allowed))}"
            )


def _member(names: type[Name], what: str, given: str) -> Name:
    try:
        return names(given)
    except ValueError:
        raise ValueError(f"{what} {given!r}: choose one of {', '.join(names)}") from None


_COMES_LATE = frozenset(
    {FaultKind.DELAY, FaultKind.DUPLICATE, FaultKind.LATE_WRITE, FaultKind.DROP}
)
_MAY_COME_AT_ONCE = frozenset({FaultKind.DUPLICATE, FaultKind.DROP})
_DAMAGES = tuple(Damage)
_KINDS = frozenset(FaultKind)


class FaultSchedule:
    """Decides for each call whether it has a fault.

    Equal seeds, rates and calls give equal faults. Each method has its own random stream, so an
    additional lookup does not change the faults of jobs. `FaultyTier.injected` records the faults;
    `FaultSchedule(faults=...)` with that list repeats them.
    """

    def __init__(
        self,
        seed: int = 0,
        rates: Mapping[str, float] | None = None,
        faults: Iterable[Fault] = (),
        *,
        delay_polls: tuple[int, int] = (1, 8),
        delay_s: tuple[float, float] = (0.0, 0.0),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`rates`: the share of calls with a fault, by kind (`"drop"`, for every method that can
        have it) or by method and kind (`"submit_load.drop"`, which takes precedence). `faults`:
        faults of single calls, in place of drawn ones. `delay_polls`, `delay_s`: bounds of the
        delays that are drawn. `clock`: measures the delays in seconds.
        """
        self.seed = seed
        self.clock = clock
        self._delay_polls = delay_polls
        self._delay_s = delay_s
        self._rates = _rates_by_method(rates or {})
        self._streams = {method: Random(f"{seed}/{method}") for method in FAULTS_OF}
        self._calls: Counter[str] = Counter()
        self._planned = {(fault.method, fault.call): fault for fault in faults}

    def can_have(self, kind: FaultKind) -> bool:
        """True if this schedule can have a fault of this kind."""
        drawn = any(rates.get(kind, 0.0) > 0 for rates in self._rates.values())
        return drawn or any(fault.kind is kind for fault in self._planned.values())

    def next_fault(self, method: str) -> Fault | None:
        """Return the fault of the next call of `method`, or None. `FaultyTier` calls this once for
        each call of the tier."""
        call = self._calls[method]
        self._calls[method] += 1
        drawn = self._draw(method, call)
        return self._planned.get((method, call), drawn)

    def _draw(self, method: str, call: int) -> Fault | None:
        rates = self._rates.get(method)
        if not rates:
            return None
        stream = self._streams[method]
        point = stream.random()
        for kind, rate in rates.items():
            if point < rate:
                return self._fault_of(method, call, kind, stream)
            point -= rate
        return None

    def _fault_of(self, method: str, call: int, kind: FaultKind, stream: Random) -> Fault:
        if kind in _COMES_LATE:
            polls, seconds = stream.randint(*self._delay_polls), stream.uniform(*self._delay_s)
            if kind in _MAY_COME_AT_ONCE and stream.random() < 0.5:
                polls, seconds = 0, 0.0
            return Fault(method, call, kind, polls, seconds)
        if kind is FaultKind.CORRUPT:
            return Fault(method, call, kind, damage=stream.choice(_DAMAGES))
        return Fault(method, call, kind)


def _rates_by_method(rates: Mapping[str, float]) -> dict[str, dict[FaultKind, float]]:
    by_method: dict[str, dict[FaultKind, float]] = {method: {} for method in FAULTS_OF}
    # Rates for one method come last, so that they override the general ones.
    for name, rate in sorted(rates.items(), key=lambda item: "." in item[0]):
        method, _, kind_name = name.rpartition(".")
        if kind_name not in _KINDS or (method and method not in FAULTS_OF):
            raise ValueError(
                f"rates[{name!r}]: write a kind ({', '.join(FaultKind)}), or a method and a kind "
                f"such as 'submit_load.drop' (methods: {', '.join(FAULTS_OF)})"
            )
        kind = FaultKind(kind_name)
        if method and kind not in FAULTS_OF[method]:
            raise ValueError(
                f"rates[{name!r}]: {method} can have {', '.join(sorted(FAULTS_OF[method]))}"
            )
        if not 0.0 <= rate <= 1.0:
            raise ValueError(f"rates[{name!r}] = {rate}: write a share between 0 and 1")
        for target in [method] if method else FAULTS_OF:
            if kind in FAULTS_OF[target]:
                by_method[target][kind] = rate
    for method, of_method in by_method.items():
        if sum(of_method.values()) > 1.0:
            raise ValueError(
                f"the rates of {method} sum to {sum(of_method.values())}: a call has one fault at "
                "most, so keep the sum at 1 or below"
            )
    return {method: of_method for method, of_method in by_method.items() if of_method}
