"""The paged KV cache on the "device": arrays of blocks, for each rank and layer."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from kvtier.base import CanonicalKVCacheRef, CanonicalKVCaches, CanonicalKVCacheTensor
from kvtier.engine.config import EngineConfig, ModelConfig
from kvtier.engine.weights import Array

__all__ = ["KVCache", "array_page_bytes", "first_block_ids"]

_KEYS, _VALUES = 0, 1


def first_block_ids(engine: EngineConfig) -> tuple[int, ...]:
    """Return the id of each group's first block. No two groups share an id."""
    return tuple(sum(engine.num_blocks[:index]) for index in range(len(engine.num_blocks)))


def array_page_bytes(model: ModelConfig, engine: EngineConfig) -> list[int]:
    """Return, for each array of a rank, the bytes of one page: one block in one layer. If groups
    have pages of different sizes, this is the largest."""
    num_arrays = max(len(group.layers) for group in model.groups)
    return [
        max(
            _page_bytes(model, engine, tokens)
            for group, tokens in zip(model.groups, engine.block_tokens, strict=True)
            if len(group.layers) > index
        )
        for index in range(num_arrays)
    ]


def _page_bytes(model: ModelConfig, engine: EngineConfig, tokens: int) -> int:
    """Return how many bytes one rank holds for `tokens` tokens in one layer."""
    return tokens * model.kv_bytes_per_token_and_layer // engine.world_size


class KVCache:
    """The caches of all ranks. Each rank holds its share of the KV heads, in arrays of its own.

    All groups share these arrays, each with its own range of blocks: the n-th layer of every group
    is in array n. So an offloaded block is as large as a block of one group, not of all groups
    together. A page is one block in one layer; pages of a group with smaller blocks are padded.
    """

    def __init__(self, model: ModelConfig, engine: EngineConfig) -> None:
        self._groups = model.groups
        self._block_tokens = engine.block_tokens
        self._world_size = engine.world_size
        self._heads_per_rank = model.num_kv_heads // engine.world_size
        self._head_dim = model.head_dim
        self._group_page_bytes = [
            _page_bytes(model, engine, tokens) for tokens in engine.block_tokens
        ]
        self._arrays: list[list[NDArray[np.uint8]]] = [
            [
                np.zeros((sum(engine.num_blocks), page), np.uint8)
                for page in array_page_bytes(model, engine)
            ]
            for _ in range(engine.world_size)
        ]

    def canonical(self, rank: int) -> CanonicalKVCaches:
        """Return this rank's arrays, for its offloading worker."""
        return CanonicalKVCaches(
            tensors=[CanonicalKVCacheTensor(array, array.shape[1]) for array in self._arrays[rank]],
            group_data_refs=[
                [CanonicalKVCacheRef(index, page) for index in range(len(group.layers))]
                for group, page in zip(self._groups, self._group_page_bytes, strict=True)
            ],
        )

    def write(
        self,
        group_idx: int,
        place: int,
        table: Sequence[int],
        start: int,
        keys: Array,
        values: Array,
    ) -> None:
        """Write the keys and values of the tokens from `start` on; both are arrays (tokens, KV
        heads, head_dim).

        `place`: the layer's index in its group.
        """
        block_tokens = self._block_tokens[group_idx]
        first, end = start // block_tokens, -(-(start + len(keys)) // block_tokens)
        positions = np.arange(start, start + len(keys))
        blocks = self._existing(table, first, end)[positions // block_tokens - first]
        offsets = positions % block_tokens
        for rank in range(self._world_size):
            pages = self._pages(rank, group_idx, place)
            heads = self._heads(rank)
            pages[blocks, _KEYS, :, offsets] = keys[:, heads]
            pages[blocks, _VALUES, :, offsets] = values[:, heads]

    def read(
        self,
        group_idx: int,
        place: int,
        table: Sequence[int],
        present: tuple[int, int],
        wanted: tuple[int, int],
    ) -> tuple[Array, Array]:
        """Return the keys and the values of the `wanted` positions, each as an array (KV heads,
        positions, head_dim). `present`, `wanted`: the first position, and the one after the last.

        For positions outside of `present`, zeros are returned, not the content of the blocks.
        """
        block_tokens = self._block_tokens[group_idx]
        start, end = max(present[0], wanted[0]), min(present[1], wanted[1])
        first, last = start // block_tokens, -(-end // block_tokens)
        blocks = self._existing(table, first, last)
        skipped = start - first * block_tokens
        num_heads = self._world_size * self._heads_per_rank
        both = np.zeros((2, num_heads, wanted[1] - wanted[0], self._head_dim), np.float32)
        for rank in range(self._world_size):
            pages = self._pages(rank, group_idx, place)[blocks].transpose(1, 2, 0, 3, 4)
            run = pages.reshape(2, self._heads_per_rank, -1, self._head_dim)
            both[:, self._heads(rank), start - wanted[0] : end - wanted[0]] = run[
                :, :, skipped : skipped + end - start
            ]
        return both[_KEYS], both[_VALUES]

    def _heads(self, rank: int) -> slice:
        return slice(rank * self._heads_per_rank, (rank + 1) * self._heads_per_rank)

    def _pages(self, rank: int, group_idx: int, place: int) -> Array:
        """Return the pages of a layer without copying them, as an array (blocks, keys and values,
        heads of this rank, tokens, head_dim)."""
        tokens = self._block_tokens[group_idx]
        used = self._arrays[rank][place][:, : self._group_page_bytes[group_idx]]
        return used.view(np.float32).reshape(-1, 2, self._heads_per_rank, tokens, self._head_dim)

    @staticmethod
    def _existing(table: Sequence[int], first: int, end: int) -> NDArray[np.int64]:
        blocks = np.asarray(table[first:end], np.int64)
        if len(blocks) != end - first or (blocks < 0).any():
            raise RuntimeError(
                f"blocks {first} to {end - 1} are needed, but the table has {list(table)}"
            )
        return blocks
