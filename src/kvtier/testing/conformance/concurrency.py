"""Many jobs at once."""

from __future__ import annotations

from random import Random

from kvtier.testing.conformance.hooks import ConformanceHooks
from kvtier.testing.harness import TierHarness
from kvtier.testing.job_ledger import demand

__all__ = ["ConcurrencyChecks"]

_ROUNDS = 8
_ROUNDS_NEEDED = 3
_NUM_STORES = 64
"""More than any tier carries out side by side: what is behind these has to wait."""


class ConcurrencyChecks(ConformanceHooks):
    """Jobs that are in flight together."""

    def test_overlapping_jobs_bring_the_right_bytes(self) -> None:
        """Stores and loads of the same blocks, many in flight: whatever a load says has arrived is
        right to the byte, and what a store says is kept can be loaded in the end."""
        chance = Random(1)
        with self.harness() as harness:
            keys = harness.keys(self.fitting(24))
            for _ in range(200):
                some = chance.sample(keys, chance.randint(1, min(6, len(keys))))
                (harness.load if chance.random() < 0.5 else harness.store)(some)
                if chance.random() < 0.3:
                    harness.step()
            harness.wait_for(*harness.ledger.unreported.values())
            kept = set[bytes]()
            for report in harness.ledger.reports.values():
                if not report.job.is_promotion:
                    kept |= report.moved
            (report,) = harness.wait_for(harness.load(keys))
            lost = kept - report.moved
            demand(
                not lost,
                f"{len(lost)} of {len(keys)} blocks were reported as stored, fit, and do not load",
            )

    def test_stores_of_one_block_at_once_keep_it(self) -> None:
        """Several stores of the same new blocks, under way together: each is reported, and the
        blocks are there."""
        with self.harness() as harness:
            keys = harness.keys(self.fitting(4))
            with self.slowed(harness.tier):
                jobs = [harness.store(keys) for _ in range(4)]
            harness.wait_for(*jobs)
            (report,) = harness.wait_for(harness.load(keys))
            demand(
                report.result.success,
                f"{len(keys) - len(report.moved)} of {len(keys)} blocks do not load after several "
                "stores of them were under way together",
            )

    def test_loads_do_not_wait_behind_stores(self) -> None:
        """A load that is submitted after many stores ends before most of them: a request is
        waiting for the load, and nobody for the stores.

        No clock is involved. In several rounds, stores are submitted and then one load; the rounds
        count in which many stores were left right after that. A tier that is so quick that there
        are hardly any such rounds has nothing to wait behind, unless the hook `slow_backend` makes
        it slow.
        """
        with self.harness(num_slots=2 * _NUM_STORES + 2) as harness:
            (wanted,) = harness.keys(1)
            harness.wait_for(harness.store([wanted]))
            outcomes = [self._load_overtakes_stores(harness, n) for n in range(_ROUNDS)]
            counted = [outcome for outcome in outcomes if outcome is not None]
            demand(
                len(counted) < _ROUNDS_NEEDED or any(counted),
                f"in {len(counted)} of {_ROUNDS} rounds a load was submitted behind {_NUM_STORES} "
                "stores, and each time it was reported after most of them: loads must not wait "
                "behind stores",
            )
            self.skip_if_not_slowed(harness.tier)

    def _load_overtakes_stores(self, harness: TierHarness, number: int) -> bool | None:
        """None: there were too few stores left to be overtaken."""
        (wanted,) = harness.keys(1)
        start = 100 * (number + 1)
        with self.slowed(harness.tier):
            # The wanted block goes along, so that a full tier does not give it up.
            stores = [
                harness.store([wanted, *harness.keys(1, start=start + i)])
                for i in range(_NUM_STORES)
            ]
            load = harness.load([wanted])
            harness.step()
            left = [job for job in stores if job.job_id in harness.ledger.unreported]
        harness.wait_for(load, *stores)
        if len(left) < _NUM_STORES // 2:
            return None
        reported = list(harness.ledger.reports)
        behind = set(reported[reported.index(load.job_id) :])
        return sum(job.job_id in behind for job in left) >= len(left) // 2
