"""The scheduler's cost per block with a hundred tenants, beside the same without tenants."""

from __future__ import annotations

import sys
from contextlib import ExitStack
from dataclasses import asdict
from statistics import median
from typing import Any

from tests.bench.report import print_table, run_alone, save, verdict
from tests.bench.request_life import HARVEST, PHASES
from tests.bench.tiered_subjects import Case
from tests.bench.worker import worker

ROUNDS, BATCHES = 3, 4
"""Rounds with new processes, and batches of each case in a round, in turns."""
TENANTS = 100
MAX_RATIO = 1.15

CASES = [Case(policy, num_tiers) for policy in ("lru", "arc") for num_tiers in (0, 1)]


def run() -> None:
    ratios: dict[Case, list[float]] = {case: [] for case in CASES}
    costs: dict[Case, list[tuple[float, float]]] = {case: [] for case in CASES}
    for _ in range(ROUNDS):
        with ExitStack() as processes:
            plain, shared = (
                processes.enter_context(worker(sys.executable, "tests.bench.tiered_life", "kvtier"))
                for _ in range(2)
            )
            for case in CASES:
                plain.ask({"begin": asdict(case)})
                shared.ask({"begin": asdict(case) | {"tenants": TENANTS}})
                pairs = [
                    (life_of(plain.ask({"batch": number})), life_of(shared.ask({"batch": number})))
                    for number in range(BATCHES)
                ]
                for each in (plain, shared):
                    each.ask({"end": 0})
                costs[case] += pairs
                ratios[case].append(median(ours / without for without, ours in pairs))
    result: dict[str, Any] = {}
    rows = []
    for case in CASES:
        without, ours = (median(pair[i] for pair in costs[case]) for i in (0, 1))
        ratio = median(ratios[case])
        result[str(case)] = {"plain_ns": without, "tenants_ns": ours, "ratios": ratios[case]}
        spread = f"({min(ratios[case]):.3f} to {max(ratios[case]):.3f})"
        rows.append([str(case), f"{without:.0f}", f"{ours:.0f}", f"{ratio:.3f}", spread])
    print_table(
        f"One request's life, in ns per block: {CASES[0].slots:,} slots, 512 blocks a request",
        ["", "no tenants", f"{TENANTS} tenants", "ratio", "rounds"],
        rows,
    )
    for case in CASES:
        print("  " + verdict(str(case), median(ratios[case]), MAX_RATIO))
    save("tenant_cost", result)


def life_of(costs: dict[str, float]) -> float:
    """The sum over all calls of a request's life."""
    return sum(costs[phase] for phase in (HARVEST, *PHASES))


if __name__ == "__main__":
    run_alone(run, __doc__)
