"""The shape of a rank's caches on a device, and their bytes as an oracle sees them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from kvtier.base import CanonicalKVCacheRef, CanonicalKVCaches, CanonicalKVCacheTensor

Bytes = NDArray[np.uint8]

ITEM_BYTES = {"uint8": 1, "float8_e4m3fn": 1, "bfloat16": 2}


@dataclass(frozen=True)
class PagedTensor:
    """One canonical tensor: where its pages are in an allocation."""

    allocation: int
    offset: int
    stride: int
    """Bytes from one page to the next."""
    page: int
    dtype: str = "uint8"


@dataclass(frozen=True)
class CacheLayout:
    """Several tensors may be in one allocation, as K and V of a layer often are."""

    num_blocks: int
    allocations: tuple[int, ...]
    """Bytes of each allocation."""
    tensors: tuple[PagedTensor, ...]
    groups: tuple[dict[int, int], ...]
    """For each group, the tensors it uses and the bytes of data in their pages."""
    blocks_per_chunk: int = 1

    @property
    def cell_bytes(self) -> int:
        return sum(tensor.page for tensor in self.tensors) * self.blocks_per_chunk

    def cell_offset(self, tensor_idx: int, place: int) -> int:
        """The offset of a tensor's page in a cell."""
        before = sum(tensor.page for tensor in self.tensors[:tensor_idx]) * self.blocks_per_chunk
        return before + place * self.tensors[tensor_idx].page

    def new_memory(self, seed: int) -> list[Bytes]:
        """Random bytes for every allocation. No byte is zero, because a store adds zeros."""
        rng = np.random.default_rng(seed)
        return [rng.integers(1, 256, size, dtype=np.uint8) for size in self.allocations]

    def page(self, memory: Sequence[Bytes], tensor_idx: int, block: int) -> Bytes:
        """One page in the allocations, without a copy."""
        tensor = self.tensors[tensor_idx]
        start = tensor.offset + block * tensor.stride
        return memory[tensor.allocation][start : start + tensor.page]

    def canonical(self, memory: Sequence[Any]) -> CanonicalKVCaches:
        """The caches for a worker. `memory`: the allocations as flat byte tensors."""
        return CanonicalKVCaches(
            [
                CanonicalKVCacheTensor(self._view(memory[tensor.allocation], tensor), tensor.page)
                for tensor in self.tensors
            ],
            [[CanonicalKVCacheRef(*ref) for ref in group.items()] for group in self.groups],
        )

    def _view(self, allocation: Any, tensor: PagedTensor) -> Any:
        # Gaps that hold nothing else belong to the tensor, as in engines.
        whole = tensor.offset == 0 and tensor.stride * self.num_blocks == len(allocation)
        shape = (self.num_blocks, tensor.stride if whole else tensor.page)
        view = torch.as_strided(allocation, shape, (tensor.stride, 1), tensor.offset)
        return view.view(getattr(torch, tensor.dtype))


def plain_layout(
    *pages: int, num_blocks: int, blocks_per_chunk: int = 1, dtype: str = "uint8"
) -> CacheLayout:
    """One group that uses all of several tensors, each in an allocation of its own."""
    return CacheLayout(
        num_blocks,
        tuple(page * num_blocks for page in pages),
        tuple(PagedTensor(i, 0, page, page, dtype) for i, page in enumerate(pages)),
        (dict(enumerate(pages)),),
        blocks_per_chunk,
    )
