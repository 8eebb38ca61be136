"""Whether the rows of the primary tier can be moved as they lie."""

from __future__ import annotations

from kvtier.tiering.base import PrimaryRows
from kvtier.tiering.io.page import PAGE_BYTES

__all__ = ["require_movable"]

_MAX_ROW_BYTES = 1 << 30  # the kernel moves less than 2 GiB by one call


def require_movable(rows: PrimaryRows, address: int, tier_type: str) -> None:
    """Raises `ValueError` if rows that begin at this address are too long, or not aligned."""
    row_bytes = rows.row_bytes
    if row_bytes > _MAX_ROW_BYTES:
        raise ValueError(
            f"rows of {row_bytes} bytes: the {tier_type} tier moves at most {_MAX_ROW_BYTES} at "
            "once; use fewer blocks_per_chunk"
        )
    if row_bytes % PAGE_BYTES or address % PAGE_BYTES:
        raise ValueError(
            f"rows of {row_bytes} bytes at {address:#x}: the primary tier's rows "
            f"must be aligned to {PAGE_BYTES} bytes"
        )
