"""Memory that a disk reads and writes quickly."""

from __future__ import annotations

import mmap
from contextlib import suppress
from typing import Final

from kvtier.tiering.io.aio import address_of

__all__ = ["make_buffers"]

_HUGE_PAGE_BYTES = 2 << 20
_MADV_WIPEONFORK: Final = 18
"""Python has no name for it."""


def make_buffers(num_bytes: int) -> memoryview:
    """Zeros, aligned to pages, in as few pieces of physical memory as the machine has: the disk of
    a virtual one takes twice as long for what lies in single pages all over the place."""
    memory = mmap.mmap(
        -1, num_bytes + _HUGE_PAGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    )
    if num_bytes >= _HUGE_PAGE_BYTES:
        with suppress(OSError):  # a kernel without huge pages
            memory.madvise(mmap.MADV_HUGEPAGE)
    with suppress(OSError):  # Linux before 4.14
        # A child would share these pages until one of both writes, and whoever writes has a copy
        # then that the disk knows nothing of. It gets zeros instead.
        memory.madvise(_MADV_WIPEONFORK)
    start = -address_of(memory) % _HUGE_PAGE_BYTES
    return memoryview(memory)[start : start + num_bytes]
