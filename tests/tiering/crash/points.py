"""Places in the code at which a life can be killed: around every change of a file.

The tier is not changed for them: they are wrapped around its methods, in a process that will be
killed. Here are the points in asynchronous I/O, which all tiers share.
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

from kvtier.tiering.io.aio import AioQueue

__all__ = ["KillPoints", "plant", "write_plainly"]


def plant(owner: Any, **replacements: Callable[..., Any] | object) -> None:
    """Replace attributes of a class or a module for the rest of this process. Each must exist."""
    for name, replacement in replacements.items():
        if not hasattr(owner, name):
            raise AttributeError(f"{owner} has no {name} any more: plant it where it is now")
        setattr(owner, name, replacement)


class KillPoints:
    """Counts arrivals at points, and kills the process at the chosen one. Any thread."""

    def __init__(self, point: str | None, nth: int, report: Callable[..., None]) -> None:
        """`nth`: the arrival at `point` that kills the process."""
        self._point = point
        self._nth = nth
        self._report = report
        self._arrivals: Counter[str] = Counter()

    def arrive(self, point: str, before_the_end: Callable[[], object] | None = None) -> None:
        """`before_the_end` is called only if the process is killed here."""
        self._arrivals[point] += 1
        if point == self._point and self._arrivals[point] == self._nth:
            if before_the_end is not None:
                before_the_end()
            self._report("at", point)
            os.kill(os.getpid(), signal.SIGKILL)
            threading.Event().wait()  # take no further step, however late the signal comes

    def plant(self) -> None:
        """Wrap the tier's methods: from now on, this process can be killed at every point."""
        raise NotImplementedError

    def plant_in_aio(self) -> None:
        """The points of reads and writes of blocks: "slot before", "slot half", "slot after" (the
        write is submitted), "slot written" and "slot read"."""
        real_prepare, real_submit, real_reap = AioQueue.prepare, AioQueue.submit, AioQueue.reap
        writes: dict[tuple[int, int], Callable[[], None] | None] = {}
        """By queue and tag, a function that makes the first half of a write; None: a read."""

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
    write_plainly(path, offset, whole[: len(whole) // 2])


def write_plainly(path: Path, offset: int, data: bytes) -> None:
    """Write without O_DIRECT, so that any length will do."""
    with open(path, "r+b", buffering=0) as file:
        os.pwrite(file.fileno(), data, offset)
