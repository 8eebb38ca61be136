"""The points at which a life of the disk tier can be killed: around every change of the file."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from typing import Any

from kvtier.tiering.disk.file import SlabFile
from kvtier.tiering.disk.layout import (
    CONTROL_OFFSET,
    HOLDER_OFFSET,
    SLOTS_OFFSET,
    SUPERBLOCK_OFFSETS,
)
from tests.tiering.crash.points import KillPoints, plant, write_plainly

WRITTEN = ("superblock 1", "superblock 2", "holder", "index", "move", "slot")
"""Parts of the file that one call writes; the call may be interrupted half-way."""
CALLED = ("allocate", "truncate", "sync", "rename", "unlink")
POINTS = (
    *(f"{what} {when}" for what in WRITTEN for when in ("before", "half", "after")),
    *(f"{what} {when}" for what in CALLED for when in ("before", "after")),
    "slot written",
    "slot read",
)
AT_CREATION = tuple(p for p in POINTS if p.split()[0] in ("allocate", "sync", "rename"))
AFTER_CREATION_FAILED = tuple(p for p in POINTS if p.split()[0] == "unlink")
AT_SHRINKING = tuple(p for p in POINTS if p.split()[0] in ("move", "truncate"))
MANY_TIMES = tuple(p for p in POINTS if p.split()[0] in ("slot", "index"))

_FIXED = {SUPERBLOCK_OFFSETS[0]: "superblock 1", SUPERBLOCK_OFFSETS[1]: "superblock 2"}
_FIXED |= {HOLDER_OFFSET: "holder", CONTROL_OFFSET: "control"}


class SlabPoints(KillPoints):
    """The points of the disk tier."""

    def __init__(self, point: str | None, nth: int, report: Callable[..., None]) -> None:
        super().__init__(point, nth, report)
        self._is_moving = threading.local()

    def _around(self, owner: Any, name: str, what: str) -> None:
        real = getattr(owner, name)

        def call(*args: Any) -> Any:
            self.arrive(f"{what} before")
            answer = real(*args)
            self.arrive(f"{what} after")
            return answer

        plant(owner, **{name: call})

    def plant(self) -> None:
        for name in ("allocate", "truncate", "sync"):
            self._around(SlabFile, name, name)
        for name in ("rename", "unlink"):
            self._around(os, name, name)
        self._plant_in_writes()
        self.plant_in_aio()

    def _plant_in_writes(self) -> None:
        real_write, real_write_aligned = SlabFile.write, SlabFile.write_aligned

        def write(file: SlabFile, offset: int, data: bytes) -> None:
            # Synchronous writes of slots happen only when blocks are moved.
            self._is_moving.now = offset >= SLOTS_OFFSET
            try:
                real_write(file, offset, data)
            finally:
                self._is_moving.now = False

        def write_aligned(file: SlabFile, offset: int, data: memoryview) -> None:
            what = _FIXED.get(offset)
            if what is None:
                what = "move" if getattr(self._is_moving, "now", False) else "index"
            self.arrive(f"{what} before")
            half = bytes(data[: len(data) // 2])
            self.arrive(f"{what} half", lambda: write_plainly(file.path, offset, half))
            real_write_aligned(file, offset, data)
            self.arrive(f"{what} after")

        plant(SlabFile, write=write, write_aligned=write_aligned)
