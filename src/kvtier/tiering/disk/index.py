"""The index of a slab: a table with one entry per slot. Changes are made in memory; the index
flusher writes the changed pages to the file shortly afterwards.

The index saves reading every slot header when an engine starts. Correctness does not depend on it:
every load verifies the slot's header, so a wrong entry causes only a miss.
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Iterable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvtier.base import OffloadKey
from kvtier.tiering.disk.file import SlabFile
from kvtier.tiering.disk.layout import ENTRIES_PER_PAGE, OWNER_BYTES, Geometry
from kvtier.tiering.io.page import PAGE_BYTES, close_page, is_intact

__all__ = [
    "EMPTY",
    "INLINE",
    "IN_HEADER",
    "MAX_INLINE_KEY",
    "IndexTable",
    "is_alive",
    "namespace_sizes",
    "namespace_tag",
    "tag_name",
    "write_index",
]

MAX_INLINE_KEY = 42
"""Longest key in bytes that fits into an entry. The next engine reads longer keys from the slot
headers."""

# Earlier releases write zeros behind a key, and read nothing there.
_OWNER_AT = MAX_INLINE_KEY - OWNER_BYTES
"""Longest key that leaves room for the tag of a tenant, behind which it is."""

EMPTY, INLINE, IN_HEADER = 0, 1, 2

# magic, page number, start of the slab's uuid
_PAGE_HEAD = struct.Struct("<4sI8s8x")
_MAGIC = b"KVTI"
# sequence number, last use, namespace, length of the key, state, key
_ENTRY = struct.Struct("<QQIBB42s")
_ENTRY_BYTES = 64
_LENGTH_AT = struct.calcsize("<QQI")
_KEY_AT = _LENGTH_AT + 2
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
_PAGES_AT_ONCE = 256
_TAG_BYTES = 4
_ENTRIES_END = _PAGE_HEAD.size + ENTRIES_PER_PAGE * _ENTRY_BYTES


def is_alive(entries: NDArray[np.void], cut: int) -> NDArray[np.bool_]:
    """True for entries of valid blocks: not empty, and with a sequence number of at least `cut`."""
    alive: NDArray[np.bool_] = (entries["state"] != EMPTY) & (entries["seq"] >= cut)
    return alive


def namespace_tag(fingerprint: bytes) -> int:
    """The fingerprint, shortened for the index. The seal has the complete one."""
    return int.from_bytes(fingerprint[:_TAG_BYTES], "little")


def tag_name(tag: int) -> str:
    """The part of the fingerprint that a tag is, as the fingerprint's first hexadecimal digits."""
    return tag.to_bytes(_TAG_BYTES, "little").hex()


def namespace_sizes(entries: NDArray[np.void], cut: int) -> list[tuple[int, int]]:
    """The tag of each namespace with valid blocks, and their number."""
    tags, counts = np.unique(entries["tag"][is_alive(entries, cut)], return_counts=True)
    return list(zip(tags.tolist(), counts.tolist(), strict=True))


class IndexTable:
    """All entries. Lanes (I/O threads) call `put` and `clear`, the index flusher `mark_used`. `put`
    and `clear` write the entry with one call that holds the interpreter lock, so no other thread
    sees half an entry.

    Every change marks the page; `take_changed` returns the marked pages and removes the marks.
    """

    def __init__(self, geometry: Geometry, uuid: bytes, raw: bytes | None = None) -> None:
        """`raw`: the pages as read from the file; None for an empty table. Damaged pages are
        emptied, and listed in `damaged_pages`."""
        self.geometry = geometry
        self._uuid = uuid
        size = geometry.num_index_pages * PAGE_BYTES
        # An anonymous mapping is page-aligned, and takes no memory until it is used.
        self._memory = mmap.mmap(-1, max(size, PAGE_BYTES))
        self._changed = bytearray(geometry.num_index_pages)
        self.damaged_pages: list[int] = []
        self.long_keys: dict[int, bytes] = {}
        """Keys that are too long for an entry, by slot."""
        self.long_owners: dict[int, int] = {}
        """The tenants of those blocks, unless they are of "default"."""
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
        """Number of pages."""
        return len(self._changed)

    def entries(self) -> NDArray[np.void]:
        """A copy of every slot's entry. Fields: seq, used, tag, key_len, state, key."""
        return self._grid().flatten()[: self.geometry.num_slots]

    def keys(self, entries: NDArray[np.void], slots: NDArray[np.int64]) -> list[OffloadKey]:
        """The keys of these slots, in the same order. `entries`: the entries of all slots."""
        chosen = entries[slots]
        lengths = chosen["key_len"].tolist()
        keys: list[Any] = [
            key[:length] for key, length in zip(chosen["key"].tolist(), lengths, strict=True)
        ]
        if self.long_keys:
            for position, slot in enumerate(slots.tolist()):
                keys[position] = self.long_keys.get(slot, keys[position])
        return keys

    def owners(self, entries: NDArray[np.void], slots: NDArray[np.int64]) -> list[int]:
        """The tags of the tenants of these slots' blocks. `entries`: the entries of all slots."""
        chosen = entries[slots]
        stored = np.frombuffer(chosen["key"].tobytes(), np.uint8).reshape(-1, MAX_INLINE_KEY)
        tags = np.zeros((len(chosen), 8), np.uint8)
        tags[:, :OWNER_BYTES] = stored[:, _OWNER_AT:]
        tags[chosen["key_len"] > _OWNER_AT] = 0
        owners: list[int] = tags.view("<u8")[:, 0].tolist()
        if self.long_owners:
            for position, slot in enumerate(slots.tolist()):
                owners[position] = self.long_owners.get(slot, owners[position])
        return owners

    def set_entries(self, entries: NDArray[np.void]) -> None:
        """Replace the entries of all slots."""
        grid = self._grid()
        flat = np.zeros(grid.size, _ENTRY_DTYPE)
        flat[: len(entries)] = entries
        grid[...] = flat.reshape(grid.shape)
        self._changed[:] = b"\x01" * len(self._changed)

    def _grid(self) -> NDArray[np.void]:
        """A view of all entries: row = page, column = position in the page. It has entries beyond
        the last slot."""
        pages = np.frombuffer(self._memory, np.uint8)[: len(self._changed) * PAGE_BYTES]
        bodies = pages.reshape(-1, PAGE_BYTES)[:, _PAGE_HEAD.size : _ENTRIES_END]
        return bodies.view(_ENTRY_DTYPE)

    def slots_of_page(self, page_no: int) -> range:
        start = page_no * ENTRIES_PER_PAGE
        return range(start, min(start + ENTRIES_PER_PAGE, self.geometry.num_slots))

    def damaged_slots(self) -> list[int]:
        """Slots whose entries are on damaged pages."""
        return [slot for page_no in self.damaged_pages for slot in self.slots_of_page(page_no)]

    # --- changes -------------------------------------------------------------------------------

    def put(self, slot: int, seq: int, tag: int, key: bytes, owner: int = 0) -> None:
        """Enter the block that was written into the slot. The write counts as its last use.
        `owner`: the tag of the tenant that is charged for it."""
        state, inline, length = INLINE, key, len(key)
        if length > (_OWNER_AT if owner else MAX_INLINE_KEY):
            state, inline, length = IN_HEADER, b"", 0
            self.long_keys[slot] = key
            if owner:
                self.long_owners[slot] = owner
        elif owner:
            inline = key.ljust(_OWNER_AT, b"\0") + owner.to_bytes(OWNER_BYTES, "little")
        page_no, offset = self._place(slot)
        _ENTRY.pack_into(self._memory, offset, seq, seq, tag, length, state, inline)
        self._changed[page_no] = 1

    def set_owner(self, slots: Iterable[int], owner: int) -> None:
        """Other tenants are charged for the blocks in these slots. Scheduler thread, for blocks
        that are not being written. Keys too long for an entry keep the owner in their header."""
        tag = owner.to_bytes(OWNER_BYTES, "little")
        for slot in slots:
            page_no, offset = self._place(slot)
            length, state = self._memory[offset + _LENGTH_AT : offset + _KEY_AT]
            if state == INLINE and length <= _OWNER_AT:
                start = offset + _KEY_AT + _OWNER_AT
                self._memory[start : start + OWNER_BYTES] = tag
                self._changed[page_no] = 1

    def clear(self, slot: int) -> None:
        """Remove the slot's entry."""
        page_no, offset = self._place(slot)
        self._memory[offset : offset + _ENTRY_BYTES] = _NO_ENTRY
        self._changed[page_no] = 1
        self.long_keys.pop(slot, None)
        self.long_owners.pop(slot, None)

    def mark_used(self, slots: NDArray[np.int64], used: NDArray[np.int64]) -> None:
        """Set the last use of the blocks in these slots. `used`: sequence numbers."""
        pages, positions = np.divmod(slots, ENTRIES_PER_PAGE)
        uses = self._grid()["used"]
        # Keep the larger number: a smaller one is a use from before this block was stored.
        uses[pages, positions] = np.maximum(uses[pages, positions], used.astype(np.uint64))
        np.frombuffer(self._changed, np.uint8)[pages] = 1

    def _place(self, slot: int) -> tuple[int, int]:
        page_no, position = divmod(slot, ENTRIES_PER_PAGE)
        return page_no, page_no * PAGE_BYTES + _PAGE_HEAD.size + position * _ENTRY_BYTES

    # --- writing to the file -------------------------------------------------------------------

    @property
    def has_changed(self) -> bool:
        """True if a page has changed since `take_changed` last returned it. Any thread; takes about
        a microsecond for a million slots."""
        return 1 in self._changed

    def take_changed(self) -> list[int]:
        """The numbers of the pages that have changed since the last call, in ascending order."""
        changed: list[int] = np.flatnonzero(
            np.frombuffer(bytes(self._changed), np.uint8)  # a copy: other threads set marks
        ).tolist()
        for page_no in changed:
            self._changed[page_no] = 0  # before the page is copied: a later change marks it again
        return changed

    def give_back(self, pages: Iterable[int]) -> None:
        """Mark pages as changed again, because they could not be written."""
        for page_no in pages:
            self._changed[page_no] = 1

    def copy_page(self, page_no: int, target: memoryview) -> None:
        """Copy a page into `target` as it is written to the file, with head and checksum."""
        start = page_no * PAGE_BYTES
        target[:] = self._memory[start : start + PAGE_BYTES]
        _PAGE_HEAD.pack_into(target, 0, _MAGIC, page_no, self._uuid[:8])
        close_page(target)

    def close(self) -> None:
        """Free the memory."""
        self._memory.close()


def write_index(file: SlabFile, index: IndexTable, pages: list[int] | None = None) -> None:
    """Write `pages` of the index to the file; None: all pages. Adjacent pages are written with one
    call. Waits for the disk."""
    geometry = index.geometry
    todo = list(range(geometry.num_index_pages)) if pages is None else pages
    with mmap.mmap(-1, _PAGES_AT_ONCE * PAGE_BYTES) as memory, memoryview(memory) as view:
        start = 0
        while start < len(todo):
            end = start
            while end < len(todo) and todo[end] - todo[start] == end - start < _PAGES_AT_ONCE:
                with view[(end - start) * PAGE_BYTES :][:PAGE_BYTES] as target:
                    index.copy_page(todo[end], target)
                end += 1
            with view[: (end - start) * PAGE_BYTES] as run:
                file.write_aligned(geometry.index_offset + todo[start] * PAGE_BYTES, run)
            start = end
