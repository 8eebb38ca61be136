"""Opening a root directory."""

from __future__ import annotations

import errno
import logging
import mmap
import os
from contextlib import suppress
from pathlib import Path

from kvtier.config.redaction import printable
from kvtier.tiering.fs.below import Below
from kvtier.tiering.fs.books import Books
from kvtier.tiering.fs.ledger import LedgerVersion
from kvtier.tiering.fs.refusal import RootRefused, refusal_for
from kvtier.tiering.fs.seat import Occupant
from kvtier.tiering.fs.tree import namespaces_in
from kvtier.tiering.io.page import PAGE_BYTES

__all__ = ["allows_o_direct", "is_root", "open_root", "require_ours", "warn_of_limits"]

logger = logging.getLogger(__name__)

_PATIENCE_S = 10.0
_OURS = frozenset(("ledger", "engines", "blocks", "lost+found"))


def is_root(path: Path) -> bool:
    """Whether a directory is the root of an fs tier, or what is left of one. A file called ledger
    may be anybody's."""
    below = Below(path)
    blocks = path / "blocks"
    if not below.is_directory(blocks):
        return False
    return below.is_directory(path / "engines") or bool(namespaces_in(below, blocks))


def open_root(path: Path, occupant: Occupant, patience_s: float = _PATIENCE_S) -> Books:
    """Open a root, making it if need be, and take a seat there. Raises `RootRefused`."""
    try:
        if path.exists():
            require_ours(path)
        books = Books(path, occupant, patience_s)
    except LedgerVersion as problem:
        raise RootRefused(
            f"{path}: {problem}. Use that version, or give another directory"
        ) from None
    except OSError as error:
        raise refusal_for(path, error) from error
    try:
        _require_hard_links(books)
    except BaseException:
        books.close()
        raise
    return books


def require_ours(path: Path) -> None:
    """Raise `RootRefused` unless a directory is a root, or may become one: it has nothing else."""
    # What begins with a dot is the file system's: .snapshot, .nfs0123.
    names = {name for name in os.listdir(path) if not name.startswith(".")}
    strange = sorted(names - _OURS)
    if strange and not is_root(path):
        raise RootRefused(
            f"{path} holds other things ({printable(', '.join(strange[:3]))}): give a directory of "
            "its own, which is made if need be"
        )
    if path.stat().st_mode & 0o077:
        logger.warning(
            "%s can be entered by other users. Blocks are written so that only uid %d can read "
            "them; still, chmod 700 it",
            path,
            os.geteuid(),
        )


def _require_hard_links(books: Books) -> None:
    """Blocks are published by a second link, which fails where there is a block already."""
    first, second = books.seat.incoming(), books.seat.incoming()
    try:
        os.close(books.below.open(first, os.O_CREAT | os.O_EXCL | os.O_WRONLY))
        books.below.link(first, second)
    except OSError as error:
        if error.errno not in (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK):
            raise refusal_for(books.path, error) from error
        raise RootRefused(
            f"{books.path}: its file system has no hard links, by which blocks are published: use "
            "one that has, such as NFS, ext4, XFS, Lustre or CephFS"
        ) from None
    finally:
        for path in (first, second):
            with suppress(FileNotFoundError):
                books.below.unlink(path)


def warn_of_limits(books: Books, max_bytes: int, min_free_bytes: int) -> None:
    """Say at the start what an operator cannot have meant."""
    answer = os.statvfs(books.path)
    size, free = answer.f_blocks * answer.f_frsize, answer.f_bavail * answer.f_frsize
    total = books.ledger.read().total
    if total > max_bytes:
        logger.warning(
            "%s holds %d bytes, and max_bytes is %d: blocks of this model are removed until they "
            "fit, also those of other engines. Give all of them the same max_bytes",
            books.path,
            total,
            max_bytes,
        )
    if max_bytes > size:
        logger.warning(
            "%s: max_bytes is %d, and its file system has %d: it will run full. Give less, or "
            "min_free_bytes",
            books.path,
            max_bytes,
            size,
        )
    if min_free_bytes > free + total:
        logger.warning(
            "%s: min_free_bytes is %d, and its file system has %d free: nothing can be stored. "
            "Give less, or make room",
            books.path,
            min_free_bytes,
            free,
        )


def allows_o_direct(books: Books) -> bool:
    """Whether files can bypass the page cache there. Tries it with a file, which is removed."""
    path = books.seat.incoming()
    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_DIRECT
    fd = -1
    try:
        fd = books.below.open(path, flags)
        with mmap.mmap(-1, PAGE_BYTES) as page:
            return os.pwritev(fd, [page], 0) == PAGE_BYTES
    except OSError as error:
        if error.errno in (errno.EINVAL, errno.EOPNOTSUPP):
            return False
        raise refusal_for(books.path, error) from error
    finally:
        if fd >= 0:
            os.close(fd)
        with suppress(FileNotFoundError):
            books.below.unlink(path)
