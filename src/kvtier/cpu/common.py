"""What the two halves of the CPU tier share."""

from __future__ import annotations

from kvtier.base import BlockIDsLoadStoreSpec, Medium


class CPULoadStoreSpec(BlockIDsLoadStoreSpec):
    """Slots of the primary tier, by index."""

    @staticmethod
    def medium() -> Medium:
        return Medium.CPU
