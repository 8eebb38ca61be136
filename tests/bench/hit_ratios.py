"""Hit ratios of the built-in policies over real traces, beside those a simulator published."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys

from kvtier.replay.counting import Counting
from kvtier.replay.settings import ReplaySettings, TierSettings
from kvtier.replay.trace import open_trace
from tests.bench.report import print_table, run_alone, save, verdict
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


def measure(trace: str, policy: str) -> dict[float, float]:
    """Hit percentage by capacity."""
    with open_trace(str(TRACES[trace])) as opened:
        requests, block_tokens = list(opened.requests()), opened.block_tokens
    num_unique = len(set().union(*(request.keys for request in requests)))
    percentages = {}
    for percent in PUBLISHED[trace][policy]:
        # One byte per token, so that capacities are exact.
        host = TierSettings(
            name="host",
            num_bytes=int(num_unique * percent / 100) * block_tokens,
            policy=policy,
            read_bytes_per_s=1,
            write_bytes_per_s=1,
        )
        settings = ReplaySettings(host=host, kv_bytes_per_token=1, is_timed=False)
        counting = Counting(settings, block_tokens)
        for _ in counting.serve(requests):
            pass
        percentages[percent] = counting.end().hit_percent
        print(f"  {trace}, {policy}, {percent:g} %: done", file=sys.stderr, flush=True)
    return percentages


def run() -> None:
    result: dict[str, dict[str, dict[float, float]]] = {}
    largest = 0.0
    commands = [
        (trace, policy, [sys.executable, "-m", "tests.bench.hit_ratios", trace, policy])
        for trace, policies in PUBLISHED.items()
        for policy in policies
    ]
    for trace, policy, command in commands:
        output = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
        measured = {float(percent): hits for percent, hits in json.loads(output).items()}
        result.setdefault(trace, {})[policy] = measured
    for trace, policies in result.items():
        capacities = list(next(iter(policies.values())))
        rows = []
        for policy, measured in policies.items():
            published = PUBLISHED[trace][policy]
            rows.append([policy, *(f"{measured[percent]:.1f}" for percent in capacities)])
            rows.append(["  published", *(f"{published[percent]:.1f}" for percent in capacities)])
            largest = max(largest, *(abs(measured[c] - published[c]) for c in capacities))
        print_table(
            f"Hit ratio in %, trace {trace}, by capacity in % of its unique blocks",
            ["policy", *(f"{percent:g}" for percent in capacities)],
            rows,
        )
    print("  " + verdict("largest difference in points", largest, TOLERANCE))
    save("hit_ratios", {"hit_percent": result, "largest_difference": largest})


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure one policy; print figures as JSON.")
    parser.add_argument("trace", choices=sorted(PUBLISHED))
    parser.add_argument("policy", choices=["lru", "arc"])
    arguments = parser.parse_args()
    print(json.dumps(measure(arguments.trace, arguments.policy)))


if __name__ == "__main__":
    if len(sys.argv) > 1:  # a child process that measures one figure
        main()
    else:
        run_alone(run, __doc__)
