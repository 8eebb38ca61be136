"""Hit ratios of the built-in policies over real traces: LRU and ARC beside those that a simulator
published, and how far `density` closes the gap between LRU and the best possible."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from statistics import mean
from typing import Any

from kvtier.replay.engine import Counting
from kvtier.replay.settings import ReplaySettings, TierSettings
from kvtier.replay.trace import open_trace
from tests.bench.report import print_table, run_alone, save, verdict, verdict_at_least
from tests.traces import CODING_AGENTS, CONVERSATION

TRACES = {"conversation": CONVERSATION, "coding_agents": CODING_AGENTS}

TOLERANCE = 0.3
"""Largest allowed difference, in percentage points."""

# Percentage of unique blocks that fit -> percentage of references that hit. From a simulator
# that is independent of this project, for LRU with a request's blocks touched last to first, and
# for ARC as in the paper.
PUBLISHED: dict[str, dict[str, dict[float, float]]] = {
    "conversation": {
        "lru": {1: 5.4, 2: 8.0, 5: 20.2, 10: 28.8, 20: 35.8},
        "arc": {1: 6.7, 2: 9.2, 5: 21.6, 10: 29.5, 20: 33.3},
    },
    "coding_agents": {
        "lru": {0.2: 7.9, 0.5: 29.5, 1: 65.1, 2: 88.4, 5: 95.2},
        "arc": {0.2: 12.6, 0.5: 35.8, 1: 65.2, 2: 86.9, 5: 94.8},
    },
}
BEST: dict[str, dict[float, float]] = {
    "conversation": {1: 25.0, 2: 32.1, 5: 38.2, 10: 38.2, 20: 38.2},
    "coding_agents": {0.2: 36.1, 0.5: 62.5, 1: 82.1, 2: 93.2, 5: 96.4},
}
"""What MIN hits, which knows the future. From the same simulator."""
LEAST_CLOSED = {"conversation": 20.0, "coding_agents": 30.0}
"""Percentage of the gap between LRU and MIN that `density` must close, on average."""
LARGEST_LOSS = 0.3
"""How many points fewer `density` may hit than the better of LRU and ARC, at any capacity."""


def measure(trace: str, policy: str) -> dict[float, float]:
    """Hit percentage by capacity."""
    with open_trace(str(TRACES[trace])) as opened:
        requests, block_tokens = list(opened.requests()), opened.block_tokens
    num_unique = len(set().union(*(request.keys for request in requests)))
    percentages = {}
    for percent in BEST[trace]:
        num_blocks = int(num_unique * percent / 100)
        host = in_blocks("host", num_blocks, block_tokens, policy=policy)
        settings = ReplaySettings(host=host, kv_bytes_per_token=1, is_timed=False)
        counting = Counting(settings, block_tokens)
        for _ in counting.serve(requests):
            pass
        percentages[percent] = counting.end().hit_percent
        print(f"  {trace}, {policy}, {percent:g} %: done", file=sys.stderr, flush=True)
    return percentages


def in_blocks(name: str, num_blocks: int, block_tokens: int, **changes: Any) -> TierSettings:
    """A tier with exactly this many blocks, if a token has one byte. Its speeds have no meaning."""
    return TierSettings(
        name=name,
        num_bytes=num_blocks * block_tokens,
        read_bytes_per_s=1,
        write_bytes_per_s=1,
        **changes,
    )


def run() -> None:
    result: dict[str, dict[str, dict[float, float]]] = {}
    largest = 0.0
    closed: dict[str, dict[float, float]] = {}
    losses: dict[str, float] = {}
    commands = [
        (trace, policy, [sys.executable, "-m", "tests.bench.hit_ratios", trace, policy])
        for trace in PUBLISHED
        for policy in ("lru", "arc", "density")
    ]
    for trace, policy, command in commands:
        output = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
        measured = {float(percent): hits for percent, hits in json.loads(output).items()}
        result.setdefault(trace, {})[policy] = measured
    for trace, policies in result.items():
        capacities = list(next(iter(policies.values())))
        rows = []
        for policy, measured in policies.items():
            rows.append([policy, *(f"{measured[percent]:.1f}" for percent in capacities)])
            if policy not in PUBLISHED[trace]:
                continue
            published = PUBLISHED[trace][policy]
            rows.append(["  published", *(f"{published[percent]:.1f}" for percent in capacities)])
            largest = max(largest, *(abs(measured[c] - published[c]) for c in capacities))
        closed[trace] = gap_closed(policies, BEST[trace])
        losses[trace] = max(
            max(policies["lru"][c], policies["arc"][c]) - policies["density"][c] for c in capacities
        )
        rows.append(["  gap closed, %", *(f"{closed[trace][c]:.0f}" for c in capacities)])
        rows.append(["MIN, published", *(f"{BEST[trace][c]:.1f}" for c in capacities)])
        print_table(
            f"Hit ratio in %, trace {trace}, by capacity in % of its unique blocks",
            ["policy", *(f"{percent:g}" for percent in capacities)],
            rows,
        )
    print("  " + verdict("largest difference in points", largest, TOLERANCE))
    mean_closed = {trace: mean(by_capacity.values()) for trace, by_capacity in closed.items()}
    for trace, least in LEAST_CLOSED.items():
        what = f"density, {trace}: % of the gap closed, mean"
        print("  " + verdict_at_least(what, mean_closed[trace], least))
        loss = losses[trace]
        print("  " + verdict(f"density, {trace}: largest loss in points", loss, LARGEST_LOSS))
    save(
        "hit_ratios",
        {
            "hit_percent": result,
            "largest_difference": largest,
            "gap_closed_percent": closed,
            "mean_gap_closed_percent": mean_closed,
            "largest_loss": losses,
        },
    )


def gap_closed(
    policies: dict[str, dict[float, float]], best: dict[float, float]
) -> dict[float, float]:
    """Percentage of the gap between LRU and MIN that `density` closes, by capacity."""
    lru, density = policies["lru"], policies["density"]
    return {c: 100 * (density[c] - lru[c]) / (best[c] - lru[c]) for c in lru}


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure one policy; print figures as JSON.")
    parser.add_argument("trace", choices=sorted(PUBLISHED))
    parser.add_argument("policy", choices=["lru", "arc", "density"])
    arguments = parser.parse_args()
    print(json.dumps(measure(arguments.trace, arguments.policy)))


if __name__ == "__main__":
    if len(sys.argv) > 1:  # a child process that measures one figure
        main()
    else:
        run_alone(run, __doc__)
