"""When which fault happens: drawn from a seed, or written down call by call."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from random import Random

from kvtier.testing.damage import Damage
from kvtier.testing.faults.kinds import FAULTS_OF, Fault, FaultKind

__all__ = ["FaultSchedule"]

_COMES_LATE = frozenset(
    {FaultKind.DELAY, FaultKind.DUPLICATE, FaultKind.LATE_WRITE, FaultKind.DROP}
)
_MAY_COME_AT_ONCE = frozenset({FaultKind.DUPLICATE, FaultKind.DROP})
_DAMAGES = tuple(Damage)
_KINDS = frozenset(FaultKind)


class FaultSchedule:
    """Answers, call by call, whether there is a fault.

    Equal seeds, rates and calls give equal faults. Each method has a random stream of its own, so
    that one lookup more or less changes nothing for the jobs. What a tier did is recorded in
    `FaultyTier.injected`, and `FaultSchedule(faults=...)` of that does it again.
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
        have it) or by method and kind (`"submit_load.drop"`, which then decides). `faults`: what
        happens at single calls, in place of anything drawn. `delay_polls`, `delay_s`: least and
        most, for what comes late by `rates`. `clock`: what "late" is measured by.
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
        """Whether this schedule knows a fault of this kind at all."""
        drawn = any(rates.get(kind, 0.0) > 0 for rates in self._rates.values())
        return drawn or any(fault.kind is kind for fault in self._planned.values())

    def next_fault(self, method: str) -> Fault | None:
        """The fault of this call of `method`, if it has one. To be asked once per call."""
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
    # Those for one method last, so that they decide.
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
