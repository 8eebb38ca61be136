"""Slot numbers, as the manager of the CPU tier passes them to its workers."""

from __future__ import annotations

from kvtier.base import BlockIDsLoadStoreSpec, Medium


class CPULoadStoreSpec(BlockIDsLoadStoreSpec):
    """Slots of the primary tier, by index."""

    @staticmethod
    def medium() -> Medium:
        return Medium.CPU
