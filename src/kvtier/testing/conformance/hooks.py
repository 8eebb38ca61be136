"""What a tier's author tells the conformance kit."""

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
    """Everything that an author may override. Only `make_tier` is required."""

    capacity_blocks: ClassVar[int | None] = None
    """The most blocks that the tier of `make_tier` keeps; at least 4. None: more than 1000. Give a
    small one in one test class at least, or nothing is known about a full tier."""
    survives_restart: ClassVar[bool] = False
    """Whether a second tier with the same spec finds the blocks of a first one."""
    call_limit_s: ClassVar[float] = 0.1
    """No call on the scheduler's thread may take as long as this; the engine takes one that does
    for a failure. A call that copies nothing and waits for nobody takes microseconds."""
    patience_s: ClassVar[float] = 20.0
    """How long anything may take before it is taken for a hang."""
    settle_s: ClassVar[float] = 0.05
    """How long the kit watches for something that must not happen."""
    row_bytes: ClassVar[int] = 8192
    """The size of a block: a multiple of the page size."""

    def make_tier(self, spec: OffloadingSpec, view: memoryview) -> SecondaryTierManager:
        """A new tier. Called several times in one test, one tier after the other; two of them are
        never alive at once. Blocks that an earlier tier left behind must not be in the way."""
        raise NotImplementedError(
            "write `def make_tier(self, spec, view)` in your test class, and return your tier "
            "made with offloading_spec=spec, primary_kv_view=view and a tier_type"
        )

    def backing(self, tier: SecondaryTierManager) -> BackingBytes | None:
        """How to reach the bytes that the tier keeps. None: its seals are not checked."""
        return None

    def slow_backend(self, tier: SecondaryTierManager) -> AbstractContextManager[object] | None:
        """Inside this context the tier's storage answers slowly, or not at all. None: cannot be
        had; checks that need it are made with the storage as quick as it is, and then skipped."""
        return None

    # --- for the checks ------------------------------------------------------------------------

    def harness(self, namespace: str | None = None, num_slots: int = _NUM_SLOTS) -> TierHarness:
        """A tier of `make_tier` and an engine's side of the contract around it."""
        capacity = self.capacity_blocks
        if capacity is not None and capacity < _LEAST_CAPACITY:
            raise ValueError(
                f"capacity_blocks = {capacity}: the checks need a tier that keeps "
                f"{_LEAST_CAPACITY} blocks at least. Make a larger one, or leave it None if the "
                "tier keeps more than 1000"
            )
        return TierHarness(
            self.make_tier,
            num_slots=max(num_slots, min(capacity or 0, 1024) + 16),
            row_bytes=self.row_bytes,
            patience_s=self.patience_s,
            namespace=namespace,
        )

    def fitting(self, wanted: int) -> int:
        """So many blocks, or as many as the tier keeps."""
        return wanted if self.capacity_blocks is None else min(wanted, self.capacity_blocks)

    def slowed(self, tier: SecondaryTierManager) -> AbstractContextManager[object]:
        """`slow_backend` where there is one."""
        return self.slow_backend(tier) or nullcontext()

    def skip_if_not_slowed(self, tier: SecondaryTierManager) -> None:
        """End a check that has found nothing wrong, but says little without `slow_backend`."""
        if self.slow_backend(tier) is None:
            pytest.skip(
                "no hook `slow_backend`: nothing is wrong while the storage is as quick as it is; "
                "write it in your test class to have this checked while it is slow"
            )
