"""The conformance kit: what every tier must do, as tests for its author to run. Needs pytest."""

from __future__ import annotations

from kvtier.testing.conformance.calls import CallChecks
from kvtier.testing.conformance.concurrency import ConcurrencyChecks
from kvtier.testing.conformance.drain import DrainChecks
from kvtier.testing.conformance.epochs import EpochChecks
from kvtier.testing.conformance.lifetime import LifetimeChecks
from kvtier.testing.conformance.lookups import LookupChecks
from kvtier.testing.conformance.reporting import ReportingChecks
from kvtier.testing.conformance.round_trip import RoundTripChecks
from kvtier.testing.conformance.seals import SealChecks

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
