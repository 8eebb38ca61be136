"""Room for a slab: how many slots fit, and their bytes really allocated."""

from __future__ import annotations

import errno
import os
from pathlib import Path

from kvtier.tiering.disk.file import SlabFile
from kvtier.tiering.disk.layout import Geometry
from kvtier.tiering.disk.refusal import SlabRefused

__all__ = ["allocate", "allocate_within"]


def geometry_for(max_bytes: int, payload_bytes: int) -> Geometry:
    geometry = Geometry.within(max_bytes, payload_bytes)
    if geometry.num_slots < 1:
        raise SlabRefused(
            f"max_bytes = {max_bytes}: that is too little for one block of {payload_bytes} bytes; "
            f"give {Geometry(payload_bytes, 1).needed_bytes} or more"
        )
    return geometry


def allocate_within(file: SlabFile, max_bytes: int, payload_bytes: int, path: Path) -> Geometry:
    """Make room for the most slots that fit. What the file system needs to remember where the file
    lies is known only afterwards: where free space is in many small parts, that is more."""
    extent_bytes = 0
    while True:
        geometry = geometry_for(max_bytes - extent_bytes, payload_bytes)
        allocate(file, geometry, path)
        found = max(0, file.allocated_bytes - file.size)
        if geometry.needed_with(found) <= max_bytes or found <= extent_bytes:
            return geometry
        extent_bytes = found


def allocate(file: SlabFile, geometry: Geometry, path: Path) -> None:
    """`path`: what to call the file."""
    has = file.allocated_bytes
    try:
        file.allocate(geometry.file_bytes)
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise
        raise SlabRefused(
            f"{path} needs {geometry.file_bytes} bytes and has {has}; its file system has "
            f"{file.free_bytes} left ({os.strerror(error.errno)}): give a smaller max_bytes, or "
            "make room"
        ) from None
