"""The bytes that the example tier keeps, for tests to damage."""

from __future__ import annotations

import numpy as np

from kvtier.base import OffloadKey
from kvtier.seal import SEAL_BYTES
from kvtier.tiering.example.manager import ExampleSecondaryTierManager
from kvtier.tiering.example.transfer import SealedBlock

__all__ = ["ExampleBacking"]


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
