"""Weights made from a seed, and matrix products in which no bit of a row depends on other rows.

BLAS chooses its kernel, and with it the order of additions, by the shape of a product, and splits
large products between threads. So every product here consists of calls of one fixed shape: `TILE`
rows, padded if there are fewer, and a panel of columns small enough for one thread. The result of a
row then depends on that row and its place in the tile, but not on the other rows. A token always
has the same place: the token at position p is row p % TILE of its tile.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvtier.engine.config import ModelConfig

__all__ = [
    "TILE",
    "Array",
    "LayerWeights",
    "Product",
    "Weights",
    "columns_per_call",
    "make_weights",
]

Array = NDArray[np.float32]

TILE = 32
"""Number of rows in every call. Tile k has the tokens at positions [k * TILE, (k + 1) * TILE)."""

# OpenBLAS uses only the calling thread if rows * columns * summands is at most this number.
_ONE_THREAD = 1 << 18
_FEWEST, _MOST = 8, 64


def columns_per_call(rows: int, summands: int) -> int:
    """Return the number of columns, a power of two, with which a product runs on one thread.

    `summands`: number of summands in each element of the product. If rows * summands is over 32,768
    (for one tile: over 1,024 summands), no number is small enough. The result is then `_FEWEST`,
    and OPENBLAS_NUM_THREADS=1 must be set in the environment to keep BLAS on one thread.
    """
    fitting = max(_FEWEST, min(_MOST, _ONE_THREAD // (rows * summands)))
    return 1 << (fitting.bit_length() - 1)


class Product:
    """Multiplies tiles with one weight matrix."""

    def __init__(self, weight: Array) -> None:
        summands, self._columns = weight.shape
        width = columns_per_call(TILE, summands)
        num_panels = -(-self._columns // width)
        padded = np.zeros((summands, num_panels * width), np.float32)
        padded[:, : self._columns] = weight
        self._panels = np.ascontiguousarray(
            padded.reshape(summands, num_panels, width).transpose(1, 0, 2)
        )

    def __call__(self, tiles: Array) -> Array:
        """Return the product, an array (tiles, TILE, columns). `tiles`: an array (tiles, TILE,
        summands)."""
        panels = np.matmul(np.ascontiguousarray(tiles)[:, None], self._panels)
        joined: Array = panels.transpose(0, 2, 1, 3).reshape(len(tiles), TILE, -1)
        return joined[..., : self._columns]


# Factor of the query and key weights. It makes attention sharp, so that one wrong block of the
# cache changes the logits, and in most cases the tokens.
_SHARPNESS = 2.0


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """The weights of one layer. Matrices have a row per input and a column per output."""

    attention_norm: Array
    query: Array
    key: Array
    value: Array
    output: Array
    mlp_norm: Array
    gate: Array
    up: Array
    down: Array


@dataclass(frozen=True, slots=True)
class Weights:
    """All weights of a model."""

    embedding: Array
    """(vocab, hidden)"""
    layers: tuple[LayerWeights, ...]
    norm: Array
    head: Array
    """(hidden, vocab)"""


def make_weights(config: ModelConfig) -> Weights:
    """Make the weights of a configuration. They are the same in every process."""
    generator = np.random.default_rng(config.seed)

    def matrix(inputs: int, outputs: int, size: float = 1.0) -> Array:
        # With this scale, activations keep their magnitude from layer to layer.
        scale = np.float32(size / inputs**0.5)
        return generator.standard_normal((inputs, outputs), np.float32) * scale

    def norm() -> Array:
        return 1 + generator.standard_normal(config.hidden, np.float32) * np.float32(0.1)

    heads = config.num_heads * config.head_dim
    kv_heads = config.num_kv_heads * config.head_dim
    embedding = generator.standard_normal((config.vocab, config.hidden), np.float32)
    layers = tuple(
        LayerWeights(
            attention_norm=norm(),
            query=matrix(config.hidden, heads, _SHARPNESS),
            key=matrix(config.hidden, kv_heads, _SHARPNESS),
            value=matrix(config.hidden, kv_heads),
            output=matrix(heads, config.hidden),
            mlp_norm=norm(),
            gate=matrix(config.hidden, config.mlp_hidden),
            up=matrix(config.hidden, config.mlp_hidden),
            down=matrix(config.mlp_hidden, config.hidden),
        )
        for _ in range(config.num_layers)
    )
    final_norm = norm()
    if config.tied:
        head = np.ascontiguousarray(embedding.T) * np.float32(config.hidden**-0.5)
    else:
        head = matrix(config.hidden, config.vocab)
    return Weights(embedding, layers, final_norm, head)
