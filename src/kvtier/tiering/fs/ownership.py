"""Whose a root is. An engine uses only directories of its own user that nobody else may write to:
whoever may write there can put anything in the place of a directory or a block."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path
from uuid import uuid4

from kvtier.tiering.fs.below import Below

__all__ = ["NotOurs", "require_own"]

_WRITE_OF_OTHERS = stat.S_IWGRP | stat.S_IWOTH


class NotOurs(OSError):
    """A directory that this user must not use. The message says why, and the remedy."""

    def __init__(self, path: Path, problem: str) -> None:
        super().__init__(errno.EPERM, problem, str(path))

    def __str__(self) -> str:
        return f"{self.filename} {self.strerror}"


def require_own(below: Below, root: Path) -> None:
    """Raise `NotOurs` unless a root, and what there is of `blocks` and `engines` in it, belong to
    this user and can be written by nobody else; `NotADirectoryError` where one is something else,
    such as a link."""
    status = os.stat(root)
    if status.st_uid != os.geteuid() and status.st_uid != _owner_of_new_files(below, root):
        raise NotOurs(
            root,
            f"belongs to uid {status.st_uid}, and this process runs as uid {os.geteuid()}: run it "
            f"as uid {status.st_uid}, or give it all of the directory: chown -R {os.geteuid()} "
            f"{root}",
        )
    _require_private(root, status)
    for directory in (root / "blocks", root / "engines"):
        try:
            found = below.lstat(directory)
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
            "directory inside of it as root_dir, which is made for this user alone",
        )


def _owner_of_new_files(below: Below, root: Path) -> int:
    """The uid that a new file gets there. A file server may map users to others (root_squash,
    all_squash): then neither the root nor anything in it belongs to our own uid."""
    path = root / f".kvtier-{uuid4().hex}"
    fd = below.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY)
    try:
        return os.fstat(fd).st_uid
    finally:
        os.close(fd)
        below.unlink(path)
