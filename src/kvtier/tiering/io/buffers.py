"""Memory that a disk reads and writes quickly."""

from __future__ import annotations

import mmap
from contextlib import suppress

from kvtier.tiering.io.aio import address_of

__all__ = ["make_buffers"]

_HUGE_PAGE_BYTES = 2 << 20


def make_buffers(num_bytes: int) -> memoryview:
    """Zeros, aligned to pages, in as few pieces of physical memory as the machine has: the disk of
    a virtual one takes twice as long for what lies in single pages all over the place."""
    memory = mmap.mmap(
        -1, num_bytes + _HUGE_PAGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    )
    with suppress(OSError):  # a kernel without huge pages
        memory.madvise(mmap.MADV_HUGEPAGE)
    # A child has no use for it, and until it has let go of it, writing here would make a copy that
    # the disk knows nothing of.
    memory.madvise(mmap.MADV_DONTFORK)
    start = -address_of(memory) % _HUGE_PAGE_BYTES
    return memoryview(memory)[start : start + num_bytes]
