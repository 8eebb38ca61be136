"""A slab file as tests see it: offsets of its parts, and ways to damage it."""

from __future__ import annotations

import os
from pathlib import Path

from kvtier.base import OffloadKey
from kvtier.tiering.disk.layout import (
    CONTROL_OFFSET,
    HOLDER_OFFSET,
    SUPERBLOCK_OFFSETS,
    SlabFormatError,
    Superblock,
)
from kvtier.tiering.disk.recovery import found_in
from kvtier.tiering.io.page import PAGE_BYTES


class Image:
    """The content of a slab at one moment, read without asking its engine."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.content = path.read_bytes()
        self.superblock = max(superblocks_in(self.content), key=lambda copy: copy.revision)
        self.geometry = self.superblock.geometry

    def slot_of(self, key: OffloadKey) -> int:
        """The slot with this block; of several, the one written last."""
        found = [
            block
            for slot in range(self.geometry.num_slots)
            if (block := found_in(self.header(slot), slot, self.superblock.uuid)) is not None
            and block.key == key
        ]
        if not found:
            raise KeyError(key)
        return max(found, key=lambda block: block.seq).slot

    def header(self, slot: int) -> bytes:
        return self.slot_bytes(slot)[:PAGE_BYTES]

    def slot_bytes(self, slot: int) -> bytes:
        start = self.geometry.slot_offset(slot)
        return self.content[start : start + self.geometry.slot_bytes]

    def write_slot(self, slot: int, content: bytes) -> None:
        write(self.path, self.geometry.slot_offset(slot), content)

    @property
    def regions(self) -> dict[str, range]:
        """The parts of the file besides the slots."""
        pages = {f"superblock {i}": offset for i, offset in enumerate(SUPERBLOCK_OFFSETS)}
        pages |= {"holder": HOLDER_OFFSET, "control": CONTROL_OFFSET}
        regions = {name: range(start, start + PAGE_BYTES) for name, start in pages.items()}
        geometry = self.geometry
        return regions | {"index": range(geometry.index_offset, geometry.file_bytes)}

    def slots_in(self, damaged: range) -> set[int]:
        """The slots that overlap with a part of the file."""
        geometry = self.geometry
        return {
            slot
            for slot in range(geometry.num_slots)
            if damaged.start < geometry.slot_offset(slot + 1)
            and damaged.stop > geometry.slot_offset(slot)
        }


def write(path: Path, offset: int, content: bytes) -> None:
    """Write to the file without its engine."""
    with open(path, "r+b", buffering=0) as file:
        os.pwrite(file.fileno(), content, offset)


def superblocks_in(content: bytes) -> list[Superblock]:
    """The intact copies of the superblock."""
    copies = []
    for offset in SUPERBLOCK_OFFSETS:
        try:
            copies.append(Superblock.decode(content[offset : offset + PAGE_BYTES]))
        except SlabFormatError:
            continue
    return copies
