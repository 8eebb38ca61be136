"""A slab file as a whole: made, opened, locked, resized, and closed."""

from __future__ import annotations

import errno
import glob
import logging
import os
import socket
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from kvtier.tiering.base import TierRefused
from kvtier.tiering.disk.file import NotAFile, SlabFile, lock_within
from kvtier.tiering.disk.index import IndexTable
from kvtier.tiering.disk.layout import (
    CONTROL_OFFSET,
    HOLDER_OFFSET,
    PAGE_BYTES,
    SLOTS_OFFSET,
    SUPERBLOCK_OFFSETS,
    Geometry,
    Holder,
    SlabFormatError,
    SlabVersionError,
    Superblock,
    decode_clear_request,
    is_slab_page,
)
from kvtier.tiering.disk.recovery import read_index, resize, write_index

__all__ = [
    "Slab",
    "SlabRefused",
    "open_slab",
    "read_clear_request",
    "read_holder",
    "read_superblock",
]

logger = logging.getLogger(__name__)

_LOCK_PATIENCE_S = 1.0
_MAKING_PATIENCE_S = 60.0
_CLOCK_STEP = 2**32
"""By how much the clock jumps when a slab is opened: more than can pass before it is saved."""


class SlabRefused(TierRefused):
    """The slab cannot be used; says why, and the remedy."""


class Slab:
    """An open slab, locked for one engine. Made by `open_slab`.

    `superblock` changes through `save_superblock` alone, which the index keeper calls, and whoever
    opens and closes the slab.
    """

    def __init__(self, file: SlabFile, superblock: Superblock, index: IndexTable) -> None:
        self.file = file
        self.superblock = superblock
        self.index = index

    @property
    def geometry(self) -> Geometry:
        return self.superblock.geometry

    @property
    def first_seq(self) -> int:
        """No block was ever stored or used with this number, or a larger one, when the slab was
        opened. Numbers grow from here; `keep_clock` must be told."""
        return self.superblock.clock

    def keep_clock(self, seq: int) -> None:
        """Let the next engine begin beyond `seq`, even if this one is killed."""
        if seq > self.superblock.clock + _CLOCK_STEP // 2:
            self.save_superblock(clock=seq)

    def save_superblock(self, **changes: Any) -> None:
        """Change the superblock, also in the file."""
        changed = replace(self.superblock, **changes, revision=self.superblock.revision + 1)
        _write_superblock(self.file, changed)
        self.superblock = changed

    def close(self) -> None:
        """Let others have it. What is not in the file yet is lost."""
        self.index.close()
        self.file.close()


def open_slab(
    path: Path,
    payload_bytes: int,
    max_bytes: int | None,
    engine_id: str,
    use_o_direct: bool | None,
    tag: int | None = None,
) -> Slab:
    """Open the slab at `path` for blocks of so many bytes, or make it. Waits for the disk.

    `max_bytes`: what it may take in all; None: as much as it has. `use_o_direct`: None: if it can
    be had. `tag`: the namespace whose blocks are kept first. Whatever can be kept of an existing
    slab is kept. Raises `SlabRefused`, and then nothing has changed but what could not be used
    anyway.
    """
    path = path.resolve()  # a link to a file that is not there yet says where it is to be
    try:
        if not path.exists() or _abandoned(path):
            with _alone_in(path.parent):
                for leftover in _abandoned(path):
                    leftover.unlink(missing_ok=True)
                if not path.exists():
                    _make(path, max_bytes, payload_bytes)
        file = SlabFile(path, os.O_RDWR)
    except NotAFile:
        raise SlabRefused(
            f"{path} is not a regular file: give the path of a file, which is made if need be"
        ) from None
    except OSError as error:
        raise _refusal(path, error) from error
    try:
        return _open(file, payload_bytes, max_bytes, engine_id, use_o_direct, tag)
    except OSError as error:
        file.close()
        raise _refusal(path, error) from error
    except BaseException:
        file.close()
        raise


def _refusal(path: Path, error: OSError) -> SlabRefused:
    remedies = {
        errno.EACCES: f"let the user of this engine (uid {os.geteuid()}) read and write it, and "
        "make files beside it",
        errno.EPERM: "see whether the file is immutable (lsattr), or forbidden by the container",
        errno.EROFS: "mount its file system for writing, or give another path",
        errno.EISDIR: "give the path of a file",
        errno.EMFILE: "let this process have more files open (ulimit -n)",
        errno.ENFILE: "let the system have more files open (sysctl fs.file-max)",
        errno.EIO: "look at the disk (dmesg)",
    }
    remedy = remedies.get(error.errno or 0, "mend that, or give another path")
    return SlabRefused(f"{path}: {error.strerror or error}: {remedy}")


def _open(
    file: SlabFile,
    payload_bytes: int,
    max_bytes: int | None,
    engine_id: str,
    use_o_direct: bool | None,
    tag: int | None,
) -> Slab:
    _lock(file)
    if not file.path.exists() or not file.path.samefile(f"/proc/self/fd/{file.fd}"):
        raise SlabRefused(f"{file.path} was replaced while it was opened: start the engine again")
    stored = _superblock_or_new(file, payload_bytes, max_bytes)
    holder = Holder(engine_id, os.getpid(), socket.gethostname(), time.time_ns())
    file.write(HOLDER_OFFSET, holder.encode())
    superblock = _within_file(file, stored)
    wanted = _make_room(file, stored, superblock, payload_bytes, max_bytes)
    os.fchmod(file.fd, 0o600)
    if superblock.geometry.payload_bytes != payload_bytes:
        logger.warning(
            "%s holds blocks of %d bytes, and this engine's have %d: it is emptied",
            file.path,
            superblock.geometry.payload_bytes,
            payload_bytes,
        )
        superblock = _format(file, wanted)
    if use_o_direct is not False:
        _use_o_direct(file, is_required=use_o_direct is True)
    index = read_index(file, superblock)
    if wanted != superblock.geometry:
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
    _write_superblock(file, superblock)
    if file.size != wanted.file_bytes:
        file.truncate(wanted.file_bytes)
    return Slab(file, superblock, index)


def _make_room(
    file: SlabFile,
    stored: Superblock,
    readable: Superblock,
    payload_bytes: int,
    max_bytes: int | None,
) -> Geometry:
    """What the slab is to be like from now on; there is room for it. `stored`: what its superblock
    says; `readable`: what is left of that in the file."""
    has_our_blocks = stored.geometry.payload_bytes == payload_bytes
    if max_bytes is None and has_our_blocks:
        wanted = readable.geometry
    elif max_bytes == stored.max_bytes and has_our_blocks:
        wanted = stored.geometry
        if wanted.file_bytes > max_bytes:
            raise SlabRefused(f"{file.path}: its superblock makes no sense: remove the file")
    else:
        size = max_bytes or readable.geometry.needed_bytes
        return _allocate_within(file, size, payload_bytes, file.path)
    # All of it, once more: someone may have cut the end off, or made a hole into the file.
    _allocate(file, wanted, file.path)
    return wanted


def _use_o_direct(file: SlabFile, is_required: bool) -> None:
    if file.use_o_direct():
        return
    if is_required:
        raise SlabRefused(
            f"use_o_direct is true, and the file system of {file.path} does not allow O_DIRECT: "
            'leave it at "auto", or put the file on a disk of its own'
        )
    logger.warning(
        "%s: its file system does not allow O_DIRECT; blocks pass through the page cache, which "
        "costs memory and processor time",
        file.path,
    )


def _format(file: SlabFile, geometry: Geometry) -> Superblock:
    """Let the file, whose room is allocated, be an empty slab."""
    superblock = Superblock(uuid.uuid4().bytes, geometry, created_ns=time.time_ns())
    write_index(file, IndexTable(geometry, superblock.uuid))
    file.write(CONTROL_OFFSET, bytes(PAGE_BYTES))
    _write_superblock(file, superblock)
    return superblock


def _lock(file: SlabFile) -> None:
    """Wait a moment if someone else has it: an engine that is just ending, or `kvtier store`."""
    if not lock_within(file.fd, _LOCK_PATIENCE_S):
        raise SlabRefused(_in_use(file))


def _superblock_or_new(file: SlabFile, payload_bytes: int, max_bytes: int | None) -> Superblock:
    """The superblock, or one for a slab whose own cannot be read any more."""
    try:
        superblock = read_superblock(file)
        _mend_copies(file, superblock)
        if not _slots_in_file(file, superblock):
            raise SlabFormatError("the file has been cut off")
        return superblock
    except SlabVersionError as error:
        raise SlabRefused(
            f"{file.path}: {error}: use that kvtier, give another path, or remove the file"
        ) from None
    except SlabFormatError as error:
        pages = [file.read(offset, PAGE_BYTES) for offset in SUPERBLOCK_OFFSETS]
        if not any(is_slab_page(page) for page in pages):
            raise SlabRefused(
                f"{file.path} is not a slab: give another path, or remove that file"
            ) from None
        logger.warning("%s: %s; it is made anew", file.path, error)
        size = file.size if max_bytes is None else max_bytes
        return _format(file, _allocate_within(file, size, payload_bytes, file.path))


def _mend_copies(file: SlabFile, superblock: Superblock) -> None:
    """Let all copies be this one, before any of them is written anew: else the last whole one might
    be torn. A copy that cannot be read or written is left as it is."""
    page = superblock.encode()
    for offset in SUPERBLOCK_OFFSETS:
        with suppress(OSError):
            if file.read(offset, PAGE_BYTES) != page:
                file.write(offset, page)


def _slots_in_file(file: SlabFile, superblock: Superblock) -> int:
    """How many slots there are, in a file that may have been cut off."""
    geometry = superblock.geometry
    if file.size >= geometry.file_bytes:
        return geometry.num_slots
    return min(geometry.num_slots, max(0, file.size - SLOTS_OFFSET) // geometry.slot_bytes)


def _within_file(file: SlabFile, superblock: Superblock) -> Superblock:
    """The superblock of a file that may have been cut off: what lies behind its end is gone."""
    num_slots = _slots_in_file(file, superblock)
    if num_slots == superblock.geometry.num_slots:
        return superblock
    logger.warning(
        "%s has been cut off: %d of %d slots are left. It gets back the size that max_bytes says",
        file.path,
        num_slots,
        superblock.geometry.num_slots,
    )
    return replace(superblock, geometry=replace(superblock.geometry, num_slots=num_slots))


def read_superblock(file: SlabFile) -> Superblock:
    """The newer of the intact copies. Raises `SlabFormatError`, or `OSError`, if there is none."""
    found = []
    problem: Exception = SlabFormatError("there is no superblock")
    for offset in SUPERBLOCK_OFFSETS:
        try:
            found.append(Superblock.decode(file.read(offset, PAGE_BYTES)))
        except (SlabFormatError, OSError) as error:
            if not isinstance(problem, SlabVersionError):
                problem = error
    if not found or isinstance(problem, SlabVersionError):
        raise problem
    return max(found, key=lambda superblock: superblock.revision)


def _write_superblock(file: SlabFile, superblock: Superblock) -> None:
    """One copy after the other: whenever this is cut short, one of them is whole."""
    page = superblock.encode()
    for offset in SUPERBLOCK_OFFSETS:
        file.write(offset, page)


def _geometry(max_bytes: int, payload_bytes: int) -> Geometry:
    geometry = Geometry.within(max_bytes, payload_bytes)
    if geometry.num_slots < 1:
        raise SlabRefused(
            f"max_bytes = {max_bytes}: that is too little for one block of {payload_bytes} bytes; "
            f"give {Geometry(payload_bytes, 1).needed_bytes} or more"
        )
    return geometry


def _allocate_within(file: SlabFile, max_bytes: int, payload_bytes: int, path: Path) -> Geometry:
    """Make room for the most slots that fit. What the file system needs to remember where the file
    lies is known only afterwards: where free space is in many small parts, that is more."""
    extent_bytes = 0
    while True:
        geometry = _geometry(max_bytes - extent_bytes, payload_bytes)
        _allocate(file, geometry, path)
        found = max(0, file.allocated_bytes - file.size)
        if geometry.needed_with(found) <= max_bytes or found <= extent_bytes:
            return geometry
        extent_bytes = found


def _allocate(file: SlabFile, geometry: Geometry, path: Path) -> None:
    """`path`: what to call the file."""
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


# --- a new slab --------------------------------------------------------------------------------


@contextmanager
def _alone_in(directory: Path) -> Iterator[None]:
    """Let no other engine make a slab in this directory meanwhile."""
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        if not lock_within(fd, _MAKING_PATIENCE_S):
            raise SlabRefused(
                f"another process has locked the directory {directory} for more than "
                f"{_MAKING_PATIENCE_S:.0f} s: see who does (lsof), or give another path"
            )
        yield
    finally:
        os.close(fd)


def _make(path: Path, max_bytes: int | None, payload_bytes: int) -> None:
    """Make an empty slab under a name of its own, and give it `path` when it is whole."""
    if max_bytes is None:
        raise SlabRefused(f"there is no slab at {path} yet: give max_bytes, and it is made")
    temporary = path.with_name(f".{path.name}.{os.getpid()}.new")
    file = SlabFile(temporary, os.O_RDWR | os.O_CREAT | os.O_EXCL)
    try:
        geometry = _allocate_within(file, max_bytes, payload_bytes, path)
        file.truncate(geometry.file_bytes)
        _format(file, geometry)
        file.sync()
        os.rename(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise
    finally:
        file.close()


def _abandoned(path: Path) -> list[Path]:
    """What engines left that were killed while they made this slab, or are just making."""
    return list(path.parent.glob(f".{glob.escape(path.name)}.*.new"))


# --- who has it --------------------------------------------------------------------------------


def read_holder(file: SlabFile) -> Holder | None:
    """Who opened the slab last, and may have it open still."""
    try:
        return Holder.decode(file.read(HOLDER_OFFSET, PAGE_BYTES))
    except SlabFormatError:
        return None


def read_clear_request(file: SlabFile) -> bytes | None:
    """The last request to forget everything, obeyed or not."""
    try:
        return decode_clear_request(file.read(CONTROL_OFFSET, PAGE_BYTES))
    except (SlabFormatError, OSError):
        return None


def _in_use(file: SlabFile) -> str:
    holder = read_holder(file)
    who = "another process"
    if holder is not None:
        is_here = (holder.pid, holder.host) == (os.getpid(), socket.gethostname())
        place = "this very process" if is_here else f"process {holder.pid} on {holder.host}"
        since = datetime.fromtimestamp(holder.since_ns / 1e9, UTC)
        who = f'the engine "{holder.engine_id}" ({place}, since {since:%Y-%m-%d %H:%M:%S} UTC)'
    return f"{file.path} is in use by {who}: give each engine, and each of its tiers, a path of its own"
