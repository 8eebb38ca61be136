"""Fingerprints: what was computed by other weights, or before a reset, does not exist."""

from __future__ import annotations

import os

from kvtier.base import LookupResult
from kvtier.testing.conformance.hooks import ConformanceHooks
from kvtier.testing.job_ledger import demand

__all__ = ["EpochChecks"]


def _new_fingerprint() -> bytes:
    return os.urandom(16)


class EpochChecks(ConformanceHooks):
    """A fingerprint names a namespace. The same key in another one is another block."""

    def test_blocks_of_another_fingerprint_are_not_found(self) -> None:
        """A block is found and loaded under the fingerprint it was stored under, and no other."""
        with self.harness() as harness:
            own, others = harness.fingerprint, _new_fingerprint()
            mine, theirs = harness.keys(2)
            harness.wait_for(harness.store([mine]))
            harness.fingerprint = others
            harness.wait_for(harness.store([theirs]))
            (report,) = harness.wait_for(harness.load([mine]))
            demand(not report.moved, "a load got a block that is kept under another fingerprint")
            harness.fingerprint = own
            demand(
                harness.look_up(theirs) is LookupResult.MISS,
                "a block is a HIT that a job with another fingerprint has stored",
            )
            (report,) = harness.wait_for(harness.load([theirs]))
            demand(not report.moved, "a load got a block that is kept under another fingerprint")

    def test_another_model_finds_nothing(self) -> None:
        """A tier for another configuration finds no block of this one, though both may use the
        same storage."""
        with self.harness() as first:
            keys = first.keys(3)
            first.wait_for(first.store(keys))
        with self.harness() as second:
            demand(
                not second.hits(keys),
                "blocks of one configuration are a HIT for another: the fingerprint is part of "
                "the name under which a block is kept",
            )
            (report,) = second.wait_for(second.load(keys))
            demand(not report.moved, "a load got another configuration's block")

    def test_a_new_epoch_hides_earlier_blocks(self) -> None:
        """After `begin_epoch`, blocks stored before are a MISS, and blocks stored later are kept as
        usual, also those with the same keys."""
        with self.harness() as harness:
            keys = harness.keys(self.fitting(4))
            harness.wait_for(harness.store(keys))
            demand(len(harness.hits(keys)) == len(keys), "blocks are a MISS after their store")
            harness.begin_epoch(_new_fingerprint())
            demand(
                not harness.hits(keys),
                "blocks from before begin_epoch are still a HIT: look up in self.fingerprint, and "
                "forget earlier answers",
            )
            (report,) = harness.wait_for(harness.load(keys))
            demand(not report.moved, "a load got a block from before begin_epoch")
            (report,) = harness.wait_for(harness.store(keys))
            demand(
                report.result.success,
                "a store after begin_epoch failed: blocks of an earlier epoch must not keep later "
                "ones out",
            )
            (report,) = harness.wait_for(harness.load(keys))
            demand(report.result.success, "blocks stored after begin_epoch do not load")

    def test_jobs_under_way_stay_in_their_epoch(self) -> None:
        """A store that was submitted before `begin_epoch` is reported, and what it brings never
        shows afterwards. A load from before is reported as well."""
        with self.harness() as harness:
            keys = harness.keys(self.fitting(16))
            harness.wait_for(harness.store(keys[:2]))
            with self.slowed(harness.tier):
                jobs = [harness.store([key]) for key in keys[2:]]
                jobs.append(harness.load(keys[:2]))
                harness.begin_epoch(_new_fingerprint())
            harness.wait_for(*jobs)
            demand(
                not harness.hits(keys),
                "a store that was under way at begin_epoch shows in the new epoch: keep a block "
                "under the fingerprint of its job, not under that of the tier",
            )
