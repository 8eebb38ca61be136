"""The bytes of the disk tier's blocks, for tests to damage."""

from __future__ import annotations

import os

from kvtier.base import OffloadKey
from kvtier.seal import SEAL_BYTES
from kvtier.tiering.disk.layout import encode_stamp, read_stamp, write_slot_header
from kvtier.tiering.disk.manager import DiskSecondaryTierManager
from kvtier.tiering.io.page import PAGE_BYTES

__all__ = ["DiskBacking"]


class DiskBacking:
    """`BackingBytes` of a `DiskSecondaryTierManager`. A written block gets a valid stamp, so that
    only its seal shows the damage."""

    def __init__(self, tier: DiskSecondaryTierManager) -> None:
        self._tier = tier
        self._slab = tier._slab

    def offset_of(self, key: OffloadKey) -> int:
        """Offset of the block's slot."""
        return self._slab.geometry.slot_offset(self._tier._table.readable[key].block_id)

    def read(self, fingerprint: bytes, key: OffloadKey) -> bytes:
        if fingerprint != self._tier.fingerprint:
            raise KeyError(key)
        slot = self._slab.file.read(self.offset_of(key), self._slab.geometry.slot_bytes)
        return slot[:SEAL_BYTES] + slot[PAGE_BYTES:]

    def write(self, fingerprint: bytes, key: OffloadKey, block: bytes) -> None:
        if fingerprint != self._tier.fingerprint:
            raise KeyError(key)
        offset = self.offset_of(key)
        block += bytes(SEAL_BYTES + self._slab.geometry.payload_bytes - len(block))
        page = bytearray(self._slab.file.read(offset, PAGE_BYTES))
        stamp = read_stamp(bytes(page))
        write_slot_header(page, block[:SEAL_BYTES], encode_stamp(stamp.uuid, stamp.slot, stamp.seq))
        with open(self._slab.file.path, "r+b") as file:
            os.pwrite(file.fileno(), bytes(page) + block[SEAL_BYTES:], offset)
            os.fsync(file.fileno())
