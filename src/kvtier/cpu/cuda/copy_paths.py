"""Which of the ways to copy pages is the quickest, as measured on an H200 (PCIe 5).

Two things can move a page: the copy engines, which disturb no kernel but need some time for every
page, and a kernel, which does not care about the size of a page but takes some SMs from the model
and, since it speaks to the bus in smaller packets, reaches 92 to 94 % of it at most. GB/s of
scattered pages, host to device / device to host; a plain copy reaches 55.2 / 55.1:

| page    | copy engines, 1 stream | 2 streams   | 4 streams   | kernel      |
|---------|------------------------|-------------|-------------|-------------|
| 16 KiB  | 4.6 / 16.8             | 5.0 / 17.1  | 3.8 / 25.5  | 50.9 / 51.5 |
| 64 KiB  | 41.7 / 38.7            | 45.4 / 41.5 | 49.7 / 44.5 | 51.0 / 51.7 |
| 256 KiB | 49.5 / 47.0            | 52.3 / 50.0 | 53.6 / 51.7 | 50 / 50     |
| 1 MiB   | 53.4 / 52.4            | 54.3 / 53.7 | 54.8 / 54.3 | 50 / 51     |
| 2 MiB   | 54.7 / 54.1            | 54.7 / 54.7 | 55.0 / 54.7 | 50 / 51     |

A small job is over before a kernel is at full speed: 16 pages of 64 KiB take the engines as long.

A kernel that speaks to the bus stays on its SMs for as long as the copy takes, and matrix products
become 2 to 17 % slower beside it, however few SMs it takes. So where the pages of a block
lie together in its slot, as they do when an engine has a tensor for each layer, a kernel only
collects them on the device, which is over in no time, and the copy engines move whole slots.
"""

from __future__ import annotations

from enum import Enum, auto

__all__ = ["Path", "choose_path"]

_ENGINES_FROM_BYTES = 128 << 10
"""Pages from this size on are for the copy engines,"""
_ONE_STREAM_FROM_BYTES = 512 << 10
"""and from this size on they need no second stream."""
_SMALL_PAGE_BYTES = 32 << 10
"""Below this size the engines are no match, however few pages there are."""
_FEW_PAGES = 16
_STAGED_RUN_BYTES = range(256 << 10, (16 << 20) + 1)
"""How much must lie together in a slot to be worth a stage in between, and how much may."""
_STAGED_FROM_BYTES = 2 << 20
"""A smaller job is over soon, whoever does it."""


class Path(Enum):
    """How the pages of a job are copied."""

    ENGINES = auto()
    """By the copy engines, in one stream."""
    ENGINES_TWICE = auto()
    """By the copy engines, half of the pages in a second stream: while one copy ends, the next one
    has begun."""
    KERNEL = auto()
    """By a kernel that reads or writes host memory."""
    STAGED = auto()
    """By a kernel between their places and a buffer on the device, and from there, a slot at a
    time, by the copy engines."""

    @property
    def words(self) -> str:
        """Its name, as it is shown to people."""
        return self.name.lower().replace("_", " ")


def choose_path(page_bytes: float, num_pages: int, run_bytes: int) -> Path:
    """For pages of that size (their mean, if they differ), of which so many bytes lie together in
    a slot; 0 if none do."""
    if page_bytes >= _ONE_STREAM_FROM_BYTES:
        return Path.ENGINES
    if page_bytes >= _ENGINES_FROM_BYTES:
        return Path.ENGINES_TWICE if num_pages > _FEW_PAGES else Path.ENGINES
    if page_bytes >= _SMALL_PAGE_BYTES and num_pages <= _FEW_PAGES:
        return Path.ENGINES
    if run_bytes in _STAGED_RUN_BYTES and page_bytes * num_pages >= _STAGED_FROM_BYTES:
        return Path.STAGED
    return Path.KERNEL
