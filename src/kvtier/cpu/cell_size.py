"""Whether a rank's caches fit into its part of the shared region."""

from __future__ import annotations

from collections.abc import Sequence

from kvtier.cpu.shared_offload_region import SharedOffloadRegion

__all__ = ["require_cell_fits"]


def require_cell_fits(
    page_bytes: Sequence[int], region: SharedOffloadRegion, blocks_per_chunk: int
) -> None:
    """`page_bytes`: of each canonical tensor. Raises `ValueError`."""
    if blocks_per_chunk < 1:
        raise ValueError(f"blocks_per_chunk={blocks_per_chunk}: a slot holds at least 1 block")
    cell_bytes = sum(page_bytes) * blocks_per_chunk
    if cell_bytes > region.cpu_page_size:
        raise ValueError(
            f"the caches need {cell_bytes} bytes per slot (blocks_per_chunk="
            f"{blocks_per_chunk} pages of each of {len(page_bytes)} tensors), but the region was "
            f"made with cpu_page_size={region.cpu_page_size}. Give the true "
            "worker_kv_bytes_per_block, the sum of all tensors' page_size_bytes"
        )
