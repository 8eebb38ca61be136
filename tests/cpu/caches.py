"""Device caches in host memory, and their description for a worker."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvtier.base import (
    CanonicalKVCacheRef,
    CanonicalKVCaches,
    CanonicalKVCacheTensor,
    OffloadingWorker,
)

Bytes = NDArray[np.uint8]


@dataclass(frozen=True)
class Layout:
    """The shape of a rank's caches."""

    pages: tuple[int, ...]
    """Page bytes of each tensor."""
    groups: tuple[dict[int, int], ...]
    """For each group, the tensors it uses and the bytes of data in their pages."""
    blocks_per_chunk: int = 1
    num_device_blocks: int = 8
    gap: int = 0
    """Bytes between the pages of a tensor that belong to none of them."""

    @property
    def cell_bytes(self) -> int:
        return sum(self.pages) * self.blocks_per_chunk

    def tensor_start(self, tensor_idx: int) -> int:
        """The offset of a tensor's pages in a cell."""
        return sum(self.pages[:tensor_idx]) * self.blocks_per_chunk

    def new_tensors(self, seed: int) -> list[Bytes]:
        """Random bytes, pages and gaps."""
        rng = np.random.default_rng(seed)
        return [
            rng.integers(1, 256, (self.num_device_blocks, page + self.gap), dtype=np.uint8)
            for page in self.pages
        ]

    def canonical(self, tensors: Sequence[Any]) -> CanonicalKVCaches:
        return CanonicalKVCaches(
            [
                CanonicalKVCacheTensor(tensor, page)
                for tensor, page in zip(tensors, self.pages, strict=True)
            ],
            [[CanonicalKVCacheRef(*ref) for ref in group.items()] for group in self.groups],
        )


def finish(worker: OffloadingWorker, *job_ids: int) -> dict[int, bool]:
    """Wait for these jobs and take all reports: job id to success."""
    worker.wait(job_ids)
    results = worker.get_finished()
    assert len({result.job_id for result in results}) == len(results)
    return {result.job_id: result.success for result in results}
