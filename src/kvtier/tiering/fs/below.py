"""File operations below a root that never pass through a symbolic link.

Each level is opened relative to the one above it with O_NOFOLLOW | O_DIRECTORY, so a link in the
place of a directory is an error (ENOTDIR) and leads nowhere. Only the root itself is named by a
path, which may contain links: that path is the operator's.
"""

from __future__ import annotations

import os
import resource
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import TypeAlias

from kvtier.tiering.fs.names import SHARDS

__all__ = ["Below"]

_StrPath: TypeAlias = str | Path

_SHARD_LETTERS = len(SHARDS[0])
_PASS = os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC
_LIST = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | os.O_NOFOLLOW
_FEW = 16
"""Handles for directories above the shards."""
_PART_OF_LIMIT = 16
"""Of the descriptors that this process may have, handles take at most one in 16."""


class _Handle:
    """An open directory. It is closed when the last thread that uses it lets go of it."""

    __slots__ = ("fd",)

    def __init__(self, fd: int) -> None:
        self.fd = fd

    def __del__(self, close: object = os.close) -> None:
        close(self.fd)  # type: ignore[operator]


class Below:
    """The files and directories below one root. Any thread but the scheduler's.

    Paths are those that one would give to `os`, beginning with the root's. Every method raises
    `OSError` with the whole path in `filename`.
    """

    def __init__(self, root: Path) -> None:
        """Opens nothing yet."""
        self._path = str(root)
        self._names = (self._path, "") if self._path in (".", "/") else (self._path,)
        """What paths begin with: pathlib leaves out these two."""
        self._handles: dict[str, _Handle] = {}
        soft_limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        self._max_shards = min(len(SHARDS), max(0, soft_limit) // _PART_OF_LIMIT)

    def forget(self) -> None:
        """Open every directory anew when it is next used: someone may have put another in its
        place. Called at the start of each transaction, twice a second, and at the end of use."""
        handles, self._handles = self._handles, {}
        handles.clear()  # whoever still has it, such as a traceback, keeps nothing open

    def lstat(self, path: _StrPath) -> os.stat_result:
        outer, name = _split(path)
        handle = self._directory(outer)
        try:
            return os.lstat(name, dir_fd=handle.fd)
        except OSError as error:
            _set_path(error, path)
            raise
        finally:
            del handle  # a traceback must not keep it open

    def is_directory(self, path: _StrPath) -> bool:
        """False: it is something else, or not there."""
        try:
            return stat.S_ISDIR(self.lstat(path).st_mode)
        except (FileNotFoundError, NotADirectoryError):
            return False

    def open(self, path: _StrPath, flags: int, mode: int = 0o600) -> int:
        outer, name = _split(path)
        handle = self._directory(outer)
        try:
            return os.open(name, flags | os.O_NOFOLLOW | os.O_CLOEXEC, mode, dir_fd=handle.fd)
        except OSError as error:
            _set_path(error, path)
            raise
        finally:
            del handle

    def utime(self, path: _StrPath, stamp_ns: int) -> None:
        outer, name = _split(path)
        handle = self._directory(outer)
        try:
            os.utime(name, ns=(stamp_ns, stamp_ns), dir_fd=handle.fd, follow_symlinks=False)
        except OSError as error:
            _set_path(error, path)
            raise
        finally:
            del handle

    def mkdir(self, path: _StrPath) -> None:
        outer, name = _split(path)
        handle = self._directory(outer)
        try:
            os.mkdir(name, 0o700, dir_fd=handle.fd)
        except OSError as error:
            _set_path(error, path)
            raise
        finally:
            del handle

    def unlink(self, path: _StrPath) -> None:
        outer, name = _split(path)
        handle = self._directory(outer)
        try:
            os.unlink(name, dir_fd=handle.fd)
        except OSError as error:
            _set_path(error, path)
            raise
        finally:
            del handle

    def rmdir(self, path: _StrPath) -> None:
        outer, name = _split(path)
        handle = self._directory(outer)
        try:
            os.rmdir(name, dir_fd=handle.fd)
        except OSError as error:
            _set_path(error, path)
            raise
        finally:
            del handle

    def link(self, path: _StrPath, new_path: _StrPath) -> None:
        """Give a file a second name, unless something has that name."""
        (outer, name), (new_outer, new_name) = _split(path), _split(new_path)
        handle, new_handle = self._directory(outer), self._directory(new_outer)
        try:
            os.link(
                name,
                new_name,
                src_dir_fd=handle.fd,
                dst_dir_fd=new_handle.fd,
                follow_symlinks=False,
            )
        except OSError as error:
            _set_path(error, new_path)
            raise
        finally:
            del handle, new_handle

    def rename(self, path: _StrPath, new_path: _StrPath) -> None:
        (outer, name), (new_outer, new_name) = _split(path), _split(new_path)
        handle, new_handle = self._directory(outer), self._directory(new_outer)
        try:
            os.rename(name, new_name, src_dir_fd=handle.fd, dst_dir_fd=new_handle.fd)
        except OSError as error:
            _set_path(error, path)
            raise
        finally:
            del handle, new_handle

    def scan(self, path: _StrPath) -> Iterator[os.DirEntry[str]]:
        """What is in a directory. `stat` of an entry works until the next one is asked for; its
        `path` is the name alone."""
        fd = self._open_to_list(path)
        try:
            with os.scandir(fd) as entries:
                yield from entries
        finally:
            os.close(fd)

    def listdir(self, path: _StrPath) -> list[str]:
        fd = self._open_to_list(path)
        try:
            return os.listdir(fd)
        finally:
            os.close(fd)

    def _open_to_list(self, path: _StrPath) -> int:
        if os.fspath(path) in self._names:
            return os.open(self._path, _LIST & ~os.O_NOFOLLOW)
        return self.open(path, _LIST)

    # --- handles -------------------------------------------------------------------------------

    def _directory(self, path: str) -> _Handle:
        handles = self._handles  # what is opened after `forget` must not come from before it
        return handles.get(path) or self._open(handles, path)

    def _open(self, handles: dict[str, _Handle], path: str) -> _Handle:
        outer, _, name = path.rpartition("/")
        if path in self._names:
            handle = _Handle(os.open(self._path, _PASS))
        elif not path:
            raise ValueError(f"not a path below {self._path}")
        else:
            above = handles.get(outer) or self._open(handles, outer)
            try:
                handle = _Handle(os.open(name, _PASS | os.O_NOFOLLOW, dir_fd=above.fd))
            except OSError as error:
                _set_path(error, path)
                raise
            finally:
                del above
        most = self._max_shards if len(name) == _SHARD_LETTERS else self._max_shards + _FEW
        if len(handles) < most:
            handles[path] = handle
        return handle


def _split(path: _StrPath) -> tuple[str, str]:
    outer, _, name = os.fspath(path).rpartition("/")
    return outer, name


def _set_path(error: OSError, path: _StrPath) -> None:
    """Let an error have the whole path: the system was given only the last part of it."""
    error.filename, error.filename2 = os.fspath(path), None
