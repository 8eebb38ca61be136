"""Measures what it costs when a tier stops answering in the middle of a trace, and recovers.

    python -m tests.tiering.black_hole [--requests N] [--json]

The trace and the orchestrator are real, and so is the measured time on the scheduler thread. Engine
steps and latencies of tiers pass in virtual time.
"""

from __future__ import annotations

import argparse
import json
import logging
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from enum import Enum
from typing import Any, ParamSpec, TypeVar

from kvtier.base import LookupResult, OffloadKey, ReqContext, ScheduleEndContext
from kvtier.tiering.base import JobResult, SecondaryTierManager, TransferJob
from kvtier.tiering.health import BreakerState, TierSettings
from kvtier.tiering.manager import CPUPrimaryTierOffloadingManager, TieringOffloadingManager
from kvtier.tiering.metrics import tier_label, tier_series
from tests import traces
from tests.arguments import whole_number
from tests.bench.report import print_table, save
from tests.tiering.simulation.memory import plain_memory
from tests.tiering.simulation.traits import spec_of
from tests.tiering.simulation.virtual_time import VirtualTime
from tests.trace_replay import key_of

P = ParamSpec("P")
T = TypeVar("T")

STEP_S = 0.05
BLOCKS_PER_STEP = 16
"""Tokens that the engine computes for one request in one step."""
MAX_RUNNING = 16
SETTINGS = TierSettings()
LATENCIES_S = (0.005, 0.03)
CAPACITIES = (0.05, 0.2, 1.0)
"""Capacity of the primary tier and of the two others, as a share of the blocks of the trace."""
BREAKERS = ("breaker_state", "store_breaker_state")
"""The breakers of a tier: for the tier as a whole, and for its stores."""
PERIODS = ("before", "during", "after")


class Death(Enum):
    """How a tier fails."""

    ANSWER = "answers nothing"
    """It answers no lookup and ends no job."""
    MOVE = "moves nothing"
    """It answers lookups from its index, but ends no job."""


class MortalTier(SecondaryTierManager):
    """A tier that keeps keys only, moves them in virtual time, and can be stopped."""

    def __init__(
        self, clock: VirtualTime, view: memoryview, latency_s: float, capacity: int
    ) -> None:
        super().__init__(spec_of(bytes(16)), view, "mortal")
        self._clock = clock
        self._latency = latency_s
        self._capacity = capacity
        self._kept: OrderedDict[OffloadKey, None] = OrderedDict()
        self._finished: list[JobResult] = []
        self._stuck: list[TransferJob] = []
        self.death: Death | None = None

    def lookup(self, key: OffloadKey, req_context: ReqContext) -> LookupResult:
        if self.death is Death.ANSWER:
            return LookupResult.RETRY
        return LookupResult.HIT if key in self._kept else LookupResult.MISS

    def submit_store(self, job: TransferJob) -> None:
        self._clock.at(self._clock.now + self._latency, lambda: self._end(job))

    def submit_load(self, job: TransferJob) -> None:
        self._clock.at(self._clock.now + self._latency, lambda: self._end(job))

    def get_finished_jobs(self) -> Iterable[JobResult]:
        finished, self._finished = self._finished, []
        return finished

    def _end(self, job: TransferJob) -> None:
        """Do the work that another thread would do in this time."""
        if self.death is not None:
            self._stuck.append(job)
            return
        kept = self._kept
        for key in reversed(job.keys):
            kept[key] = None
            kept.move_to_end(key)
        while len(kept) > self._capacity:
            kept.popitem(last=False)
        self._finished.append(JobResult(job.job_id, True, None, self._latency))

    def come_back(self) -> None:
        """The tier recovers, and ends the jobs it has."""
        self.death = None
        stuck, self._stuck = self._stuck, []
        for job in stuck:
            self._end(job)

    def drain_jobs(self) -> None:
        return


@dataclass
class Period:
    """Figures for one third of the trace."""

    seconds: float = 0.0
    """In virtual time."""
    num_requests: int = 0
    num_blocks: int = 0
    num_hits: int = 0
    """Blocks of prompts that were not computed."""
    decision_s: float = 0.0
    """Time of all calls on the scheduler thread."""
    slowest_step_s: float = 0.0
    longest_wait_s: float = 0.0
    """Time from the first lookup of a request to the last one."""

    def figures(self) -> dict[str, float]:
        return asdict(self) | {
            "hit_percent": 100 * self.num_hits / max(self.num_blocks, 1),
            "decision_us_per_block": 1e6 * self.decision_s / max(self.num_blocks, 1),
        }


@dataclass
class _Request:
    context: ReqContext
    keys: list[OffloadKey]
    arrived: float
    num_computed: int | None = None
    """None while it waits."""
    loading: list[OffloadKey] = field(default_factory=list)
    storing: list[list[OffloadKey]] = field(default_factory=list)


@dataclass
class Outcome:
    """Figures for one failure."""

    who: str
    allowed_wait_s: float
    """The longest time that a request may wait for tiers."""
    periods: dict[str, dict[str, float]] = field(default_factory=dict)
    num_stuck: int = 0
    """Requests that never ended."""
    opened_after_s: float | None = None
    """Seconds from the failure until a breaker opened; None: none did."""
    closed_after_s: float | None = None
    """Seconds from the recovery until all breakers were closed."""
    most_quarantined: int = 0


class BlackHole:
    """One engine with two tiers, one of which fails and recovers."""

    def __init__(self, requests: Sequence[list[int]], tier: int, death: Death | None) -> None:
        """`death`: None for a run without a failure."""
        num_unique = traces.num_unique(list(requests))
        num_blocks, *kept = (max(2048, int(num_unique * share)) for share in CAPACITIES)
        memory = plain_memory(num_blocks)
        self._memory = memory
        self._clock = VirtualTime()
        primary = CPUPrimaryTierOffloadingManager(num_blocks, memory.region)
        view = primary.get_kv_memoryview()
        self._tiers = [
            MortalTier(self._clock, view, latency, capacity)
            for latency, capacity in zip(LATENCIES_S, kept, strict=True)
        ]
        self._manager = TieringOffloadingManager(
            primary,
            self._tiers,
            settings=[SETTINGS, SETTINGS],
            prefill_tokens_per_s=0,
            clock=self._clock,
        )
        self._victim, self._death = tier, death
        self._waiting = [[key_of(block) for block in blocks] for blocks in requests if blocks]
        self._waiting.reverse()
        self._num_requests = len(self._waiting)
        self._running: list[_Request] = []
        self._periods = {name: Period() for name in PERIODS}
        self._now_in = "before"
        self._spent = 0.0
        name = "nobody goes" if death is None else f"tier {tier} {death.value}"
        self.outcome = Outcome(name, SETTINGS.lookup_timeout_s + SETTINGS.load_timeout_s)
        self._changed_at = 0.0

    def run(self) -> Outcome:
        """Serve the trace."""
        num_steps = 0
        while self._running or self._waiting:
            self._change_period()
            self._step()
            num_steps += 1
            if num_steps > 1000 + 40 * self._num_requests:
                break
        self.outcome.num_stuck = len(self._running)
        self.outcome.periods = {name: self._periods[name].figures() for name in PERIODS}
        self._memory.release()
        self._manager.shutdown()
        return self.outcome

    def _change_period(self) -> None:
        done = 1 - len(self._waiting) / self._num_requests
        period = PERIODS[min(int(done * 3), 2)]
        if period == self._now_in:
            return
        self._now_in = period
        self._changed_at = self._clock.now
        if period == "during":
            self._tiers[self._victim].death = self._death
        else:
            self._tiers[self._victim].come_back()

    def _step(self) -> None:
        manager, period = self._manager, self._periods[self._now_in]
        spent_before = self._spent
        while self._waiting and len(self._running) < MAX_RUNNING:
            number = self._num_requests - len(self._waiting)
            context = ReqContext(f"request-{number}")
            self._time(manager.on_new_request, context)
            self._running.append(_Request(context, self._waiting.pop(), self._clock.now))
        for request in self._running:
            if request.num_computed is None:
                self._look_up(request, period)
        self._time(manager.on_schedule_end, ScheduleEndContext())
        for request in self._running:
            if request.num_computed is not None and not request.loading:
                self._compute(request)
        self._clock.advance(STEP_S)
        period.seconds += STEP_S
        for request in list(self._running):
            self._complete(request, period)
        self._time(lambda: list(manager.take_events()))
        self._watch_breaker()
        spent = self._spent - spent_before
        period.decision_s += spent
        period.slowest_step_s = max(period.slowest_step_s, spent)

    def _look_up(self, request: _Request, period: Period) -> None:
        found = self._time(self._manager.lookup_prefix, request.keys, request.context)
        waited = self._clock.now - request.arrived
        period.longest_wait_s = max(period.longest_wait_s, waited)
        if not found.is_final:
            return
        request.num_computed = found.num_hits
        period.num_hits += found.num_hits
        if found.num_hits:
            request.loading = request.keys[: found.num_hits]
            self._time(self._manager.prepare_load, request.loading, request.context)

    def _compute(self, request: _Request) -> None:
        assert request.num_computed is not None
        new = request.keys[request.num_computed :][:BLOCKS_PER_STEP]
        if new:
            output = self._time(self._manager.prepare_store, new, request.context)
            if output is not None and output.keys_to_store:
                request.storing.append(output.keys_to_store)
        request.num_computed += len(new)

    def _complete(self, request: _Request, period: Period) -> None:
        if request.loading:
            self._time(self._manager.complete_load, request.loading, request.context)
            request.loading = []
            return
        for keys in request.storing:
            self._time(self._manager.complete_store, keys, request.context)
        request.storing = []
        if request.num_computed == len(request.keys):
            self._time(self._manager.touch, request.keys, request.context)
            self._time(self._manager.on_request_finished, request.context)
            self._running.remove(request)
            period.num_requests += 1
            period.num_blocks += len(request.keys)

    def _watch_breaker(self) -> None:
        gauges = self._time(self._manager.get_stats).gauges
        outcome = self.outcome
        quarantined = int(gauges["kvtier_cpu_quarantined_slots"])
        outcome.most_quarantined = max(outcome.most_quarantined, quarantined)
        label = tier_label(self._victim, "mortal")
        states = {BreakerState(gauges[tier_series(label, name)]) for name in BREAKERS}
        since = self._clock.now - self._changed_at
        if self._now_in == "during" and BreakerState.OPEN in states:
            outcome.opened_after_s = outcome.opened_after_s or since
        if self._now_in == "after" and states == {BreakerState.CLOSED}:
            outcome.closed_after_s = outcome.closed_after_s or since

    def _time(self, call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        start = time.perf_counter()
        answer = call(*args, **kwargs)
        self._spent += time.perf_counter() - start
        return answer


def measure(num_requests: int) -> list[Outcome]:
    """No failure; then each kind of failure of each tier."""
    requests = traces.conversation()[:num_requests]
    cases = [(0, None), *((tier, death) for tier in range(2) for death in Death)]
    return [BlackHole(requests, tier, death).run() for tier, death in cases]


def show(outcomes: Sequence[Outcome]) -> None:
    """Print one table for requests and one for the tier."""
    rows = []
    for outcome in outcomes:
        for name in PERIODS:
            period = outcome.periods[name]
            rows.append(
                [
                    f"{outcome.who}, {name}",
                    f"{period['seconds']:.1f}",
                    f"{period['decision_us_per_block']:.2f}",
                    f"{1000 * period['slowest_step_s']:.1f}",
                    f"{period['hit_percent']:.1f}",
                    f"{period['longest_wait_s']:.2f}",
                ]
            )
    header = ["period", "seconds", "us per block", "slowest step, ms", "hits, %", "longest wait, s"]
    print_table("A tier goes in the middle of a trace, and comes back", header, rows)
    rows = [
        [
            outcome.who,
            str(outcome.num_stuck),
            f"{outcome.allowed_wait_s:.2f}",
            _seconds(outcome.opened_after_s),
            _seconds(outcome.closed_after_s),
            str(outcome.most_quarantined),
        ]
        for outcome in outcomes
    ]
    header = ["", "stuck", "allowed wait, s", "cut off after, s", "back after, s", "quarantined"]
    print_table("What became of requests, of the tier, and of slots", header, rows)


def _seconds(value: float | None) -> str:
    return "never" if value is None else f"{value:.2f}"


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.tiering.black_hole", description=__doc__)
    parser.add_argument("--requests", type=whole_number, default=3000, help="of the trace")
    parser.add_argument("--json", action="store_true", help="print one JSON document only")
    arguments = parser.parse_args()
    logging.disable()
    outcomes = measure(arguments.requests)
    result: dict[str, Any] = {"outcomes": [asdict(outcome) for outcome in outcomes]}
    if arguments.json:
        print(json.dumps(result, indent=2))
        return
    show(outcomes)
    save("black_hole", result)


if __name__ == "__main__":
    main()
