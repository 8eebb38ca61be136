"""Cost of one request's whole life in a tiering manager, per block and per phase.

Run as a module it measures one manager, a few requests at a time, so that two of them can be
measured in turns. It reads one JSON command per line on standard input and writes one JSON answer
per line: `{"begin": case}`, `{"batch": number}`, `{"end": 0}`. It runs in two environments: this
project's, and one that has vLLM, for vLLM's own manager.
"""

from __future__ import annotations

import gc
import os
from statistics import median
from typing import Any

from tests.bench.request_life import Subject, keys_of, live
from tests.bench.tiered_subjects import SUBJECTS, Case, Tiered
from tests.bench.worker import answer

BLOCKS = 512
"""Blocks of a request."""
REQUESTS = 5
"""Requests measured in a batch."""
REQUESTS_AT_ONCE = 32
"""New requests in one step, each looking up one block."""

FIRST_HIT = "first hit"
"""A hit for a request that has not looked up the block before. This is not part of the life, where
a request finds blocks that it missed and stored itself. vLLM does more work for the first
lookup."""
FIRST_MISS = "first miss"
"""A miss for a request that has missed nothing else in this step. This is not part of the life,
where a request continues behind its first miss; kvtier does not pass those lookups on to tiers."""

FIRST_IN_FLIGHT = 1 << 40
FIRST_IN_VAIN = 1 << 41
"""First numbers of requests that no other part uses."""


def begin(tiered: Tiered, case: Case) -> None:
    """Fill the primary tier, so that every store evicts, and start transfers."""
    subject = tiered.subject
    tiered.withhold(True)
    begin_transfers(subject, case.in_flight)
    tiered.withhold(False)
    scratch = dict.fromkeys(subject.phases, 0)
    for request in range(-(case.slots // BLOCKS + 1), 0):
        live(subject, FIRST_IN_FLIGHT + request, BLOCKS, scratch)
    # Objects left by imports must not count for the manager.
    gc.collect()
    gc.freeze()


def begin_transfers(subject: Subject, num_blocks: int) -> None:
    """Run requests that store blocks and end."""
    scratch = dict.fromkeys(subject.phases, 0)
    for request in range(-(-num_blocks // BLOCKS)):
        live(subject, FIRST_IN_FLIGHT + request, BLOCKS, scratch)


def batch(subject: Subject, number: int) -> dict[str, float]:
    """Nanoseconds per block of a batch of requests, by phase and kind of lookup."""
    numbers = range(number * REQUESTS, (number + 1) * REQUESTS)
    lives = []
    for request in numbers:
        spent = dict.fromkeys(subject.phases, 0)
        live(subject, request, BLOCKS, spent)
        lives.append(spent)
    cost = {phase: median(spent[phase] for spent in lives) / BLOCKS for phase in subject.phases}
    cost[FIRST_HIT] = median(time_first_hits(subject, request) for request in numbers)
    cost[FIRST_MISS] = median(time_first_misses(subject, request) for request in numbers)
    return cost


def time_first_hits(subject: Subject, request: int) -> float:
    """Nanoseconds per block of a new request that looks up blocks stored by an earlier one."""
    manager = subject.manager
    lookup = manager.lookup
    context = subject.make_context(f"later-{request}")
    first, *others = keys_of(subject, request, BLOCKS)
    manager.on_new_request(context)
    lookup(first, context)
    start = subject.clock()
    for key in others:
        lookup(key, context)
    spent = subject.clock() - start
    manager.on_request_finished(context)
    end_step(subject)
    return spent / len(others)


def time_first_misses(subject: Subject, number: int) -> float:
    """Nanoseconds per block of new requests that each look up one absent block."""
    manager = subject.manager
    lookup = manager.lookup
    names = [f"in-vain-{number}-{i}" for i in range(REQUESTS_AT_ONCE)]
    contexts = [subject.make_context(name) for name in names]
    keys = keys_of(subject, FIRST_IN_VAIN + number, REQUESTS_AT_ONCE)
    for context in contexts:
        manager.on_new_request(context)
    lookup(keys[0], contexts[0])
    questions = list(zip(keys[1:], contexts[1:], strict=True))
    start = subject.clock()
    for key, context in questions:
        lookup(key, context)
    spent = subject.clock() - start
    for context in contexts:
        manager.on_request_finished(context)
    end_step(subject)
    return spent / len(questions)


def end_step(subject: Subject) -> None:
    subject.manager.on_schedule_end(subject.schedule_end)
    subject.manager.get_stats()


class Session:
    """Measures one manager."""

    def __init__(self, name: str) -> None:
        self._make = SUBJECTS[name]
        self._tiered: Tiered | None = None
        self._processors = os.sched_getaffinity(0)

    def begin(self, described: dict[str, Any]) -> None:
        case = Case(**described)
        # All subjects run on the same processor, since two are rarely equally fast.
        os.sched_setaffinity(0, {min(self._processors)} if case.settle else self._processors)
        self._tiered = self._make(case)
        begin(self._tiered, case)

    def batch(self, number: int) -> dict[str, float]:
        assert self._tiered is not None
        return batch(self._tiered.subject, number)

    def end(self, _: object = None) -> None:
        if self._tiered is not None:
            self._tiered.subject.manager.shutdown()
        self._tiered = None
        gc.unfreeze()
        gc.collect()


if __name__ == "__main__":
    answer(Session, SUBJECTS, __doc__)
