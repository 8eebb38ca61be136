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
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from statistics import median
from typing import NamedTuple

import numpy as np

__all__ = ["Calibration", "NotMeasured", "calibrate"]

_FILE_BYTES = 1 << 30
_CHUNK_BYTES = 8 << 20
_IN_FLIGHT = 4
"""Chunks that are written or read at the same time."""
_PAGE_BYTES = 4096
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


def calibrate(folder: str, progress: Callable[[int, int], None]) -> Calibration:
    """Measure host copies, and the disk of this directory, for a few seconds. Needs 1 GiB of free
    space there, and leaves no file behind, even if the process is killed."""
    copy_rate = _copy_rate()
    try:
        fd, is_direct = _open_nameless(folder)
    except OSError as error:
        raise NotMeasured(
            f"{folder}: {error.strerror}: give a directory you may write to"
        ) from None
    try:
        return _measure_disk(fd, is_direct, copy_rate, progress)
    except OSError as error:
        remedy = (
            f"make {_FILE_BYTES >> 30} GiB of room"
            if error.errno == errno.ENOSPC
            else "try another"
        )
        raise NotMeasured(f"{folder}: {error.strerror}: {remedy}") from None
    finally:
        os.close(fd)


def _copy_rate() -> float:
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


def _measure_disk(
    fd: int, is_direct: bool, copy_rate: float, progress: Callable[[int, int], None]
) -> Calibration:
    starts = range(0, _FILE_BYTES, _CHUNK_BYTES)
    total = 2 * _FILE_BYTES
    buffers = [mmap.mmap(-1, _CHUNK_BYTES) for _ in range(_IN_FLIGHT)]
    for buffer in buffers:
        buffer.write(random.Random(0).randbytes(_CHUNK_BYTES))

    def all_chunks(move: Callable[[mmap.mmap, int], None], done: int) -> float:
        began = time.perf_counter()

        def lane(first: int) -> None:
            for start in starts[first::_IN_FLIGHT]:
                move(buffers[first], start)

        with ThreadPoolExecutor(_IN_FLIGHT) as pool:
            list(pool.map(lane, range(_IN_FLIGHT)))
        os.fdatasync(fd)
        progress(done + _FILE_BYTES, total)
        return _FILE_BYTES / (time.perf_counter() - began)

    def write(buffer: mmap.mmap, start: int) -> None:
        if os.pwrite(fd, buffer, start) != _CHUNK_BYTES:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def read(buffer: mmap.mmap, start: int) -> None:
        os.preadv(fd, [buffer], start)

    os.posix_fallocate(fd, 0, _FILE_BYTES)
    all_chunks(write, 0)  # the first time, the file system also assigns the blocks
    write_rate = all_chunks(write, 0)
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    read_rate = all_chunks(read, _FILE_BYTES)
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    return Calibration(copy_rate, read_rate, write_rate, _latency(fd), is_direct)


def _latency(fd: int) -> float:
    page = mmap.mmap(-1, _PAGE_BYTES)
    places = random.Random(1).sample(range(_FILE_BYTES // _PAGE_BYTES), _NUM_LATENCIES)
    seconds = []
    for place in places:
        began = time.perf_counter()
        os.preadv(fd, [page], place * _PAGE_BYTES)
        seconds.append(time.perf_counter() - began)
    return median(seconds)
