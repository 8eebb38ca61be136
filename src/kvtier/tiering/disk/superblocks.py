"""The pages that describe a slab file: read, mended and written."""

from __future__ import annotations

import logging
from contextlib import suppress
from dataclasses import replace

from kvtier.tiering.disk.file import SlabFile
from kvtier.tiering.disk.layout import (
    CONTROL_OFFSET,
    HOLDER_OFFSET,
    SLOTS_OFFSET,
    SUPERBLOCK_OFFSETS,
    Geometry,
    Holder,
    SlabFormatError,
    SlabVersionError,
    Superblock,
    decode_clear_request,
    decode_note,
)
from kvtier.tiering.io.page import PAGE_BYTES

__all__ = [
    "has_index",
    "mend_copies",
    "read_clear_request",
    "read_holder",
    "read_note",
    "read_superblock",
    "slots_in_file",
    "within_file",
    "write_superblock",
]

logger = logging.getLogger(__name__)


def read_superblock(file: SlabFile) -> Superblock:
    """The newer of the intact copies. Raises `SlabFormatError`, or `OSError`, if there is none."""
    found = []
    problem: Exception = SlabFormatError("there is no superblock")
    for offset in SUPERBLOCK_OFFSETS:
        try:
            found.append(Superblock.decode(file.read(offset, PAGE_BYTES)))
        except (SlabFormatError, OSError) as error:
            if not isinstance(problem, SlabVersionError):
                problem = error
    if not found or isinstance(problem, SlabVersionError):
        raise problem
    return max(found, key=lambda superblock: superblock.revision)


def write_superblock(file: SlabFile, superblock: Superblock) -> None:
    """One copy after the other: whenever this is cut short, one of them is whole."""
    page = superblock.encode()
    for offset in SUPERBLOCK_OFFSETS:
        file.write(offset, page)


def mend_copies(file: SlabFile, superblock: Superblock) -> None:
    """Let all copies be this one, before any of them is written anew: else the last whole one might
    be torn. Writing a sector often mends it; one that cannot be written is left as it is."""
    page = superblock.encode()
    for offset in SUPERBLOCK_OFFSETS:
        found = b""
        with suppress(OSError):
            found = file.read(offset, PAGE_BYTES)
        if found != page:
            with suppress(OSError):
                file.write(offset, page)


def slots_in_file(file: SlabFile, superblock: Superblock) -> int:
    """How many slots there are, in a file that may have been cut off: no more than there is room
    for in what it takes on its disk, because each costs memory."""
    geometry = superblock.geometry
    if file.size >= geometry.file_bytes:
        return geometry.num_slots
    length = min(file.size, file.allocated_bytes)
    return min(geometry.num_slots, max(0, length - SLOTS_OFFSET) // geometry.slot_bytes)


def within_file(file: SlabFile, superblock: Superblock) -> Superblock:
    """The superblock of a file that may have been cut off: what lies behind its end is gone."""
    num_slots = slots_in_file(file, superblock)
    if num_slots == superblock.geometry.num_slots:
        return superblock
    logger.warning(
        "%s has been cut off: %d of %d slots are left; max_bytes, if given, gets it its size back",
        file.path,
        num_slots,
        superblock.geometry.num_slots,
    )
    return replace(superblock, geometry=replace(superblock.geometry, num_slots=num_slots))


def has_index(file: SlabFile, geometry: Geometry) -> bool:
    """Whether most of the index is really in the file, which was not cut off. To read one takes
    memory for every slot, and the superblock of a file that is one large hole may claim any number
    of them."""
    length = geometry.file_bytes - geometry.index_offset
    return file.data_bytes(geometry.index_offset, geometry.file_bytes) * 2 >= length


def read_holder(file: SlabFile) -> Holder | None:
    """Who opened the slab last, and may have it open still."""
    try:
        return Holder.decode(file.read(HOLDER_OFFSET, PAGE_BYTES))
    except SlabFormatError:
        return None


def read_note(file: SlabFile) -> bytes:
    """The note that whoever had the slab open before has left; b"": none."""
    try:
        return decode_note(file.read(HOLDER_OFFSET, PAGE_BYTES))
    except OSError:
        return b""


def read_clear_request(file: SlabFile) -> bytes | None:
    """The last request to forget everything, obeyed or not."""
    try:
        return decode_clear_request(file.read(CONTROL_OFFSET, PAGE_BYTES))
    except (SlabFormatError, OSError):
        return None
