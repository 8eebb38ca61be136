"""Shorter pauses for tests that wait for what the fs tier does by itself."""

from __future__ import annotations

import pytest

from kvtier.tiering.fs import clerk, lookups, sweeper

__all__ = ["shorten_pauses"]


def shorten_pauses(patch: pytest.MonkeyPatch) -> None:
    """Engines notice that all is quiet, try again what has failed, and look for dead ones, more
    often than in earnest."""
    patch.setattr(clerk, "_HEARTBEAT_S", 0.05)
    patch.setattr(clerk, "_QUIET_S", 0.2)
    patch.setattr(clerk, "_RETRY_S", 0.1)
    patch.setattr(clerk, "_MEASURE_COST", 1)  # on a busy machine a hundred times may be very long
    patch.setattr(sweeper, "_RECLAIM_EVERY_S", 0.1)
    patch.setattr(lookups, "_ABSENT_FOR_S", 0.1)
