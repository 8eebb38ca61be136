"""Checks that a tier starts and ends, and leaves nothing behind."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path

import pytest

from kvtier.testing.conformance.hooks import ConformanceHooks
from kvtier.testing.harness import TierHarness
from kvtier.testing.job_ledger import demand

__all__ = ["LifetimeChecks"]

_TASKS = Path("/proc/self/task")
_DESCRIPTORS = Path("/proc/self/fd")


class LifetimeChecks(ConformanceHooks):
    """Checks of start and shutdown. The primary tier unmaps the slots once the tiers are shut
    down."""

    def test_the_view_is_free_after_shutdown(self) -> None:
        """After `shutdown` the tier holds no row of the primary tier's memory, and no array made
        from a row. Otherwise the memory could not be unmapped."""
        with self.harness() as harness:
            _use(harness, self.fitting(8))
            harness.drain()
            harness.shut_down()
            holders = harness.release_slots()
            demand(
                not holders,
                f"after shutdown, a part of the primary tier's memory is still held: "
                f"{'; '.join(holders)}. Drop rows when their job ends",
            )

    def test_no_slot_changes_after_shutdown(self) -> None:
        """`shutdown` may be called while jobs are under way. It returns, and after that the tier
        writes into no slot."""
        with self.harness() as harness:
            keys = harness.keys(self.fitting(12))
            harness.wait_for(harness.store(keys))
            for number in range(6):
                harness.store(harness.keys(4, start=100 + 4 * number))
                harness.load(keys[number % 3 :: 3])
            harness.shut_down()
            harness.slots.take_back_all()
            time.sleep(self.settle_s)
            harness.demand_slots_untouched()

    def test_shutdown_twice_is_harmless(self) -> None:
        """A second `shutdown` returns and does not raise."""
        with self.harness() as harness:
            _use(harness, self.fitting(4))
            harness.drain()
            harness.shut_down()
            harness.shut_down()

    def test_shutdown_of_an_unused_tier_returns(self) -> None:
        """`shutdown` returns even if there was no job and no call of `drain_jobs`."""
        with self.harness() as harness:
            harness.shut_down()

    def test_no_thread_or_descriptor_is_left(self) -> None:
        """After `shutdown` the tier's threads have ended and its files and connections are closed.

        Only the second tier is checked: with the first one, the process may open descriptors that
        it keeps. The test keeps both tiers, as an engine does, so a thread that ends only when
        its tier is garbage-collected counts as left behind.
        """
        kept = [self._live_once()]
        threads, tasks, descriptors = set(threading.enumerate()), _count(_TASKS), _descriptors()
        kept.append(self._live_once())
        deadline = time.monotonic() + self.patience_s
        while True:
            left = sorted(thread.name for thread in set(threading.enumerate()) - threads)
            opened = sorted(_descriptors() - descriptors)
            more_tasks = _count(_TASKS) - tasks
            if not left and not opened and more_tasks <= 0:
                return
            if time.monotonic() > deadline:
                break
            time.sleep(0.005)
        name = type(kept[-1].tier).__name__
        demand(not left, f"{name} leaves threads behind after shutdown: {', '.join(left)}")
        demand(not opened, f"{name} leaves descriptors open after shutdown: {', '.join(opened)}")
        demand(more_tasks <= 0, f"{name} leaves {more_tasks} native threads after shutdown")

    def test_blocks_survive_a_restart(self) -> None:
        """With `survives_restart`, a second tier with the same configuration finds and loads the
        blocks of the first."""
        if not self.survives_restart:
            pytest.skip("survives_restart is False: this tier forgets everything at shutdown")
        with self.harness() as first:
            keys = first.keys(self.fitting(8))
            first.wait_for(first.store(keys))
        with self.harness(namespace=first.namespace) as second:
            missing = len(keys) - len(second.hits(keys))
            demand(missing == 0, f"{missing} of {len(keys)} blocks are a MISS after a restart")
            (report,) = second.wait_for(second.load(keys))
            demand(report.result.success, "blocks from before a restart do not load")

    def _live_once(self) -> TierHarness:
        with self.harness() as harness:
            _use(harness, self.fitting(8))
        return harness


def _use(harness: TierHarness, num_blocks: int) -> None:
    keys = harness.keys(num_blocks)
    harness.wait_for(harness.store(keys))
    harness.hits(keys)
    harness.wait_for(harness.load(keys))


def _count(folder: Path) -> int:
    return len(os.listdir(folder))


def _descriptors() -> set[str]:
    """Return the open descriptors with their targets, except the one opened to list them."""
    found = set()
    for name in os.listdir(_DESCRIPTORS):
        try:
            found.add(f"{name} ({os.readlink(_DESCRIPTORS / name)})")
        except FileNotFoundError:
            continue
    return found
