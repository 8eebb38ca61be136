"""Reads a slab, the file of a disk tier, for `kvtier store`, while an engine may be writing it.

Writes nothing, and keeps no lock. The file may change at any moment: a page that is being written
is read again, and a slot that does not match the index may have been overwritten since the index
was read.
"""

from __future__ import annotations

import os
import struct
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

import numpy as np
from numpy.typing import NDArray

from kvtier import seal
from kvtier.base import OffloadKey
from kvtier.seal import SealFailure
from kvtier.tiering.disk.file import NotAFile, SlabFile, has_index, read_holder
from kvtier.tiering.disk.index import EMPTY, IN_HEADER, IndexTable, is_alive, namespace_tag
from kvtier.tiering.disk.layout import (
    CONTROL_OFFSET,
    SUPERBLOCK_OFFSETS,
    Geometry,
    Holder,
    SlabFormatError,
    Superblock,
    decode_clear_request,
    is_slab_page,
    read_stamp,
)
from kvtier.tiering.disk.recovery import FoundBlock, scan_headers
from kvtier.tiering.inspection import WHAT_TO_GIVE
from kvtier.tiering.io.page import PAGE_BYTES, is_intact

__all__ = ["CheckedSlot", "Entry", "SlabReader", "SlabUnreadable", "Snapshot", "check_slot"]

_NUM_TRIES = 8
_PAUSE_S = 0.02
"""Pause between two tries. An engine finishes writing a page within this time."""
_VERSION = struct.Struct("<8xH")


class SlabUnreadable(Exception):
    """The file is not a readable slab. The message names the reason and the remedy."""


@dataclass(frozen=True, slots=True)
class Entry:
    """A slot's entry in the index."""

    seq: int
    """Sequence number of the block."""
    tag: int
    """Start of the namespace's fingerprint, as `namespace_tag` returns it."""
    key: OffloadKey | None
    """None if the key is too long for the index; it is then only in the slot's header."""


class Snapshot:
    """The superblock and the index, read from the file at about the same time."""

    def __init__(self, superblock: Superblock, table: IndexTable) -> None:
        self.superblock = superblock
        self.geometry: Geometry = superblock.geometry
        self.damaged_pages: Sequence[int] = table.damaged_pages
        """Numbers of the damaged pages of the index. Their slots count as empty here."""
        self._unknown = table.damaged_slots()
        self.entries: NDArray[np.void] = table.entries()
        """One for each slot. Fields: seq, used, tag, key_len, state, key."""

    def live_slots(self) -> NDArray[np.int64]:
        """The slots whose blocks an engine would find, in ascending order."""
        return np.flatnonzero(is_alive(self.entries, self.superblock.cut))

    def num_dead(self) -> int:
        """Number of cleared blocks that are still in the index."""
        return int(np.count_nonzero(self.entries["state"] != EMPTY)) - len(self.live_slots())

    def unknown_slots(self) -> list[int]:
        """The slots whose page of the index is damaged. An engine reads their headers when it
        starts."""
        return self._unknown

    def entry(self, slot: int) -> Entry | None:
        """The entry of a slot. None if an engine would find no block in it."""
        row = self.entries[slot]
        seq, state = int(row["seq"]), int(row["state"])
        if state == EMPTY or seq < self.superblock.cut:
            return None
        key = None if state == IN_HEADER else OffloadKey(_key_of(row))
        return Entry(seq, int(row["tag"]), key)


def _key_of(row: np.void) -> bytes:
    stored: bytes = row["key"].tobytes()
    return stored[: int(row["key_len"])]


class SlabReader:
    """A slab opened for reading. A context manager. One thread uses it; only `read_into` may be
    called on any thread."""

    def __init__(self, path: Path) -> None:
        """Raises `SlabUnreadable` or `OSError`."""
        try:
            self.file = SlabFile(path, os.O_RDONLY)
        except NotAFile as refused:
            raise SlabUnreadable(f"{refused}: give the path of a slab file") from None
        try:
            self.file.use_o_direct()  # must not evict other files from the page cache
            self.superblock = self.read_superblock()
        except BaseException:
            self.file.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.file.close()

    # --- the slab ------------------------------------------------------------------------------

    def read_superblock(self) -> Superblock:
        """Read the superblock again. Raises `SlabUnreadable`."""
        pages = self._superblock_pages()
        for _ in range(_NUM_TRIES):
            found = [copy for page in pages if (copy := _superblock_in(page)) is not None]
            if found:
                self.superblock = max(found, key=lambda copy: copy.revision)
                return self.superblock
            if not any(map(is_slab_page, pages)):
                break
            time.sleep(_PAUSE_S)
            pages = self._superblock_pages()
        raise SlabUnreadable(self._what_it_is(pages))

    @property
    def version(self) -> int:
        """Version of the file's format."""
        page = next(page for page in self._superblock_pages() if is_slab_page(page))
        version: int = _VERSION.unpack_from(page)[0]
        return version

    def num_intact_superblocks(self) -> int:
        """Number of intact copies of the superblock, at most two; one is enough. Retries, because
        an engine may be writing them."""
        most = 0
        for _ in range(_NUM_TRIES):
            pages = self._superblock_pages()
            most = max(most, sum(_superblock_in(page) is not None for page in pages))
            if most == len(pages):
                break
            time.sleep(_PAUSE_S)
        return most

    def _superblock_pages(self) -> list[bytes]:
        return [self.file.read(offset, PAGE_BYTES) for offset in SUPERBLOCK_OFFSETS]

    def _what_it_is(self, pages: Sequence[bytes]) -> str:
        path = self.file.path
        if not self.file.size:
            return f"{path} is empty, so it is not a slab: give another path, or remove that file"
        for page in pages:
            if is_slab_page(page) and is_intact(page):
                try:
                    Superblock.decode(page)
                except SlabFormatError as error:
                    return f"{path} cannot be read: {error}. Use the kvtier that wrote it"
        if any(map(is_slab_page, pages)):
            return (
                f"both copies of the superblock of {path} are damaged: its blocks are lost. "
                "The next engine that opens it formats it again; or remove the file"
            )
        return f"{path} is not a slab: {WHAT_TO_GIVE}"

    def holder(self) -> Holder | None:
        """The process that opened the slab last: an engine, or `kvtier store clear`."""
        return read_holder(self.file)

    def is_held(self) -> bool:
        """True if a process holds the slab's lock, in any container on this machine."""
        return self.file.is_locked()

    def clear_request(self) -> bytes | None:
        """Id of the last request to clear the slab, whether it was carried out or not."""
        try:
            return decode_clear_request(self.file.read(CONTROL_OFFSET, PAGE_BYTES))
        except SlabFormatError:
            return None

    # --- the index -----------------------------------------------------------------------------

    def snapshot(self) -> Snapshot:
        """Read the index. A running engine writes it about every 50 ms."""
        for _ in range(_NUM_TRIES):
            before = self.read_superblock()
            table = self._read_table(before)
            after = self.read_superblock()
            if (after.uuid, after.geometry) == (before.uuid, before.geometry):
                snapshot = Snapshot(after, table)
                table.close()
                return snapshot
        raise SlabUnreadable(
            f"{self.file.path} was formatted or resized each time it was read: try again later"
        )

    def _read_table(self, superblock: Superblock) -> IndexTable:
        geometry = superblock.geometry
        start, length = geometry.index_offset, geometry.num_index_pages * PAGE_BYTES
        is_truncated = self.file.size < geometry.file_bytes
        if is_truncated and length > min(self.file.size, self.file.allocated_bytes):
            raise SlabUnreadable(
                f"{self.file.path} has {self.file.size} bytes and should have "
                f"{geometry.file_bytes}: it was truncated; remove it, or start an engine, which "
                "repairs it"
            )
        if not is_truncated and not has_index(self.file, geometry):
            raise SlabUnreadable(
                f"{self.file.path} has a hole where its index should be, for {geometry.num_slots} "
                "slots: it was damaged, or no engine wrote it; remove it, or start an engine, "
                "which repairs it"
            )
        raw = self.file.read(start, length)
        table = IndexTable(geometry, superblock.uuid, raw)
        for _ in range(_NUM_TRIES):
            if not table.damaged_pages or not self.is_held():
                break
            time.sleep(_PAUSE_S)
            patched = bytearray(raw)
            for page_no in table.damaged_pages:
                at = page_no * PAGE_BYTES
                patched[at : at + PAGE_BYTES] = self.file.read(start + at, PAGE_BYTES)
            raw = bytes(patched)
            table = IndexTable(geometry, superblock.uuid, raw)
        return table

    # --- the slots -----------------------------------------------------------------------------

    def headers_of(self, snapshot: Snapshot, slots: Sequence[int]) -> dict[int, FoundBlock]:
        """The intact headers of these slots, by slot. Raises `AioUnavailable`."""
        found = scan_headers(self.file, snapshot.geometry, snapshot.superblock.uuid, slots)
        return {block.slot: block for block in found}

    def read_into(self, offset: int, memory: memoryview) -> int:
        """Read whole pages into page-aligned memory. Returns the number of bytes read, which is
        smaller at the end of the file. Any thread."""
        return os.preadv(self.file.fd, [memory], offset)


def _superblock_in(page: bytes) -> Superblock | None:
    try:
        return Superblock.decode(page)
    except SlabFormatError:
        return None


# --- one slot ----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class CheckedSlot:
    """What `check_slot` found in a slot."""

    key: OffloadKey | None
    """The key of the block in the slot. None if there is no block, or its key cannot be read."""
    failure: SealFailure | None = None
    """Why no engine would accept the block. None if one would, or if there is no block."""


def check_slot(
    block: memoryview, superblock: Superblock, slot: int, expected: Entry | None
) -> CheckedSlot:
    """Check the bytes of a slot, as an engine would with `expected` in its index. Does no I/O.

    A block that is newer than `expected` was written after the index was read, and is checked only
    against its own seal. If `expected` is None, every block is checked like that, and the slot may
    be empty.
    """
    header, payload = block[:PAGE_BYTES], block[PAGE_BYTES:]
    try:
        sealed = seal.read(header[: seal.SEAL_BYTES])
        stamp = read_stamp(header)
    except seal.SealError as error:
        return CheckedSlot(None, error.failure if expected else None)
    except SlabFormatError:
        return CheckedSlot(None, SealFailure.HEADER if expected else None)
    is_here = stamp.uuid == superblock.uuid and stamp.slot == slot
    if expected is None:
        if not is_here or stamp.seq < superblock.cut:
            return CheckedSlot(None)
    elif not (is_here and stamp.seq > expected.seq):
        if namespace_tag(sealed.fingerprint) != expected.tag:
            return CheckedSlot(sealed.key, SealFailure.FINGERPRINT)
        if expected.key is not None and sealed.key != expected.key:
            return CheckedSlot(sealed.key, SealFailure.KEY)
    seal_bytes = header[: seal.SEAL_BYTES]
    failure = seal.check(seal_bytes, payload, sealed.key, sealed.fingerprint)
    if failure is None and expected is not None and not (is_here and stamp.seq >= expected.seq):
        failure = SealFailure.STALE
    return CheckedSlot(sealed.key, failure)
