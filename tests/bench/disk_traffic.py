"""Jobs for a tier on disk, and who sees to it that there are always some."""

from __future__ import annotations

import time
from collections.abc import Iterator
from random import Random
from typing import Any

import numpy as np

from tests.bench.disk_subjects import DiskSubject

STEP_S = 0.001
NUM_DIRECTORIES = 256
"""Over which vLLM's tier spreads its files. They are made while it is filled, and are there from
then on, as in a store that has been in use for a while."""

Keys = list[Any]


class Load:
    """A tier that is kept busy, with some jobs under way at any time. One thread."""

    def __init__(self, subject: DiskSubject, num_rows: int) -> None:
        self.subject = subject
        # In no order, as the slots of a primary tier are after a while.
        self._free_rows = Random(0).sample(range(num_rows), num_rows)
        self._under_way: dict[int, tuple[list[int], Keys, bool]] = {}
        self._num_jobs = 0
        self._num_keys = 0

    @property
    def num_under_way(self) -> int:
        return len(self._under_way)

    def submit(self, keys: Keys, is_load: bool) -> None:
        rows = self._free_rows[-len(keys) :]
        del self._free_rows[-len(keys) :]
        self._num_jobs += 1
        self._under_way[self._num_jobs] = rows, keys, is_load
        job = self.subject.make_job(self._num_jobs, keys, np.array(rows, dtype=np.int64), is_load)
        if is_load:
            self.subject.tier.submit_load(job)
        else:
            self.subject.tier.submit_store(job)

    def collect(self) -> list[tuple[Keys, bool]]:
        """The jobs that have ended: their keys, and whether it was a load. None may have failed."""
        ended = []
        for result in self.subject.tier.get_finished_jobs():
            rows, keys, is_load = self._under_way.pop(result.job_id)
            if not result.success:
                num_moved = len(result.successful_keys or ())
                raise AssertionError(
                    f"a {'load' if is_load else 'store'} of {len(keys)} blocks moved {num_moved}"
                )
            self._free_rows += rows
            ended.append((keys, is_load))
        return ended

    def run(self, jobs: Iterator[Keys], is_load: bool, at_once: int) -> int:
        """Have all these jobs done, so many at once. Answers how many blocks were moved."""
        num_moved = 0
        waiting = next(jobs, None)
        while waiting is not None or self.num_under_way:
            while waiting is not None and self.num_under_way < at_once:
                self.submit(waiting, is_load)
                waiting = next(jobs, None)
            time.sleep(STEP_S)
            num_moved += sum(len(keys) for keys, _ in self.collect())
            self.subject.tier.on_schedule_end(self.subject.schedule_end)
        return num_moved

    def new_keys(self, count: int) -> Keys:
        """Never seen before."""
        numbers = range(self._num_keys, self._num_keys + count)
        self._num_keys = numbers.stop
        return [self.subject.make_key(hash_of(number), 0) for number in numbers]


def hash_of(number: int) -> bytes:
    """32 bytes. Of the first five hexadecimal digits, vLLM's tier makes a directory."""
    directory = number % NUM_DIRECTORIES
    return (directory << 4).to_bytes(2, "big") + bytes(6) + number.to_bytes(8, "big") * 3
