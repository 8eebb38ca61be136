"""Simulated power cuts: torn and lost writes of the last life."""

from __future__ import annotations

import os
from enum import Enum
from pathlib import Path
from random import Random

from kvtier.tiering.disk.layout import SLOTS_OFFSET, SUPERBLOCK_OFFSETS
from kvtier.tiering.io.page import PAGE_BYTES
from tests.tiering.disk.crash.image import superblocks_in

HALF = PAGE_BYTES // 2
KINDS = (
    "torn index",
    "torn index",
    "lost index",
    "torn superblock",
    "lost superblock",
    "lost slots",
)
"""Kinds of damage; those named twice are twice as likely."""


class Loss(Enum):
    """What a power cut has lost."""

    NOTHING = "nothing"
    """Nothing: there was nothing to damage."""
    WRITES = "writes"
    """Writes, of which another copy exists."""
    BLOCKS = "blocks"
    """Blocks may be lost."""


class PowerCut:
    """Holds the file as it was before a life, to undo parts of what the life has written."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.before = path.read_bytes() if path.exists() else b""

    def strike(self, kind: str, random: Random) -> Loss:
        """Damage the file."""
        if not self.before or not self._path.exists():
            return Loss.NOTHING
        after = self._path.read_bytes()
        before = superblocks_in(self.before)
        now = superblocks_in(after)
        if len(now) != 2 or not before:  # two copies survive one failure, not two
            return Loss.NOTHING
        geometry = max(now, key=lambda copy: copy.revision).geometry
        with open(self._path, "r+b", buffering=0) as file:
            if kind.endswith("superblock"):
                pages = [random.choice(SUPERBLOCK_OFFSETS)]
            elif any(copy.geometry != geometry for copy in (*now, *before)):
                return Loss.NOTHING
            elif kind == "lost slots":
                slots = self.before[SLOTS_OFFSET : geometry.index_offset]
                os.pwrite(file.fileno(), slots, SLOTS_OFFSET)
                return Loss.BLOCKS
            else:
                all_pages = range(geometry.index_offset, geometry.file_bytes, PAGE_BYTES)
                pages = random.sample(all_pages, random.randint(1, len(all_pages)))
            loss = Loss.WRITES
            for offset in pages:
                old = self.before[offset : offset + PAGE_BYTES]
                new = after[offset : offset + PAGE_BYTES]
                page = old
                if kind.startswith("torn"):
                    page = random.choice((old[:HALF] + new[HALF:], new[:HALF] + old[HALF:]))
                # If only one half has changed, a torn page may be intact, and outdated.
                if page == old != new and kind.endswith("index"):
                    loss = Loss.BLOCKS
                os.pwrite(file.fileno(), page, offset)
        return loss
