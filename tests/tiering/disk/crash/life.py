"""One life of a disk tier.

It reports what it is about to do and what was done, for the oracle. Within the life it checks for
itself that no acknowledged block is lost and that no other bytes are loaded.
"""

from __future__ import annotations

import os
import struct
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import count
from random import Random

import numpy as np
from xxhash import xxh3_64_intdigest

from kvtier.base import (
    LookupResult,
    OffloadKey,
    ReqContext,
    ScheduleEndContext,
    make_offload_key,
)
from kvtier.testing.harness import sample_spec
from kvtier.testing.job_ledger import LentSlots
from kvtier.tiering.base import JobResult, TransferJob
from kvtier.tiering.disk.manager import FILE_BYTES, DiskSecondaryTierManager
from tests.tiering.crash.processes import Wrong
from tests.tiering.disk.crash.orders import Orders

_NUM_ROWS = 48
_AT_ONCE = 40
_LONGEST_LIFE_S = 20
_PATIENCE_S = 10.0
_GAUGE_PATIENCE_S = 4.0
_NUMBER = struct.Struct("<Q")
_LONG_KEY_EVERY = 7


@dataclass(slots=True)
class Job:
    job: TransferJob
    generations: dict[int, int]
    """By number of a key: the generation that is stored, or that must be loaded."""


@dataclass(slots=True)
class Storing:
    """A generation that jobs are storing. Several may bring the same one."""

    generation: int
    num_jobs: int = 0
    is_stored: bool = False


class Life:
    """Gives the tier jobs without an engine."""

    def __init__(self, orders: Orders, report: Callable[..., None]) -> None:
        self._orders = orders
        self._report = report
        self._random = Random(orders.seed)
        self._rows = LentSlots(_NUM_ROWS, orders.row_bytes)
        spec = sample_spec(
            orders.row_bytes, _NUM_ROWS, orders.namespace, engine_id=f"life {orders.number}"
        )
        started = time.monotonic()
        self._tier = DiskSecondaryTierManager(
            spec,
            self._rows.view,
            "disk",
            path=orders.path,
            max_bytes=orders.max_bytes,
            eviction_policy=orders.policy,
        )
        took = time.monotonic() - started
        self._fingerprint = self._tier.fingerprint
        self._homes = [self._fingerprint, *(Random(i).randbytes(16) for i in range(2))]
        self._generations = count((orders.number << 20) + 1)
        self._job_ids = count(1)
        self._requests = count(1)
        self._jobs: dict[int, Job] = {}
        self._kept: dict[int, int] = {}
        """By number of key, the generation that the tier has acknowledged and not removed."""
        self._storing: dict[int, Storing] = {}
        status = os.stat(orders.path)
        report("opened", self._fingerprint.hex(), took, status.st_size, status.st_blocks * 512)
        report("clock", self._tier._slab.superblock.uuid.hex(), self._tier._table.next_seq)

    # --- blocks of earlier lives ---------------------------------------------------------------

    def inspect(self) -> None:
        """Load all blocks that are found, and report their generations."""
        self._await_gauge()
        numbers = [n for n in range(self._orders.num_keys) if self._is_hit(n)]
        for start in range(0, len(numbers), _AT_ONCE):
            batch = numbers[start : start + _AT_ONCE]
            job = self._new_job(batch, is_promotion=True)
            self._tier.submit_load(job)
            [result] = self._await_results(1)
            loaded = _moved(job, result)
            found = []
            for number, row in zip(batch, job.block_ids.tolist(), strict=True):
                if key_of(number) in loaded:
                    self._kept[number] = self._generation_in(row, number, job)
                    found.append(self._kept[number])
                elif self._is_hit(number):
                    raise Wrong(f"block {number} could not be loaded, and is a hit again")
            self._rows.take_back(job.block_ids.tolist())
            self._report("found", found)
        list(self._tier.take_events())
        self._report("inspected")

    def _await_gauge(self) -> None:
        """Wait until the gauge equals what `du` says."""
        deadline = time.monotonic() + _GAUGE_PATIENCE_S
        while True:
            stats = self._tier.get_stats()
            gauge = stats.gauges[FILE_BYTES]
            allocated = os.stat(self._orders.path).st_blocks * 512
            if gauge == allocated:
                return
            if time.monotonic() > deadline:
                raise Wrong(f"the gauge says {gauge} bytes, and du {allocated}")
            time.sleep(0.01)

    def _await_results(self, how_many: int) -> list[JobResult]:
        deadline = time.monotonic() + _PATIENCE_S
        results: list[JobResult] = []
        while len(results) < how_many:
            if time.monotonic() > deadline:
                raise Wrong("a job does not end")
            results += self._tier.get_finished_jobs()
            time.sleep(0.0002)
        return results

    # --- operations ----------------------------------------------------------------------------

    def work(self) -> None:
        random = self._random
        for _ in range(self._orders.num_operations):
            roll = random.random()
            if roll < self._orders.epoch_rate:
                self._begin_epoch()
            elif roll < 0.45:
                self._store()
            elif roll < 0.65:
                self._load()
            elif roll < 0.75:
                keys = [key_of(number) for number in self._some_numbers()]
                self._tier.touch(keys, self._request())
            elif roll < 0.8:
                time.sleep(random.uniform(0, 0.004))
            self._step()

    def _some_numbers(self) -> list[int]:
        num_keys = self._orders.num_keys
        if self._random.random() < 0.5:
            first = self._random.randrange(num_keys)
            return list(range(first, min(num_keys, first + self._random.randint(1, 12))))
        return self._random.sample(range(num_keys), self._random.randint(1, min(12, num_keys)))

    def _request(self) -> ReqContext:
        request = ReqContext(f"request {next(self._requests)}")
        self._tier.on_new_request(request)
        return request

    def _store(self) -> None:
        numbers = self._some_numbers()
        if self._rows.num_free < len(numbers):
            return
        generations, new = {}, []
        for number in numbers:
            if number in self._kept:
                generations[number] = self._kept[number]
                continue
            if number not in self._storing:
                self._storing[number] = Storing(next(self._generations))
                new.append([number, self._storing[number].generation])
            self._storing[number].num_jobs += 1
            generations[number] = self._storing[number].generation
        job = self._new_job(numbers, is_promotion=False)
        for number, row in zip(numbers, job.block_ids.tolist(), strict=True):
            self._rows.fill(row, self._payload(number, generations[number]))
        self._jobs[job.job_id] = Job(job, generations)
        self._report("put", new)
        self._tier.submit_store(job)
        self._report("placed", self._take_removed(), self._tier._table.next_seq)
        if self._random.random() < 0.7:
            self._tier.on_request_finished(job.req_context)

    def _load(self) -> None:
        if not self._kept:
            return
        numbers = list(dict.fromkeys(self._random.choices(list(self._kept), k=8)))
        if self._rows.num_free < len(numbers):
            return
        for number in numbers:
            if not self._is_hit(number):
                raise Wrong(f"block {number} was acknowledged, not removed, and is a miss")
        job = self._new_job(numbers, is_promotion=True)
        expected = {number: self._kept[number] for number in numbers}
        self._jobs[job.job_id] = Job(job, expected)
        self._tier.submit_load(job)
        self._tier.on_request_finished(job.req_context)

    def _begin_epoch(self) -> None:
        home = self._random.random() < 0.5
        chance = self._random
        fingerprint = chance.choice(self._homes) if home else chance.randbytes(16)
        self._report("epoch", self._tier._table.next_seq, fingerprint.hex())
        self._tier.begin_epoch(fingerprint)
        self._report("epoch has begun")
        self._fingerprint = fingerprint
        self._kept.clear()
        self._storing.clear()
        list(self._tier.take_events())
        for number in range(self._orders.num_keys):
            if self._is_hit(number):
                raise Wrong(f"block {number} is a hit right after an epoch has begun")

    def _step(self) -> None:
        for result in self._tier.get_finished_jobs():
            self._finish(self._jobs.pop(result.job_id), result)
        self._tier.on_schedule_end(ScheduleEndContext())
        removed = self._take_removed()
        if removed:
            raise Wrong(f"generations {removed} are removed, and nothing was wrong with them")

    def _finish(self, own: Job, result: JobResult) -> None:
        job = own.job
        moved = _moved(job, result)
        is_current = job.fingerprint == self._fingerprint
        if job.is_promotion:
            self._check_loaded(own, moved, is_current)
        elif is_current:
            self._note_stored(own, moved)
        self._take_back(job.block_ids.tolist())

    def _take_back(self, slots: Sequence[int]) -> None:
        self._rows.take_back(list(slots))

    def _check_loaded(self, own: Job, moved: set[bytes], is_current: bool) -> None:
        rows = own.job.block_ids.tolist()
        for (number, generation), row in zip(own.generations.items(), rows, strict=True):
            if key_of(number) in moved:
                if self._generation_in(row, number, own.job) != generation:
                    raise Wrong(f"block {number} was loaded, but not as it was stored last")
            elif is_current:
                raise Wrong(f"block {number} could not be loaded")

    def _note_stored(self, own: Job, moved: set[bytes]) -> None:
        acked = []
        for number, generation in own.generations.items():
            storing = self._storing.get(number)
            if storing is None or storing.generation != generation:
                continue
            storing.num_jobs -= 1
            storing.is_stored |= key_of(number) in moved
            if not storing.num_jobs:
                del self._storing[number]
                if storing.is_stored:
                    self._kept[number] = generation
                    acked.append(generation)
        self._report("acked", acked)

    def _take_removed(self) -> list[int]:
        """The generations that the tier has removed."""
        numbers = {key_of(number): number for number in range(self._orders.num_keys)}
        removed: list[int] = []
        for event in self._tier.take_events():
            if event.removed:
                removed += [self._forget(numbers[key]) for key in event.keys]
        return removed

    def _forget(self, number: int) -> int:
        if number in self._kept:
            return self._kept.pop(number)
        storing = self._storing.get(number)
        if storing is None or not storing.is_stored:
            raise Wrong(f"block {number} was removed, and was not there")
        del self._storing[number]  # one of its jobs is not over, but has nothing to do with it
        return storing.generation

    # --- the end -------------------------------------------------------------------------------

    def end(self) -> None:
        """Shut down as an engine does that is not killed."""
        self._tier.drain_jobs()
        self._step()
        if self._jobs:
            raise Wrong(f"{len(self._jobs)} jobs were never reported")
        self._tier.shutdown()
        self._report("shut down")

    # --- jobs and bytes ------------------------------------------------------------------------

    def _new_job(self, numbers: Sequence[int], is_promotion: bool) -> TransferJob:
        return TransferJob(
            job_id=next(self._job_ids),
            keys=[key_of(number) for number in numbers],
            block_ids=np.array(self._rows.lend(len(numbers)), np.int64),
            is_promotion=is_promotion,
            req_context=self._request(),
            fingerprint=self._fingerprint,
        )

    def _is_hit(self, number: int) -> bool:
        return self._tier.lookup(key_of(number), ReqContext("")) is LookupResult.HIT

    def _payload(self, number: int, generation: int) -> bytes:
        return payload_of_generation(
            key_of(number), self._fingerprint, generation, self._orders.row_bytes
        )

    def _generation_in(self, row: int, number: int, job: TransferJob) -> int:
        generation = generation_in(self._rows.content(row), key_of(number), job.fingerprint)
        if generation is None:
            raise Wrong(f"block {number} was loaded with bytes that nobody has ever stored there")
        return generation


def _moved(job: TransferJob, result: JobResult) -> set[bytes]:
    return set(job.keys) if result.success else set(result.successful_keys or ())


# --- blocks whose bytes show which store they come from -------------------------------------------


@cache
def key_of(number: int) -> OffloadKey:
    """Some keys are too long for the index."""
    text = b"block-%026d" % number
    return make_offload_key(text * 2 if number % _LONG_KEY_EVERY == 0 else text, 0)


def payload_of_generation(
    key: OffloadKey, fingerprint: bytes, generation: int, num_bytes: int
) -> bytes:
    """Bytes that no other store of any block has."""
    head = _NUMBER.pack(generation)
    noise = np.random.Generator(np.random.SFC64(xxh3_64_intdigest(head + fingerprint + key)))
    return head + noise.bytes(num_bytes - len(head))


def generation_in(payload: bytes, key: OffloadKey, fingerprint: bytes) -> int | None:
    """The generation of this key and namespace that has these bytes; None: there is none."""
    generation: int = _NUMBER.unpack_from(payload)[0]
    expected = payload_of_generation(key, fingerprint, generation, len(payload))
    return generation if payload == expected else None
