"""A slab's file: every call on it but the asynchronous ones.

O_DIRECT wants memory aligned to pages, so whatever is small passes through memory of our own.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import stat
import time
from contextlib import suppress
from pathlib import Path
from weakref import WeakSet

from kvtier.tiering.io.page import PAGE_BYTES

__all__ = ["NotAFile", "SlabFile", "lock_within"]

_MODE = 0o600
_LONGEST_IO = 4 << 20
_LOCK_PAUSE_S = 0.02

_open_files: WeakSet[SlabFile] = WeakSet()


class NotAFile(Exception):
    """There is something under that name which is no regular file."""


class SlabFile:
    """An open file. Any thread; calls may wait for the disk."""

    def __init__(self, path: Path, flags: int) -> None:
        """`flags`: as for `os.open`."""
        self.path = path
        # O_NONBLOCK: opening a pipe by mistake must not wait for its other end.
        self.fd = os.open(path, flags | os.O_CLOEXEC | os.O_NONBLOCK, _MODE)
        if not stat.S_ISREG(os.fstat(self.fd).st_mode):
            os.close(self.fd)
            raise NotAFile(f"{path} is not a regular file")
        self.is_direct = False
        _open_files.add(self)

    def use_o_direct(self) -> bool:
        """Bypass the page cache from now on, if the file system and the disk below it allow it.
        The file must have a page to read. Answers whether it does."""
        flags = fcntl.fcntl(self.fd, fcntl.F_GETFL)
        try:
            fcntl.fcntl(self.fd, fcntl.F_SETFL, flags | os.O_DIRECT)
            self.read(0, PAGE_BYTES)
        except OSError as error:
            if error.errno in (errno.EINVAL, errno.EOPNOTSUPP):
                fcntl.fcntl(self.fd, fcntl.F_SETFL, flags)
                return False
            # It is the page that cannot be read, not the way to read it.
        self.is_direct = True
        return True

    # --- bytes ---------------------------------------------------------------------------------

    def read(self, offset: int, length: int) -> bytes:
        """`length` bytes, or fewer where the file ends. Both are whole pages."""
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
        """Write whole pages."""
        with mmap.mmap(-1, max(len(data), PAGE_BYTES)) as memory:
            memory[: len(data)] = data
            with memoryview(memory) as view, view[: len(data)] as source:
                self.write_aligned(offset, source)

    def write_aligned(self, offset: int, data: memoryview) -> None:
        """Write whole pages out of page-aligned memory."""
        done = 0
        while done < len(data):
            with data[done:] as rest:
                done += os.pwritev(self.fd, [rest], offset + done)

    def sync(self) -> None:
        os.fdatasync(self.fd)

    def is_at_its_path(self) -> bool:
        """Whether this very file is still found under its path. Also if that cannot be said."""
        try:
            return os.path.samestat(os.stat(self.path), os.fstat(self.fd))
        except (FileNotFoundError, NotADirectoryError):
            return False
        except OSError:
            return True

    def is_locked(self) -> bool:
        """Whether a process on this machine, in any container, has locked it for itself.

        Takes a shared lock and releases it at once: no other way to look at a lock works across
        containers. Shared, because NFS refuses an exclusive lock on a file open for reading.
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
        """What `du` says."""
        return os.fstat(self.fd).st_blocks * 512

    def data_bytes(self, start: int, end: int) -> int:
        """How many of these bytes were ever written. All of them, if the file system cannot say."""
        total = 0
        while start < end:
            try:
                data = os.lseek(self.fd, start, os.SEEK_DATA)
                hole = os.lseek(self.fd, data, os.SEEK_HOLE)
            except OSError as error:
                if error.errno == errno.ENXIO:  # nothing but a hole up to the end of the file
                    return total
                if error.errno in (errno.EINVAL, errno.EOPNOTSUPP):
                    return total + end - start
                raise
            total += max(0, min(hole, end) - data)
            start = hole
        return total

    def allocate(self, length: int) -> None:
        """Make every byte up to `length` really there. If that fails, the file is as long as
        before."""
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
        """What the file system has left for us."""
        answer = os.fstatvfs(self.fd)
        return answer.f_bavail * answer.f_frsize

    def close(self) -> None:
        """Once more changes nothing."""
        if self.fd >= 0:
            fd, self.fd = self.fd, -1
            os.close(fd)


def _close_in_child() -> None:
    """A child that was forked must not keep its parent's files locked when that has ended."""
    for file in list(_open_files):
        file.close()


os.register_at_fork(after_in_child=_close_in_child)


def lock_within(fd: int, patience_s: float) -> bool:
    """Become the only one who has this locked, until it is closed or the process ends."""
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
