"""One life of an engine on a root that others share, in a process that is going to be killed.

It reports what it does, for the oracle. It checks for itself that no wrong byte is loaded, that no
block is damaged, and that the least recently used blocks are evicted.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from random import Random

import kvtier.tiering.fs.eviction
import kvtier.tiering.fs.publisher
import kvtier.tiering.fs.quota
import kvtier.tiering.fs.root
import kvtier.tiering.fs.uses
import kvtier.tiering.io.lookups
from kvtier.base import LookupResult, OffloadKey
from kvtier.testing import TierHarness
from kvtier.tiering.base import TransferJob
from kvtier.tiering.fs import manager
from kvtier.tiering.fs.layout import block_name
from tests.tiering.crash.points import plant
from tests.tiering.crash.processes import Wrong
from tests.tiering.fs.crash.mutants import MUTANTS
from tests.tiering.fs.crash.orders import Orders
from tests.tiering.fs.crash.points import RootPoints
from tests.tiering.fs.crash.reports import TierReports
from tests.tiering.fs.harness import du, fs_harness

ROW_BYTES = 8192
_NUM_ROWS = 32
_AT_ONCE = 12
_LONGEST_LIFE_S = 60
_MOST_EPOCHS = 2


def live(orders: Orders, report: Callable[..., None]) -> None:
    """Run the life. The kit calls this in the process of the life."""
    # A life that hangs ends by another signal than SIGKILL.
    signal.alarm(_LONGEST_LIFE_S + int(min(orders.work_for_s, 1000)))
    boot_id = orders.boot.to_bytes(16, "big")
    plant(kvtier.tiering.fs.root, _boot_id=lambda: boot_id)
    # The tier waits for a multiple of what its last measurement took: too long on a busy machine.
    plant(kvtier.tiering.fs.quota, _MEASURE_COST=1)
    if orders.is_hasty:
        _plant_haste()
    if orders.mutant is not None:
        MUTANTS[orders.mutant].plant()
    TierReports(Path(orders.root), report).plant()
    RootPoints(orders.point, orders.nth, report).plant()
    life = _Life(orders, report)
    life.work()
    if orders.inspects:
        life.inspect()
    if not orders.ends_cleanly:
        os.kill(os.getpid(), signal.SIGKILL)
    life.end()


def _plant_haste() -> None:
    plant(kvtier.tiering.fs.publisher, _HEARTBEAT_S=0.02, _QUIET_S=0.03, _PATIENCE_S=0.5)
    plant(kvtier.tiering.fs.quota, _MEASURE_EVERY_S=0.02)
    plant(kvtier.tiering.fs.eviction, _RECLAIM_EVERY_S=0.05, _NOTHING_FOUND_S=0.3)
    plant(kvtier.tiering.io.lookups, _PRESENT_FOR_S=0.3, _ABSENT_FOR_S=0.05)
    plant(kvtier.tiering.fs.uses, _WRITE_EVERY_S=0.01, _SAME_USE_NS=50_000_000)


class _Life:
    def __init__(self, orders: Orders, report: Callable[..., None]) -> None:
        self._orders = orders
        self._report = report
        self._random = Random(orders.seed)
        self._harness = fs_harness(
            Path(orders.root),
            row_bytes=ROW_BYTES,
            num_rows=_NUM_ROWS,
            namespace=orders.namespace,
            max_bytes=orders.max_bytes,
        )
        self._keys = TierHarness.keys(orders.num_keys)
        self._storing: dict[OffloadKey, int] = {}
        """Number of jobs that are storing a block."""
        self._unsure: set[int] = set()
        """Jobs with blocks that another job was storing; the tier counts those as stored early."""
        self._num_epochs = 0
        self._open: set[int] = set()
        """Jobs that are not finished."""
        self._num_stored = self._num_loaded = 0
        report("opened", self._harness.fingerprint.hex())

    # --- operations ----------------------------------------------------------------------------

    def work(self) -> None:
        random = self._random
        end = time.monotonic() + self._orders.work_for_s
        for _ in range(self._orders.num_operations):
            if time.monotonic() > end:
                return
            roll = random.random()
            if roll < self._orders.epoch_rate and self._num_epochs < _MOST_EPOCHS:
                self._begin_epoch()
            elif roll < 0.5:
                self._store(self._some_keys())
            elif roll < 0.8:
                self._load(self._some_keys())
            elif roll < 0.9:
                request = self._harness.new_request()
                self._harness.call("touch", self._some_keys(), request)
                self._harness.call("on_request_finished", request)
            else:
                time.sleep(random.choice((0.001, 0.01, 0.05)))
            self._step()

    def _some_keys(self) -> list[OffloadKey]:
        random, keys = self._random, self._keys
        count = random.randint(1, min(_AT_ONCE, len(keys)))
        if random.random() < 0.5:
            first = random.randrange(len(keys))
            return keys[first : first + count]
        return random.sample(keys, count)

    def _store(self, keys: list[OffloadKey]) -> None:
        job = self._harness.store(keys)
        self._open.add(job.job_id)
        if any(key in self._storing for key in keys):
            self._unsure.add(job.job_id)
        for key in keys:
            self._storing[key] = self._storing.get(key, 0) + 1

    def _load(self, keys: list[OffloadKey]) -> None:
        hits = self._harness.hits(keys)
        if hits:
            job = self._harness.load([key for key in keys if key in hits])
            self._open.add(job.job_id)

    def _begin_epoch(self) -> None:
        self._num_epochs += 1
        self._harness.begin_epoch(self._random.randbytes(16))
        self._report("epoch", self._harness.fingerprint.hex())
        for key in self._random.sample(self._keys, 3):
            if self._harness.look_up(key) is not LookupResult.MISS:
                raise Wrong("a block is found right after an epoch has begun")

    def _step(self) -> None:
        self._harness.step()
        reports = self._harness.ledger.reports
        ended = [job_id for job_id in self._open if job_id in reports]
        for job_id in ended:
            self._open.remove(job_id)
            heard = reports[job_id]
            if heard.job.is_promotion:
                self._num_loaded += len(heard.moved)
            else:
                self._note_stored(heard.job, heard.moved)
        if ended:
            self._report("progress", self._num_stored, self._num_loaded)
        failures = self._harness.tier.take_seal_failures()
        if failures:
            raise Wrong(f"blocks are damaged: {dict(failures)}")

    def _note_stored(self, job: TransferJob, moved: set[OffloadKey]) -> None:
        self._num_stored += len(moved)
        for key in job.keys:
            self._storing[key] -= 1
            if not self._storing[key]:
                del self._storing[key]
        if job.job_id not in self._unsure:
            self._report("stored", job.fingerprint.hex(), sorted(block_name(key) for key in moved))

    # --- the end -------------------------------------------------------------------------------

    def inspect(self) -> None:
        """Load all blocks that are found, and wait until the gauge equals what `du` says."""
        harness = self._harness
        harness.drain()
        self._await_quiet()
        hits = sorted(harness.hits(self._keys))
        for start in range(0, len(hits), _AT_ONCE):
            [loaded] = harness.wait_for(harness.load(hits[start : start + _AT_ONCE]))
            if not loaded.result.success:
                raise Wrong("a block is there, and cannot be loaded")
            self._report("found", sorted(block_name(key) for key in loaded.job.keys))
        self._step()
        self._await_quiet()
        self._report("inspected")

    def _await_quiet(self) -> None:
        if not self._orders.quiet_patience_s:
            return
        root = Path(self._orders.root)
        deadline = time.monotonic() + self._orders.quiet_patience_s
        while True:
            gauges = self._harness.tier.get_stats().gauges  # type: ignore[union-attr]
            said, is_so = gauges[manager.USED_BYTES], du(root)
            presences = os.listdir(root / "engines")
            # Two presences: the directory of this engine, and its file that others lock to see
            # whether it runs.
            if said == is_so and len(presences) == 2:
                return
            if time.monotonic() > deadline:
                raise Wrong(
                    f"the gauge says {said} bytes, and du {is_so}, with presences {presences}"
                )
            time.sleep(0.01)

    def end(self) -> None:
        """Shut down as an engine does that is not killed."""
        with self._harness:
            self._step()
        self._report("shut down")
