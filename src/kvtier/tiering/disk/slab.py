"""Opens a slab, the file of a disk tier: locks it, makes or repairs it, gives it its size, and
loads its index.

Begin reading at `open_slab`. `recovery` reads and repairs the index.
"""

from __future__ import annotations

import errno
import glob
import logging
import os
import time
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from kvtier.config import NamespaceDescription
from kvtier.tiering.disk.file import (
    NotAFile,
    SlabFile,
    has_index,
    lock_within,
    read_clear_request,
    read_note,
    read_superblock,
    repair_copies,
    slots_in_file,
    within_file,
    write_superblock,
)
from kvtier.tiering.disk.index import IndexTable, is_alive, namespace_tag, write_index
from kvtier.tiering.disk.layout import (
    HOLDER_OFFSET,
    SUPERBLOCK_OFFSETS,
    Geometry,
    Holder,
    SlabFormatError,
    SlabVersionError,
    Superblock,
    is_slab_page,
)
from kvtier.tiering.disk.ownership import (
    SlabRefused,
    foreign_refusal,
    lock_slab,
    refusal_for,
    this_process,
)
from kvtier.tiering.disk.recovery import read_index, resize
from kvtier.tiering.io.page import PAGE_BYTES
from kvtier.tiering.namespaces import difference_text

__all__ = ["Slab", "geometry_for", "open_slab"]

logger = logging.getLogger(__name__)

_CREATION_PATIENCE_S = 60.0
_CLOCK_STEP = 2**32
"""Sequence numbers skipped when a slab is opened. An engine uses fewer than this before it saves
its next number in the superblock's `clock`."""


class Slab:
    """An open slab, locked for one engine. Made by `open_slab`.

    `superblock` changes only through `save_superblock`. The index flusher calls it, and
    `kvtier store clear` when no engine has the slab open.
    """

    def __init__(
        self,
        file: SlabFile,
        superblock: Superblock,
        index: IndexTable,
        holder: Holder,
        note: bytes,
        found: Sequence[NamespaceDescription],
    ) -> None:
        self.file = file
        self.superblock = superblock
        self.index = index
        self.note = note
        """Bytes that an earlier engine left for the next one (`SecondaryTierManager.keep_note`).
        Empty if it left none."""
        self.found_descriptions = {each.namespace: each for each in found}
        """What earlier engines wrote about their namespaces, by name. Some of them may have no
        block any more."""
        self._holder = holder

    @property
    def geometry(self) -> Geometry:
        return self.superblock.geometry

    @property
    def first_seq(self) -> int:
        """The first sequence number for this engine, larger than all numbers of earlier engines.
        Read it before the first `keep_clock`, which may raise it."""
        return self.superblock.clock

    def keep_clock(self, seq: int) -> None:
        """Save `seq`, the next sequence number, as the clock if it is more than half of
        `_CLOCK_STEP` beyond the saved one. So the next engine begins beyond all numbers of this
        one, even if this one is killed."""
        if seq > self.superblock.clock + _CLOCK_STEP // 2:
            self.save_superblock(clock=seq)

    def save_superblock(self, **changes: Any) -> None:
        """Change fields of the superblock: first in the file, then in memory."""
        changed = replace(self.superblock, **changes, revision=self.superblock.revision + 1)
        write_superblock(self.file, changed)
        self.superblock = changed

    def describe(self, description: NamespaceDescription) -> tuple[NamespaceDescription, ...]:
        """The superblock's descriptions, with one that was added or replaced."""
        others = [
            each for each in self.superblock.descriptions if each.namespace != description.namespace
        ]
        return (description, *others)

    def save_note(self, note: bytes) -> None:
        """Write a note for the next engine."""
        self.file.write(HOLDER_OFFSET, self._holder.encode(note))

    def close(self) -> None:
        """Release the index, the file and its lock. Changes of the index that are not in the file
        are lost."""
        self.index.close()
        self.file.close()


# --- opening -----------------------------------------------------------------------------------


def open_slab(
    path: Path,
    payload_bytes: int,
    max_bytes: int | None,
    engine_id: str,
    use_o_direct: bool | None,
    description: NamespaceDescription | None = None,
    may_be_foreign: bool = False,
) -> Slab:
    """Open the slab at `path` for blocks of `payload_bytes`, or make it. Keeps every block of an
    existing slab that fits. Waits for the disk.

    `max_bytes`: limit on the file's disk usage; None: keep its size. `use_o_direct`: None: use it
    if the file system supports it. `description`: what the caller's namespace is made of, which is
    written into the file; the blocks of this namespace are kept first if the slab shrinks.
    `may_be_foreign`: accept a file that other users can write to, for callers that load no blocks.

    Raises `SlabRefused` or `AioUnavailable`. After `SlabRefused`, all blocks that this engine could
    use are still there.
    """
    path = path.resolve()  # a link may point to a file that does not exist yet
    try:
        _make_if_missing(path, max_bytes, payload_bytes)
        file = SlabFile(path, os.O_RDWR)
    except NotAFile:
        raise SlabRefused(
            f"{path} is not a regular file: give the path of a file; it is created if it is missing"
        ) from None
    except OSError as error:
        raise refusal_for(path, error) from error
    try:
        if not may_be_foreign and (refusal := foreign_refusal(file)) is not None:
            raise refusal
        return _open(file, payload_bytes, max_bytes, engine_id, use_o_direct, description)
    except OSError as error:
        file.close()
        raise refusal_for(path, error) from error
    except BaseException:
        file.close()
        raise


def _open(
    file: SlabFile,
    payload_bytes: int,
    max_bytes: int | None,
    engine_id: str,
    use_o_direct: bool | None,
    description: NamespaceDescription | None,
) -> Slab:
    lock_slab(file)
    if not file.is_at_its_path():
        raise SlabRefused(f"{file.path} was replaced while it was opened: start the engine again")
    if use_o_direct is not False:  # before the first change, because it may refuse the file
        _use_o_direct(file, is_required=use_o_direct is True)
    stored = _superblock_or_new(file, payload_bytes, max_bytes)
    holder = this_process(engine_id)
    note = read_note(file)
    file.write(HOLDER_OFFSET, holder.encode(note))
    superblock = within_file(file, stored)
    if superblock is not stored and max_bytes is None:
        superblock = replace(superblock, max_bytes=0)  # unknown: the file was truncated
    wanted = _allocate_wanted(file, stored, superblock, payload_bytes, max_bytes)
    os.fchmod(file.fd, 0o600)
    superblock = _format_if_unusable(file, stored, superblock, wanted, payload_bytes, description)
    index = read_index(file, superblock)
    if wanted != superblock.geometry:
        tag = None if description is None else _tag_of(description)
        index = resize(file, superblock, index, wanted, tag)
    clock = max(superblock.clock, superblock.cut) + _CLOCK_STEP
    superblock = replace(
        superblock,
        geometry=wanted,
        clock=clock,
        revision=superblock.revision + 1,
        max_bytes=superblock.max_bytes if max_bytes is None else max_bytes,
    )
    clear_request = read_clear_request(file)
    if clear_request not in (None, superblock.last_clear):
        superblock = replace(superblock, cut=clock, last_clear=clear_request)
    found = superblock.descriptions
    superblock = replace(superblock, descriptions=_current(found, index, superblock, description))
    write_superblock(file, superblock)
    if file.size != wanted.file_bytes:
        file.truncate(wanted.file_bytes)
    return Slab(file, superblock, index, holder, note, found)


def _current(
    found: Sequence[NamespaceDescription],
    index: IndexTable,
    superblock: Superblock,
    own: NamespaceDescription | None,
) -> tuple[NamespaceDescription, ...]:
    """The engine's own description, and those of other namespaces that still have blocks."""
    entries = index.entries()
    tags = set(entries["tag"][is_alive(entries, superblock.cut)].tolist())
    kept = [each for each in found if _tag_of(each) in tags]
    if own is None:
        return tuple(kept)
    return (own, *(each for each in kept if each.namespace != own.namespace))


def _tag_of(description: NamespaceDescription) -> int:
    return namespace_tag(bytes.fromhex(description.namespace))


def _superblock_or_new(file: SlabFile, payload_bytes: int, max_bytes: int | None) -> Superblock:
    """Read the superblock. If both copies are damaged, or the file was truncated before the end of
    its first slot, format the slab and return the new superblock."""
    superblock = None
    try:
        superblock = read_superblock(file)
        repair_copies(file, superblock)
        if not slots_in_file(file, superblock):
            raise SlabFormatError("the file was truncated")
        return superblock
    except SlabVersionError as error:
        raise SlabRefused(
            f"{file.path}: {error}: use that kvtier, give another path, or remove the file"
        ) from None
    except SlabFormatError as error:
        pages = [file.read(offset, PAGE_BYTES) for offset in SUPERBLOCK_OFFSETS]
        if not any(is_slab_page(page) for page in pages):
            raise SlabRefused(
                f"{file.path} is not a slab: give the path of one, or of a file that does not "
                "exist yet"
            ) from None
        logger.warning("%s: %s; the slab is formatted, and its blocks are lost", file.path, error)
        size = file.size if max_bytes is None else max_bytes
        geometry = _allocate_within(file, size, payload_bytes, file.path)
        return format_slab(file, geometry, superblock)


def _format_if_unusable(
    file: SlabFile,
    stored: Superblock,
    superblock: Superblock,
    wanted: Geometry,
    payload_bytes: int,
    description: NamespaceDescription | None,
) -> Superblock:
    """Empty a slab whose blocks have another size, or that is resized while most of its index is a
    hole. Returns the superblock to use from now on."""
    if superblock.geometry.payload_bytes != payload_bytes:
        logger.warning(
            "%s holds blocks of %d bytes, but this engine's have %d bytes: the slab is emptied%s",
            file.path,
            superblock.geometry.payload_bytes,
            payload_bytes,
            difference_text(description, stored.descriptions),
        )
        return format_slab(file, wanted, superblock)
    is_resized = wanted != stored.geometry and superblock is stored
    if is_resized and not has_index(file, stored.geometry):
        logger.warning(
            "%s: most of the index for %d slots is a hole in the file: the slab is emptied",
            file.path,
            superblock.geometry.num_slots,
        )
        return format_slab(file, wanted, superblock)
    return superblock


def _use_o_direct(file: SlabFile, is_required: bool) -> None:
    if file.use_o_direct():
        return
    if is_required:
        raise SlabRefused(
            f"use_o_direct is true, and the file system of {file.path} does not allow O_DIRECT: "
            'leave it at "auto", or put the file on a file system that does (ext4, XFS)'
        )
    logger.warning(
        "%s: its file system does not allow O_DIRECT; blocks pass through the page cache, which "
        "costs memory and processor time",
        file.path,
    )


# --- making ------------------------------------------------------------------------------------


def _make_if_missing(path: Path, max_bytes: int | None, payload_bytes: int) -> None:
    """Make an empty slab at `path` unless there is one. Raises `SlabRefused` or `OSError`."""
    if path.exists() and not _abandoned(path):
        return
    with _lock_directory(path.parent):
        for leftover in _abandoned(path):
            leftover.unlink(missing_ok=True)
        if not path.exists():
            _make(path, max_bytes, payload_bytes)


@contextmanager
def _lock_directory(directory: Path) -> Iterator[None]:
    """A context in which no other engine makes a slab in this directory."""
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        if not lock_within(fd, _CREATION_PATIENCE_S):
            raise SlabRefused(
                f"another process has locked the directory {directory} for more than "
                f"{_CREATION_PATIENCE_S:.0f} s: find out which one (lsof), or give another path"
            )
        yield
    finally:
        os.close(fd)


def _make(path: Path, max_bytes: int | None, payload_bytes: int) -> None:
    """Make an empty slab under a temporary name, and rename it to `path` when it is complete."""
    if max_bytes is None:
        raise SlabRefused(f"there is no slab at {path} yet: give max_bytes to create one")
    temporary = path.with_name(f".{path.name}.{os.getpid()}.new")
    file = SlabFile(temporary, os.O_RDWR | os.O_CREAT | os.O_EXCL)
    try:
        geometry = _allocate_within(file, max_bytes, payload_bytes, path)
        file.truncate(geometry.file_bytes)
        format_slab(file, geometry)
        file.sync()
        os.rename(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise
    finally:
        file.close()


def _abandoned(path: Path) -> list[Path]:
    """Temporary files for this slab. Inside `_lock_directory`, all of them were left by engines
    that were killed. Outside, an engine may be using one of them."""
    return list(path.parent.glob(f".{glob.escape(path.name)}.*.new"))


def format_slab(file: SlabFile, geometry: Geometry, former: Superblock | None = None) -> Superblock:
    """Write an empty index and a new superblock into a file whose space is allocated.

    `former`: the superblock to replace. The new one gets a higher revision: if one of its copies is
    lost in a crash, the old copy in that place must not count as the newer one.
    """
    superblock = Superblock(
        uuid.uuid4().bytes,
        geometry,
        revision=former.revision + 1 if former is not None else 0,
        created_ns=time.time_ns(),
        # An empty slab counts as cleared. The request itself stays in the file: if this process is
        # killed before the superblock is written, the next engine still has to clear the slab.
        last_clear=read_clear_request(file) or bytes(16),
    )
    write_index(file, IndexTable(geometry, superblock.uuid))
    write_superblock(file, superblock)
    return superblock


# --- space -------------------------------------------------------------------------------------


def geometry_for(max_bytes: int, payload_bytes: int) -> Geometry:
    """The geometry with the most slots that fit into `max_bytes`. Raises `SlabRefused` if not even
    one fits."""
    geometry = Geometry.within(max_bytes, payload_bytes)
    if geometry.num_slots < 1:
        raise SlabRefused(
            f"max_bytes = {max_bytes}: that is too little for one block of {payload_bytes} bytes; "
            f"give {Geometry(payload_bytes, 1).needed_bytes} or more"
        )
    return geometry


def _allocate_wanted(
    file: SlabFile,
    stored: Superblock,
    readable: Superblock,
    payload_bytes: int,
    max_bytes: int | None,
) -> Geometry:
    """Decide on the geometry of the slab and allocate its space. `stored`: the superblock in the
    file. `readable`: the same without slots that were cut off by truncation."""
    has_our_blocks = stored.geometry.payload_bytes == payload_bytes
    if max_bytes is None and has_our_blocks:
        wanted = readable.geometry
    elif max_bytes == stored.max_bytes and has_our_blocks:
        wanted = stored.geometry
        if wanted.file_bytes > max_bytes:
            raise SlabRefused(f"{file.path}: its superblock is inconsistent: remove the file")
    else:
        size = max_bytes or readable.geometry.needed_bytes
        return _allocate_within(file, size, payload_bytes, file.path)
    # Allocate again, because the file may have been truncated, or may have holes.
    _allocate(file, wanted, file.path)
    return wanted


def _allocate_within(file: SlabFile, max_bytes: int, payload_bytes: int, path: Path) -> Geometry:
    """Allocate as many slots as fit into `max_bytes`, together with the file system's records of
    the file's extents. The size of these records is known only after allocating, because it depends
    on how fragmented the free space is."""
    extent_bytes = 0
    while True:
        geometry = geometry_for(max_bytes - extent_bytes, payload_bytes)
        _allocate(file, geometry, path)
        found = max(0, file.allocated_bytes - file.size)
        if geometry.needed_with(found) <= max_bytes or found <= extent_bytes:
            return geometry
        extent_bytes = found


def _allocate(file: SlabFile, geometry: Geometry, path: Path) -> None:
    """Allocate the space of the slab. `path`: the file's name in error messages."""
    has = file.allocated_bytes
    try:
        file.allocate(geometry.file_bytes)
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise
        raise SlabRefused(
            f"{path} needs {geometry.file_bytes} bytes and has {has}; its file system has "
            f"{file.free_bytes} left ({os.strerror(error.errno)}): give a smaller max_bytes, or "
            "make room"
        ) from None
