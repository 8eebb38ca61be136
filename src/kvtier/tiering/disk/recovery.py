"""Recovery: finds the blocks in a slab that an earlier engine left. Runs when an engine starts.

`read_index` loads the index from the file, and reads slot headers where the index is damaged.
`resize` changes the number of slots, and moves blocks. `populate` fills the slot table.
"""

from __future__ import annotations

import gc
import logging
import mmap
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvtier import seal
from kvtier.base import OffloadKey
from kvtier.tiering.disk.file import SlabFile
from kvtier.tiering.disk.index import (
    EMPTY,
    IN_HEADER,
    IndexTable,
    is_alive,
    namespace_tag,
    write_index,
)
from kvtier.tiering.disk.layout import (
    Geometry,
    SlabFormatError,
    Superblock,
    encode_stamp,
    read_description,
    read_owner,
    read_stamp,
    write_slot_header,
)
from kvtier.tiering.disk.slots import SlabTable
from kvtier.tiering.io.aio import AioQueue, address_of
from kvtier.tiering.io.page import PAGE_BYTES

__all__ = ["FoundBlock", "found_in", "populate", "read_index", "resize", "scan_headers"]

logger = logging.getLogger(__name__)

_PAGES_AT_ONCE = 256

_SCAN_DEPTH = 64
_SCAN_REAP = 16
_SLOTS_AT_ONCE = 4096
_NUM_SCAN_THREADS = 2
_LOG_EVERY_S = 5.0


# --- the index in the file ---------------------------------------------------------------------


def read_index(file: SlabFile, superblock: Superblock) -> IndexTable:
    """Read the index from the file. The entries of damaged pages are made from the slot headers."""
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
            tag = namespace_tag(block.fingerprint)
            index.put(block.slot, block.seq, tag, block.key, block.owner)
        _drop_duplicates(index)
    return index


def _raw_index(file: SlabFile, geometry: Geometry) -> bytes:
    """Read all pages of the index. Pages that cannot be read are zeros, and so count as damaged."""
    parts = []
    for first in range(0, geometry.num_index_pages, _PAGES_AT_ONCE):
        num_pages = min(_PAGES_AT_ONCE, geometry.num_index_pages - first)
        offset = geometry.index_offset + first * PAGE_BYTES
        parts.append(_read_readable(file, offset, num_pages).ljust(num_pages * PAGE_BYTES, b"\0"))
    return b"".join(parts)


def _read_readable(file: SlabFile, offset: int, num_pages: int) -> bytes:
    """Read pages. After an error, read each half separately, down to single pages, so that only
    unreadable pages are zeros."""
    try:
        return file.read(offset, num_pages * PAGE_BYTES)
    except OSError:
        if num_pages == 1:
            return bytes(PAGE_BYTES)
    half = num_pages // 2
    head = _read_readable(file, offset, half).ljust(half * PAGE_BYTES, b"\0")
    return head + _read_readable(file, offset + half * PAGE_BYTES, num_pages - half)


def _read_long_keys(file: SlabFile, superblock: Superblock, index: IndexTable) -> None:
    """Read the keys that are too long for the index from the slot headers."""
    entries = index.entries()
    slots = np.flatnonzero(entries["state"] == IN_HEADER)
    expected = dict(zip(slots.tolist(), entries["seq"][slots].tolist(), strict=True))
    for block in scan_headers(file, superblock.geometry, superblock.uuid, list(expected)):
        # If the header has a smaller sequence number than the index, the last write to the slot was
        # lost, and the slot still holds an older block.
        if block.seq >= expected[block.slot]:
            del expected[block.slot]
            tag = namespace_tag(block.fingerprint)
            index.put(block.slot, block.seq, tag, block.key, block.owner)
            index.mark_used(np.array([block.slot]), entries["used"][[block.slot]])
    for slot in expected:
        index.clear(slot)


def _drop_duplicates(index: IndexTable) -> None:
    """Keep one entry for each block. Several slots can have a header of the same block: after it
    was evicted and stored again, or while `resize` moved it. The slot with the largest sequence
    number is kept. Of two slots with the same sequence number, the lower slot has a copy made by
    `resize`, which may be incomplete, so the higher slot is kept."""
    entries = index.entries()
    slots = np.flatnonzero(entries["state"] != EMPTY)
    slots = slots[np.lexsort((-slots, np.iinfo(np.uint64).max - entries["seq"][slots]))]
    seen: set[tuple[int, OffloadKey]] = set()
    names = zip(entries["tag"][slots].tolist(), index.keys(entries, slots), strict=True)
    for slot, name in zip(slots.tolist(), names, strict=True):
        if name in seen:
            index.clear(slot)
        seen.add(name)


# --- slot headers ------------------------------------------------------------------------------


class FoundBlock(NamedTuple):
    """A block whose header is intact. Its payload is verified when it is loaded."""

    slot: int
    seq: int
    fingerprint: bytes
    key: OffloadKey
    time_ns: int
    description: bytes | None
    """What the engine that stored it has said about it (`BlockDescriber`)."""
    owner: int
    """The tag of the tenant that is charged for it; 0 for "default"."""


def found_in(page: bytes | memoryview, slot: int, uuid: bytes) -> FoundBlock | None:
    """The block that a header page describes. None if the page is damaged, or belongs to another
    slab or slot."""
    try:
        stamp = read_stamp(page)
        block = seal.read(page[: seal.SEAL_BYTES])
    except (SlabFormatError, seal.SealError):
        return None
    if stamp.uuid != uuid or stamp.slot != slot:
        return None
    return FoundBlock(
        slot,
        stamp.seq,
        block.fingerprint,
        block.key,
        block.time_ns,
        read_description(page),
        read_owner(page),
    )


def scan_headers(
    file: SlabFile, geometry: Geometry, uuid: bytes, slots: Sequence[int]
) -> Iterator[FoundBlock]:
    """Read the headers of these slots, many at once. Leaves out those that are unreadable, damaged
    or of another slab. Raises `AioUnavailable`."""
    batches = [slots[i : i + _SLOTS_AT_ONCE] for i in range(0, len(slots), _SLOTS_AT_ONCE)]
    logged = time.monotonic()
    num_read = 0
    with ThreadPoolExecutor(min(_NUM_SCAN_THREADS, max(1, len(batches))), "kvtier-scan") as pool:
        for found in pool.map(lambda batch: _scan_batch(file, geometry, uuid, batch), batches):
            yield from found
            num_read = min(num_read + _SLOTS_AT_ONCE, len(slots))
            if time.monotonic() - logged > _LOG_EVERY_S:
                logged = time.monotonic()
                logger.info("%s: %d of %d headers read", file.path, num_read, len(slots))


def _scan_batch(
    file: SlabFile, geometry: Geometry, uuid: bytes, slots: Sequence[int]
) -> list[FoundBlock]:
    found: list[FoundBlock] = []
    queue = AioQueue(_SCAN_DEPTH, 1)
    memory = mmap.mmap(-1, _SCAN_DEPTH * PAGE_BYTES)
    try:
        base = address_of(memory)
        todo = iter(slots)
        slot_of: dict[int, int] = {}
        free = list(range(_SCAN_DEPTH))
        while True:
            tags = []
            batch = list(islice(todo, len(free)))
            if not batch and not slot_of:
                return found
            for slot in batch:
                tag = free.pop()
                where = (base + tag * PAGE_BYTES, PAGE_BYTES)
                queue.prepare(tag, file.fd, False, geometry.slot_offset(slot), where)
                slot_of[tag] = slot
                tags.append(tag)
            while tags:
                count, error = queue.submit(tags)
                tags = tags[count:]
                if error:
                    refused = tags.pop(0)
                    del slot_of[refused]
                    free.append(refused)
            for tag, result in queue.reap(_SCAN_REAP):
                slot = slot_of.pop(tag)
                free.append(tag)
                if result == PAGE_BYTES:
                    start = tag * PAGE_BYTES
                    block = found_in(memory[start : start + PAGE_BYTES], slot, uuid)
                    if block is not None:
                        found.append(block)
    finally:
        queue.close()


# --- another size ------------------------------------------------------------------------------


def resize(
    file: SlabFile, superblock: Superblock, index: IndexTable, wanted: Geometry, tag: int | None
) -> IndexTable:
    """Change the number of slots. Writes the new index to the file, and returns it. The caller
    writes the superblock afterwards.

    If not all blocks fit any more, keeps those of the namespace `tag` first, and then the most
    recently used. Moves kept blocks from behind the new end. Erases the old index before the first
    move: after a crash the old superblock is still valid, and recovery reads the slot headers.
    """
    resized = IndexTable(wanted, superblock.uuid)
    old = index.entries()
    new = np.zeros(wanted.num_slots, old.dtype)
    num_kept = min(len(old), len(new))
    new[:num_kept] = old[:num_kept]
    moved: dict[int, int] = {}
    if len(new) < len(old):
        moved = _shrink(file, superblock, index, old, new, tag)
    index.close()
    resized.set_entries(new)
    for slot, source in ({slot: slot for slot in index.long_keys} | moved).items():
        key = index.long_keys.get(source)
        if key is not None and slot < len(new) and new[slot]["state"] == IN_HEADER:
            resized.long_keys[slot] = key
            if source in index.long_owners:
                resized.long_owners[slot] = index.long_owners[source]
    write_index(file, resized)
    return resized


def _shrink(
    file: SlabFile,
    superblock: Superblock,
    index: IndexTable,
    old: NDArray[np.void],
    new: NDArray[np.void],
    tag: int | None,
) -> dict[int, int]:
    """Choose the blocks to keep, move those behind the new end into free slots before it, and fill
    in `new`. Returns the former slots of the moved blocks, by new slot."""
    occupied = np.flatnonzero(is_alive(old, superblock.cut))
    order = np.lexsort((old["used"][occupied], old["tag"][occupied] == tag))
    staying = occupied[order][-len(new) :]
    sources = staying[staying >= len(new)].tolist()
    is_free = np.ones(len(new), bool)
    is_free[staying[staying < len(new)]] = False
    targets = np.flatnonzero(is_free).tolist()
    new[is_free] = np.zeros(1, new.dtype)
    logger.info(
        "%s: %d slots instead of %d; %d blocks are moved, %d are dropped",
        file.path,
        len(new),
        len(old),
        len(sources),
        len(occupied) - len(staying),
    )
    if sources:
        file.write(superblock.geometry.index_offset, bytes(len(index) * PAGE_BYTES))
    moved: dict[int, int] = {}
    for source, target in zip(sources, targets, strict=False):
        if _move(file, superblock, source, target):
            new[target] = old[source]
            moved[target] = source
    return moved


def _move(file: SlabFile, superblock: Superblock, source: int, target: int) -> bool:
    """Copy a block to the slot `target`, with a header for that slot. Returns False if the block
    cannot be read or its header is damaged."""
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
    write_slot_header(page, slot[: seal.SEAL_BYTES], stamp, found.description, found.owner)
    file.write(geometry.slot_offset(target), bytes(page) + slot[PAGE_BYTES:])
    return True


# --- the slot table ----------------------------------------------------------------------------


def populate(table: SlabTable, index: IndexTable, cut: int, tag: int) -> None:
    """Enter every block of the namespace `tag` into the slot table. Called when an engine starts.

    Slots with blocks of other namespaces count as free, but are used last, because an engine that
    uses those blocks may start later. So do those of blocks that are beyond their tenants' caps.
    """
    entries, slots, keys = _blocks_of(index, cut, tag)
    if len(set(keys)) < len(keys):
        _drop_duplicates(index)
        entries, slots, keys = _blocks_of(index, cut, tag)
    seqs: list[int] = entries["seq"][slots].tolist()
    # `adopt` makes up to millions of objects and no garbage: collecting would only take time.
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        owners = index.owners(entries, slots) if table.has_tenants else None
        dropped = table.adopt(keys, slots.tolist(), seqs, owners)
    finally:
        if was_enabled:
            gc.enable()
    alive = is_alive(entries, cut)
    is_foreign = alive & (entries["tag"] != tag)
    table.set_free(np.flatnonzero(~alive).tolist(), np.flatnonzero(is_foreign).tolist() + dropped)


def _blocks_of(
    index: IndexTable, cut: int, tag: int
) -> tuple[NDArray[np.void], NDArray[np.int64], list[OffloadKey]]:
    """Returns all entries of the index; the slots of the namespace `tag`, most recently used first;
    and the keys of those slots."""
    entries = index.entries()
    slots = np.flatnonzero(is_alive(entries, cut) & (entries["tag"] == tag))
    slots = slots[np.argsort(entries["used"][slots], kind="stable")[::-1]]
    return entries, slots, index.keys(entries, slots)
