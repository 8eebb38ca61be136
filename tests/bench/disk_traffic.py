"""Keeps a tier on disk busy with jobs."""

from __future__ import annotations

import time
from collections.abc import Iterator
from random import Random
from typing import Any

import numpy as np

from tests.bench.disk_subjects import DiskSubject

STEP_S = 0.001
NUM_DIRECTORIES = 256
"""Directories over which vLLM's tier spreads its files. They are made while it is filled, and stay,
as in a store that has been in use for a while."""

Keys = list[Any]


class Load:
    """Keeps a number of jobs under way in one tier. One thread."""

    def __init__(self, subject: DiskSubject, num_rows: int) -> None:
        self.subject = subject
        # In random order, as the slots of a primary tier are after a while.
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
        """Finished jobs: their keys, and whether each was a load. Raises if one has failed."""
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
        """Run all jobs, at most `at_once` at a time. Returns the number of blocks moved."""
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
        """Keys that were not used before."""
        numbers = range(self._num_keys, self._num_keys + count)
        self._num_keys = numbers.stop
        return [self.subject.make_key(hash_of(number), 0) for number in numbers]


def hash_of(number: int) -> bytes:
    """A hash of 32 bytes. vLLM's tier makes a directory from its first five hexadecimal digits."""
    directory = number % NUM_DIRECTORIES
    return (directory << 4).to_bytes(2, "big") + bytes(6) + number.to_bytes(8, "big") * 3
