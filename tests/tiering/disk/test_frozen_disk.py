"""A disk that blocks writes for a while: loads go on, and no foreign memory is touched."""

from __future__ import annotations

import threading
import time
from pathlib import Path

from kvtier.testing import FaultSchedule, TierHarness
from kvtier.tiering.disk.manager import DiskSecondaryTierManager
from tests.tiering.disk.engine import configured_engine, engine_with_faults
from tests.tiering.disk.harness import disk_harness, disk_of, is_mapped
from tests.tiering.disk.small_disk import loop_disk
from tests.tiering.patience import wait_until

KEYS = TierHarness.keys(32)


def is_held_up(tier: DiskSecondaryTierManager) -> bool:
    """True if a thread has begun a write that the file system blocks."""
    return any(lane._num_stores for lane in tier._mover.lanes)


def test_loads_are_answered_while_stores_wait(tmp_path: Path) -> None:
    with (
        loop_disk(tmp_path, 64 << 20) as disk,
        disk_harness(disk.root / "kv.slab", 1000) as harness,
    ):
        harness.wait_for(harness.store(KEYS))
        with disk.frozen():
            stores = [harness.store(harness.keys(1, start=100 * n)) for n in range(1, 21)]
            wait_until(lambda: is_held_up(disk_of(harness)), "a write is under way")
            time.sleep(0.1)  # gives other threads time to take the other stores
            loads = [harness.load(KEYS[n : n + 4]) for n in range(0, 32, 4)]
            for report in harness.wait_for(*loads):
                assert report.result.success
            assert all(job.job_id not in harness.ledger.reports for job in stores)
        for report in harness.wait_for(*stores):
            assert report.result.success


def test_what_waits_in_the_kernel_keeps_its_memory(tmp_path: Path) -> None:
    """The engine ends while a write is blocked, and does not wait for it."""
    threads = set(threading.enumerate())
    with loop_disk(tmp_path, 64 << 20) as disk:
        path = disk.root / "kv.slab"
        engine, faulty = engine_with_faults(path, FaultSchedule(), shutdown_timeout_s=0.2)
        tier = faulty.tier
        assert isinstance(tier, DiskSecondaryTierManager)
        with disk.frozen():
            engine.serve(KEYS)
            wait_until(lambda: is_held_up(tier), "a write is under way")
            address = tier._mover.rows_address
            engine.manager.shutdown()
            assert is_mapped(address), "what is written may be someone else's memory"
        wait_until(lambda: set(threading.enumerate()) <= threads, "the tier has ended")
        with configured_engine(path, num_rows=64, num_blocks=1024) as after:
            after.serve(KEYS)  # compares the content
            after.settle()


# --- how much is under way ---------------------------------------------------------------------


def test_stores_take_half_of_the_queue_and_no_load_waits_for_one(tmp_path: Path) -> None:
    with disk_harness(tmp_path / "kv.slab", 256, num_rows=200, io_threads=1) as harness:
        (lane,) = disk_of(harness)._mover.lanes
        reap = lane._queue.reap
        seen: list[tuple[int, int, int]] = []
        answers = threading.Event()

        def watched(at_least: int = 1) -> list[tuple[int, int]]:
            seen.append((lane._num_stores, lane._num_in_flight, at_least))
            answers.wait()
            return reap(at_least)

        harness.wait_for(harness.store(KEYS))
        lane._queue.reap = watched  # type: ignore[method-assign]
        jobs = [harness.store(harness.keys(1, start=40))]
        wait_until(lambda: bool(seen), "the thread waits for the first of them")
        jobs += [harness.store(harness.keys(1, start=50 + n)) for n in range(100)]
        jobs += [harness.load(KEYS[n : n + 1]) for n in range(4)]
        answers.set()
        for report in harness.wait_for(*jobs):
            assert report.result.success
    assert max(num_stores for num_stores, _, _ in seen) == lane._depth // 2
    mixed = [at_least for stores, all_, at_least in seen if 0 < stores < all_]
    assert mixed, "no load was under way beside a store"
    assert set(mixed) == {1}, "a load that has been read waits for stores"
