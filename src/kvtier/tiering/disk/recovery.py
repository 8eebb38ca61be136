"""What an engine does with a slab's index when it opens the file: read, mend, move, write it."""

from __future__ import annotations

import logging
import mmap

import numpy as np

from kvtier import seal
from kvtier.base import OffloadKey
from kvtier.tiering.disk.file import SlabFile
from kvtier.tiering.disk.index import EMPTY, IN_HEADER, IndexTable, is_alive, namespace_tag
from kvtier.tiering.disk.layout import Geometry, Superblock, encode_stamp, write_slot_header
from kvtier.tiering.disk.scan import found_in, scan_headers
from kvtier.tiering.io.page import PAGE_BYTES

__all__ = ["forget_twins", "read_index", "resize", "write_index"]

logger = logging.getLogger(__name__)

_PAGES_AT_ONCE = 256


def read_index(file: SlabFile, superblock: Superblock) -> IndexTable:
    """The index as it was last written. Where it is damaged, the slots are asked."""
    geometry = superblock.geometry
    index = IndexTable(geometry, superblock.uuid, _raw_index(file, geometry))
    _read_long_keys(file, superblock, index)
    if index.damaged_pages:
        slots = index.damaged_slots()
        logger.warning(
            "%s: %d of %d pages of the index are damaged; the headers of %d slots are read",
            file.path,
            len(index.damaged_pages),
            geometry.num_index_pages,
            len(slots),
        )
        for block in scan_headers(file, geometry, superblock.uuid, slots):
            index.put(block.slot, block.seq, namespace_tag(block.fingerprint), block.key)
        forget_twins(index)
    return index


def forget_twins(index: IndexTable) -> None:
    """One block in two slots: a slot remembers a block that left it or was moved, or a crash came
    after a block was written anew and before the old one was forgotten. The newest counts; of
    equals the last, because the other is a copy of it that may not be whole."""
    entries = index.entries()
    slots = np.flatnonzero(entries["state"] != EMPTY)
    slots = slots[np.lexsort((-slots, np.iinfo(np.uint64).max - entries["seq"][slots]))]
    seen: set[tuple[int, OffloadKey]] = set()
    names = zip(entries["tag"][slots].tolist(), index.keys(entries, slots), strict=True)
    for slot, name in zip(slots.tolist(), names, strict=True):
        if name in seen:
            index.clear(slot)
        seen.add(name)


def _raw_index(file: SlabFile, geometry: Geometry) -> bytes:
    """All pages of the index. Those that cannot be read are zeros, and so count as damaged."""
    parts = []
    for first in range(0, geometry.num_index_pages, _PAGES_AT_ONCE):
        num_pages = min(_PAGES_AT_ONCE, geometry.num_index_pages - first)
        offset = geometry.index_offset + first * PAGE_BYTES
        parts.append(_read_readable(file, offset, num_pages).ljust(num_pages * PAGE_BYTES, b"\0"))
    return b"".join(parts)


def _read_readable(file: SlabFile, offset: int, num_pages: int) -> bytes:
    try:
        return file.read(offset, num_pages * PAGE_BYTES)
    except OSError:
        if num_pages == 1:
            return bytes(PAGE_BYTES)
    half = num_pages // 2
    head = _read_readable(file, offset, half).ljust(half * PAGE_BYTES, b"\0")
    return head + _read_readable(file, offset + half * PAGE_BYTES, num_pages - half)


def _read_long_keys(file: SlabFile, superblock: Superblock, index: IndexTable) -> None:
    """Keys that are too long for the index stand in the headers alone."""
    entries = index.entries()
    slots = np.flatnonzero(entries["state"] == IN_HEADER)
    expected = dict(zip(slots.tolist(), entries["seq"][slots].tolist(), strict=True))
    for block in scan_headers(file, superblock.geometry, superblock.uuid, list(expected)):
        # A smaller number than the index has: an older block is back in its place.
        if block.seq >= expected[block.slot]:
            del expected[block.slot]
            index.put(block.slot, block.seq, namespace_tag(block.fingerprint), block.key)
            index.mark_used(np.array([block.slot]), entries["used"][[block.slot]])
    for slot in expected:
        index.clear(slot)


def write_index(file: SlabFile, index: IndexTable, pages: list[int] | None = None) -> None:
    """Put pages of the index into the file; None: all of them. Neighbours go together."""
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


def resize(
    file: SlabFile, superblock: Superblock, index: IndexTable, wanted: Geometry, tag: int | None
) -> IndexTable:
    """Let the slab have another number of slots. Returns the new index, which is in the file.

    If there are fewer, the blocks that were used last stay, those of the namespace `tag` before all
    others, and those of them that lie behind the new end are moved. The old index is given up
    before that: whenever this is cut short, the old superblock holds, and the slots are asked.
    """
    resized = IndexTable(wanted, superblock.uuid)
    old = index.entries()
    new = np.zeros(wanted.num_slots, old.dtype)
    num_kept = min(len(old), len(new))
    new[:num_kept] = old[:num_kept]
    occupied = np.flatnonzero(is_alive(old, superblock.cut))
    moved: dict[int, bytes] = {}
    if len(new) < len(old):
        order = np.lexsort((old["used"][occupied], old["tag"][occupied] == tag))
        staying = occupied[order][-len(new) :]
        strangers = staying[staying >= len(new)].tolist()
        is_free = np.ones(len(new), bool)
        is_free[staying[staying < len(new)]] = False
        homes = np.flatnonzero(is_free).tolist()
        new[is_free] = np.zeros(1, new.dtype)
        logger.info(
            "%s: %d slots instead of %d; %d blocks are moved, %d are dropped",
            file.path,
            len(new),
            len(old),
            len(strangers),
            len(occupied) - len(staying),
        )
        if strangers:
            file.write(superblock.geometry.index_offset, bytes(len(index) * PAGE_BYTES))
        for stranger, home in zip(strangers, homes, strict=False):
            if _move(file, superblock, stranger, home):
                new[home] = old[stranger]
                if stranger in index.long_keys:
                    moved[home] = index.long_keys[stranger]
    index.close()
    resized.set_entries(new)
    resized.long_keys |= {
        slot: key
        for slot, key in (index.long_keys | moved).items()
        if slot < len(new) and new[slot]["state"] == IN_HEADER
    }
    write_index(file, resized)
    return resized


def _move(file: SlabFile, superblock: Superblock, source: int, target: int) -> bool:
    """Copy a block to another slot, with a header that says so."""
    geometry = superblock.geometry
    try:
        slot = file.read(geometry.slot_offset(source), geometry.slot_bytes)
    except OSError:
        return False
    found = found_in(slot[:PAGE_BYTES], source, superblock.uuid)
    if found is None:
        return False
    page = bytearray(PAGE_BYTES)
    stamp = encode_stamp(superblock.uuid, target, found.seq)
    write_slot_header(page, slot[: seal.SEAL_BYTES], stamp)
    file.write(geometry.slot_offset(target), bytes(page) + slot[PAGE_BYTES:])
    return True
