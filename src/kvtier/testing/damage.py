"""Damage to blocks where a tier keeps them: what a broken disk, wire or neighbour would do."""

from __future__ import annotations

from enum import StrEnum
from random import Random
from typing import Protocol

from kvtier import seal
from kvtier.base import OffloadKey

__all__ = ["BackingBytes", "Damage", "inflict"]


class Damage(StrEnum):
    """How a kept block is damaged. None of these may ever be served."""

    FLIP = "flip"
    """One bit, anywhere in the seal or the payload, is another."""
    TRUNCATE = "truncate"
    """The end is missing, from anywhere in the seal or the payload on."""
    SWAP = "swap"
    """Two blocks have changed places, each with its own seal: whole, and wrong."""
    FOREIGN = "foreign"
    """A block that another engine sealed under the same key, for other weights: whole, and wrong.
    """


class BackingBytes(Protocol):
    """Reaches the bytes that a tier keeps, behind its back. Written by the tier's author.

    A block is its seal followed by its payload, however the tier lays them out. Called while the
    tier is doing nothing with that block.
    """

    def read(self, fingerprint: bytes, key: OffloadKey) -> bytes:
        """What is kept of this block. `KeyError` if nothing is."""

    def write(self, fingerprint: bytes, key: OffloadKey, block: bytes) -> None:
        """Replace what is kept of this block. Less than a whole block: only that much is kept;
        where blocks have a fixed length, the rest reads as zeros. The tier is not told."""


def inflict(
    backing: BackingBytes,
    fingerprint: bytes,
    key: OffloadKey,
    how: Damage,
    *,
    other: OffloadKey | None = None,
    seed: int = 0,
) -> None:
    """Damage the kept block of `key`. `other`: the block to swap it with, kept as well.

    The same seed does the same damage. `KeyError` if a block is not kept.
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
        raise ValueError("a swap needs two blocks: give another key that is kept as `other`")
    else:
        backing.write(fingerprint, key, backing.read(fingerprint, other))
        backing.write(fingerprint, other, block)
