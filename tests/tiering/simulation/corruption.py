"""Ways in which a stored block is corrupted."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

from kvtier import seal
from kvtier.base import OffloadKey
from kvtier.seal import SEAL_BYTES

_FOREIGN = bytes(range(16))


@dataclass(slots=True)
class Kept:
    """A stored block: its seal and its bytes."""

    header: bytes
    payload: bytes


def _flip(data: bytes, rng: random.Random, first: int, last: int) -> bytes:
    at = rng.randrange(first, last)
    return data[:at] + bytes([data[at] ^ 1 << rng.randrange(8)]) + data[at + 1 :]


def _flip_payload(kept: Kept, rng: random.Random, _: OffloadKey, __: Kept | None) -> Kept:
    return Kept(kept.header, _flip(kept.payload, rng, 0, len(kept.payload)))


def _flip_header(kept: Kept, rng: random.Random, _: OffloadKey, __: Kept | None) -> Kept:
    return Kept(_flip(kept.header, rng, 10, SEAL_BYTES), kept.payload)


def _other_format(kept: Kept, _: random.Random, __: OffloadKey, ___: Kept | None) -> Kept:
    return Kept(kept.header[:8] + b"\x63\x00" + kept.header[10:], kept.payload)


def _erase(kept: Kept, _: random.Random, __: OffloadKey, ___: Kept | None) -> Kept:
    return Kept(bytes(SEAL_BYTES), bytes(len(kept.payload)))


def _of_another_model(kept: Kept, rng: random.Random, key: OffloadKey, __: Kept | None) -> Kept:
    payload = rng.randbytes(len(kept.payload))
    return Kept(seal.make(key, memoryview(payload), _FOREIGN, "stranger"), payload)


def _of_another_size(kept: Kept, _: random.Random, key: OffloadKey, __: Kept | None) -> Kept:
    fingerprint = seal.read(kept.header).fingerprint
    short = memoryview(kept.payload)[: len(kept.payload) // 2]
    return Kept(seal.make(key, short, fingerprint, "stranger"), kept.payload)


def _swapped(kept: Kept, _: random.Random, __: OffloadKey, another: Kept | None) -> Kept:
    return another or kept


def _stitched(kept: Kept, _: random.Random, __: OffloadKey, another: Kept | None) -> Kept:
    return Kept(kept.header, (another or kept).payload)


_WAYS: list[Callable[[Kept, random.Random, OffloadKey, Kept | None], Kept]] = [
    _flip_payload,
    _flip_header,
    _other_format,
    _erase,
    _of_another_model,
    _of_another_size,
    _swapped,
    _stitched,
]


def corrupted(kept: Kept, key: OffloadKey, another: Kept | None, rng: random.Random) -> Kept:
    """The block after a corruption. `another`: a block that is stored beside it."""
    return rng.choice(_WAYS)(kept, rng, key, another)
