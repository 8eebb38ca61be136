"""The scheduler's cost per block: kvtier's primary tier beside vLLM's own, in the same run."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from tests.bench.report import print_table, run_alone, save, verdict
from tests.bench.request_life import BLOCK_CALLS, PHASES

SCRIPT = Path(__file__).with_name("request_life.py")
SOURCES = Path(__file__).parents[2] / "src"
ROUNDS = 5
LIMITS = {"lru": 0.25, "arc": 0.5}
"""Limit of the ratio of kvtier's whole life of a request to vLLM's seven calls for blocks."""


def measure_once(python: str, subject: str, policy: str) -> dict[str, float]:
    environment = os.environ | {"PYTHONPATH": str(SOURCES), "VLLM_LOGGING_LEVEL": "ERROR"}
    command = [python, str(SCRIPT), subject, "--policy", policy]
    output = subprocess.run(
        command, check=True, stdout=subprocess.PIPE, text=True, env=environment, timeout=600
    ).stdout
    cost: dict[str, float] = json.loads(output.splitlines()[-1])
    return cost


def run() -> None:
    vllm_python = os.environ.get("KVTIER_VLLM_PYTHON")
    if vllm_python is None:
        sys.exit(
            "scheduler_cost: KVTIER_VLLM_PYTHON is not set. It names the python of an environment "
            "with vLLM, to compare with; `make bench` makes one and sets it."
        )
    result = {}
    for policy, limit in LIMITS.items():
        # In turns, so that a busy minute of the machine affects both. The best of each counts: on a
        # shared machine a process may be slower by half for its whole life, but never faster.
        rounds = [
            (
                measure_once(sys.executable, "kvtier", policy),
                measure_once(vllm_python, "vllm", policy),
            )
            for _ in range(ROUNDS)
        ]
        ours = {phase: min(round_[0][phase] for round_ in rounds) for phase in PHASES}
        theirs = {phase: min(round_[1][phase] for round_ in rounds) for phase in PHASES}
        total = sum(ours.values())
        their_blocks = sum(theirs[phase] for phase in BLOCK_CALLS)
        ratio = total / their_blocks
        ratios = {phase: ours[phase] / theirs[phase] for phase in PHASES}
        # Of the other calls, some do nothing in vLLM, and none scales with blocks.
        slowest = max(BLOCK_CALLS, key=ratios.__getitem__)
        rows = [
            [
                phase,
                f"{ours[phase]:.0f}",
                f"{theirs[phase]:.0f}",
                f"{ratios[phase]:.2f}",
            ]
            for phase in PHASES
        ]
        rows.append(["all", f"{total:.0f}", f"{sum(theirs.values()):.0f}", ""])
        rows.append(["all / vLLM's seven block calls", "", f"{their_blocks:.0f}", f"{ratio:.2f}"])
        print_table(
            f"Scheduler cost, policy {policy}: ns per block, 512 blocks a request, 20,000 slots",
            ["phase", "kvtier", "vLLM", "ratio"],
            rows,
        )
        worst = ratios[slowest]
        print("  " + verdict(f"{policy}, total against vLLM's block calls", ratio, limit))
        print("  " + verdict(f"{policy}, slowest block call ({slowest})", worst, 1.0))
        result[policy] = {
            "kvtier_ns": ours,
            "vllm_ns": theirs,
            "ratio_to_block_calls": ratio,
            "worst_phase": slowest,
            "worst_phase_ratio": worst,
        }
    save("scheduler_cost", result)


if __name__ == "__main__":
    run_alone(run, __doc__)
