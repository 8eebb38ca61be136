"""Opens the files and directories of a root, the directory of an fs tier. Never follows a link
inside it.

Each level is opened relative to the one above it with O_NOFOLLOW | O_DIRECTORY, so a link in place
of a directory fails with ENOTDIR instead of leading elsewhere. Only the root itself is opened by
its path, which may contain links: the operator chose that path.

An engine refuses a directory that another user owns or may write to: that user could replace a
directory or a block.
"""

from __future__ import annotations

import errno
import logging
import os
import resource
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import TypeAlias
from uuid import uuid4

from kvtier.config.errors import printable
from kvtier.tiering.base import TierRefused
from kvtier.tiering.fs.layout import SHARDS, namespaces_in

__all__ = [
    "NoFollowTree",
    "NotOurs",
    "RootRefused",
    "is_root",
    "refusal_for",
    "remedy_for",
    "require_ours",
    "require_own",
]

logger = logging.getLogger(__name__)

_StrPath: TypeAlias = str | Path

_SHARD_LETTERS = len(SHARDS[0])
_PASS = os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC
_LIST = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | os.O_NOFOLLOW
_NUM_UPPER_HANDLES = 16
"""Handles that may stay open for directories above the shards, in addition to those of shards. A
shard is one of the 256 directories that hold the blocks of a namespace."""
_LIMIT_DIVISOR = 16
"""Shard handles use at most 1/16 of the descriptors that this process may open."""
_OUR_NAMES = frozenset(("ledger", "engines", "blocks", "lost+found"))
_WRITE_OF_OTHERS = stat.S_IWGRP | stat.S_IWOTH


class _Handle:
    """An open directory. It is closed when the last thread drops its reference."""

    __slots__ = ("fd",)

    def __init__(self, fd: int) -> None:
        self.fd = fd

    def __del__(self, close: object = os.close) -> None:
        close(self.fd)  # type: ignore[operator]


class NoFollowTree:
    """Opens, lists and changes the files and directories of one root. Any thread may use it, but
    each call waits for the disk, so the scheduler's thread uses it only while it starts the tier.

    Every path is a whole path, as for `os`, and starts with the root's own path. Every method
    raises `OSError` with the whole path in `filename`.
    """

    def __init__(self, root: Path) -> None:
        """Opens nothing: directories are opened at their first use."""
        self._path = str(root)
        self._names = (self._path, "") if self._path in (".", "/") else (self._path,)
        """The names of the root: its path, and what `_split` returns as the directory of a path
        right below the root. For the roots "." and "/", `_split` returns an empty string, because
        pathlib writes such a path as "blocks" or "/blocks"."""
        self._handles: dict[str, _Handle] = {}
        soft_limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        self._max_shards = min(len(SHARDS), max(0, soft_limit) // _LIMIT_DIVISOR)

    def forget(self) -> None:
        """Drop all open directories. The next use opens each one again, because another directory
        may have replaced it. Called in every transaction, every 0.5 s while no blocks are stored,
        and when the engine leaves the root."""
        handles, self._handles = self._handles, {}
        handles.clear()  # a traceback that still refers to the dict then keeps nothing open

    def lstat(self, path: _StrPath) -> os.stat_result:
        outer, name = _split(path)
        handle = self._directory(outer)
        try:
            return os.lstat(name, dir_fd=handle.fd)
        except OSError as error:
            _set_path(error, path)
            raise
        finally:
            del handle  # or a traceback would keep the directory open

    def is_directory(self, path: _StrPath) -> bool:
        """False if the path does not exist or is no directory."""
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
        """Create a second name for a file. Raises `FileExistsError` if that name is taken."""
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
        """The entries of a directory. `entry.stat` works until the next entry is requested;
        `entry.path` is only the name."""
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
        handles = self._handles  # one dict for the whole descent: `forget` may replace it meanwhile
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
        is_shard = len(name) == _SHARD_LETTERS
        most = self._max_shards if is_shard else self._max_shards + _NUM_UPPER_HANDLES
        if len(handles) < most:
            handles[path] = handle
        return handle


def _split(path: _StrPath) -> tuple[str, str]:
    outer, _, name = os.fspath(path).rpartition("/")
    return outer, name


def _set_path(error: OSError, path: _StrPath) -> None:
    """Put the whole path into an error: the system call was given only its last part."""
    error.filename, error.filename2 = os.fspath(path), None


# --- who may use a directory --------------------------------------------------------------------


class NotOurs(OSError):
    """This user must not use a directory. The message gives the reason and the remedy."""

    def __init__(self, path: Path, problem: str) -> None:
        super().__init__(errno.EPERM, problem, str(path))

    def __str__(self) -> str:
        return f"{self.filename} {self.strerror}"


def require_own(tree: NoFollowTree, root: Path) -> None:
    """Raise `NotOurs` unless this user owns the root, the same uid owns `blocks` and `engines`
    where they exist, and no other user may write to any of them. If a file server maps users, the
    uid that it gives new files counts as this user. Raises `NotADirectoryError` if `blocks` or
    `engines` is something else, such as a link."""
    status = os.stat(root)
    if status.st_uid != os.geteuid() and status.st_uid != _owner_of_new_files(tree, root):
        raise NotOurs(
            root,
            f"belongs to uid {status.st_uid}, and this process runs as uid {os.geteuid()}: run it "
            f"as uid {status.st_uid}, or give this user the whole directory: chown -R "
            f"{os.geteuid()} {root}",
        )
    _require_private(root, status)
    for directory in (root / "blocks", root / "engines"):
        try:
            found = tree.lstat(directory)
        except FileNotFoundError:
            continue
        if not stat.S_ISDIR(found.st_mode):
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(directory))
        if found.st_uid != status.st_uid:
            raise NotOurs(
                directory,
                f"belongs to uid {found.st_uid}, and {root} to uid {status.st_uid}: give all of it "
                f"to one user: chown -R {status.st_uid} {root}",
            )
        _require_private(directory, found)


def _require_private(path: Path, status: os.stat_result) -> None:
    mode = stat.S_IMODE(status.st_mode)
    if mode & _WRITE_OF_OTHERS:
        raise NotOurs(
            path,
            f"can be written by other users (mode {mode:04o}): chmod 700 it, or give a new "
            "directory inside it as root_dir, which is then made for this user alone",
        )


def _owner_of_new_files(tree: NoFollowTree, root: Path) -> int:
    """Return the uid that owns a new file. A file server may map users (root_squash, all_squash):
    then neither the root nor anything in it belongs to the uid of this process."""
    path = root / f".kvtier-{uuid4().hex}"
    fd = tree.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY)
    try:
        return os.fstat(fd).st_uid
    finally:
        os.close(fd)
        tree.unlink(path)


# --- why a root is refused ----------------------------------------------------------------------


class RootRefused(TierRefused):
    """The directory cannot be used. The message gives the reason and the remedy."""


def refusal_for(path: Path, error: OSError) -> RootRefused:
    if isinstance(error, NotOurs):  # its message is complete
        return RootRefused(printable(str(error)))
    where = printable(str(error.filename or path))
    return RootRefused(f"{where}: {error.strerror or error}: {remedy_for(path, error.errno or 0)}")


def remedy_for(path: Path, error: int) -> str:
    """What an operator can do about an error number in a root."""
    remedies = {
        errno.ENOENT: "mount its file system again, or make its parent directory; if it was "
        f"emptied or removed, run `kvtier store init {path}`",
        errno.EEXIST: "remove it: it has the name of a block but is not a block",
        errno.ELOOP: "remove it: links are not followed",
        errno.EACCES: f"let the user of this engine (uid {os.geteuid()}) read and write all of it",
        errno.EPERM: "see whether the container or the export forbids it (root_squash)",
        errno.EROFS: "mount its file system for writing, or give another directory",
        errno.ENOTDIR: "give the path of a directory; below it, remove anything that stands in "
        "place of a directory, such as a link, which is not followed",
        errno.EMFILE: "let this process have more files open (ulimit -n)",
        errno.ENFILE: "let the system have more files open (sysctl fs.file-max)",
        errno.ENOLCK: "mount it with locks (for NFS: without nolock, and with lockd running)",
        errno.ENOSYS: "use a file system with locks and hard links",
        errno.EOPNOTSUPP: "use a file system with locks and hard links",
        errno.ENOSPC: "make room on its file system",
        errno.EDQUOT: "raise this user's quota on its file system",
        errno.ESTALE: "mount it again",
        errno.ETIMEDOUT: "another engine or command holds the lock of its ledger: find it with "
        "`kvtier store stat`, and see whether it hangs",
        errno.EIO: "look at the disk, or the server (dmesg)",
    }
    return remedies.get(error, "repair that, or give another directory")


def is_root(path: Path) -> bool:
    """True if a directory is the root of an fs tier, or what is left of one. Does not look for a
    file called `ledger`, because any program may have made one."""
    tree = NoFollowTree(path)
    blocks = path / "blocks"
    if not tree.is_directory(blocks):
        return False
    return tree.is_directory(path / "engines") or bool(namespaces_in(tree, blocks))


def require_ours(path: Path) -> None:
    """Raise `RootRefused` if a directory is not a root and cannot become one, because it holds
    other files. Log a warning if other users may enter it."""
    # Names that begin with a dot are the file system's: .snapshot, .nfs0123.
    names = {name for name in os.listdir(path) if not name.startswith(".")}
    strange = sorted(names - _OUR_NAMES)
    if strange and not is_root(path):
        raise RootRefused(
            f"{path} holds other things ({printable(', '.join(strange[:3]))}): give the tier a "
            "directory of its own, which is made if it does not exist"
        )
    if path.stat().st_mode & 0o077:
        logger.warning(
            "%s can be entered by other users. They cannot read blocks, which are written for uid "
            "%d only; run chmod 700 on the directory all the same",
            path,
            os.geteuid(),
        )
