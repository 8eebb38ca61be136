"""The layout of a root directory and of a block's file, and the bytes that they take on the disk.

ledger                        how many bytes the blocks take, and what each engine reserved
engines/<engine>.alive        locked by an engine for as long as it lives (`presence`)
engines/<engine>/             that engine's staging directory (`presence`)
blocks/<fingerprint>/<00 to ff>/<key>       the blocks
blocks/<fingerprint>/.made-of.json          what the namespace is made of

The directories 00 to ff of a namespace are its shards. A hash of the block's key selects the shard.
Names are encoded, so no fingerprint or key can lead out of the root. Engines and commands never
touch a file that does not match this layout.
"""

from __future__ import annotations

import base64
import binascii
import errno
import os
import re
import stat
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from xxhash import xxh3_64_intdigest

from kvtier import seal
from kvtier.base import OffloadKey
from kvtier.config.namespace import DESCRIPTION_BYTES, NamespaceDescription
from kvtier.tiering.io.page import BODY_BYTES, PAGE_BYTES, close_page, is_intact

if TYPE_CHECKING:
    from kvtier.seal.keys import SealKeys
    from kvtier.tiering.fs.access import NoFollowTree

__all__ = [
    "DESCRIPTION_FILE",
    "LONGEST_KEY",
    "SHARDS",
    "BlockFile",
    "block_file_bytes",
    "block_name",
    "block_path",
    "bytes_taken",
    "check_block",
    "count_blocks",
    "is_engine_name",
    "is_namespace_name",
    "key_at",
    "key_of",
    "measure_overhead",
    "namespace_path",
    "namespaces_in",
    "read_description",
    "read_shard",
    "remove_directories",
    "shards_in",
    "write_header",
]

SHARDS = tuple(f"{number:02x}" for number in range(256))
LONGEST_KEY = 128
"""Bytes. A seal has no room for a longer key."""
DESCRIPTION_FILE = ".made-of.json"
"""The name is hidden, so that earlier releases do not take the file for one that somebody put
there."""
_LONGEST_AS_HEX = 120
_LONG_MARK = "_"  # no hex digit
_HEX_16 = re.compile("[0-9a-f]{32}")
_PADDING = bytes(BODY_BYTES - seal.SEAL_BYTES)


# --- names -------------------------------------------------------------------------------------


def namespace_path(blocks: Path, fingerprint: bytes) -> Path:
    """The directory of a namespace. `blocks`: the directory `blocks` in the root or, for the
    private blocks of an engine, in its staging directory."""
    return blocks / fingerprint.hex()


def block_path(namespace: str, key: OffloadKey) -> str:
    """The path of a block's file, given the directory of its namespace."""
    return f"{namespace}/{SHARDS[xxh3_64_intdigest(key) % len(SHARDS)]}/{block_name(key)}"


def block_name(key: OffloadKey) -> str:
    if 0 < len(key) <= _LONGEST_AS_HEX:
        return key.hex()
    # A file name has 1 to 255 bytes: hex would be too long here, or empty.
    return _LONG_MARK + base64.urlsafe_b64encode(key).decode()


def key_of(name: str) -> OffloadKey | None:
    """The key of the block with this file name; None if `block_name` never makes this name."""
    try:
        if name.startswith(_LONG_MARK):
            key = OffloadKey(base64.b64decode(name[1:], altchars=b"-_", validate=True))
        else:
            key = OffloadKey(bytes.fromhex(name))
    except (ValueError, binascii.Error):
        return None
    return key if block_name(key) == name else None


def key_at(shard: str, name: str) -> OffloadKey | None:
    """Like `key_of`; also None if a block with this name belongs in another shard."""
    key = key_of(name)
    if key is None or SHARDS[xxh3_64_intdigest(key) % len(SHARDS)] != shard:
        return None
    return key


def is_namespace_name(name: str) -> bool:
    return _HEX_16.fullmatch(name) is not None


def is_engine_name(name: str) -> bool:
    return _HEX_16.fullmatch(name) is not None


# --- one block file: a header page with the seal, then the payload -----------------------------


def block_file_bytes(payload_bytes: int) -> int:
    """The length of a block's file."""
    return PAGE_BYTES + payload_bytes


def write_header(page: memoryview, block_seal: bytes) -> None:
    """Fill the header page of a block. Overwrites the whole page."""
    page[:BODY_BYTES] = block_seal + _PADDING
    close_page(page)


def check_block(
    page: memoryview,
    payload: memoryview,
    key: OffloadKey,
    fingerprint: bytes,
    keys: SealKeys | None = None,
) -> seal.SealFailure | None:
    """None if this is the block of `key` under `fingerprint`; otherwise what does not match."""
    failure = seal.check(page, payload, key, fingerprint, keys)
    if failure is None and not is_intact(page):
        return seal.SealFailure.HEADER
    return failure


class BlockFile(NamedTuple):
    """A block's file as it was when its directory was read."""

    path: str
    used_ns: int
    """Time of the last use (the file's mtime), in nanoseconds since 1970."""
    num_bytes: int
    """Bytes on the disk, as `du` counts them."""
    size: int
    """Length of the file."""

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
    """Bytes of a block's file on the disk, as `du` counts them; at least its length, since some
    file systems allocate late and report almost nothing until then."""
    return max(status.st_blocks * 512, status.st_size)


# --- directories -------------------------------------------------------------------------------


def namespaces_in(tree: NoFollowTree, blocks: Path) -> list[Path]:
    """The directories of namespaces in a `blocks` directory. Anything else with such a name, for
    example a link, is left out."""
    try:
        found = sorted(
            entry.name
            for entry in tree.scan(blocks)
            if is_namespace_name(entry.name) and entry.is_dir(follow_symlinks=False)
        )
    except FileNotFoundError:
        return []
    return [blocks / name for name in found]


def shards_in(tree: NoFollowTree, namespace: Path) -> Iterator[os.DirEntry[str]]:
    """The shard directories that exist in a namespace. Anything else with such a name, for example
    a link, is left out."""
    names = frozenset(SHARDS)
    try:
        for entry in tree.scan(namespace):
            if entry.name in names and entry.is_dir(follow_symlinks=False):
                yield entry
    except FileNotFoundError:
        return


def read_shard(tree: NoFollowTree, namespace: str | Path, shard: str) -> Iterator[BlockFile]:
    """The blocks in one shard: regular files with the name of a block that belongs there. Skips
    files that disappear meanwhile; yields nothing if the directory is missing. Raises `OSError` for
    anything else."""
    directory = f"{namespace}/{shard}"
    try:
        for entry in tree.scan(directory):
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


def count_blocks(tree: NoFollowTree, blocks: Path) -> tuple[int, int]:
    """Bytes and number of the blocks in all namespaces of a `blocks` directory."""
    num_bytes = count = 0
    for namespace in namespaces_in(tree, blocks):
        for shard in shards_in(tree, namespace):
            for block in read_shard(tree, namespace, shard.name):
                num_bytes += block.num_bytes
                count += 1
    return num_bytes, count


def read_description(tree: NoFollowTree, namespace: Path) -> NamespaceDescription | None:
    """What a namespace is made of; None if there is no description, or it cannot be read."""
    try:
        fd = tree.open(namespace / DESCRIPTION_FILE, os.O_RDONLY | os.O_NONBLOCK)
        try:
            is_file = stat.S_ISREG(os.fstat(fd).st_mode)
            content = os.pread(fd, DESCRIPTION_BYTES + 1, 0) if is_file else b""
        finally:
            os.close(fd)
    except OSError:
        return None
    return NamespaceDescription.decode(content, namespace.name)


def measure_overhead(
    tree: NoFollowTree, root: Path, engine_entries: Iterable[str], staging: Iterable[Path]
) -> int:
    """Bytes of everything except the files of blocks: directories, the ledger, `.alive` files.
    `engine_entries`: the names in `engines` that belong to engines. `staging`: the staging
    directories of the engines with an account in the ledger. Called under the ledger's lock."""
    total = os.stat(root).st_blocks * 512
    total += sum(_bytes_of(tree, root / name) for name in ("ledger", "engines"))
    total += sum(_bytes_of(tree, root / "engines" / name) for name in engine_entries)
    for blocks in (root / "blocks", *(directory / "blocks" for directory in staging)):
        total += _bytes_of(tree, blocks)
        for namespace in namespaces_in(tree, blocks):
            total += _bytes_of(tree, namespace) + _bytes_of(tree, namespace / DESCRIPTION_FILE)
            for shard in shards_in(tree, namespace):
                with suppress(FileNotFoundError):  # private shards are removed without the lock
                    total += shard.stat(follow_symlinks=False).st_blocks * 512
    return total


def _bytes_of(tree: NoFollowTree, path: str | Path) -> int:
    try:
        return tree.lstat(path).st_blocks * 512
    except FileNotFoundError:
        return 0


def remove_directories(tree: NoFollowTree, namespace: Path) -> None:
    """Remove the directories of a namespace, up to the first that is not empty. Called under the
    ledger's lock, except for private namespaces. Removes the last shard first, because a namespace
    that has its last shard is taken to have all of them."""
    for shard in reversed(SHARDS):
        with suppress(FileNotFoundError):
            try:
                tree.rmdir(namespace / shard)
            except OSError as error:
                if error.errno in (errno.ENOTEMPTY, errno.ENOTDIR):
                    return  # it holds new blocks or foreign files, or is no directory
                raise
    with suppress(OSError):
        tree.unlink(namespace / DESCRIPTION_FILE)
    with suppress(OSError):
        tree.rmdir(namespace)
