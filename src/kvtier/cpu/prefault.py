"""Touching the pages of a mapping in advance, so that no later copy stops for a page fault."""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np

__all__ = ["prefault"]

_MADV_POPULATE_WRITE = 23  # Linux 5.14; Python's mmap module has no name for it
_PIECE_BYTES = 1 << 26
_MAX_THREADS = 8

# Not mmap.madvise: that one keeps the GIL, and so would make the threads take turns.
_libc = ctypes.CDLL(None, use_errno=True)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


def prefault(address: int, ranges: Iterable[tuple[int, int]]) -> None:
    """Map the pages of all (start, end) byte ranges, counted from the page-aligned `address`.

    The bytes are not changed, also when other processes write them at the same time. Runs in
    several threads, which have ended when it returns. Raises `OSError` if a page cannot be had.
    """
    pieces = list(_page_aligned_pieces(ranges))
    num_threads = min(_MAX_THREADS, len(os.sched_getaffinity(0)), len(pieces))
    # Every thread gets a share of the list rather than single pieces, which may be many.
    shares = [pieces[first::num_threads] for first in range(num_threads)]
    with ThreadPoolExecutor(num_threads, thread_name_prefix="kvtier-prefault") as pool:
        for done in [pool.submit(_populate_all, address, share) for share in shares]:
            done.result()


def _populate_all(address: int, pieces: list[tuple[int, int]]) -> None:
    for start, end in pieces:
        _populate(address + start, end - start)


def _page_aligned_pieces(ranges: Iterable[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    """The ranges rounded out to pages, neighbours joined, then cut into pieces of bounded size."""
    joined: list[tuple[int, int]] = []
    for first_byte, end_byte in ranges:
        start = first_byte // mmap.PAGESIZE * mmap.PAGESIZE
        end = -(-end_byte // mmap.PAGESIZE) * mmap.PAGESIZE
        if joined and start <= joined[-1][1]:
            joined[-1] = (joined[-1][0], end)
        else:
            joined.append((start, end))
    for start, end in joined:
        for piece in range(start, end, _PIECE_BYTES):
            yield piece, min(piece + _PIECE_BYTES, end)


def _populate(address: int, length: int) -> None:
    while _libc.madvise(address, length, _MADV_POPULATE_WRITE):
        code = ctypes.get_errno()
        if code == errno.EINVAL:
            _read_every_page(address, length)
            return
        if code not in (errno.EAGAIN, errno.EINTR):
            raise OSError(code, f"cannot prefault {length} bytes: {os.strerror(code)}")


def _read_every_page(address: int, length: int) -> None:
    """For kernels before 5.14. A read is enough, and cannot undo what another process writes."""
    memory = (ctypes.c_ubyte * length).from_address(address)
    np.asarray(memory)[:: mmap.PAGESIZE].max()
