"""The conformance kit: tests of the contract, which the author of a tier runs. Needs pytest."""

from __future__ import annotations

from kvtier.testing.conformance.jobs import (
    DrainChecks,
    ReportingChecks,
    RoundTripChecks,
    SealChecks,
)
from kvtier.testing.conformance.lifetime import LifetimeChecks
from kvtier.testing.conformance.lookups import EpochChecks, LookupChecks
from kvtier.testing.conformance.threads import CallChecks, ConcurrencyChecks

__all__ = ["TierConformance"]


class TierConformance(
    RoundTripChecks,
    ReportingChecks,
    LookupChecks,
    DrainChecks,
    ConcurrencyChecks,
    SealChecks,
    EpochChecks,
    CallChecks,
    LifetimeChecks,
):
    """Derive a test class from this one, and give it `make_tier`. See `ConformanceHooks`."""
