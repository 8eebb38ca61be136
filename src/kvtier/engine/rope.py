"""Rotary position embedding."""

from __future__ import annotations

import numpy as np

from kvtier.engine.config import ModelConfig
from kvtier.engine.products import Array

__all__ = ["Rope"]


class Rope:
    """Turns each pair (i, i + half) of a head by an angle that grows with the position."""

    def __init__(self, config: ModelConfig, padded_tokens: int) -> None:
        self._half = config.head_dim // 2
        frequencies = config.rope_base ** (-np.arange(self._half) / self._half)
        # One table for all positions: a cosine may depend on where it stands in an array.
        angles = np.arange(padded_tokens)[:, None] * frequencies
        self._cos = np.cos(angles).astype(np.float32)
        self._sin = np.sin(angles).astype(np.float32)

    def turn(self, heads: Array, first_positions: list[int]) -> Array:
        """`heads`: (tiles, TILE, heads, head_dim); `first_positions`: of each tile."""
        rows = heads.shape[1]
        positions = np.asarray(first_positions)[:, None] + np.arange(rows)
        cos, sin = self._cos[positions][:, :, None], self._sin[positions][:, :, None]
        low, high = heads[..., : self._half], heads[..., self._half :]
        return np.concatenate([low * cos - high * sin, high * cos + low * sin], axis=-1)
