"""Measures the time inside calls of vLLM's scheduler."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from inspect import isfunction
from statistics import median
from typing import Any

BLOCK_METHODS = ("lookup", "get_load_source")
"""Methods called for one block each, with its key and the request's context."""
MANAGER_METHODS = (
    *BLOCK_METHODS,
    "prepare_load",
    "complete_load",
    "prepare_store",
    "complete_store",
    "on_new_request",
    "on_request_finished",
    "on_schedule_end",
    "has_pending_work",
    "take_events",
    "get_stats",
)
"""All methods of a manager that vLLM 0.32's scheduler calls while requests run."""

_BATCHES = 9
_BATCH_CALLS = 2_000

Clock = Callable[[], int]
CLOCKS: dict[str, Clock] = {"processor": time.thread_time_ns, "wall": time.perf_counter_ns}
"""Processor time of the scheduler's thread, and wall time. Only wall time includes interruptions by
other processes, and waits for the interpreter while a tier's thread holds it."""


class Untimed:
    """Nanoseconds spent within calls that do not count."""

    def __init__(self) -> None:
        self.ns = 0
        self.clock: Clock = time.perf_counter_ns

    @contextmanager
    def here(self) -> Iterator[None]:
        began = self.clock()
        yield
        self.ns += self.clock() - began


UNTIMED = Untimed()


class Tally:
    """Number and total duration of calls of one kind."""

    __slots__ = ("calls", "ns")

    def __init__(self) -> None:
        self.calls = 0
        self.ns = 0


def timed_block_call(method: Callable[..., Any], tally: Tally, now: Clock) -> Callable[..., Any]:
    """As little code as possible: these calls are many and short."""

    def call(key: Any, req_context: Any) -> Any:
        began = now()
        result = method(key, req_context)
        tally.ns += now() - began
        tally.calls += 1
        return result

    return call


def timed_call(method: Callable[..., Any], tally: Tally, now: Clock) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        untimed = UNTIMED.ns
        began = now()
        result = method(*args, **kwargs)
        tally.ns += now() - began - (UNTIMED.ns - untimed)
        tally.calls += 1
        return result

    return call


class _Nothing:
    def do(self, key: Any, req_context: Any) -> None:
        return


Timed = Callable[[Callable[..., Any], Tally, Clock], Callable[..., Any]]


def stopwatch_ns(timed: Timed, now: Clock) -> float:
    """The stopwatch's own time per call, measured with a call that does nothing."""
    nothing = _Nothing()
    shown = []
    for _ in range(_BATCHES):
        tally = Tally()
        call = timed(nothing.do, tally, now)
        for _ in range(_BATCH_CALLS):
            call(None, None)
        began = now()
        for _ in range(_BATCH_CALLS):
            nothing.do(None, None)
        bare = now() - began
        began = now()
        for _ in range(_BATCH_CALLS):
            pass
        loop = now() - began
        shown.append((tally.ns - (bare - loop)) / _BATCH_CALLS)
    return median(shown)


@dataclass
class Step:
    """One engine step."""

    wall_ns: int
    calls: dict[str, int] = field(default_factory=dict)
    ns: dict[str, float] = field(default_factory=dict)
    """Nanoseconds by kind of call, without the stopwatch's own time."""


class ManagerMeter:
    """Times every call that vLLM's scheduler makes to its connector's manager, step by step."""

    def __init__(self, connector: Any, now: Clock) -> None:
        UNTIMED.clock = now
        self.steps: list[Step] = []
        """Steps that computed something."""
        self.waiting_steps: list[Step] = []
        """Steps that only waited. An engine with nothing to compute until a load has ended steps as
        fast as it can. Their number depends on the machine, and no request waits for them."""
        self._computes = False
        self._watch_scheduling(connector)
        manager = connector.connector_scheduler.manager
        self._tallies = {name: Tally() for name in MANAGER_METHODS}
        for name, tally in self._tallies.items():
            method = getattr(manager, name)
            if name in BLOCK_METHODS:
                timed = timed_block_call(method, tally, now)
            elif name == "take_events":
                # vLLM's is a generator, which does its work while it is iterated.
                timed = timed_call(lambda method=method: list(method()), tally, now)
            else:
                timed = timed_call(method, tally, now)
            setattr(manager, name, timed)
        of_block, of_other = (stopwatch_ns(timed, now) for timed in (timed_block_call, timed_call))
        self._too_much = {
            name: of_block if name in BLOCK_METHODS else of_other for name in MANAGER_METHODS
        }

    def _watch_scheduling(self, connector: Any) -> None:
        build_connector_meta = connector.build_connector_meta

        def watched(scheduler_output: Any) -> Any:
            self._computes = scheduler_output.total_num_scheduled_tokens > 0
            return build_connector_meta(scheduler_output)

        connector.build_connector_meta = watched

    def end_step(self, wall_ns: int) -> None:
        """End a step: all calls since the last step belong to it."""
        step = Step(wall_ns)
        for name, tally in self._tallies.items():
            if tally.calls:
                step.calls[name] = tally.calls
                step.ns[name] = tally.ns - tally.calls * self._too_much[name]
                tally.calls = tally.ns = 0
        (self.steps if self._computes else self.waiting_steps).append(step)
        self._computes = False


class ConnectorMeter:
    """The time that a subclass of vLLM's connector adds: time in the methods that override, less
    time in the overridden methods."""

    def __init__(self, now: Clock) -> None:
        self._now = now
        self._whole: dict[str, Tally] = {}
        self._vllm: dict[str, Tally] = {}
        self._too_much = stopwatch_ns(timed_method, now)

    def added_ns(self) -> dict[str, dict[str, float]]:
        """Calls and total nanoseconds, by method."""
        return {
            name: {
                "calls": whole.calls,
                # The outer stopwatch includes the inner one's own time.
                "ns": whole.ns - self._vllm[name].ns - 2 * whole.calls * self._too_much,
            }
            for name, whole in self._whole.items()
            if whole.calls
        }

    @contextmanager
    def on(self, subclass: type, base: type) -> Iterator[None]:
        """Measure all objects of the class while the context is open."""
        replaced = []
        for name, method in list(vars(subclass).items()):
            if name.startswith("_") or not isfunction(method):
                continue
            self._whole[name], self._vllm[name] = Tally(), Tally()
            for owner, tallies in ((subclass, self._whole), (base, self._vllm)):
                own = vars(owner).get(name)
                replaced.append((owner, name, own))
                setattr(owner, name, timed_method(getattr(owner, name), tallies[name], self._now))
        try:
            yield
        finally:
            for owner, name, own in replaced:
                if own is None:
                    delattr(owner, name)
                else:
                    setattr(owner, name, own)


def timed_method(method: Callable[..., Any], tally: Tally, now: Clock) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        began = now()
        result = method(*args, **kwargs)
        tally.ns += now() - began
        tally.calls += 1
        return result

    return call
