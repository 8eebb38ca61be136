"""Places in the code at which a life can end: around every change of the file.

Nothing in the tier knows of them. They are put around its methods, in a process that will be
killed.
"""

from __future__ import annotations

import ctypes
import os
import signal
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from kvtier.tiering.disk.file import SlabFile
from kvtier.tiering.disk.layout import (
    CONTROL_OFFSET,
    HOLDER_OFFSET,
    SLOTS_OFFSET,
    SUPERBLOCK_OFFSETS,
)
from kvtier.tiering.io.aio import AioQueue
from tests.tiering.disk.crash.planting import plant

WRITTEN = ("superblock 1", "superblock 2", "holder", "index", "move", "slot")
"""What is written by one call, which may be cut short."""
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


class Points:
    """Counts arrivals, and ends the process at the one that was chosen. Any thread."""

    def __init__(self, point: str | None, nth: int, report: Callable[..., None]) -> None:
        self._point = point
        self._nth = nth
        self._report = report
        self._arrivals: Counter[str] = Counter()
        self._is_moving = threading.local()

    def arrive(self, point: str, last_deed: Callable[[], object] | None = None) -> None:
        """`last_deed` is done only if this is the end."""
        self._arrivals[point] += 1
        if point == self._point and self._arrivals[point] == self._nth:
            if last_deed is not None:
                last_deed()
            self._report("at", point)
            os.kill(os.getpid(), signal.SIGKILL)
            threading.Event().wait()  # no further step, whenever the signal comes

    def _around(self, owner: Any, name: str, what: str) -> None:
        real = getattr(owner, name)

        def call(*args: Any) -> Any:
            self.arrive(f"{what} before")
            answer = real(*args)
            self.arrive(f"{what} after")
            return answer

        plant(owner, **{name: call})

    def plant(self) -> None:
        """From now on, this process can end at every point."""
        for name in ("allocate", "truncate", "sync"):
            self._around(SlabFile, name, name)
        for name in ("rename", "unlink"):
            self._around(os, name, name)
        self._plant_in_writes()
        self._plant_in_aio()

    def _plant_in_writes(self) -> None:
        real_write, real_write_aligned = SlabFile.write, SlabFile.write_aligned

        def write(file: SlabFile, offset: int, data: bytes) -> None:
            # Slots are written this way only when they are moved.
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
            self.arrive(f"{what} half", lambda: _write_plainly(file.path, offset, half))
            real_write_aligned(file, offset, data)
            self.arrive(f"{what} after")

        plant(SlabFile, write=write, write_aligned=write_aligned)

    def _plant_in_aio(self) -> None:
        real_prepare, real_submit, real_reap = AioQueue.prepare, AioQueue.submit, AioQueue.reap
        writes: dict[tuple[int, int], Callable[[], None] | None] = {}
        """By queue and tag, how to make the first half of a write; None: it is a read."""

        def prepare(
            queue: AioQueue,
            tag: int,
            fd: int,
            is_write: bool,
            offset: int,
            segments: Sequence[int],
        ) -> None:
            path = Path(f"/proc/self/fd/{fd}")
            writes[id(queue), tag] = (
                partial(_write_half, path, offset, tuple(segments)) if is_write else None
            )
            real_prepare(queue, tag, fd, is_write, offset, segments)

        def submit(queue: AioQueue, tags: Sequence[int]) -> tuple[int, int]:
            halves = [half for tag in tags if (half := writes[id(queue), tag]) is not None]
            for half in halves:
                self.arrive("slot before")
                self.arrive("slot half", half)
            answer = real_submit(queue, tags)
            for _ in halves:
                self.arrive("slot after")
            return answer

        def reap(queue: AioQueue, *args: Any) -> list[tuple[int, int]]:
            ended = real_reap(queue, *args)
            for tag, _ in ended:
                is_read = writes[id(queue), tag] is None
                self.arrive("slot read" if is_read else "slot written")
            return ended

        plant(AioQueue, prepare=prepare, submit=submit, reap=reap)


def _write_half(path: Path, offset: int, segments: Sequence[int]) -> None:
    """`segments`: as for `AioQueue.prepare`."""
    pieces = zip(segments[::2], segments[1::2], strict=True)
    whole = b"".join(ctypes.string_at(address, length) for address, length in pieces)
    _write_plainly(path, offset, whole[: len(whole) // 2])


def _write_plainly(path: Path, offset: int, data: bytes) -> None:
    with open(path, "r+b", buffering=0) as file:
        os.pwrite(file.fileno(), data, offset)
