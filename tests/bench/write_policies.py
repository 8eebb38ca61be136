"""Hits and writes of each write policy over real traces, with host memory and one tier below."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections import OrderedDict
from collections.abc import Collection, Iterable, Sequence
from typing import Any

from kvtier.base import LookupResult, Medium, OffloadKey, ReqContext, ScheduleEndContext
from kvtier.config.options import WritePolicyName
from kvtier.tiering.base import JobResult, SecondaryTierManager, TransferJob
from kvtier.tiering.health import TierSettings
from kvtier.tiering.manager import CPUPrimaryTierOffloadingManager, TieringOffloadingManager
from tests import traces
from tests.bench.report import print_table, run_alone, save, verdict
from tests.config.sample import make_config
from tests.tiering.driven_manager import Clock, Memory, PlainSpec
from tests.trace_replay import key_of

SETTINGS: dict[str, list[tuple[float, float]]] = {
    "conversation": [(5, 5), (5, 20)],
    "coding_agents": [(0.5, 2), (1, 5)],
}
"""Capacity of host memory and of the tier, in percent of the unique blocks of a trace."""
BLOCKS_PER_STEP = 16
"""Blocks of a prompt that the engine computes in a step: 8,192 tokens."""
STEP_S = 0.05

LARGEST_LOSS = 0.3
"""Points that `adaptive` may have less than the better one of `through` and `on_evict`."""
LARGEST_SHARE_WRITTEN = 0.6
"""On the conversation trace: what `adaptive` may write, as a share of what `through` writes."""
MOST_WRITTEN_PER_READ = 5.0
"""On the conversation trace, for `adaptive`."""

_HIT, _MISS = LookupResult.HIT, LookupResult.MISS


class InstantTier(SecondaryTierManager):
    """Remembers keys, no bytes, in LRU order. Its jobs end at once."""

    medium = Medium.STORAGE

    def __init__(self, capacity: int, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.capacity_blocks: int = capacity
        self._kept: OrderedDict[OffloadKey, None] = OrderedDict()
        self._results: list[JobResult] = []
        self.num_written = 0
        self.num_read = 0

    def lookup(self, key: OffloadKey, req_context: ReqContext) -> LookupResult:
        return _HIT if key in self._kept else _MISS

    def submit_store(self, job: TransferJob) -> None:
        kept = self._kept
        for key in reversed(job.keys):
            if key not in kept:
                self.num_written += 1
                if len(kept) == self.capacity_blocks:
                    kept.popitem(last=False)
            kept[key] = None
            kept.move_to_end(key)
        self._results.append(JobResult(job.job_id, True, transfer_time=1e-4))

    def submit_load(self, job: TransferJob) -> None:
        there = [key for key in job.keys if key in self._kept]
        self.num_read += len(there)
        self._results.append(JobResult(job.job_id, len(there) == len(job.keys), there, 1e-4))

    def get_finished_jobs(self) -> Iterable[JobResult]:
        results, self._results = self._results, []
        return results

    def touch(self, keys: Collection[OffloadKey], req_context: ReqContext) -> None:
        kept = self._kept
        for key in reversed(tuple(keys)):
            if key in kept:
                kept.move_to_end(key)

    def missing(self, keys: Sequence[OffloadKey], req_context: ReqContext) -> list[OffloadKey]:
        return [key for key in keys if key not in self._kept]

    def drain_jobs(self) -> None:
        return


def replay(
    requests: Iterable[list[int]], num_host: int, num_tier: int, policy: WritePolicyName
) -> dict[str, float]:
    """Run a trace, one request after the other."""
    clock = Clock()
    memory = Memory(num_host)
    primary = CPUPrimaryTierOffloadingManager(num_host, memory)  # type: ignore[arg-type]
    tier = InstantTier(
        num_tier,
        offloading_spec=PlainSpec(make_config()),
        primary_kv_view=primary.get_kv_memoryview(),
        tier_type="instant",
    )
    manager = TieringOffloadingManager(
        primary,
        [tier],
        settings=[TierSettings(write_policy=policy, max_pinned_share=0.5)],
        prefill_tokens_per_s=0,
        clock=clock,
    )

    def step() -> None:
        manager.on_schedule_end(ScheduleEndContext())
        clock.now += STEP_S

    num_references = num_hits = 0
    for number, blocks in enumerate(requests):
        prompt = [key_of(block) for block in blocks]
        context = ReqContext(f"request-{number}")
        manager.on_new_request(context)
        found = manager.lookup_prefix(prompt, context)
        while not found.is_final:
            step()
            found = manager.lookup_prefix(prompt, context)
        num_references += len(prompt)
        num_hits += found.num_hits
        if found.num_hits:
            loaded = prompt[: found.num_hits]
            manager.prepare_load(loaded, context)
            manager.complete_load(set(loaded), context)
        manager.touch(prompt, context)
        for start in range(found.num_hits, len(prompt), BLOCKS_PER_STEP):
            output = manager.prepare_store(prompt[start : start + BLOCKS_PER_STEP], context)
            if output is not None:
                manager.complete_store(set(output.keys_to_store), context)
            step()
        manager.on_request_finished(context)
        step()
    counters = manager.get_stats().counters
    result = {
        "hit_percent": 100 * num_hits / num_references,
        "written_per_reference": tier.num_written / num_references,
        "written_per_read": tier.num_written / max(tier.num_read, 1),
        "read_percent": 100 * tier.num_read / num_references,
    }
    for name in ("unwritten_blocks", "left_out_blocks"):
        result[name] = counters.get(f"kvtier_tier_0_instant_{name}", 0) / num_references
    manager.shutdown()
    return result


def measure(trace: str, host: float, below: float, policy: WritePolicyName) -> dict[str, float]:
    """Replay a trace with these capacities, in percent of its unique blocks."""
    requests = list(getattr(traces, trace)())
    num_unique = traces.num_unique(requests)
    return replay(requests, int(num_unique * host / 100), int(num_unique * below / 100), policy)


def run() -> None:
    results = []
    for trace, capacities in SETTINGS.items():
        for host, below in capacities:
            by_policy = {}
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
                        f"{one['written_per_read']:.1f}",
                        f"{one['unwritten_blocks']:.3f}",
                    ]
                    for policy, one in by_policy.items()
                ],
            )
            _judge(trace, by_policy)
            results.append({"trace": trace, "host": host, "tier": below, "policies": by_policy})
    save("write_policies", {"settings": results})


def _judge(trace: str, by_policy: dict[str, dict[str, float]]) -> None:
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
