"""How punctual a scheduler is while a tier on disk is busy: a loop of lookups every millisecond.

In one step it wakes up, looks up the blocks of a request, collects finished jobs and submits as
many again. The tier's threads can delay both halves: they use a processor, and the interpreter.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from itertools import chain
from random import Random
from typing import Any

from tests.bench.disk_subjects import Case, Watch
from tests.bench.disk_traffic import Keys, Load

STEP_S = 0.001
LOOKED_UP = 64
"""Keys looked up in a step."""


def watch(
    load: Load, prompts: Sequence[Keys], case: Case, how: Watch
) -> tuple[dict[str, Any], list[Keys]]:
    """Returns, in microseconds, how late a step began (`wake`), had its answers (`answer`) and
    ended (`step`), and how long the lookups took (`lookup`); and the keys that were stored."""
    scheduler = _Scheduler(load, prompts, case)
    woken, answered, ended = [], [], []
    begin = due = time.perf_counter()
    while due < begin + how.seconds:
        time.sleep(max(0.0, due - time.perf_counter()))
        woken.append(time.perf_counter() - due)
        scheduler.look_up()
        answered.append(time.perf_counter() - due)
        if how.is_busy:
            scheduler.keep_busy()
        load.subject.tier.on_schedule_end(load.subject.schedule_end)
        ended.append(time.perf_counter() - due)
        due = max(due + STEP_S, time.perf_counter())
    took = time.perf_counter() - begin
    moved_bytes = scheduler.num_moved * case.block_bytes
    scheduler.wait()
    figures = {
        "wake": _percentiles(woken),
        "lookup": _percentiles([end - begin for begin, end in zip(woken, answered, strict=True)]),
        "answer": _percentiles(answered),
        "step": _percentiles(ended),
        "bytes_per_s": moved_bytes / took,
        "steps": len(ended),
    }
    return figures, scheduler.stored


class _Scheduler:
    def __init__(self, load: Load, prompts: Sequence[Keys], case: Case) -> None:
        self._load = load
        self._case = case
        self._random = Random(0)
        # The newest half stays while older blocks are evicted.
        self._there = deque(prompts, maxlen=len(prompts) // 2)
        self._asked: Keys = []
        self._context: Any = None
        self._num_requests = 0
        self._stores_next = True
        self.stored: list[Keys] = []
        self.num_moved = 0

    def look_up(self) -> None:
        """Look up the blocks of a new request, or again those of the last one if the tier did not
        know."""
        subject = self._load.subject
        if self._context is None:
            self._num_requests += 1
            self._context = subject.make_context(f"request-{self._num_requests}")
            num_prompts = -(-LOOKED_UP // self._case.job_blocks)
            prompts = self._random.sample(self._there, num_prompts)
            self._asked = list(chain.from_iterable(prompts))[:LOOKED_UP]
            subject.tier.on_new_request(self._context)
        answers = subject.look_up(self._asked, self._context)
        names = {answer.name for answer in answers}
        if "RETRY" not in names:
            assert names == {"HIT"}, f"blocks are gone: {names}"
            subject.tier.on_request_finished(self._context)
            self._context = None

    def keep_busy(self) -> None:
        """Collect finished jobs, and submit as many loads and stores again."""
        self._collect()
        while self._load.num_under_way < self._case.jobs_at_once:
            if self._stores_next:
                self.stored.append(self._load.new_keys(self._case.job_blocks))
                self._load.submit(self.stored[-1], False)
            else:
                self._load.submit(self._random.choice(self._there), True)
            self._stores_next = not self._stores_next

    def wait(self) -> None:
        while self._load.num_under_way:
            time.sleep(STEP_S)
            self._collect()

    def _collect(self) -> None:
        for keys, is_load in self._load.collect():
            self.num_moved += len(keys)
            if not is_load:
                self._there.append(keys)


def _percentiles(seconds: list[float]) -> dict[str, float]:
    ordered = sorted(seconds)
    return {
        "p50": 1e6 * ordered[len(ordered) // 2],
        "p99": 1e6 * ordered[len(ordered) * 99 // 100],
        "max": 1e6 * ordered[-1],
    }
