"""What events cost: for each block on the scheduler's thread, and for each block that the disk tier
stores with a description, on its own thread."""

from __future__ import annotations

import os
import time
from array import array
from collections.abc import Callable
from statistics import median

from kvtier.base import Medium, OffloadingEvent, make_offload_key
from kvtier.connector.descriptions import DescribedRun, DescriptionBook
from kvtier.connector.events import EventStream
from kvtier.seal import SEAL_BYTES
from kvtier.tiering.disk.layout import encode_stamp, write_slot_header
from kvtier.tiering.io.page import PAGE_BYTES
from tests.bench.report import print_table, run_alone, save, verdict

BLOCKS, TOKENS = 512, 16
ROUNDS, TIMES = 15, 20
MAX_NS = {"describe": 500, "stored": 500, "removed": 500}
"""Limits for the scheduler's thread."""


def nanoseconds(call: Callable[[], object]) -> list[float]:
    """Nanoseconds per block, one figure for each round. `call` is about all blocks."""
    spent = []
    for _ in range(ROUNDS):
        start = time.perf_counter_ns()
        for _ in range(TIMES):
            call()
        spent.append((time.perf_counter_ns() - start) / TIMES / BLOCKS)
    return spent


def measure() -> dict[str, list[float]]:
    """Nanoseconds per block of each operation."""
    keys = [make_offload_key(os.urandom(32), 0) for _ in range(BLOCKS)]
    hashes = [key[:-4] for key in keys]
    tokens = list(range(BLOCKS * TOKENS))
    book = DescriptionBook()
    stream = EventStream(book, names_tiers=False, keeps_residences=False)
    stored = [OffloadingEvent(keys, Medium.CPU, removed=False)]
    removed = [OffloadingEvent(keys, Medium.CPU, removed=True)]
    page = memoryview(bytearray(PAGE_BYTES))
    block_seal, stamp = bytes(SEAL_BYTES), encode_stamp(bytes(16), 1, 2)

    def describe() -> None:
        run = DescribedRun(array("I", tokens[:]), hashes[:], None, 1, TOKENS, "full_attention")
        book.add(keys, run)

    def with_description() -> None:
        for key in keys:
            write_slot_header(page, block_seal, stamp, book.describe(key))

    def without() -> None:
        for _ in keys:
            write_slot_header(page, block_seal, stamp)

    return {
        "describe": nanoseconds(describe),
        "stored": nanoseconds(lambda: list(stream.read(stored))),
        "removed": nanoseconds(lambda: list(stream.read(removed))),
        "header with description": nanoseconds(with_description),
        "header without": nanoseconds(without),
    }


def run() -> None:
    spent = measure()
    rows = [(what, f"{median(ns):.0f}", f"{min(ns):.0f}") for what, ns in spent.items()]
    print_table(
        f"Events: ns per block of {TOKENS} tokens, prompts of {BLOCKS} blocks",
        ("operation", "median", "least"),
        rows,
    )
    for what, limit in MAX_NS.items():
        print(
            verdict(f"{what}, ns of the scheduler's thread per block", median(spent[what]), limit)
        )
    save("event_cost", {what: median(ns) for what, ns in spent.items()})


if __name__ == "__main__":
    run_alone(run, __doc__)
