"""How fast `kvtier replay` goes through real traces, beside a bare LRU loop over a dictionary."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import replace
from itertools import islice
from math import inf
from pathlib import Path

from kvtier.base import OffloadKey
from kvtier.replay.engine import Counting, TimedEngine
from kvtier.replay.settings import ReplaySettings, TierSettings
from kvtier.replay.trace import Request, open_trace
from tests.bench.report import print_table, run_alone, save, verdict_at_least
from tests.traces import CODING_AGENTS, CONVERSATION

LEAST_PER_S = 200_000
"""References per second that counting in host memory alone must reach."""
_NUM_RUNS = 3
GIB = 1 << 30
TRACE_FILES = {
    "conversation": (CONVERSATION, 4_000),
    "coding agents": (CODING_AGENTS, 3_000),
}
"""The file, and how many of its requests are replayed."""
HOST = TierSettings(name="host", num_bytes=512 * GIB, read_bytes_per_s=50e9, write_bytes_per_s=50e9)
DISK = TierSettings(
    name="disk", num_bytes=2048 * GIB, read_bytes_per_s=6e9, write_bytes_per_s=4e9, latency_s=1e-4
)


def bare_loop(path: Path, limit: int, num_blocks: int = 8192) -> int:
    """The least that a simulator does: one ordered dictionary, one prompt after the other."""
    cached: OrderedDict[OffloadKey, None] = OrderedDict()
    num_hits = 0
    with open_trace(str(path)) as trace:
        for request in islice(trace.requests(), limit):
            is_hit = True
            for key in request.keys:
                is_hit = is_hit and key in cached
                num_hits += is_hit
            for key in reversed(request.keys):
                if key in cached:
                    cached.move_to_end(key)
                else:
                    cached[key] = None
                    if len(cached) > num_blocks:
                        cached.popitem(last=False)
    return num_hits


def replayed(path: Path, limit: int, settings: ReplaySettings) -> int:
    kind = TimedEngine if settings.is_timed else Counting
    with open_trace(str(path)) as trace:
        run = kind(settings, trace.block_tokens)
        for _ in run.serve(islice(trace.requests(), limit)):
            pass
    return run.end().num_references


def _rate(num_references: int, work: Callable[[], object]) -> float:
    """The best of several runs: other processes only make a run slower."""
    best = inf
    for _ in range(_NUM_RUNS):
        began = time.perf_counter()
        work()
        best = min(best, time.perf_counter() - began)
    return num_references / best


def _num_references(path: Path, limit: int) -> int:
    with open_trace(str(path)) as trace:
        requests: islice[Request] = islice(trace.requests(), limit)
        return sum(len(request.keys) for request in requests)


def run() -> None:
    counted = ReplaySettings(host=HOST, is_timed=False)
    timed = ReplaySettings(host=HOST, speed_up=0.25)  # so that hardly a request has to queue
    settings = {
        "host memory, counted": counted,
        "host memory, timed": timed,
        "host memory and disk, counted": replace(counted, tiers=(DISK,)),
        "host memory and disk, timed": replace(timed, tiers=(DISK,)),
    }
    rates: dict[str, dict[str, float]] = {}
    for name, (path, limit) in TRACE_FILES.items():
        count = _num_references(path, limit)
        rates[name] = {"a bare loop": _rate(count, lambda: bare_loop(path, limit))}  # noqa: B023
        for what, chosen in settings.items():
            rates[name][what] = _rate(count, lambda: replayed(path, limit, chosen))  # noqa: B023
    rows = [
        [
            what,
            *(f"{rates[name][what] / 1e3:,.0f}" for name in rates),
            *(f"{rates[name][what] / rates[name]['a bare loop']:.2f}" for name in rates),
        ]
        for what in rates["conversation"]
    ]
    print_table(
        "Thousand block references per second, and relative to the bare loop",
        ["replay", *rates, *(f"{name}, relative" for name in rates)],
        rows,
    )
    slowest = min(figures["host memory, counted"] for figures in rates.values())
    print("  " + verdict_at_least("references per s, host memory, counted", slowest, LEAST_PER_S))
    save("replay_speed", {"references_per_s": rates})


if __name__ == "__main__":
    run_alone(run, __doc__)
