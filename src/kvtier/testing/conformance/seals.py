"""Blocks that are not what they should be are never served."""

from __future__ import annotations

import pytest

from kvtier.base import OffloadKey
from kvtier.testing.conformance.hooks import ConformanceHooks
from kvtier.testing.damage import BackingBytes, Damage, inflict
from kvtier.testing.harness import TierHarness
from kvtier.testing.job_ledger import demand

__all__ = ["SealChecks"]

_MOST_CASES = 8


class SealChecks(ConformanceHooks):
    """These need the hook `backing`: how to reach the bytes that the tier keeps."""

    @pytest.mark.parametrize("how", list(Damage))
    def test_a_damaged_block_is_refused(self, how: Damage) -> None:
        """A block whose kept bytes were changed is reported as failed and counted in
        `take_seal_failures`; the other blocks of the job arrive."""
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
                    f"one block was damaged ({how}), and other blocks of the same load were "
                    "refused with it",
                )
                refused = harness.call("take_seal_failures").total()
                demand(
                    refused == len(damaged),
                    f"{len(damaged)} damaged blocks ({how}) were refused, and take_seal_failures "
                    f"counts {refused}: have verify_block look at every block that was read",
                )

    def test_a_refused_block_can_be_stored_again(self) -> None:
        """A block that was refused is not taken for present: storing it again brings it back. If
        it stayed a HIT, every request for it would wait for a load in vain."""
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
