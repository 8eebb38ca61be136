"""Faults for any tier, by seed and by schedule. Needs no pytest."""

from __future__ import annotations

from kvtier.testing.faults.kinds import FAULTS_OF, Fault, FaultKind, InjectedFault
from kvtier.testing.faults.schedule import FaultSchedule
from kvtier.testing.faults.tier import FaultyTier

__all__ = ["FAULTS_OF", "Fault", "FaultKind", "FaultSchedule", "FaultyTier", "InjectedFault"]
