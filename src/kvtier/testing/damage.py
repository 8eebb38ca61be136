"""Damages blocks in a tier's storage, as a broken disk, network or other engine could."""

from __future__ import annotations

from enum import StrEnum
from random import Random
from typing import Protocol

import numpy as np

from kvtier import seal
from kvtier.base import OffloadKey
from kvtier.seal import SEAL_BYTES
from kvtier.tiering.example.io_thread import SealedBlock
from kvtier.tiering.example.manager import ExampleSecondaryTierManager

__all__ = ["BackingBytes", "Damage", "ExampleBacking", "inflict"]


class Damage(StrEnum):
    """How a stored block is damaged. A tier must never serve such a block."""

    FLIP = "flip"
    """One bit of the seal or the payload is flipped."""
    TRUNCATE = "truncate"
    """The block ends early, anywhere in the seal or the payload."""
    SWAP = "swap"
    """Two intact blocks have changed places, each with its own seal."""
    FOREIGN = "foreign"
    """An intact block that another engine sealed under the same key, for other weights."""


class BackingBytes(Protocol):
    """Reads and writes the stored bytes of a tier directly. The tier's author implements it.

    A block is its seal followed by its payload, even if the tier stores them apart. The
    conformance kit calls these methods only while no job of the tier uses the block.
    """

    def read(self, fingerprint: bytes, key: OffloadKey) -> bytes:
        """Return the stored bytes of this block, or raise `KeyError`."""

    def write(self, fingerprint: bytes, key: OffloadKey, block: bytes) -> None:
        """Replace the stored bytes of this block; the tier does not notice. `block` may be shorter:
        store it as it is or, if blocks have a fixed length, fill the rest with zeros."""


def inflict(
    backing: BackingBytes,
    fingerprint: bytes,
    key: OffloadKey,
    how: Damage,
    *,
    other: OffloadKey | None = None,
    seed: int = 0,
) -> None:
    """Damage the stored block of `key`. `other`: a stored block to swap it with.

    The same seed does the same damage. Raises `KeyError` if a block is not stored.
    """
    rng = Random(seed)
    block = backing.read(fingerprint, key)
    if how is Damage.FLIP:
        damaged = bytearray(block)
        damaged[rng.randrange(len(block))] ^= 1 << rng.randrange(8)
        backing.write(fingerprint, key, bytes(damaged))
    elif how is Damage.TRUNCATE:
        backing.write(fingerprint, key, block[: rng.randrange(len(block))])
    elif how is Damage.FOREIGN:
        payload = rng.randbytes(len(block) - seal.SEAL_BYTES)
        their_fingerprint = rng.randbytes(len(fingerprint))
        header = seal.make(key, memoryview(payload), their_fingerprint, "foreign")
        backing.write(fingerprint, key, header + payload)
    elif other is None or other == key:
        raise ValueError("a swap needs two blocks: give the key of another stored block as `other`")
    else:
        backing.write(fingerprint, key, backing.read(fingerprint, other))
        backing.write(fingerprint, other, block)


class ExampleBacking:
    """`BackingBytes` of an `ExampleSecondaryTierManager`, which keeps one namespace at a time."""

    def __init__(self, tier: ExampleSecondaryTierManager) -> None:
        self._tier = tier

    def read(self, fingerprint: bytes, key: OffloadKey) -> bytes:
        if fingerprint != self._tier.fingerprint:
            raise KeyError(key)
        header, payload = self._tier.blocks[key]
        return header + payload.tobytes()

    def write(self, fingerprint: bytes, key: OffloadKey, block: bytes) -> None:
        if fingerprint != self._tier.fingerprint or key not in self._tier.blocks:
            raise KeyError(key)
        payload = np.frombuffer(block, np.uint8)[SEAL_BYTES:]
        self._tier.blocks[key] = SealedBlock(block[:SEAL_BYTES], payload)
