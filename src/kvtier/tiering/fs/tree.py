"""The directories of blocks, and what they take on the disk."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from kvtier.tiering.fs.below import Below
from kvtier.tiering.fs.names import SHARDS, is_namespace_name, key_at

__all__ = [
    "BlockFile",
    "bytes_taken",
    "count_blocks",
    "measure_overhead",
    "namespaces_in",
    "read_shard",
    "remove_directories",
    "shards_in",
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


def namespaces_in(below: Below, blocks: Path) -> list[Path]:
    """The directories of namespaces, in the root's or a seat's `blocks`. What is called like one
    and is no directory, such as a link, is not ours."""
    try:
        found = sorted(
            entry.name
            for entry in below.scan(blocks)
            if is_namespace_name(entry.name) and entry.is_dir(follow_symlinks=False)
        )
    except FileNotFoundError:
        return []
    return [blocks / name for name in found]


def shards_in(below: Below, namespace: Path) -> Iterator[os.DirEntry[str]]:
    """The directories of a namespace that are there. Something else with such a name, such as a
    link, is not ours."""
    names = frozenset(SHARDS)
    try:
        for entry in below.scan(namespace):
            if entry.name in names and entry.is_dir(follow_symlinks=False):
                yield entry
    except FileNotFoundError:
        return


def read_shard(below: Below, namespace: str | Path, shard: str) -> Iterator[BlockFile]:
    """The blocks in one of the directories of a namespace: regular files with the name of a block
    that belongs there. All else is somebody else's, and stays. Raises `OSError`, but not where
    there is no such directory, or where a file goes away meanwhile."""
    directory = f"{namespace}/{shard}"
    try:
        for entry in below.scan(directory):
            if key_at(shard, entry.name) is None:
                continue
            try:
                status = entry.stat(follow_symlinks=False)
            except FileNotFoundError:
                continue
            if stat.S_ISREG(status.st_mode):
                yield BlockFile.of(f"{directory}/{entry.name}", status)
    except FileNotFoundError:
        return


def count_blocks(below: Below, blocks: Path) -> tuple[int, int]:
    """Bytes and number of the blocks of all namespaces."""
    num_bytes = count = 0
    for namespace in namespaces_in(below, blocks):
        for shard in shards_in(below, namespace):
            for block in read_shard(below, namespace, shard.name):
                num_bytes += block.num_bytes
                count += 1
    return num_bytes, count


def measure_overhead(below: Below, root: Path, engines: Iterable[str], seats: list[Path]) -> int:
    """What everything else takes: directories, the ledger, the files that say who lives.
    `engines`: the names of the latter, and of the directories of seats. Under the ledger's lock."""
    total = os.stat(root).st_blocks * 512
    total += sum(_bytes_of(below, root / name) for name in ("ledger", "engines"))
    total += sum(_bytes_of(below, root / "engines" / name) for name in engines)
    for blocks in (root / "blocks", *(seat / "blocks" for seat in seats)):
        total += _bytes_of(below, blocks)
        for namespace in namespaces_in(below, blocks):
            total += _bytes_of(below, namespace)
            for shard in shards_in(below, namespace):
                with suppress(FileNotFoundError):  # those of seats are removed without the lock
                    total += shard.stat(follow_symlinks=False).st_blocks * 512
    return total


def _bytes_of(below: Below, path: str | Path) -> int:
    try:
        return below.lstat(path).st_blocks * 512
    except FileNotFoundError:
        return 0


def remove_directories(below: Below, namespace: Path) -> None:
    """Remove a namespace's directories, as far as there is nothing in them. Under the ledger's
    lock. The last one goes first: by it a namespace with all its directories is known."""
    for shard in reversed(SHARDS):
        with suppress(FileNotFoundError):
            try:
                below.rmdir(namespace / shard)
            except OSError as error:
                if error.errno in (errno.ENOTEMPTY, errno.ENOTDIR):
                    return  # what is there is not ours
                raise
    with suppress(OSError):
        below.rmdir(namespace)
