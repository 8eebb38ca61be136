"""Cost of one request's whole life on the scheduler thread, per block and per phase.

Run as a script it measures one primary tier and prints one JSON document; for tiers below, see
`tests.bench.tiered_life`. It runs in two environments, this project's and one that has vLLM, so it
imports only the manager that it measures.
"""

from __future__ import annotations

import argparse
import gc
import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median
from typing import Any

BLOCK_CALLS = (
    "lookup_miss",
    "prepare_store",
    "complete_store",
    "lookup_hit",
    "touch",
    "prepare_load",
    "complete_load",
)
"""The phases that handle blocks one by one in every manager."""

STEP_CALLS = (
    "on_new_request",
    "on_schedule_end",
    "note_prompt",
    "on_request_finished",
    "take_events",
    "get_stats",
)

PHASES = BLOCK_CALLS + STEP_CALLS

HARVEST = "harvest"
"""The first lookup of a step in a manager with tiers below. It also collects the finished transfers
of the request before."""


def do_nothing(*_: object) -> None:
    return


@dataclass
class Subject:
    """A manager to be measured, and how to call it."""

    manager: Any
    make_context: Callable[[str], Any]
    make_key: Callable[[bytes, int], bytes]
    schedule_end: Any
    harvests: bool = False
    """True if the first lookup of a step is timed separately."""
    settle: Callable[[], None] = do_nothing
    """Lets other threads finish their work for the manager between two lives. Not timed."""
    note_prompt: Callable[[list[Any]], object] = do_nothing
    """Passes on the keys of a request that ends, for estimates of hit ratios."""
    clock: Callable[[], int] = time.perf_counter_ns

    @property
    def phases(self) -> tuple[str, ...]:
        return (HARVEST, *PHASES) if self.harvests else PHASES


def kvtier_subject(policy: str, num_blocks: int) -> Subject:
    from kvtier.base import ReqContext, ScheduleEndContext, make_offload_key
    from kvtier.cpu.hit_curve import HitCurve, host_sizes
    from kvtier.cpu.manager import CPUOffloadingManager

    manager = CPUOffloadingManager(num_blocks, cache_policy=policy, enable_events=True)
    curve = HitCurve(host_sizes(num_blocks), seed=1)
    return Subject(
        manager,
        ReqContext,
        make_offload_key,
        ScheduleEndContext((), ()),
        note_prompt=lambda keys: curve.note_prompt(keys, len(keys)),
    )


def vllm_subject(policy: str, num_blocks: int) -> Subject:
    from vllm.v1.kv_offload.base import ReqContext, ScheduleEndContext, make_offload_key
    from vllm.v1.kv_offload.cpu.manager import CPUOffloadingManager

    manager = CPUOffloadingManager(num_blocks, cache_policy=policy, enable_events=True)
    return Subject(manager, ReqContext, make_offload_key, ScheduleEndContext((), ()))


SUBJECTS = {"kvtier": kvtier_subject, "vllm": vllm_subject}


def keys_of(subject: Subject, request: int, num_blocks: int) -> list[Any]:
    """Keys as an engine makes them: 32 bytes of hash, new objects."""
    return [
        subject.make_key(request.to_bytes(8, "big") * 3 + block.to_bytes(8, "big"), 0)
        for block in range(num_blocks)
    ]


def live(subject: Subject, request: int, blocks: int, spent: dict[str, int]) -> None:
    """Run one request: it misses, is computed and stored, hits, is loaded, and ends."""
    manager = subject.manager
    lookup = manager.lookup
    context = subject.make_context(f"request-{request}")
    keys = keys_of(subject, request, blocks)
    clock = subject.clock

    def timed(phase: str, call: Callable[[], Any]) -> Any:
        start = clock()
        result = call()
        spent[phase] += clock() - start
        return result

    timed("on_new_request", lambda: manager.on_new_request(context))
    unasked = keys
    if subject.harvests:
        timed(HARVEST, lambda: lookup(keys[0], context))
        unasked = keys[1:]
    start = clock()
    for key in unasked:
        lookup(key, context)
    spent["lookup_miss"] += clock() - start
    output = timed("prepare_store", lambda: manager.prepare_store(keys, context))
    stored = set(output.keys_to_store)
    assert len(stored) == blocks, "the benchmark's own assumption: every block is stored"
    timed("complete_store", lambda: manager.complete_store(stored, context))
    start = clock()
    for key in keys:
        lookup(key, context)
    spent["lookup_hit"] += clock() - start
    timed("touch", lambda: manager.touch(keys, context))
    timed("prepare_load", lambda: manager.prepare_load(keys, context))
    timed("complete_load", lambda: manager.complete_load(stored, context))
    timed("on_schedule_end", lambda: manager.on_schedule_end(subject.schedule_end))
    timed("note_prompt", lambda: subject.note_prompt(keys))
    timed("on_request_finished", lambda: manager.on_request_finished(context))
    timed("take_events", lambda: list(manager.take_events()))
    timed("get_stats", manager.get_stats)
    subject.settle()


def measure(subject: Subject, slots: int, blocks: int, requests: int) -> dict[str, float]:
    """Nanoseconds per block and phase with a full cache, where every store evicts."""
    num_to_fill = slots // blocks + 1
    scratch = dict.fromkeys(subject.phases, 0)
    for request in range(num_to_fill):
        live(subject, request, blocks, scratch)
    # Objects left by imports must not count for the manager.
    gc.collect()
    gc.freeze()
    lives: list[dict[str, int]] = []
    for request in range(num_to_fill, num_to_fill + requests):
        spent = dict.fromkeys(subject.phases, 0)
        live(subject, request, blocks, spent)
        lives.append(spent)
    return {phase: median(spent[phase] for spent in lives) / blocks for phase in subject.phases}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("subject", choices=sorted(SUBJECTS))
    parser.add_argument("--policy", default="lru")
    parser.add_argument("--slots", type=int, default=20_000)
    parser.add_argument("--blocks", type=int, default=512, help="blocks per request")
    parser.add_argument("--requests", type=int, default=100, help="requests measured")
    arguments = parser.parse_args()
    subject = SUBJECTS[arguments.subject](arguments.policy, arguments.slots)
    print(json.dumps(measure(subject, arguments.slots, arguments.blocks, arguments.requests)))


if __name__ == "__main__":
    main()
