"""Blocks whose bytes say which put they come from: of which key, in which namespace, and when."""

from __future__ import annotations

import struct
from functools import cache

import numpy as np
from xxhash import xxh3_64_intdigest

from kvtier.base import OffloadKey, make_offload_key

_NUMBER = struct.Struct("<Q")
_LONG_KEY_EVERY = 7


@cache
def key_of(number: int) -> OffloadKey:
    """Some keys are too long for an entry of the index."""
    text = b"block-%026d" % number
    return make_offload_key(text * 2 if number % _LONG_KEY_EVERY == 0 else text, 0)


def payload_of_generation(
    key: OffloadKey, fingerprint: bytes, generation: int, num_bytes: int
) -> bytes:
    """No two puts have the same bytes."""
    head = _NUMBER.pack(generation)
    noise = np.random.Generator(np.random.SFC64(xxh3_64_intdigest(head + fingerprint + key)))
    return head + noise.bytes(num_bytes - len(head))


def generation_in(payload: bytes, key: OffloadKey, fingerprint: bytes) -> int | None:
    """Which put of this key in this namespace the bytes come from; None: from no such put."""
    generation: int = _NUMBER.unpack_from(payload)[0]
    expected = payload_of_generation(key, fingerprint, generation, len(payload))
    return generation if payload == expected else None
