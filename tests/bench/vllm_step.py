"""Time inside the manager per engine step of stock vLLM: kvtier's beside vLLM's own, in one run."""

from __future__ import annotations

import time
from collections.abc import Sequence
from itertools import chain
from statistics import fmean, median, quantiles
from typing import Any

from tests.bench.report import missed, print_table, run_alone, save, scratch_directory, verdict
from tests.bench.vllm_step_rounds import CHATS, EXAMPLE, FS, KVTIER, MAX_RUNNING, SLOTS, VLLM
from tests.bench.worker import Worker, vllm_python, worker

ROUNDS = 2
"""Rounds for each clock. Engines of both kinds take turns, and the first one alternates."""
SUBJECTS = (KVTIER, VLLM)
PROCESSOR, WALL = "processor", "wall"
MAX_RATIO = 0.25
MAX_HIT_DIFFERENCE = 0.02

WHAT_IS_COMPARED = f"""
One process, stock vLLM 0.32 on its CPU platform with a model of one small layer. Engines of both
kinds take turns, {ROUNDS} for each clock, all with empty tiers. A tier holds all blocks.
  kvtier   KVTierConnector; the load-or-recompute guard is off, since it would load less here
  vLLM     its OffloadingConnector, tiering manager and tiers, with kvtier's worker, since vLLM's
           needs CUDA; `example` keeps bytes, as kvtier's does, and that time is not counted
{CHATS.num_chats} chats of {CHATS.num_turns} turns, prompts of \
{CHATS.common_blocks + CHATS.turn_blocks} to {CHATS.longest_blocks - 1} blocks of 32 tokens, \
{CHATS.distinct_blocks:,} blocks in all, {SLOTS:,} of them
in host memory; {MAX_RUNNING} requests run at a time. All calls that vLLM's scheduler makes to the \
manager
count, in processor time of the scheduler's thread and in wall time, without the stopwatch's own
time. Wall time also includes a busy machine and waits for tiers' threads. Only steps that compute
something count: the number of steps that wait for a tier depends on the machine, and no request
waits for them."""

Round = dict[str, Any]
"""Measurements of one engine; see `vllm_step_rounds`."""


def run() -> None:
    print(WHAT_IS_COMPARED, flush=True)
    with (
        scratch_directory() as scratch,
        worker(vllm_python("vllm_step"), "tests.bench.vllm_step_rounds", str(scratch)) as process,
    ):
        results = {tier: measure(process, tier) for tier in (EXAMPLE, FS)}
    require_same_tokens(results)
    save("vllm_step", {tier: compare(tier, rounds) for tier, rounds in results.items()})


def measure(process: Worker, tier: str) -> dict[str, dict[str, list[Round]]]:
    """Rounds by clock and subject."""
    rounds: dict[str, dict[str, list[Round]]] = {
        clock: {subject: [] for subject in SUBJECTS} for clock in (PROCESSOR, WALL)
    }
    for number in range(ROUNDS):
        for clock, by_subject in rounds.items():
            for subject in SUBJECTS if number % 2 == 0 else SUBJECTS[::-1]:
                began = time.monotonic()
                measured = process.ask({"run": {"subject": subject, "tier": tier, "clock": clock}})
                by_subject[subject].append(measured)
                steps, waiting = len(measured["steps"]), len(measured["waiting_steps"])
                print(
                    f"  {tier}, round {number + 1} of {ROUNDS}, {clock} time, {subject}: "
                    f"{steps} steps, {waiting} that waited, {time.monotonic() - began:.0f} s",
                    flush=True,
                )
    return rounds


def require_same_tokens(results: dict[str, Any]) -> None:
    """Record a failure if engines gave different tokens: then they did different work, or one was
    wrong."""
    answers = [
        measured["tokens"]
        for rounds in results.values()
        for by_subject in rounds.values()
        for measured in chain(*by_subject.values())
    ]
    different = sum(answer != answers[0] for answer in answers)
    if different:
        missed.append(f"vllm_step: {different} of {len(answers)} engines gave different tokens")
    print(f"\n  tokens: {'NOT ALL THE SAME' if different else 'identical in all engines'}")


def compare(tier: str, rounds: dict[str, dict[str, list[Round]]]) -> dict[str, Any]:
    """Print what a step costs in both, with verdicts."""
    by_clock = {clock: show_steps(tier, clock, both) for clock, both in rounds.items()}
    kinds = show_kinds(tier, rounds[PROCESSOR])
    hits = show_hits(tier, rounds)
    connector = show_connector(rounds[PROCESSOR][KVTIER])
    return {"steps": by_clock, "kinds": kinds, "hits": hits, "connector": connector}


def show_steps(tier: str, clock: str, both: dict[str, list[Round]]) -> dict[str, Any]:
    figures = {subject: step_figures(both[subject]) for subject in SUBJECTS}
    ours, theirs = figures[KVTIER], figures[VLLM]
    ratios = {what: ours[what] / theirs[what] for what in ours}
    by_round = [
        step_figures([our])["mean"] / step_figures([their])["mean"]
        for our, their in zip(both[KVTIER], both[VLLM], strict=True)
    ]
    print_table(
        f"{tier}, {clock} time: microseconds in the manager per engine step",
        ["", "kvtier", "vLLM", "ratio"],
        [
            [what, f"{ours[what] / 1e3:.1f}", f"{theirs[what] / 1e3:.1f}", f"{ratios[what]:.3f}"]
            for what in ours
        ],
    )
    for subject in SUBJECTS:
        print("  " + waiting_in_words(subject, both[subject]))
    spread = ", ".join(f"{ratio:.3f}" for ratio in by_round)
    print(f"  ratios of the means, by round: {spread}")
    if clock == PROCESSOR:
        print("  " + verdict(f"vllm_step, {tier}: mean per step", ratios["mean"], MAX_RATIO))
        print("  " + verdict(f"vllm_step, {tier}: median per step", ratios["median"], MAX_RATIO))
    return {"ns": figures, "ratios": ratios, "ratios_of_means_by_round": by_round}


def waiting_in_words(subject: str, rounds: Sequence[Round]) -> str:
    waiting = [ns for measured in rounds for _, ns in measured["waiting_steps"]]
    mean = fmean(waiting) / 1e3 if waiting else 0.0
    return (
        f"not counted: {len(waiting)} steps of {subject} that only waited, {mean:.1f} microseconds"
        " in the manager each"
    )


def step_figures(rounds: Sequence[Round]) -> dict[str, float]:
    """Nanoseconds in the manager per step over all rounds; for comparison, of whole steps."""
    in_manager = [ns for measured in rounds for _, ns in measured["steps"]]
    return {
        "mean": fmean(in_manager),
        "median": median(in_manager),
        "p99": quantiles(in_manager, n=100)[98],
        "whole step, median": median(ns for measured in rounds for ns, _ in measured["steps"]),
    }


def show_kinds(tier: str, both: dict[str, list[Round]]) -> dict[str, Any]:
    """Cost by kind of call; a lookup is one block."""
    kinds = {subject: sum_of_kinds(both[subject]) for subject in SUBJECTS}
    rows = []
    for name in kinds[VLLM]:
        ours, theirs = kinds[KVTIER][name], kinds[VLLM][name]
        each = [kind["ns"] / kind["calls"] if kind["calls"] else 0.0 for kind in (ours, theirs)]
        rows.append(
            [
                "lookup, one block" if name == "lookup" else name,
                f"{ours['calls']:.0f}",
                f"{theirs['calls']:.0f}",
                f"{each[0] / 1e3:.2f}",
                f"{each[1] / 1e3:.2f}",
                f"{ours['ns'] / theirs['ns']:.2f}" if theirs["ns"] else "-",
                f"{ours['ns'] / sum(kind['ns'] for kind in kinds[KVTIER].values()):.0%}",
            ]
        )
    print_table(
        f"{tier}, processor time by kind of call, microseconds",
        ["", "calls", "vLLM's", "each", "vLLM's", "all, ratio", "of kvtier's"],
        rows,
    )
    return kinds


def sum_of_kinds(rounds: Sequence[Round]) -> dict[str, dict[str, float]]:
    kinds: dict[str, dict[str, float]] = {}
    for measured in rounds:
        for name, kind in measured["kinds"].items():
            total = kinds.setdefault(name, {"calls": 0, "ns": 0.0})
            total["calls"] += kind["calls"] / len(rounds)
            total["ns"] += kind["ns"] / len(rounds)
    return kinds


def show_hits(tier: str, rounds: dict[str, dict[str, list[Round]]]) -> dict[str, Any]:
    """Both must find about as many tokens: one that finds fewer has less work."""
    everyone = {
        subject: [measured for both in rounds.values() for measured in both[subject]]
        for subject in SUBJECTS
    }
    hits = {
        subject: {
            what: fmean(measured[what] for measured in everyone[subject])
            for what in ("cached_tokens", "loaded_tokens", "promoted_blocks")
        }
        for subject in SUBJECTS
    }
    print_table(
        f"{tier}: hits, of {everyone[KVTIER][0]['prompt_tokens']:,} prompt tokens",
        ["", "kvtier", "vLLM"],
        [
            [what.replace("_", " "), *(f"{hits[subject][what]:,.0f}" for subject in SUBJECTS)]
            for what in hits[KVTIER]
        ],
    )
    ours, theirs = (hits[subject]["cached_tokens"] for subject in SUBJECTS)
    difference = abs(ours - theirs) / theirs
    print("  " + verdict(f"vllm_step, {tier}: difference of hits", difference, MAX_HIT_DIFFERENCE))
    return hits


def show_connector(rounds: Sequence[Round]) -> dict[str, float]:
    """Cost of `KVTierConnector` outside the manager, on the scheduler's side and the worker's."""
    num_steps = sum(len(measured["steps"]) for measured in rounds)
    added: dict[str, float] = {}
    for measured in rounds:
        for name, kind in measured["connector"].items():
            added[name] = added.get(name, 0.0) + kind["ns"] / num_steps
    each = ", ".join(f"{name} {ns / 1e3:.1f}" for name, ns in added.items())
    print(
        f"  beside the manager, KVTierConnector adds {sum(added.values()) / 1e3:.1f} microseconds "
        f"to a step: {each}"
    )
    return added


if __name__ == "__main__":
    run_alone(run, __doc__)
