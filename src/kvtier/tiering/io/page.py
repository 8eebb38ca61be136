"""Pages of 4 KiB: the unit of O_DIRECT I/O, and of everything that tiers write besides payloads.

A page that is not payload ends with a checksum of itself, so a torn or damaged page is recognized.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import struct
from pathlib import Path
from typing import TypeAlias

from xxhash import xxh3_64_intdigest

from kvtier.tiering.base import PrimaryRows

__all__ = [
    "BODY_BYTES",
    "PAGE_BYTES",
    "Buffer",
    "allows_o_direct",
    "close_page",
    "is_intact",
    "require_movable",
    "set_o_direct",
]

Buffer: TypeAlias = bytes | bytearray | memoryview

PAGE_BYTES = 4096
"""O_DIRECT needs offsets, lengths and addresses that are multiples of this."""

_CHECKSUM = struct.Struct("<Q")
BODY_BYTES = PAGE_BYTES - _CHECKSUM.size
"""Size of a page without its checksum, which comes last."""
_MAX_ROW_BYTES = 1 << 30
"""Limit on a row. One call moves a row and its header, and the kernel moves less than 2 GiB in one
call."""


def close_page(page: bytearray | memoryview) -> None:
    """Write the checksum at the end of a page whose body is complete."""
    _CHECKSUM.pack_into(page, BODY_BYTES, xxh3_64_intdigest(page[:BODY_BYTES]))


def is_intact(page: Buffer) -> bool:
    """True if `page` is as `close_page` left it."""
    if len(page) != PAGE_BYTES:
        return False
    (checksum,) = _CHECKSUM.unpack_from(page, BODY_BYTES)
    return bool(checksum == xxh3_64_intdigest(page[:BODY_BYTES]))


def require_movable(rows: PrimaryRows, address: int, tier_type: str) -> None:
    """Raise `ValueError` if rows that begin at `address` are too long or not aligned for I/O."""
    row_bytes = rows.row_bytes
    if row_bytes > _MAX_ROW_BYTES:
        raise ValueError(
            f"rows of {row_bytes} bytes: the {tier_type} tier moves at most {_MAX_ROW_BYTES} at "
            "once; use fewer blocks_per_chunk"
        )
    if row_bytes % PAGE_BYTES or address % PAGE_BYTES:
        raise ValueError(
            f"rows of {row_bytes} bytes at {address:#x}: the primary tier's rows "
            f"must be aligned to {PAGE_BYTES} bytes"
        )


def set_o_direct(fd: int) -> bool:
    """Make an open file bypass the page cache. The file must be at least one page long.

    Tries to read its first page. Returns False, and leaves the file as it was, if the file system
    or the disk does not support O_DIRECT. Any other error of that read is ignored.
    """
    flags = fcntl.fcntl(fd, fcntl.F_GETFL)
    try:
        fcntl.fcntl(fd, fcntl.F_SETFL, flags | os.O_DIRECT)
        with mmap.mmap(-1, PAGE_BYTES) as page:
            os.preadv(fd, [page], 0)
    except OSError as error:
        if error.errno in (errno.EINVAL, errno.EOPNOTSUPP):
            fcntl.fcntl(fd, fcntl.F_SETFL, flags)
            return False
    return True


def allows_o_direct(directory: Path) -> bool | None:
    """True if files in `directory` can bypass the page cache. Tries it with an unnamed file.

    None: it could not be tried, because there is no space or no permission, or the file system does
    not support unnamed files.
    """
    try:
        fd = os.open(directory, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)
    except OSError:
        return None
    try:
        os.pwrite(fd, bytes(PAGE_BYTES), 0)
        return set_o_direct(fd)
    except OSError:
        return None
    finally:
        os.close(fd)
