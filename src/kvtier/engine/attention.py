"""Grouped-query attention of one tile of queries over the keys before it."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from kvtier.engine.config import LayerGroup, ModelConfig
from kvtier.engine.products import TILE, Array, columns_per_call

__all__ = ["Attention", "KeyRange"]

_NEVER = np.float32(-np.inf)


class KeyRange(NamedTuple):
    """Positions [start, end), in whole key tiles."""

    start: int
    end: int


class Attention:
    """The same sums in the same order for every token, wherever its keys come from.

    Keys are taken in tiles of `key_tile` tokens at positions that are multiples of it. Which
    tiles a query tile looks at follows from its position alone. Keys that a row must not see get
    the weight 0, so that it does not matter whether they have been computed already.
    """

    def __init__(self, config: ModelConfig) -> None:
        self._queries_per_kv_head = config.num_heads // config.num_kv_heads
        self._scale = np.float32(config.head_dim**-0.5)
        rows = self._queries_per_kv_head * TILE
        self.key_tile = columns_per_call(rows, config.head_dim)

    def keys_of(self, group: LayerGroup, first_position: int) -> KeyRange:
        """What the query tile that begins at `first_position` looks at."""
        start = group.first_needed_token(first_position) // self.key_tile * self.key_tile
        end = -(-(first_position + TILE) // self.key_tile) * self.key_tile
        return KeyRange(start, end)

    def attend(
        self,
        group: LayerGroup,
        first_position: int,
        rows: slice,
        queries: Array,
        keys: Array,
        values: Array,
    ) -> Array:
        """Queries (TILE, heads, head_dim) to the same shape. Only `rows` of them are wanted.

        `keys`, `values`: (KV heads, positions of `keys_of`, head_dim). Zeros where there is no
        such token.
        """
        kv_heads, num_keys, dim = keys.shape
        sharing = self._queries_per_kv_head
        tiled = (kv_heads, num_keys // self.key_tile, self.key_tile, dim)
        by_kv_head = (
            (queries * self._scale)
            .reshape(TILE, kv_heads, sharing, dim)
            .transpose(1, 2, 0, 3)
            .reshape(kv_heads, 1, sharing * TILE, dim)
        )
        scores = np.matmul(by_kv_head, keys.reshape(tiled).swapaxes(-1, -2))
        by_row = scores.reshape(kv_heads, -1, sharing, TILE, self.key_tile)
        # A product is always of the whole tile. The rest is done row by row, and may be less.
        is_whole = rows == slice(0, TILE)
        wanted = by_row if is_whole else by_row[:, :, :, rows].copy()
        self._mask(wanted, group, first_position, rows)
        wanted -= wanted.max(axis=(1, 4), keepdims=True)
        np.exp(wanted, out=wanted)
        totals = _sum_over_tiles(wanted.sum(axis=-1))
        if not is_whole:
            by_row.fill(0)
            by_row[:, :, :, rows] = wanted
        sums = _sum_over_tiles(np.matmul(scores, values.reshape(tiled)))
        attended = np.zeros((kv_heads, sharing, TILE, dim), np.float32)
        # A sum of nothing but zeros has the sign of those that were not seen: take it away.
        attended[:, :, rows] = sums.reshape(attended.shape)[:, :, rows] / totals[
            ..., None
        ] + np.float32(0)
        return attended.transpose(2, 0, 1, 3).reshape(TILE, -1, dim)

    def _mask(self, scores: Array, group: LayerGroup, first_position: int, rows: slice) -> None:
        """Give to keys that a row must not see the lowest score.

        `scores`: (KV heads, key tiles, heads of a KV head, rows, keys of a tile).
        """
        positions = first_position + np.arange(TILE)[rows, None]
        first_key = self.keys_of(group, first_position).start
        for tile in range(scores.shape[1]):
            start = first_key + tile * self.key_tile
            is_past = start + self.key_tile <= first_position + 1
            is_in_window = start >= group.first_needed_token(first_position + TILE - 1)
            if is_past and (group.window is None or is_in_window):
                continue
            keys = np.arange(start, start + self.key_tile)
            unseen = keys > positions
            if group.window is not None:
                unseen |= keys <= positions - group.window
            np.copyto(scores[:, tile], _NEVER, where=unseen)


def _sum_over_tiles(parts: Array) -> Array:
    """Sum over axis 1, in the order of the key tiles."""
    total = parts[:, 0].copy()
    for tile in range(1, parts.shape[1]):
        total += parts[:, tile]
    return total
