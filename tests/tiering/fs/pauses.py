"""Shorter pauses for tests that wait for background work of the fs tier."""

from __future__ import annotations

import pytest

from kvtier.tiering.fs import eviction, publisher, quota
from kvtier.tiering.io import lookups

__all__ = ["shorten_pauses"]


def shorten_pauses(patch: pytest.MonkeyPatch) -> None:
    """Make engines give back reservations, retry failures and look for dead engines more often."""
    patch.setattr(publisher, "_HEARTBEAT_S", 0.05)
    patch.setattr(publisher, "_QUIET_S", 0.2)
    patch.setattr(publisher, "_RETRY_S", 0.1)
    patch.setattr(quota, "_MEASURE_EVERY_S", 0.05)
    patch.setattr(quota, "_MEASURE_COST", 1)  # 100 times a measurement is long on a busy machine
    patch.setattr(eviction, "_RECLAIM_EVERY_S", 0.1)
    patch.setattr(lookups, "_ABSENT_FOR_S", 0.1)
