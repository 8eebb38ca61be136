"""Measures what a replay needs to know about this machine: host copies, and one disk.

How fast a model computes prompts cannot be measured without the model, and copies to a GPU cannot
be measured without the GPU.
"""

from __future__ import annotations

import errno
import mmap
import os
import random
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from math import inf
from statistics import median
from typing import NamedTuple

import numpy as np

from kvtier.config.sizes import as_size

__all__ = ["Calibration", "NotMeasured", "calibrate", "copy_rate"]

_FILE_BYTES = 1 << 30
_CHUNK_BYTES = 8 << 20
_IN_FLIGHT = 4
"""Chunks that are written or read at the same time."""
_PAGE_BYTES = 4096
_CHUNK_PAGES = _CHUNK_BYTES // _PAGE_BYTES
_NUM_LATENCIES = 64
_COPIED_BYTES = 256 << 20
_NUM_COPIES = 5


class NotMeasured(Exception):
    """The disk could not be measured. The message says why, and what to do."""


class Calibration(NamedTuple):
    """Speeds of this machine."""

    copy_bytes_per_s: float
    """Copies within host memory, by one thread."""
    read_bytes_per_s: float
    write_bytes_per_s: float
    latency_s: float
    """Median of single reads of one page."""
    is_direct: bool
    """False: the file system has no direct I/O, so the page cache has made the disk look faster."""


def calibrate(
    folder: str,
    progress: Callable[[int, int], None],
    file_bytes: int = _FILE_BYTES,
    most_s: float = inf,
) -> Calibration:
    """Measure host copies, and the disk of this directory, for a few seconds. Needs `file_bytes` of
    free space there, a multiple of 8 MiB, and leaves no file behind, even if the process is killed.
    `most_s`: about how long the disk may be written and read; a slow one is then measured with
    fewer bytes."""
    copied = copy_rate()
    try:
        fd, is_direct = _open_nameless(folder)
    except OSError as error:
        raise NotMeasured(
            f"{folder}: {error.strerror}: give a directory you may write to"
        ) from None
    try:
        probe = _DiskProbe(fd, file_bytes, most_s, progress)
        return probe.measure(is_direct, copied)
    except OSError as error:
        remedy = (
            f"make {as_size(file_bytes)} of room" if error.errno == errno.ENOSPC else "try another"
        )
        raise NotMeasured(f"{folder}: {error.strerror}: {remedy}") from None
    finally:
        os.close(fd)


def copy_rate() -> float:
    """Bytes per second of copies within host memory, by one thread."""
    source = np.ones(_COPIED_BYTES, np.uint8)
    target = np.zeros(_COPIED_BYTES, np.uint8)
    best = float("inf")
    for _ in range(_NUM_COPIES):
        began = time.perf_counter()
        np.copyto(target, source)
        best = min(best, time.perf_counter() - began)
    return _COPIED_BYTES / best


def _open_nameless(folder: str) -> tuple[int, bool]:
    """Open a file without a name, with direct I/O if the file system has it."""
    fd, path = tempfile.mkstemp(prefix=".kvtier-calibrate-", dir=folder)
    try:
        with suppress(OSError):
            direct = os.open(path, os.O_RDWR | os.O_DIRECT)
            os.close(fd)
            return direct, True
        return fd, False
    finally:
        os.unlink(path)


class _DiskProbe:
    """Writes and reads one file. Each pass ends early when its share of the time is used."""

    def __init__(
        self, fd: int, file_bytes: int, most_s: float, progress: Callable[[int, int], None]
    ) -> None:
        self._fd = fd
        self._starts: Sequence[int] = range(0, file_bytes, _CHUNK_BYTES)
        """Of the chunks that the next pass moves."""
        self._pass_s = most_s / 3
        self._progress = progress
        self._num_moved = 0
        self._total = 3 * file_bytes
        self._buffers = [mmap.mmap(-1, _CHUNK_BYTES) for _ in range(_IN_FLIGHT)]
        for buffer in self._buffers:
            buffer.write(random.Random(0).randbytes(_CHUNK_BYTES))

    def measure(self, is_direct: bool, copied: float) -> Calibration:
        fd = self._fd
        os.posix_fallocate(fd, 0, self._total // 3)
        self._pass(self._write)  # the first time, the file system also assigns the blocks
        write_rate = self._pass(self._write)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        read_rate = self._pass(self._read)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        return Calibration(copied, read_rate, write_rate, self._latency(), is_direct)

    def _pass(self, move: Callable[[mmap.mmap, int], None]) -> float:
        """Move all chunks, or as many as there is time for; later passes move the same. Returns
        bytes per second."""
        began = time.perf_counter()
        moved: list[int] = []

        def lane(first: int) -> None:
            for start in self._starts[first::_IN_FLIGHT]:
                move(self._buffers[first], start)
                moved.append(start)
                if time.perf_counter() - began > self._pass_s:
                    return

        with ThreadPoolExecutor(_IN_FLIGHT) as pool:
            list(pool.map(lane, range(_IN_FLIGHT)))
        os.fdatasync(self._fd)
        seconds = time.perf_counter() - began
        self._num_moved += self._total // 3
        self._progress(self._num_moved, self._total)
        self._starts = sorted(moved)
        return len(moved) * _CHUNK_BYTES / seconds

    def _write(self, buffer: mmap.mmap, start: int) -> None:
        if os.pwrite(self._fd, buffer, start) != _CHUNK_BYTES:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def _read(self, buffer: mmap.mmap, start: int) -> None:
        os.preadv(self._fd, [buffer], start)

    def _latency(self) -> float:
        page = mmap.mmap(-1, _PAGE_BYTES)
        chance = random.Random(1)
        seconds: list[float] = []
        while len(seconds) < _NUM_LATENCIES and sum(seconds) < self._pass_s:
            place = chance.choice(self._starts) + chance.randrange(_CHUNK_PAGES) * _PAGE_BYTES
            began = time.perf_counter()
            os.preadv(self._fd, [page], place)
            seconds.append(time.perf_counter() - began)
        return median(seconds)
