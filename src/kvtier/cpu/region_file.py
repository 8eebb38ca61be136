"""The file of a shared offload region: how processes make it, join it and remove it.

One lock shows whether a region is in use. Every process that uses it holds a shared `flock` on the
file, and the kernel drops the lock when the process dies, even after `kill -9`. The code below
keeps these rules:

- A new file is locked before it has a name: it is made with O_TMPFILE, locked exclusively, given
  its header, and only then linked into the directory. No process can find it unlocked while its
  maker lives.
- The maker keeps the exclusive lock until all bytes are reserved. Joining processes wait for their
  shared lock, which they get when the file is finished or its maker is dead.
- A process that gets the exclusive lock on an existing file knows that no process uses the file,
  and removes it. The content of such a file is never used again.
- A process removes the name only while it holds a lock on the file, so that the name cannot pass to
  another file meanwhile. The lock is exclusive if no process uses the file any more, and shared if
  all processes that will use it have joined.

The lock belongs to one file descriptor, which no mapping shares, so a mapping does not keep the
lock. A subprocess that runs another program does not inherit the descriptor. A forked child
inherits it, and so keeps the region in use: this is right, because the child has the mapping, too.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import logging
import mmap
import os
import random
import re
import stat
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace

from kvtier.config.sizes import as_size
from kvtier.cpu.host_memory import NotEnoughMemory, require_room

__all__ = ["RegionFile", "RegionShape", "reclaim_dead_regions"]

logger = logging.getLogger(__name__)

_HEADER_BYTES = mmap.PAGESIZE
_MAGIC = b"kvtier shared offload region, version 2\n"
_NAME = re.compile(r"kvtier-[0-9a-f]{32}\.region")
_RESERVE_STEP = 1 << 28
_MAX_ENGINE_ID_IN_HEADER = 200


@dataclass(frozen=True, slots=True)
class RegionShape:
    """The sizes that all users of one region must agree on.

    A region has one *row* of `kv_bytes_per_block` bytes for each slot. A row has one *cell* of
    `cpu_page_size` bytes for each rank, which holds that rank's part of the block.
    """

    num_blocks: int
    kv_bytes_per_block: int
    cpu_page_size: int

    @property
    def num_cells(self) -> int:
        """Number of cells in a row, one for each rank."""
        return self.kv_bytes_per_block // self.cpu_page_size

    @property
    def board_bytes(self) -> int:
        """Bytes of the notice board, in whole pages: 8 bytes per rank and 1 per slot."""
        return -(-(8 * self.num_cells + self.num_blocks) // mmap.PAGESIZE) * mmap.PAGESIZE

    @property
    def rows_bytes(self) -> int:
        """Bytes of all rows."""
        return self.num_blocks * self.kv_bytes_per_block

    @property
    def file_bytes(self) -> int:
        """Bytes of the file: one page of header, the notice board, then the rows."""
        return _HEADER_BYTES + self.board_bytes + self.rows_bytes

    def __str__(self) -> str:
        return (
            f"num_blocks={self.num_blocks}, kv_bytes_per_block={self.kv_bytes_per_block}, "
            f"cpu_page_size={self.cpu_page_size}"
        )


class RegionFile:
    """One process's use of a region file, until `leave`. For one thread."""

    def __init__(self, path: str, lock_fd: int, shape: RegionShape) -> None:
        self.path = path
        self._lock_fd: int | None = lock_fd
        self._shape = shape

    @classmethod
    def make_or_join(cls, directory: str, engine_id: str, shape: RegionShape) -> RegionFile:
        """Make or join this engine's region. It is then complete, and locked for this process.

        Waits while another process is making it; if that process dies, this process makes it.
        Raises `NotEnoughMemory` when the region does not fit, and `ValueError` when it is in use
        with another shape or when another kind of file has its name. Errors leave nothing behind.
        """
        path = os.path.join(directory, _file_name(engine_id))
        while True:
            lock_fd = _join(path, engine_id, shape)
            if lock_fd is None:
                with _explained_lack_of_space(directory, engine_id, shape):
                    lock_fd = _make(directory, path, engine_id, shape)
            if lock_fd is not None:
                return cls(path, lock_fd, shape)

    @classmethod
    def join(cls, directory: str, engine_id: str, shape: RegionShape) -> RegionFile | None:
        """Join this engine's region. Returns None, and makes none, if no process has made it.

        Raises `ValueError` like `make_or_join`.
        """
        path = os.path.join(directory, _file_name(engine_id))
        lock_fd = _join(path, engine_id, shape)
        return None if lock_fd is None else cls(path, lock_fd, shape)

    def map_board(self) -> mmap.mmap:
        """A writable mapping of the notice board. It stays valid after `leave`."""
        return self._map(_HEADER_BYTES, self._shape.board_bytes)

    def map_rows(self) -> mmap.mmap:
        """A writable mapping of the rows. It stays valid after `leave`."""
        return self._map(_HEADER_BYTES + self._shape.board_bytes, self._shape.rows_bytes)

    def _map(self, offset: int, size: int) -> mmap.mmap:
        # The mapping keeps a descriptor open. A newly opened descriptor does not carry the lock, so
        # a mapping that outlives its region does not keep the file locked.
        assert self._lock_fd is not None
        fd = os.open(self.path, os.O_RDWR | os.O_NOFOLLOW)
        try:
            if not os.path.samestat(os.fstat(fd), os.fstat(self._lock_fd)):
                raise RuntimeError(f"{self.path} was replaced by hand while it was being opened")
            return mmap.mmap(fd, size, offset=offset)
        finally:
            os.close(fd)

    def remove_name(self) -> None:
        """Remove the file's name. Call it when all processes that will use the region have joined.

        The kernel then frees the file when its last process ends, even if that process is killed.
        A process that asks for the region after this gets a new one.
        """
        assert self._lock_fd is not None
        if _is_named(self.path, self._lock_fd):
            os.unlink(self.path)

    def leave(self) -> None:
        """End this process's use. If no other process uses the file, remove it. Idempotent."""
        if self._lock_fd is not None:
            lock_fd, self._lock_fd = self._lock_fd, None
            _give_up(self.path, lock_fd)


def reclaim_dead_regions(directory: str) -> int:
    """Remove the regions that no process uses any more. Returns how many were unused.

    Files that are not regions, or belong to another user, stay.
    """
    names = [name for name in os.listdir(directory) if _NAME.fullmatch(name)]
    return sum(_reclaim_if_dead(os.path.join(directory, name)) for name in names)


def _file_name(engine_id: str) -> str:
    """The name of an engine's file. A digest, so that no id can name a path or another region."""
    digest = hashlib.blake2b(engine_id.encode("utf-8", "surrogatepass"), digest_size=16)
    return f"kvtier-{digest.hexdigest()}.region"


def _join(path: str, engine_id: str, shape: RegionShape) -> int | None:
    """Open and lock the finished file at `path`. Returns None if there is none to join."""
    try:
        fd = _open_region(path)
    except _NotARegion as foreign:
        raise ValueError(
            f"engine_id {engine_id!r} stands for the file {path}, which is {foreign}: "
            "remove that file or choose another engine_id"
        ) from None
    if fd is None:
        return None
    try:
        if _share(path, fd, engine_id, shape):
            return fd
    except BaseException:
        _give_up(path, fd)
        raise
    _give_up(path, fd)
    # Several processes may find the maker dead at the same time, and block each other from the
    # exclusive lock. So wait for a random time before the next try.
    time.sleep(random.uniform(0, 0.005))
    return None


def _share(path: str, fd: int, engine_id: str, shape: RegionShape) -> bool:
    """Take the shared lock once the file is made. False: the file is unused, gone or unfinished."""
    if _remove_if_dead(path, fd):
        return False
    fcntl.flock(fd, fcntl.LOCK_SH)
    if not _is_named(path, fd):
        return False
    existing = _read_shape(fd)
    if os.fstat(fd).st_size != existing.file_bytes:
        return False
    _require_same_shape(path, engine_id, existing, shape)
    return True


def _require_same_shape(
    path: str, engine_id: str, existing: RegionShape, wanted: RegionShape
) -> None:
    if existing != wanted:
        raise ValueError(
            f"engine {engine_id!r} already uses a region of another shape ({path}): it was made "
            f"with {existing}; this process asks for {wanted}. Give all processes of one engine "
            "the same configuration, all its pipeline stages the same number of layers, and each "
            "engine an engine_id of its own"
        )


def _make(directory: str, path: str, engine_id: str, shape: RegionShape) -> int | None:
    """Make and lock a new file at `path`. Returns None if another process was faster."""
    reclaim_dead_regions(directory)
    fd = _open_nameless(directory)
    try:
        os.fchmod(fd, 0o600)  # the umask may have removed bits
        fcntl.flock(fd, fcntl.LOCK_EX)
        os.pwrite(fd, _header(engine_id, shape), 0)
        if not _link(fd, path):
            os.close(fd)
            return None
        _require_room(directory, engine_id, shape, already=_HEADER_BYTES)
        _reserve(fd, shape.file_bytes)
        fcntl.flock(fd, fcntl.LOCK_SH)
    except BaseException:
        _give_up(path, fd)
        raise
    if not _is_named(path, fd):  # removed by hand, or while the lock was converted
        os.close(fd)
        return None
    return fd


def _open_nameless(directory: str) -> int:
    try:
        return os.open(directory, os.O_TMPFILE | os.O_RDWR, 0o600)
    except OSError as error:
        if error.errno in (errno.EOPNOTSUPP, errno.EISDIR):
            raise ValueError(
                f"{directory} is on a filesystem without O_TMPFILE: a shared region needs a tmpfs"
            ) from error
        raise


def _link(fd: int, path: str) -> bool:
    """Give the nameless file its name. False if the name is taken."""
    try:
        # If a directory descriptor is passed, even an unused one, Python calls linkat, which can
        # follow the link in /proc to the file. It otherwise calls link, which cannot.
        os.link(f"/proc/self/fd/{fd}", path, src_dir_fd=fd, follow_symlinks=True)
    except FileExistsError:
        return False
    return True


def _require_room(directory: str, engine_id: str, shape: RegionShape, already: int) -> None:
    """Raise `NotEnoughMemory` unless the file has room. `already`: bytes that it has allocated."""
    require_room(
        directory,
        f"The KV-cache region of engine {engine_id!r}",
        num_rows=shape.num_blocks,
        row_bytes=shape.kv_bytes_per_block,
        total=lambda num_blocks: replace(shape, num_blocks=num_blocks).file_bytes - already,
    )


@contextmanager
def _explained_lack_of_space(directory: str, engine_id: str, shape: RegionShape) -> Iterator[None]:
    """Turn ENOSPC, raised after the check, into `NotEnoughMemory` with figures and a remedy."""
    try:
        yield
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise
        _require_room(directory, engine_id, shape, already=0)
        raise NotEnoughMemory(
            f"{directory} refused the {as_size(shape.file_bytes)} of the KV-cache region of "
            f"engine {engine_id!r} ({error.strerror}), although they are free now: another "
            "process took and returned them, or there are no inodes left. Try again"
        ) from error


def _reserve(fd: int, size: int) -> None:
    """Allocate every byte. The file gets its full size with the last step."""
    # In steps, because a signal undoes the step that it interrupts.
    for offset in range(0, size, _RESERVE_STEP):
        os.posix_fallocate(fd, offset, min(_RESERVE_STEP, size - offset))


def _header(engine_id: str, shape: RegionShape) -> bytes:
    content = {"engine_id": engine_id[:_MAX_ENGINE_ID_IN_HEADER], **asdict(shape)}
    return _MAGIC + json.dumps(content).encode("ascii") + b"\n"


def _read_shape(fd: int) -> RegionShape:
    content = json.loads(os.pread(fd, _HEADER_BYTES, len(_MAGIC)).split(b"\n", 1)[0])
    return RegionShape(
        content["num_blocks"], content["kv_bytes_per_block"], content["cpu_page_size"]
    )


class _NotARegion(Exception):
    """The reason why a file is not this user's region."""


def _open_region(path: str) -> int | None:
    """Open the region file at `path`. Returns None if there is no file."""
    try:
        fd = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise _NotARegion(f"a file that cannot be opened ({error.strerror})") from error
    try:
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode):
            raise _NotARegion("not a regular file")
        if status.st_uid != os.geteuid():
            raise _NotARegion(f"owned by user {status.st_uid}, not by this user")
        if os.pread(fd, len(_MAGIC), 0) != _MAGIC:
            raise _NotARegion("not a kvtier region")
    except BaseException:
        os.close(fd)
        raise
    return fd


def _give_up(path: str, fd: int) -> None:
    """Close a file, which drops its lock. Removes the file if no other process uses it."""
    os.close(fd)
    _reclaim_if_dead(path)


def _reclaim_if_dead(path: str) -> bool:
    try:
        fd = _open_region(path)
    except _NotARegion:
        return False
    if fd is None:
        return False
    try:
        return _remove_if_dead(path, fd)
    finally:
        os.close(fd)


def _remove_if_dead(path: str, fd: int) -> bool:
    """Remove the file if no process holds a lock on it. Returns True if no process does."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    if _is_named(path, fd):
        os.unlink(path)
        logger.info("Removed %s: no process uses it any more", path)
    return True


def _is_named(path: str, fd: int) -> bool:
    """True if `path` still names the file open as `fd`."""
    try:
        return os.path.samestat(os.stat(path, follow_symlinks=False), os.fstat(fd))
    except FileNotFoundError:
        return False
