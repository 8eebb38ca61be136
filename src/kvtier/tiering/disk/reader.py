"""A slab seen from outside: by whoever has not opened it for an engine, while one may be at work.

Nothing is written, and no lock is kept. What is read may change at any moment: a page that is
being written is read again, and a slot that does not fit the index may have been written since.
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
from kvtier.tiering.disk.file import NotAFile, SlabFile
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
from kvtier.tiering.disk.scan import FoundBlock, scan_headers
from kvtier.tiering.disk.superblocks import has_index, read_holder
from kvtier.tiering.io.page import PAGE_BYTES, is_intact

__all__ = ["CheckedSlot", "Entry", "SlabReader", "SlabUnreadable", "Snapshot", "check_slot"]

_NUM_TRIES = 8
_PAUSE_S = 0.02
"""A page that is being written is whole again by then."""
_VERSION = struct.Struct("<8xH")


class SlabUnreadable(Exception):
    """There is no slab to be read; says what there is, and the remedy."""


@dataclass(frozen=True, slots=True)
class Entry:
    """What the index says of a slot."""

    seq: int
    tag: int
    """The start of the namespace, as `namespace_tag` makes it."""
    key: OffloadKey | None
    """None: it is too long for the index, and stands in the slot's header alone."""


class Snapshot:
    """The superblock and the index, as they were in the file at about the same time."""

    def __init__(self, superblock: Superblock, table: IndexTable) -> None:
        self.superblock = superblock
        self.geometry: Geometry = superblock.geometry
        self.damaged_pages: Sequence[int] = table.damaged_pages
        """Of the index. Their slots count as empty here."""
        self._unknown = table.damaged_slots()
        self.entries: NDArray[np.void] = table.entries()
        """One for each slot. Fields: seq, used, tag, key_len, state, key."""

    def live_slots(self) -> NDArray[np.int64]:
        """The slots whose blocks an engine would find, in order."""
        return np.flatnonzero(is_alive(self.entries, self.superblock.cut))

    def num_dead(self) -> int:
        """Blocks that are in the index still, and were cleared."""
        return int(np.count_nonzero(self.entries["state"] != EMPTY)) - len(self.live_slots())

    def unknown_slots(self) -> list[int]:
        """The slots whose page of the index is damaged: an engine asks the slots themselves."""
        return self._unknown

    def entry(self, slot: int) -> Entry | None:
        """None: the slot holds nothing that an engine would look for."""
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
    """An open slab of which nothing is changed. A context manager; one thread, but for
    `read_into`."""

    def __init__(self, path: Path) -> None:
        """Raises `SlabUnreadable` or `OSError`."""
        try:
            self.file = SlabFile(path, os.O_RDONLY)
        except NotAFile as refused:
            raise SlabUnreadable(f"{refused}: give the path of a slab file") from None
        try:
            self.file.use_o_direct()  # what is read once would only drive others out of the cache
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

    # --- the whole -----------------------------------------------------------------------------

    def read_superblock(self) -> Superblock:
        """The superblock as it is now. Raises `SlabUnreadable`."""
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
        """Of the file's format."""
        page = next(page for page in self._superblock_pages() if is_slab_page(page))
        version: int = _VERSION.unpack_from(page)[0]
        return version

    def num_intact_superblocks(self) -> int:
        """Of two. One is enough; both may be being written just now."""
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
            return f"{path} is empty, and no slab: give another path, or remove that file"
        for page in pages:
            if is_slab_page(page) and is_intact(page):
                try:
                    Superblock.decode(page)
                except SlabFormatError as error:
                    return f"{path} cannot be read: {error}. Use the kvtier that wrote it"
        if any(map(is_slab_page, pages)):
            return (
                f"both copies of the superblock of {path} are damaged: its blocks are lost, and "
                "the next engine that opens it makes it anew; or remove the file"
            )
        return f"{path} is not a slab: give the path of a slab file"

    def holder(self) -> Holder | None:
        """Who opened the slab last."""
        return read_holder(self.file)

    def is_held(self) -> bool:
        """Whether someone has it open for writing, on this machine and in any container."""
        return self.file.is_locked()

    def clear_request(self) -> bytes | None:
        """The last request to clear that was written into the file, obeyed or not."""
        try:
            return decode_clear_request(self.file.read(CONTROL_OFFSET, PAGE_BYTES))
        except SlabFormatError:
            return None

    # --- the index -----------------------------------------------------------------------------

    def snapshot(self) -> Snapshot:
        """Read the index. An engine at work writes it about every tenth of a second."""
        for _ in range(_NUM_TRIES):
            before = self.read_superblock()
            table = self._read_table(before)
            after = self.read_superblock()
            if (after.uuid, after.geometry) == (before.uuid, before.geometry):
                snapshot = Snapshot(after, table)
                table.close()
                return snapshot
        raise SlabUnreadable(
            f"{self.file.path} is being made anew again and again: wait until an engine has it"
        )

    def _read_table(self, superblock: Superblock) -> IndexTable:
        geometry = superblock.geometry
        start, length = geometry.index_offset, geometry.num_index_pages * PAGE_BYTES
        is_cut_off = self.file.size < geometry.file_bytes
        if is_cut_off and length > min(self.file.size, self.file.allocated_bytes):
            raise SlabUnreadable(
                f"{self.file.path} has {self.file.size} bytes and should have "
                f"{geometry.file_bytes}: it was cut off; remove it, or let an engine mend it"
            )
        if not is_cut_off and not has_index(self.file, geometry):
            raise SlabUnreadable(
                f"{self.file.path} has a hole where its index should be, for {geometry.num_slots} "
                "slots: it was damaged, or is no engine's; remove it, or let an engine mend it"
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
        """By slot, what its header says, where it is intact. Raises `AioUnavailable`."""
        found = scan_headers(self.file, snapshot.geometry, snapshot.superblock.uuid, slots)
        return {block.slot: block for block in found}

    def read_into(self, offset: int, memory: memoryview) -> int:
        """Read whole pages into page-aligned memory. Returns how many bytes there were. Any
        thread."""
        return os.preadv(self.file.fd, [memory], offset)


def _superblock_in(page: bytes) -> Superblock | None:
    try:
        return Superblock.decode(page)
    except SlabFormatError:
        return None


# --- one slot ----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class CheckedSlot:
    """What is in a slot."""

    key: OffloadKey | None
    """Of the block that is there; None: there is none, or it cannot be said which."""
    failure: SealFailure | None = None
    """Why no engine would accept it."""


def check_slot(
    block: memoryview, superblock: Superblock, slot: int, expected: Entry | None
) -> CheckedSlot:
    """Judge the bytes of a slot as an engine would that has read `expected` in the index. Pure.

    A block that was written after the index was read is judged for itself: its own seal says what
    it should be. So is every block if nothing is known (None); then a slot may also be empty.
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
