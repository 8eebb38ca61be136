"""Drives one tier on disk at full rate, as its scheduler would.

Run as a module it measures one tier, a round at a time, so that several can be measured in turns.
It reads one JSON command per line on standard input and writes one JSON answer per line:
`{"begin": case}`, `{"move": round}`, `{"watch": watch}`, `{"look_up": how}`, `{"end": 0}`. It runs
in two environments: this project's, and one that has vLLM, for vLLM's own tier.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from itertools import chain, cycle, islice
from random import Random
from resource import RUSAGE_CHILDREN, RUSAGE_SELF, getrusage
from typing import Any

import numpy as np

from kvtier.cpu.shared_offload_region import SharedOffloadRegion
from tests.bench.disk_subjects import SUBJECTS, Case, DiskSubject, LookUp, Round, Watch
from tests.bench.disk_traffic import STEP_S, Keys, Load
from tests.bench.disk_watch import watch
from tests.bench.worker import answer

PASSES = 3
"""Orders in which blocks are read; about as many as fit into a round."""
SETTLED_S = 0.05
"""A new tier is idle after this time."""


def processor_seconds() -> float:
    """Processor time of all threads and children of this process so far."""
    usages = (getrusage(RUSAGE_SELF), getrusage(RUSAGE_CHILDREN))
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


def until(seconds: float, jobs: Callable[[], Keys]) -> Iterator[Keys]:
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        yield jobs()


class Session:
    """Measures one tier, which stays full."""

    def __init__(self, name: str) -> None:
        self._make = SUBJECTS[name]
        self._region: SharedOffloadRegion | None = None
        self._random = Random(0)

    def begin(self, described: dict[str, Any]) -> dict[str, Any]:
        """Make a tier and fill it."""
        self._case = case = Case(**described)
        num_rows = case.jobs_at_once * case.job_blocks
        region = SharedOffloadRegion(
            case.region, num_rows, None, case.block_bytes, case.block_bytes
        )
        view = region.create_kv_memoryview()
        noise = np.random.default_rng(0).bytes(case.block_bytes + num_rows)
        for row in range(num_rows):
            np.asarray(view)[row] = np.frombuffer(noise, np.uint8, case.block_bytes, row)
        self._load = Load(self._make(case, view), num_rows)
        self._region, self._view = region, view
        self._prompts = [
            self._load.new_keys(case.job_blocks) for _ in range(case.num_blocks // case.job_blocks)
        ]
        self._load.run(iter(self._prompts), False, case.jobs_at_once)
        return self._load.subject.about

    def move(self, described: dict[str, Any]) -> dict[str, float]:
        """Keep the tier busy for a while, and return how fast it was."""
        round_ = Round(**described)
        subject = self._load.subject
        if round_.is_load:
            subject.cool(list(chain.from_iterable(self._prompts)))
            known = self._known_prompts()
            measured = self._timed(lambda: self._several(round_, known.__next__), round_)
        else:
            if self._case.scattered:
                self._shuffle_recency()
            stored: list[Keys] = []

            def new_prompt() -> Keys:
                stored.append(self._load.new_keys(self._case.job_blocks))
                return stored[-1]

            measured = self._timed(lambda: self._several(round_, new_prompt), round_)
            self._forget_oldest(stored)
        return measured

    def watch(self, described: dict[str, Any]) -> dict[str, Any]:
        """How punctual the scheduler is while the tier works."""
        watched, stored = watch(self._load, self._prompts, self._case, Watch(**described))
        self._forget_oldest(stored)
        return watched

    def look_up(self, described: dict[str, Any]) -> dict[str, Any]:
        """How soon an engine that has just started knows which blocks are there."""
        how = LookUp(**described)
        keys = list(chain.from_iterable(self._prompts))
        if not how.is_present:
            keys = self._load.new_keys(len(keys))
        self._load.subject.tier.shutdown()
        self._load.subject = self._make(self._case, self._view)
        return look_up(self._load.subject, keys, how)

    def _several(self, round_: Round, next_prompt: Callable[[], Keys]) -> Keys:
        prompts = range(self._case.jobs_at_once if round_.is_alone else 1)
        return list(chain.from_iterable(next_prompt() for _ in prompts))

    def _timed(self, jobs: Callable[[], Keys], round_: Round) -> dict[str, float]:
        at_once = 1 if round_.is_alone else self._case.jobs_at_once
        cpu, started = processor_seconds(), time.perf_counter()
        keys = until(round_.seconds, jobs)
        if round_.most_bytes is not None:
            job_bytes = self._case.job_blocks * self._case.block_bytes
            keys = islice(keys, round_.most_bytes // job_bytes)
        num_moved = self._load.run(keys, round_.is_load, at_once)
        took = time.perf_counter() - started
        num_bytes = num_moved * self._case.block_bytes
        return {
            "bytes_per_s": num_bytes / took,
            "cpu_s_per_gb": (processor_seconds() - cpu) / num_bytes * 1e9,
        }

    def _known_prompts(self) -> Iterator[Keys]:
        """Keys of one load after the other, endlessly, in random order."""
        passes: list[Keys] = []
        for _ in range(PASSES):
            prompts = list(self._prompts)
            if self._case.scattered:
                keys = list(chain.from_iterable(prompts))
                self._random.shuffle(keys)
                size = self._case.job_blocks
                prompts = [keys[start : start + size] for start in range(0, len(keys), size)]
            self._random.shuffle(prompts)
            passes += prompts
        return cycle(passes)

    def _shuffle_recency(self) -> None:
        """Touch all blocks in random order, so that slots freed for a job lie all over the tier."""
        keys = list(chain.from_iterable(self._prompts))
        self._random.shuffle(keys)
        self._load.subject.tier.touch(keys, self._load.subject.make_context("shuffle"))

    def _forget_oldest(self, stored: list[Keys]) -> None:
        """Remove the oldest blocks, so that the tier is as full as before."""
        prompts = self._prompts + stored
        gone, self._prompts = prompts[: len(stored)], prompts[len(stored) :]
        self._load.subject.forget(list(chain.from_iterable(gone)))

    def end(self, _: object = None) -> None:
        if self._region is None:
            return
        self._load.subject.tier.drain_jobs()
        self._load.subject.tier.shutdown()
        del self._load, self._view
        self._region.cleanup()
        self._region = None


def look_up(subject: DiskSubject, keys: Keys, how: LookUp) -> dict[str, dict[str, float]]:
    """Two requests for the same blocks, one after the other: how long each waits for its answers,
    and how long the scheduler's thread is busy. `subject` is new: it has looked up nothing yet."""
    time.sleep(SETTLED_S)
    return {name: _ask(subject, keys, name, how) for name in ("first", "again")}


def _ask(subject: DiskSubject, keys: Keys, name: str, how: LookUp) -> dict[str, float]:
    context = subject.make_context(name)
    answers: dict[Any, str] = {}
    on_thread, num_steps = 0.0, 0
    begin = time.perf_counter()
    subject.tier.on_new_request(context)
    while True:
        started = time.perf_counter()
        if how.is_prompt:
            found = subject.look_up(keys, context)
            answers = dict(zip(keys, (answer.name for answer in found), strict=False))
        else:
            for key in keys:
                if answers.get(key, "RETRY") == "RETRY":
                    answers[key] = subject.tier.lookup(key, context).name
        is_known = "RETRY" not in answers.values()
        known_at = time.perf_counter()
        subject.tier.on_schedule_end(subject.schedule_end)
        if is_known:
            subject.tier.on_request_finished(context)
        on_thread += time.perf_counter() - started
        num_steps += 1
        if is_known:
            break
        time.sleep(STEP_S)
    expected = "HIT" if how.is_present else "MISS"
    assert set(answers.values()) == {expected}, f"not {expected}: {set(answers.values())}"
    return {"answered_s": known_at - begin, "on_thread_s": on_thread, "steps": num_steps}


if __name__ == "__main__":
    answer(Session, SUBJECTS, __doc__)
