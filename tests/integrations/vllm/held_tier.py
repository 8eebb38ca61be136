"""A tier that reports nothing while it is held."""

from __future__ import annotations

from collections.abc import Iterable

from kvtier.tiering.base import JobResult
from kvtier.tiering.example.manager import ExampleSecondaryTierManager

HELD = {
    "type": "HeldTier",
    "module_path": "tests.integrations.vllm.held_tier",
    "simulate_async": False,
}
"""Its entry in `secondary_tiers`."""


class HeldTier(ExampleSecondaryTierManager):
    """The example tier with a switch that holds back all results in this process."""

    is_held = True

    def get_finished_jobs(self) -> Iterable[JobResult]:
        return () if HeldTier.is_held else super().get_finished_jobs()
