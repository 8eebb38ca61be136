"""What an engine does with a slab's index when it opens the file: read, mend, move, write it."""

from __future__ import annotations

import logging
import mmap

import numpy as np

from kvtier import seal
from kvtier.tiering.disk.file import SlabFile
from kvtier.tiering.disk.index import EMPTY, IN_HEADER, IndexTable, namespace_tag
from kvtier.tiering.disk.layout import (
    PAGE_BYTES,
    Geometry,
    Superblock,
    encode_stamp,
    write_slot_header,
)
from kvtier.tiering.disk.scan import found_in, scan_headers

__all__ = ["read_index", "resize", "write_index"]

logger = logging.getLogger(__name__)

_PAGES_AT_ONCE = 256


def read_index(file: SlabFile, superblock: Superblock) -> IndexTable:
    """The index as it was last written. Where it is damaged, the slots are asked."""
    geometry = superblock.geometry
    raw = file.read(geometry.index_offset, geometry.num_index_pages * PAGE_BYTES)
    index = IndexTable(geometry, superblock.uuid, raw)
    _read_long_keys(file, superblock, index)
    slots: list[int] = []
    if index.damaged_pages:
        slots = [slot for page_no in index.damaged_pages for slot in index.slots_of_page(page_no)]
        logger.warning(
            "%s: %d of %d pages of the index are damaged; the headers of %d slots are read",
            file.path,
            len(index.damaged_pages),
            geometry.num_index_pages,
            len(slots),
        )
    for block in scan_headers(file, geometry, superblock.uuid, slots):
        index.put(block.slot, block.seq, namespace_tag(block.fingerprint), block.key)
    return index


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
    file: SlabFile, superblock: Superblock, index: IndexTable, wanted: Geometry
) -> IndexTable:
    """Let the slab have another number of slots. Returns the new index, which is in the file.

    If there are fewer, the blocks that were used last stay, and those of them that lie behind the
    new end are moved. Whenever this is cut short, the old superblock holds, and what the old index
    has lost by then is found in the slots.
    """
    resized = IndexTable(wanted, superblock.uuid)
    old = index.entries()
    new = np.zeros(wanted.num_slots, old.dtype)
    num_kept = min(len(old), len(new))
    new[:num_kept] = old[:num_kept]
    occupied = np.flatnonzero((old["state"] != EMPTY) & (old["seq"] >= superblock.cut))
    moved: dict[int, bytes] = {}
    if len(new) < len(old):
        order = np.argsort(old["used"][occupied], kind="stable")
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
    slot = file.read(geometry.slot_offset(source), geometry.slot_bytes)
    found = found_in(slot[:PAGE_BYTES], source, superblock.uuid)
    if found is None:
        return False
    page = bytearray(PAGE_BYTES)
    stamp = encode_stamp(superblock.uuid, target, found.seq)
    write_slot_header(page, slot[: seal.SEAL_BYTES], stamp)
    file.write(geometry.slot_offset(target), bytes(page) + slot[PAGE_BYTES:])
    return True
