"""Checks of jobs: stored bytes come back, damaged blocks never do, every job is reported once, and
draining ends all jobs."""

from __future__ import annotations

import time

import pytest

from kvtier.base import LookupResult, OffloadKey
from kvtier.testing.conformance.hooks import ConformanceHooks
from kvtier.testing.damage import BackingBytes, Damage, inflict
from kvtier.testing.harness import TierHarness
from kvtier.testing.job_ledger import demand

__all__ = ["DrainChecks", "ReportingChecks", "RoundTripChecks", "SealChecks"]


class RoundTripChecks(ConformanceHooks):
    """These checks load blocks; the harness compares every loaded byte."""

    def test_stored_blocks_come_back(self) -> None:
        """Blocks stored by several jobs are found and can be loaded, in any order and grouping.

        The harness lends slots in random order, and fills them with a fixed pattern before a load.
        That reveals a block in the wrong slot, and a block that was not written at all.
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
        """A thousand blocks, or as many as the tier keeps, are stored and loaded."""
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
        """A block can be loaded repeatedly, because several requests may have the same prefix."""
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
        """A block that is stored again stays readable, during the second store and after it. The
        second store is reported as successful."""
        with self.harness() as harness:
            keys = harness.keys(self.fitting(4))
            harness.wait_for(harness.store(keys))
            again, meanwhile = harness.store(keys), harness.load(keys)
            stored, loaded = harness.wait_for(again, meanwhile)
            demand(
                stored.result.success,
                "a store of blocks that are there already was reported as failed: report success",
            )
            demand(loaded.result.success, "blocks could not be loaded while they were stored again")
            demand(
                all(harness.look_up(key) is LookupResult.HIT for key in keys),
                "blocks are gone after they were stored a second time",
            )
            (report,) = harness.wait_for(harness.load(keys))
            demand(report.result.success, "blocks do not load after they were stored twice")


class ReportingChecks(ConformanceHooks):
    """Checks of reports. A job that is never reported pins slots of the primary tier forever. If a
    job is reported twice or too early, two jobs may use the same slot."""

    def test_a_load_names_exactly_what_arrived(self) -> None:
        """If the tier lacks some blocks of a load, it loads the others, names them in
        `successful_keys`, and reports the load as failed. Otherwise one lost block would cost a
        whole prefix."""
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
        """A load of blocks that the tier does not have is reported as failed. An engine submits
        such a load if the tier evicts blocks after they were a HIT."""
        with self.harness() as harness:
            (report,) = harness.wait_for(harness.load(harness.keys(3)))
            demand(
                not report.result.success and not report.moved,
                "a load of blocks that were never stored was reported as successful",
            )

    def test_nothing_to_do_is_reported(self) -> None:
        """A store of blocks that the tier has already is reported like any other, because its slots
        are pinned until then."""
        with self.harness() as harness:
            keys = harness.keys(self.fitting(4))
            harness.wait_for(harness.store(keys))
            reports = harness.wait_for(harness.store(keys), harness.store(keys[:1]))
            demand(
                all(report.result.success for report in reports),
                "a store with nothing to do was reported as failed: report success",
            )

    def test_a_job_without_blocks_is_reported(self) -> None:
        """A job without blocks is reported, too."""
        with self.harness() as harness:
            harness.wait_for(harness.store([]), harness.load([]))

    def test_a_full_tier_reports_and_stays_within_its_capacity(self) -> None:
        """With more blocks than fit, each job is reported, at most `capacity_blocks` blocks are a
        HIT, and every HIT can be loaded."""
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
                    f"{len(kept)} blocks are a HIT, but the tier may keep at most {capacity}",
                )
            for key in kept:
                (report,) = harness.wait_for(harness.load([key]))
                demand(report.result.success, "a block of a full tier is a HIT but does not load")

    def test_stores_in_flight_stay_within_the_capacity(self) -> None:
        """If many stores of more blocks than fit are in flight together, the tier still keeps at
        most `capacity_blocks` blocks."""
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
                f"{kept} blocks are a HIT after stores that were in flight together, but the tier "
                f"may keep at most {capacity}",
            )

    def test_many_jobs_are_each_reported_once(self) -> None:
        """Each of a hundred stores and loads is reported exactly once, whether or not the tier has
        the blocks of the loads."""
        with self.harness() as harness:
            keys = harness.keys(self.fitting(20))
            for number in range(100):
                wanted = [keys[(number * 7 + i) % len(keys)] for i in range(number % 3 + 1)]
                (harness.load if number % 2 else harness.store)(list(dict.fromkeys(wanted)))
            harness.wait_for(*harness.ledger.unreported.values())
            for _ in range(3):  # a second report would come now
                harness.step()


class DrainChecks(ConformanceHooks):
    """`drain_jobs` is called before the slots are taken away, so no job may outlast it."""

    def test_drain_ends_every_job(self) -> None:
        """After `drain_jobs`, every job has ended. The next poll returns all results that were not
        returned before, each once. The tier writes into no slot any more."""
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
        """Without jobs, `drain_jobs` returns, and no job is reported."""
        with self.harness() as harness:
            harness.drain()
            demand(not harness.ledger.reports, "a job was reported though none was submitted")


_MOST_CASES = 8


class SealChecks(ConformanceHooks):
    """These checks need the hook `backing`, which gives access to the stored bytes."""

    @pytest.mark.parametrize("how", list(Damage))
    def test_a_damaged_block_is_refused(self, how: Damage) -> None:
        """If the stored bytes of a block were changed, its load is reported as failed and names
        only the intact blocks in `successful_keys`. `take_seal_failures` counts the changed block.
        """
        with self.harness() as harness:
            backing = self._backing_or_skip(harness)
            for case in range(self.fitting(3 * _MOST_CASES) // 3):
                keys = harness.keys(3, start=10 * case)
                damaged = self._store_and_damage(harness, backing, keys, how, seed=case)
                harness.call("take_seal_failures")
                (report,) = harness.wait_for(harness.load(keys))
                demand(
                    not report.result.success and not report.moved & damaged,
                    f"a damaged block ({how}) was reported as loaded: verify the seal before "
                    "reporting (verify_block)",
                )
                demand(
                    report.moved == set(keys) - damaged,
                    f"intact blocks of a load were refused with its damaged blocks ({how}): name "
                    "the intact ones in successful_keys",
                )
                refused = harness.call("take_seal_failures").total()
                demand(
                    refused == len(damaged),
                    f"{len(damaged)} damaged blocks ({how}) were refused, and take_seal_failures "
                    f"counts {refused}: call verify_block for every block that was read",
                )

    def test_a_refused_block_can_be_stored_again(self) -> None:
        """A block that was refused can be stored again and then loaded. If the tier kept the
        damaged block as a HIT, every load of it would fail."""
        with self.harness() as harness:
            backing = self._backing_or_skip(harness)
            keys = harness.keys(3)
            self._store_and_damage(harness, backing, keys, Damage.FLIP, seed=0)
            harness.wait_for(harness.load(keys))
            harness.wait_for(harness.store(keys))
            (report,) = harness.wait_for(harness.load(keys))
            demand(
                report.result.success,
                "a block that was refused once does not load after it was stored again: forget a "
                "block whose seal is broken",
            )

    def _backing_or_skip(self, harness: TierHarness) -> BackingBytes:
        backing = self.backing(harness.tier)
        if backing is None:
            pytest.skip("no hook `backing`: write it in your test class to have seals checked")
        return backing

    def _store_and_damage(
        self,
        harness: TierHarness,
        backing: BackingBytes,
        keys: list[OffloadKey],
        how: Damage,
        seed: int,
    ) -> set[OffloadKey]:
        harness.wait_for(harness.store(keys))
        _, key, other = keys
        try:
            inflict(backing, harness.fingerprint, key, how, other=other, seed=seed)
        except KeyError:
            raise AssertionError(
                "the hook `backing` does not find a block that the tier has reported as stored"
            ) from None
        return {key, other} if how is Damage.SWAP else {key}
