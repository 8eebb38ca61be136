"""What the tiering manager costs with more blocks above, and after more requests."""

from __future__ import annotations

import argparse
import gc
import json
import logging
import subprocess
import sys
from dataclasses import replace
from statistics import median
from types import BuiltinFunctionType, FunctionType, ModuleType
from typing import Any

from tests.bench import scale
from tests.bench.report import print_table, save, verdict
from tests.bench.request_life import Subject, do_nothing, live, measure
from tests.bench.tiered_life import BLOCKS, FIRST_IN_FLIGHT
from tests.bench.tiered_subjects import Case, kvtier_tiered

SIZES = (20_000, 200_000, 1_000_000)
"""Blocks in the primary tier, which is full. The tier below keeps 20,000."""
FINISHED = (0, 10_000, 100_000)
"""Requests that have come and gone."""
ROW_BYTES = 64
REQUESTS = 60
ROUNDS = 3
SMALL = 4
"""Blocks of a request that only comes and goes."""
MAX_GROWTH = scale.MAX_GROWTH
MAX_GROWTH_WITH_AGE = 1.2
MAX_BYTES_PER_REQUEST = 1.0


def subject_with(policy: str, slots: int) -> Subject:
    return kvtier_tiered(Case(policy, num_tiers=1, slots=slots, row_bytes=ROW_BYTES)).subject


def time_by_size(policy: str, size: int) -> float:
    """Nanoseconds per block of a request's whole life."""
    subject = subject_with(policy, size)
    cost = measure(subject, size, BLOCKS, REQUESTS)
    subject.manager.shutdown()
    return sum(cost.values())


def time_and_memory_by_age(policy: str) -> dict[str, list[float]]:
    """For each of `FINISHED`: nanoseconds per block of a life, and bytes of all tables."""
    slots = SIZES[0]
    subject = subject_with(policy, slots)
    figures: dict[str, list[float]] = {"ns": [], "bytes": []}
    num_finished = 0
    for target in FINISHED:
        come_and_go(subject, num_finished, target)
        num_finished = target
        figures["bytes"].append(reachable_bytes(subject.manager))
        figures["ns"].append(time_of_lives(subject, first=FIRST_IN_FLIGHT + target * BLOCKS))
    subject.manager.shutdown()
    return figures


def come_and_go(subject: Subject, first: int, end: int) -> None:
    """Requests `first` to `end` live their lives, a handful at a time."""
    hasty = replace(subject, settle=do_nothing)
    scratch = dict.fromkeys(subject.phases, 0)
    for request in range(first, end):
        live(hasty, request, SMALL, scratch)
        if request % 64 == 0:
            subject.settle()
    subject.settle()


def time_of_lives(subject: Subject, first: int) -> float:
    """Nanoseconds per block of a request's whole life, with the cache full of such requests."""
    num_to_fill = SIZES[0] // BLOCKS + 1
    totals = []
    for request in range(first, first + num_to_fill + REQUESTS):
        spent = dict.fromkeys(subject.phases, 0)
        live(subject, request, BLOCKS, spent)
        totals.append(sum(spent.values()) / BLOCKS)
    return median(totals[num_to_fill:])


_OF_THE_PROGRAM = (type, ModuleType, FunctionType, BuiltinFunctionType, logging.Logger)


def reachable_bytes(root: object) -> int:
    """Of everything that `root` leads to, but for code."""
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
    result: dict[str, Any] = {}
    rows = []
    for what in ("lru", "arc", "OrderedDict"):
        times = [
            scale.measured_apart("time", what, size)
            if what == "OrderedDict"
            else measured_apart("size", what, size)
            for size in SIZES
        ]
        growth = times[-1] / times[0]
        rows.append([what, *(f"{value:.0f}" for value in times), f"{growth:.2f}"])
        result[what] = {"ns_per_block": dict(zip(SIZES, times, strict=True)), "growth": growth}
    print_table(
        "Tiering, scale: ns per block and request life with one tier, by resident blocks",
        ["", *(f"{size:,}" for size in SIZES), "growth"],
        rows,
    )
    bare = result["OrderedDict"]["growth"]
    for policy in ("lru", "arc"):
        growth = result[policy]["growth"]
        print("  " + verdict(f"{policy}, growth with blocks", growth, MAX_GROWTH))
        print("  " + verdict(f"{policy}, growth against a bare OrderedDict's", growth, bare))
    return result


def show_by_age() -> dict[str, Any]:
    result: dict[str, Any] = {}
    rows = []
    for policy in ("lru", "arc"):
        rounds = [measured_apart("age", policy, 0) for _ in range(ROUNDS)]
        times = [min(figures) for figures in zip(*(r["ns"] for r in rounds), strict=True)]
        sizes = [min(figures) for figures in zip(*(r["bytes"] for r in rounds), strict=True)]
        growth = max(times) / times[0]
        per_request = (sizes[-1] - sizes[-2]) / (FINISHED[-1] - FINISHED[-2])
        rows.append([policy, *(f"{ns:.0f}" for ns in times), f"{growth:.2f}", f"{per_request:.2f}"])
        result[policy] = {"ns_per_block": times, "table_bytes": sizes, "rounds": rounds} | {
            "growth": growth,
            "bytes_per_request": per_request,
        }
    print_table(
        "Tiering, age: ns per block and request life with one tier, by finished requests",
        ["", *(f"{n:,}" for n in FINISHED), "growth", "bytes per finished request"],
        rows,
    )
    for policy, figures in result.items():
        growth, per_request = figures["growth"], figures["bytes_per_request"]
        print("  " + verdict(f"{policy}, growth with age", growth, MAX_GROWTH_WITH_AGE))
        print("  " + verdict(f"{policy}, bytes with age", per_request, MAX_BYTES_PER_REQUEST))
    return result


def measured_apart(what: str, policy: str, size: int) -> Any:
    """From a fresh process, so that no other measurement has left its traces."""
    command = [sys.executable, "-m", "tests.bench.tiering_scale", what, policy, str(size)]
    output = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, timeout=900)
    return json.loads(output.stdout)


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure one policy; print figures as JSON.")
    parser.add_argument("what", choices=["size", "age"])
    parser.add_argument("policy", choices=["lru", "arc"])
    parser.add_argument("size", type=int)
    arguments = parser.parse_args()
    if arguments.what == "age":
        print(json.dumps(time_and_memory_by_age(arguments.policy)))
    else:
        print(json.dumps(time_by_size(arguments.policy, arguments.size)))


if __name__ == "__main__":
    main()
