"""The file of a slab: synchronous reads and writes, locks, space, and the pages before the slots.

A slab is the one file of a disk tier. It is divided into equal slots, one for each block.

O_DIRECT needs page-aligned memory, so small reads and writes go through a temporary mapping.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import mmap
import os
import stat
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from weakref import WeakSet

from kvtier.tiering.disk.layout import (
    CONTROL_OFFSET,
    HOLDER_OFFSET,
    SLOTS_OFFSET,
    SUPERBLOCK_OFFSETS,
    Geometry,
    Holder,
    SlabFormatError,
    SlabVersionError,
    Superblock,
    decode_clear_request,
    decode_note,
)
from kvtier.tiering.io.page import PAGE_BYTES, set_o_direct

__all__ = [
    "NotAFile",
    "SlabFile",
    "has_index",
    "lock_within",
    "read_clear_request",
    "read_holder",
    "read_note",
    "read_superblock",
    "repair_copies",
    "slots_in_file",
    "within_file",
    "write_superblock",
]

logger = logging.getLogger(__name__)

_MODE = 0o600
_LONGEST_IO = 4 << 20
_LOCK_PAUSE_S = 0.02

_open_files: WeakSet[SlabFile] = WeakSet()


class NotAFile(Exception):
    """The path names something that is not a regular file."""


class SlabFile:
    """An open slab file. Any thread may call any method; calls may wait for the disk."""

    def __init__(self, path: Path, flags: int) -> None:
        """Open the file. `flags`: as for `os.open`. Raises `NotAFile` or `OSError`."""
        self.path = path
        # O_NONBLOCK, so that opening a pipe by mistake does not wait for its other end.
        self.fd = os.open(path, flags | os.O_CLOEXEC | os.O_NONBLOCK, _MODE)
        if not stat.S_ISREG(os.fstat(self.fd).st_mode):
            os.close(self.fd)
            raise NotAFile(f"{path} is not a regular file")
        self.is_direct = False
        _open_files.add(self)

    def use_o_direct(self) -> bool:
        """Bypass the page cache from now on. Returns False if the file system does not support it.
        The file must be at least one page long."""
        self.is_direct = set_o_direct(self.fd)
        return self.is_direct

    # --- bytes ---------------------------------------------------------------------------------

    def read(self, offset: int, length: int) -> bytes:
        """Read `length` bytes, or fewer at the end of the file. Both arguments are multiples of
        `PAGE_BYTES`."""
        parts = []
        with mmap.mmap(-1, min(max(length, PAGE_BYTES), _LONGEST_IO)) as memory:
            done = 0
            while done < length:
                wanted = min(length - done, _LONGEST_IO)
                with memoryview(memory) as view, view[:wanted] as target:
                    count = os.preadv(self.fd, [target], offset + done)
                parts.append(memory[:count])
                done += count
                if count < wanted:
                    break
        return b"".join(parts)

    def write(self, offset: int, data: bytes) -> None:
        """Write `data`, which is whole pages, at `offset`."""
        with mmap.mmap(-1, max(len(data), PAGE_BYTES)) as memory:
            memory[: len(data)] = data
            with memoryview(memory) as view, view[: len(data)] as source:
                self.write_aligned(offset, source)

    def write_aligned(self, offset: int, data: memoryview) -> None:
        """Like `write`, for page-aligned memory, which needs no copy."""
        done = 0
        while done < len(data):
            with data[done:] as rest:
                done += os.pwritev(self.fd, [rest], offset + done)

    def sync(self) -> None:
        os.fdatasync(self.fd)

    def is_at_its_path(self) -> bool:
        """True if the path still names this file, or if that cannot be determined. False if it
        names another file or none."""
        try:
            return os.path.samestat(os.stat(self.path), os.fstat(self.fd))
        except (FileNotFoundError, NotADirectoryError):
            return False
        except OSError:
            return True

    def is_locked(self) -> bool:
        """True if another process on this machine, in any container, holds the exclusive lock.

        Takes a shared lock and releases it at once, because nothing else shows locks held in other
        containers. The lock is shared because NFS refuses an exclusive lock on a file that is open
        for reading only.
        """
        try:
            fcntl.flock(self.fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        fcntl.flock(self.fd, fcntl.LOCK_UN)
        return False

    # --- space ---------------------------------------------------------------------------------

    @property
    def size(self) -> int:
        return os.fstat(self.fd).st_size

    @property
    def allocated_bytes(self) -> int:
        """Bytes on the disk, as `du` counts them."""
        return os.fstat(self.fd).st_blocks * 512

    def data_bytes(self, start: int, end: int) -> int:
        """Number of bytes from `start` to `end` that are not holes. If the file system cannot tell,
        the size of the whole range."""
        total = 0
        while start < end:
            try:
                data = os.lseek(self.fd, start, os.SEEK_DATA)
                hole = os.lseek(self.fd, data, os.SEEK_HOLE)
            except OSError as error:
                if error.errno == errno.ENXIO:  # a hole up to the end of the file
                    return total
                if error.errno in (errno.EINVAL, errno.EOPNOTSUPP):
                    return total + end - start
                raise
            total += max(0, min(hole, end) - data)
            start = hole
        return total

    def allocate(self, length: int) -> None:
        """Allocate disk space for every byte up to `length`. If that fails, restores the file's
        former size and raises `OSError`."""
        before = self.size
        try:
            os.posix_fallocate(self.fd, 0, length)
        except OSError:
            with suppress(OSError):
                os.ftruncate(self.fd, before)
            raise

    def truncate(self, length: int) -> None:
        os.ftruncate(self.fd, length)

    @property
    def free_bytes(self) -> int:
        """Bytes left on the file system for this user."""
        answer = os.fstatvfs(self.fd)
        return answer.f_bavail * answer.f_frsize

    def close(self) -> None:
        """Close the file, which releases its lock. Further calls do nothing."""
        if self.fd >= 0:
            fd, self.fd = self.fd, -1
            os.close(fd)


def _close_in_child() -> None:
    """Runs in a forked child. Closes its copies of the files: otherwise the locks would be held
    until the child ends, even after the parent has ended."""
    for file in list(_open_files):
        file.close()


os.register_at_fork(after_in_child=_close_in_child)


def lock_within(fd: int, patience_s: float) -> bool:
    """Take the exclusive lock on an open file, waiting up to `patience_s` seconds. Returns False if
    another process holds the lock for that long. Closing the file or ending the process releases
    it."""
    deadline = time.monotonic() + patience_s
    while True:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > deadline:
                return False
            time.sleep(_LOCK_PAUSE_S)
        else:
            return True


# --- superblock --------------------------------------------------------------------------------


def read_superblock(file: SlabFile) -> Superblock:
    """The superblock: the newer of its intact copies. Raises `SlabVersionError` if either copy has
    the format of another version of kvtier, and `SlabFormatError` or `OSError` if neither copy is
    intact."""
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


def write_superblock(file: SlabFile, superblock: Superblock) -> None:
    """Write one copy after the other, so that one of them is intact at any moment."""
    page = superblock.encode()
    for offset in SUPERBLOCK_OFFSETS:
        file.write(offset, page)


def repair_copies(file: SlabFile, superblock: Superblock) -> None:
    """Make both copies equal to `superblock`, as far as their sectors can be written.

    Called before the superblock changes: with only one intact copy, a crash during the change could
    leave none."""
    page = superblock.encode()
    for offset in SUPERBLOCK_OFFSETS:
        found = b""
        with suppress(OSError):
            found = file.read(offset, PAGE_BYTES)
        if found != page:
            with suppress(OSError):
                file.write(offset, page)


def slots_in_file(file: SlabFile, superblock: Superblock) -> int:
    """Number of the slab's slots that are in the file, which may have been truncated.

    In a truncated file only allocated bytes count. A sparse file may have any length, and the
    engine needs memory for every slot that is counted.
    """
    geometry = superblock.geometry
    if file.size >= geometry.file_bytes:
        return geometry.num_slots
    length = min(file.size, file.allocated_bytes)
    return min(geometry.num_slots, max(0, length - SLOTS_OFFSET) // geometry.slot_bytes)


def within_file(file: SlabFile, superblock: Superblock) -> Superblock:
    """The superblock, without the slots that are missing from a truncated file."""
    num_slots = slots_in_file(file, superblock)
    if num_slots == superblock.geometry.num_slots:
        return superblock
    logger.warning(
        "%s was truncated: %d of %d slots are left. Give max_bytes to restore its size",
        file.path,
        num_slots,
        superblock.geometry.num_slots,
    )
    return replace(superblock, geometry=replace(superblock.geometry, num_slots=num_slots))


def has_index(file: SlabFile, geometry: Geometry) -> bool:
    """True if at least half of the index is data: neither a hole nor cut off by truncation.

    Callers ask before they read the index, which takes memory for every slot: the superblock of a
    sparse file may claim any number of slots.
    """
    length = geometry.file_bytes - geometry.index_offset
    return file.data_bytes(geometry.index_offset, geometry.file_bytes) * 2 >= length


# --- holder, note, clear request ---------------------------------------------------------------


def read_holder(file: SlabFile) -> Holder | None:
    """The process that opened the slab last; it may still have it open. None if the record is
    missing or damaged."""
    try:
        return Holder.decode(file.read(HOLDER_OFFSET, PAGE_BYTES))
    except SlabFormatError:
        return None


def read_note(file: SlabFile) -> bytes:
    """The note that the last holder left; b"" if there is none."""
    try:
        return decode_note(file.read(HOLDER_OFFSET, PAGE_BYTES))
    except OSError:
        return b""


def read_clear_request(file: SlabFile) -> bytes | None:
    """Id of the last request to clear the slab, whether it was carried out or not. None if there
    is no request, or it cannot be read."""
    try:
        return decode_clear_request(file.read(CONTROL_OFFSET, PAGE_BYTES))
    except (SlabFormatError, OSError):
        return None
