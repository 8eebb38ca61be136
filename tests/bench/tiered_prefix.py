"""Cost of one `lookup_prefix` over a long prompt, beside the same number of calls of `lookup`.

Run as a module it answers each `PrefixCase` on standard input with one JSON document on standard
output.
"""

from __future__ import annotations

import gc
import json
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median

from kvtier.base import OffloadKey, ReqContext, ScheduleEndContext, make_offload_key
from kvtier.tiering.manager import TieringOffloadingManager
from tests.bench.tiered_life import begin_transfers
from tests.bench.tiered_subjects import Case, Tiered, kvtier_tiered

PREFIX = 2048
REPEATS = 25
SLOTS = 60_000
ROW_BYTES = 64

WHERE = ("all above", "all below", "head above, rest below", "in turns")
"""Places of the keys: in the primary tier, or only in the last tier below."""


@dataclass(frozen=True)
class PrefixCase:
    """What to measure."""

    num_tiers: int
    in_flight: int = 0

    def __str__(self) -> str:
        return str(Case("lru", self.num_tiers, self.in_flight)).removeprefix("lru, ")


def keys_of(prompt: int) -> list[OffloadKey]:
    """Keys that are equal but new objects at every call, as an engine makes them."""
    return [
        make_offload_key(prompt.to_bytes(8, "little") * 3 + block.to_bytes(8, "big"), 0)
        for block in range(PREFIX)
    ]


def split(where: str, keys: list[OffloadKey]) -> tuple[list[OffloadKey], list[OffloadKey]]:
    """The keys to place in the primary tier, and those to place below."""
    if where == "all above":
        return keys, []
    if where == "all below":
        return [], keys
    if where == "in turns":
        return keys[::2], keys[1::2]
    half = len(keys) // 2
    return keys[:half], keys[half:]


Figures = tuple[float, float, float]
"""Nanoseconds per key for single lookups and for one call, and the median ratio of both, timed in
turns."""


def answer(case: PrefixCase) -> dict[str, Figures]:
    """Measurements by place of the keys."""
    tiered = kvtier_tiered(
        Case("lru", case.num_tiers, slots=SLOTS, row_bytes=ROW_BYTES), max_blocks=SLOTS
    )
    manager: TieringOffloadingManager = tiered.subject.manager
    try:
        return time_all(case, tiered)
    finally:
        manager.shutdown()


def time_all(case: PrefixCase, tiered: Tiered) -> dict[str, Figures]:
    manager: TieringOffloadingManager = tiered.subject.manager
    tiered.withhold(True)
    begin_transfers(tiered.subject, case.in_flight)
    tiered.withhold(False)
    prompts = {
        where: prompt
        for prompt, where in enumerate(WHERE)
        if case.num_tiers or where == "all above"
    }
    for where, prompt in prompts.items():
        above, below = split(where, keys_of(prompt))
        store(manager, above)
        tiered.subject.settle()
        manager.on_schedule_end(ScheduleEndContext())
        if below:
            tiered.tiers[-1].keep(below)
    gc.collect()
    gc.freeze()
    figures = {}
    for where, prompt in prompts.items():
        spent: list[tuple[float, float]] = [
            (
                time_as_new_request(manager, prompt, ask_one_by_one),
                time_as_new_request(manager, prompt, ask_at_once),
            )
            for _ in range(REPEATS)
        ]
        one_by_one, at_once = zip(*spent, strict=True)
        ratio = median(batch / singles for singles, batch in spent)
        figures[where] = median(one_by_one), median(at_once), ratio
    return figures


def store(manager: TieringOffloadingManager, keys: list[OffloadKey]) -> None:
    context = ReqContext("store")
    manager.on_new_request(context)
    output = manager.prepare_store(keys, context)
    assert output is not None
    assert output.keys_to_store == keys, "the benchmark's own assumption: every block is stored"
    manager.complete_store(keys, context)
    manager.on_request_finished(context)
    manager.on_schedule_end(ScheduleEndContext())


def ask_one_by_one(
    manager: TieringOffloadingManager, keys: list[OffloadKey], context: ReqContext
) -> None:
    lookup = manager.lookup
    for key in keys:
        lookup(key, context)


def ask_at_once(
    manager: TieringOffloadingManager, keys: list[OffloadKey], context: ReqContext
) -> None:
    assert manager.lookup_prefix(keys, context).num_hits == PREFIX


def time_as_new_request(
    manager: TieringOffloadingManager,
    prompt: int,
    ask: Callable[[TieringOffloadingManager, list[OffloadKey], ReqContext], None],
) -> float:
    """Nanoseconds per key of a request that asks once and ends before anything is promoted for
    it."""
    context = ReqContext("ask")
    keys = keys_of(prompt)
    manager.on_new_request(context)
    start = time.thread_time_ns()
    ask(manager, keys, context)
    spent = time.thread_time_ns() - start
    manager.on_request_finished(context)
    manager.on_schedule_end(ScheduleEndContext())
    return spent / PREFIX


def main() -> None:
    for line in sys.stdin:
        print(json.dumps(answer(PrefixCase(**json.loads(line)))), flush=True)
        gc.unfreeze()
        gc.collect()


if __name__ == "__main__":
    main()
