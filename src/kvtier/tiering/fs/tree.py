"""The directories of blocks, and what they take on the disk."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from kvtier.tiering.fs.names import SHARDS, is_namespace_name

__all__ = [
    "BlockFile",
    "bytes_taken",
    "count_blocks",
    "measure_overhead",
    "namespaces_in",
    "read_shard",
    "remove_directories",
]


class BlockFile(NamedTuple):
    """A block as it was when its directory was read."""

    path: str
    used_ns: int
    """When it was used last, in nanoseconds since 1970."""
    num_bytes: int
    """As `du` counts them."""
    size: int

    @classmethod
    def of(cls, path: str, status: os.stat_result) -> BlockFile:
        return cls(path, status.st_mtime_ns, bytes_taken(status), status.st_size)

    @property
    def name(self) -> str:
        return self.path.rpartition("/")[2]

    @property
    def namespace(self) -> str:
        """The directory of its namespace."""
        return self.path.rsplit("/", 2)[0]


def bytes_taken(status: os.stat_result) -> int:
    """What a file takes on the disk, as `du` counts it. Some file systems know that only later, and
    say next to nothing until then."""
    return max(status.st_blocks * 512, status.st_size)


def namespaces_in(blocks: Path) -> list[Path]:
    """The directories of namespaces, in the root's or a seat's `blocks`."""
    try:
        names = os.listdir(blocks)
    except FileNotFoundError:
        return []
    return [blocks / name for name in sorted(names) if is_namespace_name(name)]


def read_shard(namespace: str | Path, shard: str) -> Iterator[BlockFile]:
    """The files of one of the directories of a namespace. Raises `OSError`, but not where there is
    no such directory, or where a file goes away meanwhile."""
    try:
        entries = os.scandir(f"{namespace}/{shard}")
    except FileNotFoundError:
        return
    with entries:
        for entry in entries:
            if entry.name.startswith("."):
                continue  # the file system's: NFS keeps removed files so, while they are open
            try:
                status = entry.stat(follow_symlinks=False)
            except FileNotFoundError:
                continue
            if stat.S_ISREG(status.st_mode):
                yield BlockFile.of(entry.path, status)


def count_blocks(blocks: Path) -> tuple[int, int]:
    """Bytes and number of the blocks of all namespaces."""
    num_bytes = count = 0
    for namespace in namespaces_in(blocks):
        for shard in SHARDS:
            for block in read_shard(namespace, shard):
                num_bytes += block.num_bytes
                count += 1
    return num_bytes, count


def measure_overhead(root: Path, seats: list[Path]) -> int:
    """What everything else takes: directories, the ledger, the files that say who lives.
    Under the ledger's lock."""
    total = _bytes_of(root) + _bytes_of(root / "ledger")
    engines = root / "engines"
    total += _bytes_of(engines)
    for entry in os.scandir(engines):
        if not entry.name.startswith("."):
            total += _bytes_of(entry.path)
    for blocks in (root / "blocks", *(seat / "blocks" for seat in seats)):
        total += _bytes_of(blocks)
        for namespace in namespaces_in(blocks):
            total += _bytes_of(namespace)
            total += sum(_bytes_of(f"{namespace}/{shard}") for shard in SHARDS)
    return total


def _bytes_of(path: str | Path) -> int:
    try:
        return os.lstat(path).st_blocks * 512
    except FileNotFoundError:
        return 0


def remove_directories(namespace: Path) -> None:
    """Remove a namespace's directories, as far as there is no file in them. Under the ledger's
    lock. The last one goes first: by it a namespace with all its directories is known."""
    for shard in reversed(SHARDS):
        with suppress(FileNotFoundError):
            try:
                os.rmdir(namespace / shard)
            except OSError as error:
                if error.errno == errno.ENOTEMPTY:
                    return
                raise
    with suppress(OSError):
        os.rmdir(namespace)
