"""Finds out what is in slots by reading their headers, many at once."""

from __future__ import annotations

import logging
import mmap
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from typing import NamedTuple

from kvtier import seal
from kvtier.base import OffloadKey
from kvtier.tiering.disk.file import SlabFile
from kvtier.tiering.disk.layout import Geometry, SlabFormatError, read_stamp
from kvtier.tiering.io.aio import AioQueue, address_of
from kvtier.tiering.io.page import PAGE_BYTES

__all__ = ["FoundBlock", "found_in", "scan_headers"]

logger = logging.getLogger(__name__)

_DEPTH = 64
_WOKEN_BY = 16
_SLOTS_AT_ONCE = 4096
_NUM_THREADS = 2
_TELL_EVERY_S = 5.0


class FoundBlock(NamedTuple):
    """A block whose header is intact. Whether its payload is, shows when it is loaded."""

    slot: int
    seq: int
    fingerprint: bytes
    key: OffloadKey
    time_ns: int


def found_in(page: bytes | memoryview, slot: int, uuid: bytes) -> FoundBlock | None:
    """What the header page of a slot says; None if it is none, or that of another slot."""
    try:
        stamp = read_stamp(page)
        block = seal.read(page[: seal.SEAL_BYTES])
    except (SlabFormatError, seal.SealError):
        return None
    if stamp.uuid != uuid or stamp.slot != slot:
        return None
    return FoundBlock(slot, stamp.seq, block.fingerprint, block.key, block.time_ns)


def scan_headers(
    file: SlabFile, geometry: Geometry, uuid: bytes, slots: Sequence[int]
) -> Iterator[FoundBlock]:
    """Read the headers of these slots. A header that cannot be read counts as empty."""
    batches = [slots[i : i + _SLOTS_AT_ONCE] for i in range(0, len(slots), _SLOTS_AT_ONCE)]
    told = time.monotonic()
    num_read = 0
    with ThreadPoolExecutor(min(_NUM_THREADS, max(1, len(batches))), "kvtier-scan") as pool:
        for found in pool.map(lambda batch: _scan_batch(file, geometry, uuid, batch), batches):
            yield from found
            num_read = min(num_read + _SLOTS_AT_ONCE, len(slots))
            if time.monotonic() - told > _TELL_EVERY_S:
                told = time.monotonic()
                logger.info("%s: %d of %d headers read", file.path, num_read, len(slots))


def _scan_batch(
    file: SlabFile, geometry: Geometry, uuid: bytes, slots: Sequence[int]
) -> list[FoundBlock]:
    found: list[FoundBlock] = []
    queue = AioQueue(_DEPTH, 1)
    memory = mmap.mmap(-1, _DEPTH * PAGE_BYTES)
    try:
        base = address_of(memory)
        todo = iter(slots)
        slot_of: dict[int, int] = {}
        free = list(range(_DEPTH))
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
            for tag, result in queue.reap(_WOKEN_BY):
                slot = slot_of.pop(tag)
                free.append(tag)
                if result == PAGE_BYTES:
                    start = tag * PAGE_BYTES
                    block = found_in(memory[start : start + PAGE_BYTES], slot, uuid)
                    if block is not None:
                        found.append(block)
    finally:
        queue.close()
