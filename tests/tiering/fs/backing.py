"""The bytes that the fs tier keeps, for tests to damage."""

from __future__ import annotations

from pathlib import Path

from kvtier.base import OffloadKey
from kvtier.seal import SEAL_BYTES
from kvtier.tiering.fs.layout import block_path, write_header
from kvtier.tiering.fs.manager import FsSecondaryTierManager
from kvtier.tiering.io.page import PAGE_BYTES

__all__ = ["FsBacking"]


class FsBacking:
    """`BackingBytes` of a `FsSecondaryTierManager`. Writes get a matching page checksum, so that
    only the seal can detect the damage."""

    def __init__(self, tier: FsSecondaryTierManager) -> None:
        self._tier = tier

    def path_of(self, fingerprint: bytes, key: OffloadKey) -> Path:
        """The file of a block. `KeyError` if there is none."""
        if fingerprint != self._tier.fingerprint:
            raise KeyError(key)
        path = Path(block_path(str(self._tier._namespace), key))
        if not path.is_file():
            raise KeyError(key)
        return path

    def read(self, fingerprint: bytes, key: OffloadKey) -> bytes:
        block = self.path_of(fingerprint, key).read_bytes()
        return block[:SEAL_BYTES] + block[PAGE_BYTES:]

    def write(self, fingerprint: bytes, key: OffloadKey, block: bytes) -> None:
        path = self.path_of(fingerprint, key)
        page = bytearray(PAGE_BYTES)
        write_header(memoryview(page), block[:SEAL_BYTES].ljust(SEAL_BYTES, b"\0"))
        path.write_bytes(bytes(page) + block[SEAL_BYTES:])
