"""The settings and hooks that the author of a tier gives the conformance kit."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, ClassVar

import pytest

from kvtier.testing.damage import BackingBytes
from kvtier.testing.harness import TierHarness
from kvtier.tiering.base import SecondaryTierManager

if TYPE_CHECKING:
    from kvtier.base import OffloadingSpec

__all__ = ["ConformanceHooks"]

_LEAST_CAPACITY = 4
_NUM_SLOTS = 96


class ConformanceHooks:
    """Settings and methods that the author may override. Only `make_tier` is required."""

    capacity_blocks: ClassVar[int | None] = None
    """Largest number of blocks that the tier of `make_tier` keeps; 4 or more. None: more than 1000.
    In at least one test class, give a small number and a tier that keeps no more: the checks of a
    full tier need it."""
    survives_restart: ClassVar[bool] = False
    """True if a second tier with the same spec finds the blocks of a first one."""
    call_limit_s: ClassVar[float] = 0.1
    """Seconds that a call on the scheduler's thread may take. An engine counts a call of more than
    0.1 s as a failure. A call that neither copies nor waits takes microseconds."""
    patience_s: ClassVar[float] = 20.0
    """Seconds to wait for a lookup, a job, `drain_jobs` or `shutdown` before the check fails."""
    settle_s: ClassVar[float] = 0.05
    """Seconds to wait before the kit checks that a tier which has ended has changed no slot."""
    row_bytes: ClassVar[int] = 8192
    """The size of a block: a multiple of the page size."""

    def make_tier(self, spec: OffloadingSpec, view: memoryview) -> SecondaryTierManager:
        """Return a new tier. The kit calls it several times in one test, after it has shut down the
        earlier tier. The new tier must work even if the storage still has earlier blocks."""
        raise NotImplementedError(
            "write `def make_tier(self, spec, view)` in your test class, and return your tier, "
            "made with offloading_spec=spec, primary_kv_view=view and a tier_type"
        )

    def backing(self, tier: SecondaryTierManager) -> BackingBytes | None:
        """Return access to the stored bytes of the tier. If this returns None, the kit does not
        check seals."""
        return None

    def slow_backend(self, tier: SecondaryTierManager) -> AbstractContextManager[object] | None:
        """Return a context in which the tier's storage answers slowly, or not at all. If this
        returns None, the checks that need it run at the storage's normal speed, and pytest shows
        them as skipped when they pass."""
        return None

    # --- for the checks ------------------------------------------------------------------------

    def harness(self, namespace: str | None = None, num_slots: int = _NUM_SLOTS) -> TierHarness:
        """Return a harness with a new tier from `make_tier`."""
        capacity = self.capacity_blocks
        if capacity is not None and capacity < _LEAST_CAPACITY:
            raise ValueError(
                f"capacity_blocks = {capacity}: the checks need a tier that keeps at least "
                f"{_LEAST_CAPACITY} blocks. Make a larger tier, or leave capacity_blocks None if "
                "it keeps more than 1000"
            )
        return TierHarness(
            self.make_tier,
            num_slots=max(num_slots, min(capacity or 0, 1024) + 16),
            row_bytes=self.row_bytes,
            patience_s=self.patience_s,
            namespace=namespace,
        )

    def fitting(self, wanted: int) -> int:
        """Return `wanted`, or the capacity if it is smaller."""
        return wanted if self.capacity_blocks is None else min(wanted, self.capacity_blocks)

    def slowed(self, tier: SecondaryTierManager) -> AbstractContextManager[object]:
        """Return the context of `slow_backend`, or one that does nothing."""
        return self.slow_backend(tier) or nullcontext()

    def skip_if_not_slowed(self, tier: SecondaryTierManager) -> None:
        """Skip if there is no `slow_backend`. A check that proves little without a slow backend
        calls this after it has passed."""
        if self.slow_backend(tier) is None:
            pytest.skip(
                "no hook `slow_backend`: the check passed at the storage's normal speed; write the "
                "hook in your test class to run it while the storage is slow"
            )
