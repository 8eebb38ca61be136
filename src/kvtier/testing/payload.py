"""Bytes that are a function of a block's key, so that a wrong byte is seen wherever it shows up."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from xxhash import xxh3_64_intdigest

if TYPE_CHECKING:
    from kvtier.base import OffloadKey

__all__ = ["payload_of"]


def payload_of(key: OffloadKey, num_bytes: int) -> bytes:
    """The content of the block of `key`: noise, equal at every call and in every process."""
    return np.random.Generator(np.random.SFC64(xxh3_64_intdigest(key))).bytes(num_bytes)
