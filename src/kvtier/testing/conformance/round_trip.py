"""Blocks go down and come back."""

from __future__ import annotations

from kvtier.base import LookupResult
from kvtier.testing.conformance.hooks import ConformanceHooks
from kvtier.testing.job_ledger import demand

__all__ = ["RoundTripChecks"]


class RoundTripChecks(ConformanceHooks):
    """The harness compares every loaded byte; these checks see to it that blocks are loaded."""

    def test_stored_blocks_come_back(self) -> None:
        """What was stored by several jobs is found and can be loaded, in any order and grouping.

        Slots are given in no order, and poisoned before a load: a block in the wrong slot, or one
        that was not written at all, is seen.
        """
        with self.harness() as harness:
            keys = harness.keys(self.fitting(60))
            demand(
                not harness.hits(keys),
                "blocks are found before anything was stored: a new namespace must be empty",
            )
            jobs = [harness.store(keys[start : start + 7]) for start in range(0, len(keys), 7)]
            for report in harness.wait_for(*jobs):
                demand(
                    report.result.success,
                    f"a store was reported as failed, though the tier was empty and {len(keys)} "
                    "blocks fit",
                )
            missing = len(keys) - len(harness.hits(keys))
            demand(
                missing == 0,
                f"{missing} of {len(keys)} blocks are a MISS after their store was reported as "
                "successful",
            )
            backwards, step = keys[::-1], 11
            loads = [
                harness.load(backwards[start : start + step])
                for start in range(0, len(backwards), step)
            ]
            for report in harness.wait_for(*loads):
                demand(report.result.success, "a load of blocks that were a HIT failed")

    def test_many_blocks_come_back(self) -> None:
        """A thousand blocks, or as many as the tier keeps, go down and come back."""
        with self.harness() as harness:
            keys = harness.keys(self.fitting(1000))
            pieces = [keys[start : start + 32] for start in range(0, len(keys), 32)]
            for piece in pieces:
                harness.store(piece)
            harness.wait_for(*harness.ledger.unreported.values())
            loads = [harness.load(piece) for piece in pieces]
            arrived = sum(len(report.moved) for report in harness.wait_for(*loads))
            demand(
                arrived == len(keys),
                f"{arrived} of {len(keys)} blocks came back, though all of them fit",
            )

    def test_loading_takes_nothing_away(self) -> None:
        """A block can be loaded again and again: several requests want the same prefix."""
        with self.harness() as harness:
            keys = harness.keys(self.fitting(4))
            harness.wait_for(harness.store(keys))
            for number in range(3):
                (report,) = harness.wait_for(harness.load(keys))
                demand(report.result.success, f"load number {number + 1} of the same blocks failed")

    def test_groups_are_told_apart(self) -> None:
        """Two blocks with the same hash, of different KV-cache groups, are two blocks."""
        with self.harness() as harness:
            first, second = (harness.keys(2, group_idx=group)[:2] for group in range(2))
            harness.wait_for(harness.store(first))
            demand(
                not harness.hits(second),
                "a block of one KV-cache group is a HIT for another group's key: the group is "
                "part of the key",
            )
            harness.wait_for(harness.store(second))
            (report,) = harness.wait_for(harness.load([*first, *second]))
            demand(report.result.success, "two groups' blocks with the same hashes do not load")

    def test_storing_twice_keeps_the_block(self) -> None:
        """A block that is stored again stays readable, before, while and after. It is reported as
        successful: the block is there."""
        with self.harness() as harness:
            keys = harness.keys(self.fitting(4))
            harness.wait_for(harness.store(keys))
            again, meanwhile = harness.store(keys), harness.load(keys)
            stored, loaded = harness.wait_for(again, meanwhile)
            demand(
                stored.result.success,
                "a store of blocks that are there already was reported as failed: they are kept",
            )
            demand(loaded.result.success, "blocks could not be loaded while they were stored again")
            demand(
                all(harness.look_up(key) is LookupResult.HIT for key in keys),
                "blocks are gone after they were stored a second time",
            )
            (report,) = harness.wait_for(harness.load(keys))
            demand(report.result.success, "blocks do not load after they were stored twice")
