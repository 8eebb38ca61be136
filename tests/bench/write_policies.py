"""Hits and writes of each write policy over real traces, with host memory and one tier below."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from typing import Any

from kvtier.config.options import WritePolicyName
from kvtier.replay.engine import Counting
from kvtier.replay.settings import ReplaySettings
from kvtier.replay.trace import open_trace
from tests.bench.hit_ratios import TRACES, in_blocks
from tests.bench.report import print_table, run_alone, save, verdict

SETTINGS: dict[str, list[tuple[float, float]]] = {
    "conversation": [(5, 5), (5, 20)],
    "coding_agents": [(0.5, 2), (1, 5)],
}
"""Capacity of host memory and of the tier, in percent of the unique blocks of a trace."""

LARGEST_LOSS = 0.3
"""Points that `adaptive` may have less than the better one of `through` and `on_evict`."""
LARGEST_SHARE_WRITTEN = 0.6
"""On the conversation trace: what `adaptive` may write, as a share of what `through` writes."""
MOST_WRITTEN_PER_READ = 5.0
"""On the conversation trace, for `adaptive`."""


def measure(trace: str, host: float, below: float, policy: WritePolicyName) -> dict[str, Any]:
    """Replay a trace with these capacities, in percent of its unique blocks."""
    with open_trace(str(TRACES[trace])) as opened:
        requests, block_tokens = list(opened.requests()), opened.block_tokens
    num_unique = len(set().union(*(request.keys for request in requests)))
    settings = ReplaySettings(
        host=in_blocks("host", int(num_unique * host / 100), block_tokens),
        tiers=(
            in_blocks("tier", int(num_unique * below / 100), block_tokens, write_policy=policy),
        ),
        kv_bytes_per_token=1,
        is_timed=False,
    )
    counting = Counting(settings, block_tokens)
    for _ in counting.serve(requests):
        pass
    figures = counting.end()
    tier, count = figures.places[1], figures.num_references
    return {
        "hit_percent": figures.hit_percent,
        "read_percent": 100 * tier.read_blocks / count,
        "written_per_reference": tier.written_blocks / count,
        "written_per_read": tier.written_per_read,
        "unwritten_blocks": tier.unwritten_blocks / count,
        "left_out_blocks": tier.left_out_blocks / count,
    }


def run() -> None:
    results = []
    for trace, capacities in SETTINGS.items():
        for host, below in capacities:
            by_policy: dict[str, dict[str, Any]] = {}
            for policy in WritePolicyName:
                command = [sys.executable, "-m", "tests.bench.write_policies", trace]
                command += [str(host), str(below), policy]
                output = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
                by_policy[str(policy)] = json.loads(output.stdout)
                print(f"  {trace}, {host:g}+{below:g} %, {policy}: done", file=sys.stderr)
            print_table(
                f"Trace {trace}, host memory {host:g} %, tier {below:g} % of its unique blocks",
                ["policy", "hits %", "read %", "written/reference", "written/read", "unwritten"],
                [
                    [
                        policy,
                        f"{one['hit_percent']:.1f}",
                        f"{one['read_percent']:.1f}",
                        f"{one['written_per_reference']:.3f}",
                        "-" if (ratio := one["written_per_read"]) is None else f"{ratio:.1f}",
                        f"{one['unwritten_blocks']:.3f}",
                    ]
                    for policy, one in by_policy.items()
                ],
            )
            _judge(trace, by_policy)
            results.append({"trace": trace, "host": host, "tier": below, "policies": by_policy})
    save("write_policies", {"settings": results})


def _judge(trace: str, by_policy: dict[str, dict[str, Any]]) -> None:
    through, adaptive = by_policy["through"], by_policy["adaptive"]
    best = max(through["hit_percent"], by_policy["on_evict"]["hit_percent"])
    print("  " + verdict("points lost by adaptive", best - adaptive["hit_percent"], LARGEST_LOSS))
    if trace == "conversation":
        share = adaptive["written_per_reference"] / through["written_per_reference"]
        print("  " + verdict("share of through's writes", share, LARGEST_SHARE_WRITTEN))
        per_read = adaptive["written_per_read"]
        print("  " + verdict("bytes written per byte read", per_read, MOST_WRITTEN_PER_READ))


def main() -> None:
    parser = argparse.ArgumentParser(description="Replay one setting; print figures as JSON.")
    parser.add_argument("trace", choices=sorted(SETTINGS))
    parser.add_argument("host", type=float, help="capacity of host memory, in percent")
    parser.add_argument("tier", type=float, help="capacity of the tier, in percent")
    parser.add_argument("policy", type=WritePolicyName, choices=list(WritePolicyName))
    given = parser.parse_args()
    print(json.dumps(measure(given.trace, given.host, given.tier, given.policy)))


if __name__ == "__main__":
    if len(sys.argv) > 1:  # a child process that replays one setting
        main()
    else:
        run_alone(run, __doc__)
