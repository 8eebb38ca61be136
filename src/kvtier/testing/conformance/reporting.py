"""Every job is reported once, and truthfully."""

from __future__ import annotations

import pytest

from kvtier.base import OffloadKey
from kvtier.testing.conformance.hooks import ConformanceHooks
from kvtier.testing.job_ledger import demand

__all__ = ["ReportingChecks"]


class ReportingChecks(ConformanceHooks):
    """A job that is never reported pins slots of the primary tier for ever; one that is reported
    twice, or too early, lets a slot be used by two."""

    def test_a_load_names_exactly_what_arrived(self) -> None:
        """Of a load with blocks that are not there, those that are there arrive and are named; the
        rest failed. Otherwise one lost block would cost a whole prefix."""
        with self.harness() as harness:
            present = harness.keys(self.fitting(4))
            absent = harness.keys(len(present), start=1000)
            harness.wait_for(harness.store(present))
            mixed = [key for pair in zip(absent, present, strict=True) for key in pair]
            (report,) = harness.wait_for(harness.load(mixed))
            demand(
                not report.result.success,
                "a load was reported as successful, though some of its blocks were never stored",
            )
            demand(
                report.moved == set(present),
                f"a load of {len(present)} present and {len(absent)} absent blocks named "
                f"{len(report.moved & set(present))} of the present and "
                f"{len(report.moved & set(absent))} of the absent ones in successful_keys: name "
                "exactly those that arrived",
            )

    def test_a_load_of_unknown_blocks_fails(self) -> None:
        """A load of blocks that are not there at all is reported, as failed: a HIT may be older
        than an eviction."""
        with self.harness() as harness:
            (report,) = harness.wait_for(harness.load(harness.keys(3)))
            demand(
                not report.result.success and not report.moved,
                "a load of blocks that were never stored was reported as successful",
            )

    def test_nothing_to_do_is_reported(self) -> None:
        """A store of blocks that are all there already is reported like any other. Its slots are
        pinned until then."""
        with self.harness() as harness:
            keys = harness.keys(self.fitting(4))
            harness.wait_for(harness.store(keys))
            reports = harness.wait_for(harness.store(keys), harness.store(keys[:1]))
            demand(
                all(report.result.success for report in reports),
                "a store with nothing to do was reported as failed: all its blocks are kept",
            )

    def test_a_job_without_blocks_is_reported(self) -> None:
        """Even a job of no blocks at all ends."""
        with self.harness() as harness:
            harness.wait_for(harness.store([]), harness.load([]))

    def test_a_full_tier_reports_and_stays_within_its_capacity(self) -> None:
        """More blocks than fit: each job is reported, no more blocks are a HIT than the capacity,
        and what is a HIT can be loaded. `capacity_blocks` says how many fit."""
        capacity = self.capacity_blocks
        if capacity is None:
            pytest.skip("capacity_blocks is None: give it in a test class with a small tier")
        with self.harness() as harness:
            keys = harness.keys(2 * capacity + 5)
            at_once = min(capacity + 3, harness.slots.num_free)
            kept = set[OffloadKey]()
            for start in range(0, len(keys), at_once):
                harness.wait_for(harness.store(keys[start : start + at_once]))
                kept = harness.hits(keys)
                demand(
                    len(kept) <= capacity,
                    f"{len(kept)} blocks are a HIT, and the tier may keep {capacity}",
                )
            for key in kept:
                (report,) = harness.wait_for(harness.load([key]))
                demand(report.result.success, "a block of a full tier is a HIT and does not load")

    def test_stores_in_flight_stay_within_the_capacity(self) -> None:
        """Many stores at once, of more blocks than fit, do not get past the capacity together."""
        capacity = self.capacity_blocks
        if capacity is None:
            pytest.skip("capacity_blocks is None: give it in a test class with a small tier")
        with self.harness() as harness:
            keys = harness.keys(3 * capacity)
            with self.slowed(harness.tier):
                jobs = [harness.store([key]) for key in keys[: harness.slots.num_free]]
            harness.wait_for(*jobs)
            kept = len(harness.hits(keys))
            demand(
                kept <= capacity,
                f"{kept} blocks are a HIT after stores that were in flight together, and the tier "
                f"may keep {capacity}",
            )

    def test_many_jobs_are_each_reported_once(self) -> None:
        """A hundred jobs of both kinds, with blocks that are there and some that are not: every
        one is reported, none twice."""
        with self.harness() as harness:
            keys = harness.keys(self.fitting(20))
            for number in range(100):
                wanted = [keys[(number * 7 + i) % len(keys)] for i in range(number % 3 + 1)]
                (harness.load if number % 2 else harness.store)(list(dict.fromkeys(wanted)))
            harness.wait_for(*harness.ledger.unreported.values())
            for _ in range(3):  # a second report would come now
                harness.step()
