"""Pages that say of themselves whether they are whole: what tiers put beside payloads."""

from __future__ import annotations

import struct
from typing import TypeAlias

from xxhash import xxh3_64_intdigest

__all__ = ["BODY_BYTES", "PAGE_BYTES", "Buffer", "close_page", "is_intact"]

Buffer: TypeAlias = bytes | bytearray | memoryview

PAGE_BYTES = 4096
"""Unit of everything that tiers keep in files; O_DIRECT wants offsets and addresses to be multiples
of it."""

_CHECKSUM = struct.Struct("<Q")
BODY_BYTES = PAGE_BYTES - _CHECKSUM.size
"""What a page holds besides its checksum."""


def close_page(page: bytearray | memoryview) -> None:
    """Put the checksum at the end of a page whose other bytes are written."""
    _CHECKSUM.pack_into(page, BODY_BYTES, xxh3_64_intdigest(page[:BODY_BYTES]))


def is_intact(page: Buffer) -> bool:
    """Whether a page is one that `close_page` has ended, unchanged."""
    if len(page) != PAGE_BYTES:
        return False
    (checksum,) = _CHECKSUM.unpack_from(page, BODY_BYTES)
    return bool(checksum == xxh3_64_intdigest(page[:BODY_BYTES]))
