"""A new slab file, made by one engine at a time."""

from __future__ import annotations

import glob
import os
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from kvtier.tiering.disk.file import SlabFile, lock_within
from kvtier.tiering.disk.index import IndexTable
from kvtier.tiering.disk.layout import Geometry, Superblock
from kvtier.tiering.disk.recovery import write_index
from kvtier.tiering.disk.refusal import SlabRefused
from kvtier.tiering.disk.room import allocate_within
from kvtier.tiering.disk.superblocks import read_clear_request, write_superblock

__all__ = ["format_slab", "make_if_missing"]

_MAKING_PATIENCE_S = 60.0


def format_slab(file: SlabFile, geometry: Geometry, former: Superblock | None = None) -> Superblock:
    """Make an empty slab of the file, whose room is allocated. `former`: its superblock so far.

    Revisions go on from the former one: should the write of a copy be lost, the copy that is back
    in its place must not win against the new one and bring the former blocks back.
    """
    superblock = Superblock(
        uuid.uuid4().bytes,
        geometry,
        revision=former.revision + 1 if former is not None else 0,
        created_ns=time.time_ns(),
        # Obeyed, since nothing is left. The request stays where it is: until the superblock is
        # written, the former blocks are there, and the next engine must obey it.
        last_clear=read_clear_request(file) or bytes(16),
    )
    write_index(file, IndexTable(geometry, superblock.uuid))
    write_superblock(file, superblock)
    return superblock


def make_if_missing(path: Path, max_bytes: int | None, payload_bytes: int) -> None:
    """Make an empty slab at `path` unless there is one. Raises `SlabRefused` or `OSError`."""
    if path.exists() and not _abandoned(path):
        return
    with _alone_in(path.parent):
        for leftover in _abandoned(path):
            leftover.unlink(missing_ok=True)
        if not path.exists():
            _make(path, max_bytes, payload_bytes)


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
        geometry = allocate_within(file, max_bytes, payload_bytes, path)
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
    """What engines left that were killed while they made this slab, or are just making."""
    return list(path.parent.glob(f".{glob.escape(path.name)}.*.new"))
