"""The index of a slab: one entry per slot, in memory and, a little later, in the file.

It saves reading every slot's header when an engine starts. Nothing depends on it being right: an
entry that is wrong leads to a slot whose header says otherwise.
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Iterable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvtier.base import OffloadKey
from kvtier.tiering.disk.layout import ENTRIES_PER_PAGE, Geometry
from kvtier.tiering.io.page import PAGE_BYTES, close_page, is_intact

__all__ = [
    "EMPTY",
    "INLINE",
    "IN_HEADER",
    "MAX_INLINE_KEY",
    "IndexTable",
    "is_alive",
    "namespace_tag",
]

MAX_INLINE_KEY = 42
"""Longer keys are not in the index: they are read from the slot's header at the next start."""

EMPTY, INLINE, IN_HEADER = 0, 1, 2

# magic, page number, start of the slab's uuid
_PAGE_HEAD = struct.Struct("<4sI8s8x")
_MAGIC = b"KVTI"
# sequence number, last use, namespace, length of the key, state, key
_ENTRY = struct.Struct("<QQIBB42s")
_ENTRY_BYTES = 64
_NO_ENTRY = bytes(_ENTRY_BYTES)
_ENTRY_DTYPE = np.dtype(
    [
        ("seq", "<u8"),
        ("used", "<u8"),
        ("tag", "<u4"),
        ("key_len", "u1"),
        ("state", "u1"),
        ("key", f"V{MAX_INLINE_KEY}"),
    ]
)
_ENTRIES_END = _PAGE_HEAD.size + ENTRIES_PER_PAGE * _ENTRY_BYTES


def is_alive(entries: NDArray[np.void], cut: int) -> NDArray[np.bool_]:
    """Which entries stand for blocks: not empty, and not from before the cut."""
    alive: NDArray[np.bool_] = (entries["state"] != EMPTY) & (entries["seq"] >= cut)
    return alive


def namespace_tag(fingerprint: bytes) -> int:
    """A fingerprint, shortened for the index. The seal has all of it."""
    return int.from_bytes(fingerprint[:4], "little")


class IndexTable:
    """All entries. Written by I/O threads and the index keeper; every call is one step for others.

    A page that has changed is marked; `take_changed` hands the marks out.
    """

    def __init__(self, geometry: Geometry, uuid: bytes, raw: bytes | None = None) -> None:
        """`raw`: the table as it was found in the file; what is damaged in it counts as empty, and
        is listed in `damaged_pages`."""
        self.geometry = geometry
        self._uuid = uuid
        size = geometry.num_index_pages * PAGE_BYTES
        # A mapping: page-aligned, and its pages take no memory before they are used.
        self._memory = mmap.mmap(-1, max(size, PAGE_BYTES))
        self._changed = bytearray(geometry.num_index_pages)
        self.damaged_pages: list[int] = []
        self.long_keys: dict[int, bytes] = {}
        """By slot, the keys that are too long for an entry."""
        if raw is not None:
            self._memory[: min(len(raw), size)] = raw[:size]
            self._empty_damaged_pages()

    def _empty_damaged_pages(self) -> None:
        view = memoryview(self._memory)
        for page_no in range(self.geometry.num_index_pages):
            start = page_no * PAGE_BYTES
            page = view[start : start + PAGE_BYTES]
            head = _PAGE_HEAD.pack(_MAGIC, page_no, self._uuid[:8])
            if not is_intact(page) or page[: len(head)] != head:
                page[:] = bytes(PAGE_BYTES)
                self.damaged_pages.append(page_no)
                self._changed[page_no] = 1

    def __len__(self) -> int:
        """How many pages it has."""
        return len(self._changed)

    def entries(self) -> NDArray[np.void]:
        """A copy of every slot's entry. Fields: seq, used, tag, key_len, state, key."""
        return self._grid().flatten()[: self.geometry.num_slots]

    def keys(self, entries: NDArray[np.void], slots: NDArray[np.int64]) -> list[OffloadKey]:
        """The keys in these slots, according to `entries`."""
        chosen = entries[slots]
        lengths = chosen["key_len"].tolist()
        keys: list[Any] = [
            key[:length] for key, length in zip(chosen["key"].tolist(), lengths, strict=True)
        ]
        if self.long_keys:
            for position, slot in enumerate(slots.tolist()):
                keys[position] = self.long_keys.get(slot, keys[position])
        return keys

    def set_entries(self, entries: NDArray[np.void]) -> None:
        """Let every slot have this entry."""
        grid = self._grid()
        flat = np.zeros(grid.size, _ENTRY_DTYPE)
        flat[: len(entries)] = entries
        grid[...] = flat.reshape(grid.shape)
        self._changed[:] = b"\x01" * len(self._changed)

    def _grid(self) -> NDArray[np.void]:
        """The entries themselves, by page and position in it."""
        pages = np.frombuffer(self._memory, np.uint8)[: len(self._changed) * PAGE_BYTES]
        bodies = pages.reshape(-1, PAGE_BYTES)[:, _PAGE_HEAD.size : _ENTRIES_END]
        return bodies.view(_ENTRY_DTYPE)

    def slots_of_page(self, page_no: int) -> range:
        start = page_no * ENTRIES_PER_PAGE
        return range(start, min(start + ENTRIES_PER_PAGE, self.geometry.num_slots))

    def damaged_slots(self) -> list[int]:
        """The slots whose entries are on damaged pages."""
        return [slot for page_no in self.damaged_pages for slot in self.slots_of_page(page_no)]

    # --- changes -------------------------------------------------------------------------------

    def put(self, slot: int, seq: int, tag: int, key: bytes) -> None:
        """A block was written into the slot; that counts as its last use."""
        state, inline = INLINE, key
        if len(key) > MAX_INLINE_KEY:
            state, inline = IN_HEADER, b""
            self.long_keys[slot] = key
        page_no, offset = self._place(slot)
        _ENTRY.pack_into(self._memory, offset, seq, seq, tag, len(inline), state, inline)
        self._changed[page_no] = 1

    def clear(self, slot: int) -> None:
        """The slot holds nothing any more that anyone should look for."""
        page_no, offset = self._place(slot)
        self._memory[offset : offset + _ENTRY_BYTES] = _NO_ENTRY
        self._changed[page_no] = 1
        self.long_keys.pop(slot, None)

    def mark_used(self, slots: NDArray[np.int64], used: NDArray[np.int64]) -> None:
        """The blocks in these slots were used, at these numbers."""
        pages, positions = np.divmod(slots, ENTRIES_PER_PAGE)
        uses = self._grid()["used"]
        # A use from before the block was stored comes late, and says nothing.
        uses[pages, positions] = np.maximum(uses[pages, positions], used.astype(np.uint64))
        np.frombuffer(self._changed, np.uint8)[pages] = 1

    def _place(self, slot: int) -> tuple[int, int]:
        page_no, position = divmod(slot, ENTRIES_PER_PAGE)
        return page_no, page_no * PAGE_BYTES + _PAGE_HEAD.size + position * _ENTRY_BYTES

    # --- on its way into the file --------------------------------------------------------------

    @property
    def has_changed(self) -> bool:
        """Whether a page has changed since it was last taken. Any thread; it takes a microsecond
        for a million slots."""
        return 1 in self._changed

    def take_changed(self) -> list[int]:
        """The pages that have changed since they were last taken, in order."""
        changed: list[int] = np.flatnonzero(
            np.frombuffer(bytes(self._changed), np.uint8)  # others set marks meanwhile
        ).tolist()
        for page_no in changed:
            self._changed[page_no] = 0  # before it is copied: what changes later is marked again
        return changed

    def give_back(self, pages: Iterable[int]) -> None:
        """These could not be written: they have still changed."""
        for page_no in pages:
            self._changed[page_no] = 1

    def copy_page(self, page_no: int, target: memoryview) -> None:
        """The page as it is to stand in the file, checksum included."""
        start = page_no * PAGE_BYTES
        target[:] = self._memory[start : start + PAGE_BYTES]
        _PAGE_HEAD.pack_into(target, 0, _MAGIC, page_no, self._uuid[:8])
        close_page(target)

    def close(self) -> None:
        """Give the memory back."""
        self._memory.close()
