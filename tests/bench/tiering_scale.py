"""Cost of the tiering manager with more blocks, and after more requests."""

from __future__ import annotations

import argparse
import gc
import json
import logging
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from itertools import count, islice
from statistics import median
from types import BuiltinFunctionType, FunctionType, ModuleType
from typing import Any

from tests.bench import scale
from tests.bench.report import print_table, run_alone, save, verdict
from tests.bench.request_life import Subject, do_nothing, live
from tests.bench.tiered_life import BLOCKS, FIRST_IN_FLIGHT
from tests.bench.tiered_subjects import Case, kvtier_tiered

SIZES = (20_000, 200_000, 1_000_000)
"""Blocks in the full primary tier. The tier below keeps 20,000."""
AGES = (10_000, 100_000)
"""Finished requests."""
ROW_BYTES = 64
REQUESTS = 40
SMALL = 4
"""Blocks of a request that only ages the manager."""
MAX_GROWTH_WITH_AGE = 1.2
MAX_BYTES_PER_REQUEST = 1.0


_numbers = count(FIRST_IN_FLIGHT)
"""Numbers of requests, each used once."""


def subject_with(policy: str, slots: int) -> Subject:
    return kvtier_tiered(Case(policy, num_tiers=1, slots=slots, row_bytes=ROW_BYTES)).subject


def times_by_size(policy: str) -> list[float]:
    """Nanoseconds per block of a request's whole life, for each of `SIZES`."""
    subjects = [subject_with(policy, size) for size in SIZES]
    for subject, size in zip(subjects, SIZES, strict=True):
        fill(subject, size)
    gc.collect()
    gc.freeze()
    times = times_in_turns(subjects)
    for subject in subjects:
        subject.manager.shutdown()
    return times


def fill(subject: Subject, size: int) -> None:
    scratch = dict.fromkeys(subject.phases, 0)
    for _ in range(size // BLOCKS + 1):
        live(subject, next(_numbers), BLOCKS, scratch)


def time_and_memory_by_age(policy: str) -> dict[str, list[float]]:
    """For each of `AGES`: nanoseconds per block of a life in an old and in a new manager, measured
    in turns, and bytes of all tables."""
    new, old = (subject_with(policy, SIZES[0]) for _ in range(2))
    figures: dict[str, list[float]] = {"new_ns": [], "old_ns": [], "old_bytes": []}
    age = 0
    for target in AGES:
        come_and_go(old, age, target)
        age = target
        figures["old_bytes"].append(reachable_bytes(old.manager))
        fill(new, SIZES[0])
        fill(old, SIZES[0])
        times = times_in_turns((new, old))
        figures["new_ns"].append(times[0])
        figures["old_ns"].append(times[1])
    new.manager.shutdown()
    old.manager.shutdown()
    return figures


def come_and_go(subject: Subject, first: int, end: int) -> None:
    """Run requests `first` to `end`, a few blocks each."""
    hasty = replace(subject, settle=do_nothing)
    scratch = dict.fromkeys(subject.phases, 0)
    for request in range(first, end):
        live(hasty, request, SMALL, scratch)
        if request % 64 == 0:
            subject.settle()
    subject.settle()
    subject.manager.on_schedule_end(subject.schedule_end)


def times_in_turns(subjects: Sequence[Subject]) -> list[float]:
    """Nanoseconds per block of a request's whole life in each of the full managers."""
    totals: list[list[float]] = [[] for _ in subjects]
    for request in islice(_numbers, REQUESTS):
        for subject, its_totals in zip(subjects, totals, strict=True):
            spent = dict.fromkeys(subject.phases, 0)
            live(subject, request, BLOCKS, spent)
            its_totals.append(sum(spent.values()) / BLOCKS)
    return [median(its_totals) for its_totals in totals]


_OF_THE_PROGRAM = (type, ModuleType, FunctionType, BuiltinFunctionType, logging.Logger)


def reachable_bytes(root: object) -> int:
    """Bytes of all objects reachable from `root`, except code."""
    gc.collect()
    seen: dict[int, object] = {id(root): root}
    unvisited = [root]
    total = 0
    while unvisited:
        thing = unvisited.pop()
        total += sys.getsizeof(thing)
        for other in gc.get_referents(thing):
            if id(other) not in seen and not isinstance(other, _OF_THE_PROGRAM):
                seen[id(other)] = other
                unvisited.append(other)
    return total


def run() -> None:
    save("tiering_scale", {"by_size": show_by_size(), "by_age": show_by_age()})


def show_by_size() -> dict[str, Any]:
    times: dict[str, list[float]] = {what: measured_apart("size", what) for what in ("lru", "arc")}
    times["OrderedDict"] = [scale.measured_apart("time", "OrderedDict", size) for size in SIZES]
    return scale.show_growth(
        "Tiering, scale: ns per block and request life with one tier, by resident blocks",
        "growth with blocks",
        SIZES,
        times,
    )


def show_by_age() -> dict[str, Any]:
    result: dict[str, Any] = {}
    rows = []
    for policy in ("lru", "arc"):
        measured = measured_apart("age", policy)
        growths = [
            old / new for old, new in zip(measured["old_ns"], measured["new_ns"], strict=True)
        ]
        sizes = measured["old_bytes"]
        per_request = (sizes[-1] - sizes[0]) / (AGES[-1] - AGES[0])
        rows.append([policy, *(f"{growth:.2f}" for growth in growths), f"{per_request:.2f}"])
        result[policy] = measured | {"growth": growths, "bytes_per_request": per_request}
    print_table(
        "Tiering, age: cost of a request life against that in a new manager, by finished requests",
        ["", *(f"{age:,}" for age in AGES), "bytes per finished request"],
        rows,
    )
    for policy, figures in result.items():
        growth, per_request = figures["growth"][-1], figures["bytes_per_request"]
        print("  " + verdict(f"{policy}, growth with age", growth, MAX_GROWTH_WITH_AGE))
        print("  " + verdict(f"{policy}, bytes with age", per_request, MAX_BYTES_PER_REQUEST))
    return result


def measured_apart(what: str, policy: str) -> Any:
    """Measure in a new process, so that no other measurement has an effect."""
    command = [sys.executable, "-m", "tests.bench.tiering_scale", what, policy]
    output = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, timeout=900)
    return json.loads(output.stdout)


MEASUREMENTS = {"size": times_by_size, "age": time_and_memory_by_age}


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure one policy; print figures as JSON.")
    parser.add_argument("what", choices=sorted(MEASUREMENTS))
    parser.add_argument("policy", choices=["lru", "arc"])
    arguments = parser.parse_args()
    print(json.dumps(MEASUREMENTS[arguments.what](arguments.policy)))


if __name__ == "__main__":
    if len(sys.argv) > 1:  # a child process that measures one figure
        main()
    else:
        run_alone(run, __doc__)
