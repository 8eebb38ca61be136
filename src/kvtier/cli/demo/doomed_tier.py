"""A tier that dies when it is told to, for the demo to show what that does to an engine."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from kvtier.tiering.example.manager import ExampleSecondaryTierManager

if TYPE_CHECKING:
    from kvtier.base import OffloadingSpec
    from kvtier.tiering.base import JobResult, TransferJob

__all__ = ["DoomedTier"]


class DoomedTier(ExampleSecondaryTierManager):
    """The example tier, until `kill`. From then on it is a black hole, the worst kind of dead: it
    says it has what it had, takes every job, and reports none, nor those that it had begun."""

    def __init__(
        self,
        offloading_spec: OffloadingSpec,
        primary_kv_view: memoryview,
        tier_type: str,
        max_blocks: int = 1000,
    ) -> None:
        self._is_dead = False
        super().__init__(
            offloading_spec, primary_kv_view, tier_type, max_blocks, simulate_async=True
        )

    def kill(self) -> None:
        """Scheduler thread."""
        self._is_dead = True

    def submit_store(self, job: TransferJob) -> None:
        if not self._is_dead:
            super().submit_store(job)

    def submit_load(self, job: TransferJob) -> None:
        if not self._is_dead:
            super().submit_load(job)

    def get_finished_jobs(self) -> Iterable[JobResult]:
        return () if self._is_dead else super().get_finished_jobs()
