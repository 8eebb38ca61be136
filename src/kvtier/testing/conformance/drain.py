"""Draining ends everything."""

from __future__ import annotations

import time

from kvtier.testing.conformance.hooks import ConformanceHooks
from kvtier.testing.job_ledger import demand

__all__ = ["DrainChecks"]


class DrainChecks(ConformanceHooks):
    """`drain_jobs` comes before the slots are taken away."""

    def test_drain_ends_every_job(self) -> None:
        """After `drain_jobs`, every job has ended, and the next poll has all results that were not
        polled before, none of them twice. Nothing is written into a slot any more."""
        with self.harness() as harness:
            keys = harness.keys(self.fitting(12))
            harness.wait_for(harness.store(keys))
            for number in range(8):
                harness.load(keys[number % 3 :: 3])
                harness.store(harness.keys(4, start=100 + 4 * number))
            harness.drain()
            for _ in range(3):  # a second report would come now
                harness.step()
            time.sleep(self.settle_s)
            harness.demand_slots_untouched()

    def test_drain_without_jobs_returns(self) -> None:
        """There may be nothing to wait for, and nothing to be reported."""
        with self.harness() as harness:
            harness.drain()
            demand(not harness.ledger.reports, "a job was reported though none was submitted")
