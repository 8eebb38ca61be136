"""Matrix products whose rows do not depend on each other, to the last bit.

BLAS chooses its kernel, and with it the order of additions, by the shape of a product. And it
splits large products between threads. So here every product is made of calls of one fixed shape:
`TILE` rows, padded where there are fewer, and a panel of columns small enough for one thread. Then
a row comes out the same whatever stands in the other rows, as long as it stands in the same place.
Tokens always do: the token at position p is row p % TILE of its tile.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

__all__ = ["TILE", "Array", "Product", "columns_per_call"]

Array = NDArray[np.float32]

TILE = 32
"""Rows of every product: tokens at positions [k * TILE, (k + 1) * TILE)."""

# Rows times columns times summands up to which OpenBLAS stays in the calling thread.
_ONE_THREAD = 1 << 18
_FEWEST, _MOST = 8, 64


def columns_per_call(rows: int, summands: int) -> int:
    """A power of two, so that a product of this many columns is done by one thread.

    With more than 1,024 summands there is no such number. Then the fewest columns are taken, and
    OPENBLAS_NUM_THREADS=1 in the environment keeps BLAS to one thread.
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
        """(tiles, TILE, summands) to (tiles, TILE, columns)."""
        panels = np.matmul(np.ascontiguousarray(tiles)[:, None], self._panels)
        joined: Array = panels.transpose(0, 2, 1, 3).reshape(len(tiles), TILE, -1)
        return joined[..., : self._columns]
