"""Cost of a larger tier: time and memory per block, with up to a million blocks."""

from __future__ import annotations

import argparse
import gc
import json
import subprocess
import sys
import time
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from tests.arguments import whole_number
from tests.bench.report import print_table, run_alone, save, verdict
from tests.bench.request_life import PHASES, kvtier_subject, live, measure

SIZES = (10_000, 100_000, 1_000_000)
BLOCKS = 512
REQUESTS = 60
MAX_GROWTH = 3.0
MAX_BYTES = 400


def resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * 4096


def time_per_block(policy: str, size: int) -> float:
    """Nanoseconds of a request's whole life."""
    cost = measure(kvtier_subject(policy, size), size, BLOCKS, REQUESTS)
    return sum(cost.values())


def ordered_dict_time(size: int) -> float:
    """Nanoseconds per key of the operations that every cache in Python needs: find, move, swap."""
    keys = [i.to_bytes(8, "big") * 4 for i in range(size)]
    order: OrderedDict[bytes, object] = OrderedDict.fromkeys(keys, None)
    spent = []
    for request in range(REQUESTS):
        start_key = (request * BLOCKS * 7919) % (size - BLOCKS)
        # Equal keys that are new objects, as an engine makes them.
        asked = [bytes(bytearray(key)) for key in keys[start_key : start_key + BLOCKS]]
        new = [(size + request * BLOCKS + i).to_bytes(8, "big") * 4 for i in range(BLOCKS)]
        start = time.perf_counter_ns()
        for key in asked:
            if key in order:
                order.move_to_end(key)
        for key in new:
            order.popitem(last=False)
            order[key] = None
        spent.append((time.perf_counter_ns() - start) / BLOCKS)
        keys[request * BLOCKS : (request + 1) * BLOCKS] = new
    return median(spent)


def bytes_per_block(policy: str, size: int) -> float:
    """Memory of a full tier without its keys, and for ARC without the evicted keys that it
    remembers."""
    subject = kvtier_subject(policy, size)
    scratch = dict.fromkeys(PHASES, 0)
    gc.collect()
    before = resident_bytes()
    for request in range(size // BLOCKS * 2):
        live(subject, request, BLOCKS, scratch)
    gc.collect()
    grown = resident_bytes() - before
    num_keys = len(subject.manager.slots.policy.blocks) + sum(
        len(getattr(subject.manager.slots.policy, ghosts, ())) for ghosts in ("b1", "b2")
    )
    key_bytes = sys.getsizeof(b"x" * 36)
    return (grown - num_keys * key_bytes) / len(subject.manager.slots.policy.blocks)


def run() -> None:
    result = show_growth(
        "Scale: ns per block and request life, by number of resident blocks",
        "growth",
        SIZES,
        {
            what: [measured_apart("time", what, size) for size in SIZES]
            for what in ("lru", "arc", "OrderedDict")
        },
    )
    rows = []
    for policy in ("lru", "arc"):
        size = measured_apart("memory", policy, SIZES[-1])
        result[policy]["bytes_per_block"] = size
        rows.append([policy, f"{size:.0f}"])
    print_table("Memory: bytes per resident block beyond its key", ["", "bytes"], rows)
    for policy in ("lru", "arc"):
        print("  " + verdict(f"{policy}, bytes", result[policy]["bytes_per_block"], MAX_BYTES))
    save("scale", result)


def show_growth(
    title: str, what: str, sizes: Sequence[int], times: Mapping[str, Sequence[float]]
) -> dict[str, Any]:
    """How the time of each policy grows with the size, beside that of a bare OrderedDict."""
    result: dict[str, Any] = {}
    rows = []
    for name, its in times.items():
        growth = its[-1] / its[0]
        rows.append([name, *(f"{value:.0f}" for value in its), f"{growth:.2f}"])
        result[name] = {"ns_per_block": dict(zip(sizes, its, strict=True)), "growth": growth}
    print_table(title, ["", *(f"{size:,}" for size in sizes), "growth"], rows)
    bare = result["OrderedDict"]["growth"]
    for policy in ("lru", "arc"):
        growth = result[policy]["growth"]
        print("  " + verdict(f"{policy}, {what}", growth, MAX_GROWTH))
        print("  " + verdict(f"{policy}, growth against a bare OrderedDict's", growth, bare))
    return result


def measured_apart(what: str, subject: str, size: int) -> float:
    """One figure from a new process, so that no other measurement has an effect."""
    command = [sys.executable, "-m", "tests.bench.scale", what, subject, str(size)]
    output = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, timeout=900)
    return float(json.loads(output.stdout))


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure one figure; print it as JSON.")
    parser.add_argument("what", choices=["time", "memory"])
    parser.add_argument("subject", choices=["lru", "arc", "OrderedDict"])
    parser.add_argument("size", type=whole_number)
    arguments = parser.parse_args()
    if arguments.what == "memory":
        figure = bytes_per_block(arguments.subject, arguments.size)
    elif arguments.subject == "OrderedDict":
        figure = ordered_dict_time(arguments.size)
    else:
        figure = time_per_block(arguments.subject, arguments.size)
    print(json.dumps(figure))


if __name__ == "__main__":
    if len(sys.argv) > 1:  # a child process that measures one figure
        main()
    else:
        run_alone(run, __doc__)
