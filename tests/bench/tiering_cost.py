"""The scheduler's cost per block with tiers below: kvtier's manager beside vLLM's, in one run."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, replace
from statistics import median
from typing import Any

from tests.bench.report import print_table, run_alone, save, verdict
from tests.bench.request_life import BLOCK_CALLS, HARVEST, PHASES
from tests.bench.tiered_life import FIRST_HIT, FIRST_MISS
from tests.bench.tiered_prefix import PREFIX, PrefixCase
from tests.bench.tiered_subjects import Case
from tests.bench.worker import Worker, vllm_python, worker

ROUNDS = 3
"""Rounds, each with new processes: on a shared machine, a process may be slow for its whole
life."""
BATCHES = 4
"""Batches of each case in a round, in turns."""
IN_FLIGHT = 10_000

LIFE = (HARVEST, *PHASES)
THEIR_CALLS = (HARVEST, *BLOCK_CALLS)
MAX_TOTAL = {"lru": 0.2, "arc": 0.3}
"""vLLM's ARC is faster than its LRU, kvtier's slower; see `scheduler_cost`."""
MAX_BY_PHASE = {"lookup_hit": 0.2, FIRST_HIT: 0.2, "lookup_miss": 0.125}
MAX_PREFIX = 0.5

IDLE = [Case(policy, num_tiers) for policy in ("lru", "arc") for num_tiers in (0, 1, 3)]
# With a larger primary tier, since only a share of it may be on its way into one tier.
BUSY = [
    Case(policy, num_tiers, in_flight=IN_FLIGHT, slots=45_000)
    for policy in ("lru", "arc")
    for num_tiers in (1, 3)
]
UNSETTLED = [Case("lru", num_tiers, settle=False) for num_tiers in (1, 3)]
PREFIX_CASES = [
    PrefixCase(num_tiers, in_flight)
    for in_flight in (0, IN_FLIGHT)
    for num_tiers in (0, 1, 3)
    if num_tiers or not in_flight
]

WHAT_IS_COMPARED = f"""
Processor time of the scheduler thread. vLLM's example tier moves no bytes: a store writes a name
into a dictionary and never removes one. kvtier's evicts, and copies and seals on its own thread,
here between two requests, untimed. Both are measured in turns, {BATCHES} times in each of {ROUNDS}
pairs of processes. Figures and ratios are medians; parentheses hold the lowest and the highest
median of a pair of processes. `harvest` is the first lookup of a step, which also collects finished
jobs of tiers; it counts as a block call of both. `first hit` and `first miss` are not part of the
life: a new request finds what another has stored, or misses for the first time."""

Costs = dict[str, float]
"""Nanoseconds per block, by phase or kind of lookup."""


def measure_in_turns(case: Case, workers: Sequence[Worker]) -> list[tuple[Costs, ...]]:
    for each in workers:
        each.ask({"begin": asdict(case)})
    batches = [tuple(each.ask({"batch": number}) for each in workers) for number in range(BATCHES)]
    for each in workers:
        each.ask({"end": 0})
    return batches


def run() -> None:
    python_with_vllm = vllm_python("tiering_cost")
    lives: dict[Case, list[list[tuple[Costs, ...]]]] = {}
    prefixes: dict[PrefixCase, list[dict[str, list[float]]]] = {}
    for _ in range(ROUNDS):
        with ExitStack() as processes:
            kvtier = processes.enter_context(
                worker(sys.executable, "tests.bench.tiered_life", "kvtier")
            )
            vllm = processes.enter_context(
                worker(python_with_vllm, "tests.bench.tiered_life", "vllm")
            )
            prefix = processes.enter_context(worker(sys.executable, "tests.bench.tiered_prefix"))
            for case in IDLE + BUSY:
                lives.setdefault(case, []).append(measure_in_turns(case, (kvtier, vllm)))
            for case in UNSETTLED:
                lives.setdefault(case, []).append(measure_in_turns(case, (kvtier,)))
            for prefix_case in PREFIX_CASES:
                prefixes.setdefault(prefix_case, []).append(prefix.ask(asdict(prefix_case)))
    print(WHAT_IS_COMPARED)
    result = {
        "lives": {str(case): compare(case, lives[case]) for case in IDLE + BUSY},
        "while_tiers_work": show_unsettled(lives),
        "lookup_prefix": show_prefixes(prefixes),
    }
    save("tiering_cost", result)


def compare(case: Case, rounds: list[list[tuple[Costs, ...]]]) -> dict[str, Any]:
    """Print what a case costs in both, with verdicts."""
    pairs = [pair for batches in rounds for pair in batches]
    ours, theirs = typical([pair[0] for pair in pairs]), typical([pair[1] for pair in pairs])
    rows = []
    ratios: dict[str, float] = {}
    spreads: dict[str, list[float]] = {}
    for what in (*LIFE, "all", FIRST_HIT, FIRST_MISS):
        our_phases = LIFE if what == "all" else (what,)
        their_phases = THEIR_CALLS if what == "all" else (what,)
        by_round = [
            median(sum_of(our_phases, our) / sum_of(their_phases, their) for our, their in batches)
            for batches in rounds
        ]
        ratios[what], spreads[what] = median(by_round), by_round
        rows.append(
            [
                "all / vLLM's block calls" if what == "all" else what,
                f"{sum_of(our_phases, ours):.0f}",
                f"{sum_of(their_phases, theirs):.0f}",
                f"{ratios[what]:.3f}",
                spread(by_round),
            ]
        )
    print_table(
        f"{case}: ns per block, 512 blocks a request, {case.slots:,} slots",
        ["phase", "kvtier", "vLLM", "ratio", "rounds"],
        rows,
    )
    print("  " + verdict(f"{case}: all", ratios["all"], MAX_TOTAL[case.policy]))
    for what, limit in MAX_BY_PHASE.items():
        print("  " + verdict(f"{case}: {what}", ratios[what], limit))
    return {"kvtier_ns": ours, "vllm_ns": theirs, "ratios": ratios, "ratios_by_round": spreads}


def show_unsettled(lives: dict[Case, list[list[tuple[Costs, ...]]]]) -> dict[str, Any]:
    """The same life while the tiers' threads work and compete for the interpreter."""
    result = {}
    rows = []
    for case in UNSETTLED:
        apart, together = (
            median(sum_of(LIFE, batch[0]) for batches in lives[which] for batch in batches)
            for which in (replace(case, settle=True), case)
        )
        result[str(case)] = {"apart_ns": apart, "together_ns": together}
        rows.append([str(case), f"{apart:.0f}", f"{together:.0f}"])
    print_table(
        "For information: a life in kvtier while the tiers' threads copy and seal rows of 4 KiB,\n"
        "in ns per block by the clock on the wall. What threads cannot keep up with is not stored.",
        ["", "timed apart", "at the same time"],
        rows,
    )
    return result


def show_prefixes(prefixes: dict[PrefixCase, list[dict[str, list[float]]]]) -> dict[str, Any]:
    """One `lookup_prefix`, beside the same number of calls of `lookup`."""
    result: dict[str, Any] = {}
    rows = []
    verdicts = []
    for case, rounds in prefixes.items():
        for where in rounds[0]:
            name = f"{case}: {where}"
            one_by_one, at_once = (median(round_[where][i] for round_ in rounds) for i in (0, 1))
            by_round = [round_[where][2] for round_ in rounds]
            ratio = median(by_round)
            result[name] = {"lookup_ns": one_by_one, "prefix_ns": at_once, "ratios": by_round}
            rows.append(
                [name, f"{one_by_one:.0f}", f"{at_once:.0f}", f"{ratio:.3f}", spread(by_round)]
            )
            verdicts.append(verdict(f"lookup_prefix, {name}", ratio, MAX_PREFIX))
    print_table(
        f"One lookup_prefix over {PREFIX:,} keys against as many lookups, by a new request: in ns",
        ["where the blocks are", "lookup", "lookup_prefix", "ratio", "rounds"],
        rows,
    )
    for line in verdicts:
        print("  " + line)
    return result


def typical(costs: list[Costs]) -> Costs:
    return {what: median(cost[what] for cost in costs) for what in costs[0]}


def sum_of(phases: Sequence[str], cost: Costs) -> float:
    return sum(cost[phase] for phase in phases)


def spread(ratios: Sequence[float]) -> str:
    return f"({min(ratios):.3f} to {max(ratios):.3f})"


if __name__ == "__main__":
    run_alone(run, __doc__)
