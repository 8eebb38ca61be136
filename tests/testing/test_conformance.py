"""The example tier passes the kit, in every manner of running it."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import ClassVar

from kvtier.base import LookupResult, OffloadingSpec
from kvtier.testing import (
    BackingBytes,
    ExampleBacking,
    FaultSchedule,
    FaultyTier,
    TierConformance,
)
from kvtier.tiering.base import JobNotBegun, SecondaryTierManager, TransferJob
from kvtier.tiering.example.manager import ExampleSecondaryTierManager
from tests.testing.gated_tier import GatedTier


class ExampleConformance(TierConformance):
    def make_tier(self, spec: OffloadingSpec, view: memoryview) -> SecondaryTierManager:
        return ExampleSecondaryTierManager(spec, view, "example")

    def backing(self, tier: SecondaryTierManager) -> BackingBytes:
        below = tier.tier if isinstance(tier, FaultyTier) else tier
        assert isinstance(below, ExampleSecondaryTierManager)
        return ExampleBacking(below)


class TestOnTheSchedulersThread(ExampleConformance):
    pass


class TestSmall(ExampleConformance):
    capacity_blocks: ClassVar[int | None] = 8

    def make_tier(self, spec: OffloadingSpec, view: memoryview) -> SecondaryTierManager:
        return ExampleSecondaryTierManager(spec, view, "example", max_blocks=8)


class _RefusesUnknownBlocks(ExampleSecondaryTierManager):
    """Does not begin a load of which it has nothing."""

    def submit_load(self, job: TransferJob) -> None:
        if not any(self.lookup(key, job.req_context) is LookupResult.HIT for key in job.keys):
            raise JobNotBegun("none of these blocks is here")
        super().submit_load(job)


class TestThatRefusesJobs(ExampleConformance):
    def make_tier(self, spec: OffloadingSpec, view: memoryview) -> SecondaryTierManager:
        return _RefusesUnknownBlocks(spec, view, "example")


class TestOnItsOwnThread(ExampleConformance):
    def make_tier(self, spec: OffloadingSpec, view: memoryview) -> SecondaryTierManager:
        return GatedTier(spec, view, "example")

    def slow_backend(self, tier: SecondaryTierManager) -> AbstractContextManager[object]:
        assert isinstance(tier, GatedTier)
        return tier.closed()


class TestSmallOnItsOwnThread(TestOnItsOwnThread):
    capacity_blocks: ClassVar[int | None] = 4

    def make_tier(self, spec: OffloadingSpec, view: memoryview) -> SecondaryTierManager:
        return GatedTier(spec, view, "example", max_blocks=4)


class TestWithLatency(TestOnItsOwnThread):
    def make_tier(self, spec: OffloadingSpec, view: memoryview) -> SecondaryTierManager:
        return GatedTier(spec, view, "example", latency_ms=2)


class TestBehindAWrapperWithoutFaults(ExampleConformance):
    """The wrapper changes nothing where it has no fault."""

    def make_tier(self, spec: OffloadingSpec, view: memoryview) -> SecondaryTierManager:
        return FaultyTier(ExampleSecondaryTierManager(spec, view, "example", simulate_async=True))


class TestLateAndOutOfOrder(ExampleConformance):
    """Faults that every engine has to live with: a tier that has them still keeps the contract."""

    def make_tier(self, spec: OffloadingSpec, view: memoryview) -> SecondaryTierManager:
        schedule = FaultSchedule(7, {"delay": 0.3, "reorder": 0.5, "late_write": 0.2})
        return FaultyTier(ExampleSecondaryTierManager(spec, view, "example"), schedule)
