"""Runs: small blocks that follow each other in a prompt share an object.

A request costs money, and takes milliseconds whatever its size. So blocks below 1 MiB are stored
together, up to 4 MiB or 64 blocks of one store in an object. The object has the name of its first
block. Its header names all blocks; then they follow, each with its seal:

    magic, block bytes, header bytes, number of blocks, checksum | keys | block | block | ...

A prompt's blocks are found by following its runs: the first block names the first run, and the
block behind the part of the run that is also in this prompt names the next one. That works because
an engine stores what it did not find, and so a run begins where the blocks found before it end. A
block in the middle of a run is found by an engine that has read the run's header, or stored it;
`RunIndex` remembers that.

Only blocks of full attention are stored like this: a sliding window is looked up from its middle.
"""

from __future__ import annotations

import struct
import threading
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from xxhash import xxh3_64_intdigest

from kvtier.base import OffloadKey
from kvtier.config.engine import AttentionKind
from kvtier.seal import SealFailure

if TYPE_CHECKING:
    from kvtier.config import OffloadingConfig

__all__ = ["FIRST_READ_BYTES", "Run", "RunIndex", "blocks_per_run", "header_of", "read_header"]

_RUN_BYTES = 4 << 20
_MOST_BLOCKS = 64
_LARGE_BLOCK_BYTES = 1 << 20
"""Blocks of this size have objects of their own."""

_MAGIC, _VERSION = b"KVTRUN\x00", 1
# magic, version, bytes of a block with its seal, bytes of the header, number of blocks, checksum
_HEAD = struct.Struct("<7sBIIIQ")
_KEY_LENGTH = struct.Struct("<H")
_LONGEST_HEADER = _HEAD.size + _MOST_BLOCKS * (_KEY_LENGTH.size + 128)
FIRST_READ_BYTES = 4096
"""Enough for the header of any run with keys of vLLM's length."""
_MAX_RUNS = 4096
"""Runs that an engine remembers."""


def blocks_per_run(config: OffloadingConfig, block_bytes: int) -> int:
    """The most blocks that share an object; 1 if each has its own."""
    is_full_attention = all(group.kind is AttentionKind.FULL for group in config.groups)
    if block_bytes >= _LARGE_BLOCK_BYTES or not is_full_attention:
        return 1
    return min(_RUN_BYTES // block_bytes, _MOST_BLOCKS)


@dataclass(frozen=True, slots=True)
class Run:
    """What the header of an object says."""

    keys: tuple[OffloadKey, ...]
    block_bytes: int
    """With the seal."""
    header_bytes: int

    @property
    def first(self) -> OffloadKey:
        """Names the object."""
        return self.keys[0]

    def start_of(self, position: int) -> int:
        """Where a block begins in the object."""
        return self.header_bytes + position * self.block_bytes

    def num_matching(self, keys: Sequence[OffloadKey]) -> int:
        """How many of `keys` are here without a gap, from the first one on."""
        if not keys or keys[0] not in self.keys:
            return 0
        here = self.keys[self.keys.index(keys[0]) :]
        for count, (ours, theirs) in enumerate(zip(here, keys, strict=False)):
            if ours != theirs:
                return count
        return min(len(here), len(keys))


def header_of(keys: Sequence[OffloadKey], block_bytes: int) -> bytes:
    """The header of an object with these blocks."""
    names = b"".join(_KEY_LENGTH.pack(len(key)) + key for key in keys)
    size = _HEAD.size + len(names)
    unchecked = _HEAD.pack(_MAGIC, _VERSION, block_bytes, size, len(keys), 0)
    checksum = xxh3_64_intdigest(unchecked + names)
    return _HEAD.pack(_MAGIC, _VERSION, block_bytes, size, len(keys), checksum) + names


def read_header(content: bytes, asked: int) -> Run | int | SealFailure:
    """Read the header at the beginning of an object: the run, or how many bytes of the object are
    needed to read it, or why it is none. `asked`: how many bytes were asked for."""
    if len(content) < _HEAD.size:
        return SealFailure.NOT_SEALED
    magic, version, block_bytes, size, count, checksum = _HEAD.unpack_from(content)
    if magic != _MAGIC:
        return SealFailure.NOT_SEALED
    if version != _VERSION:
        return SealFailure.FORMAT
    if not 0 < count <= _MOST_BLOCKS or not _HEAD.size < size <= _LONGEST_HEADER:
        return SealFailure.HEADER
    if len(content) < size:
        return int(size) if asked < size else SealFailure.LENGTH
    names = content[_HEAD.size : size]
    unchecked = _HEAD.pack(magic, version, block_bytes, size, count, 0)
    if xxh3_64_intdigest(unchecked + names) != checksum:
        return SealFailure.HEADER
    keys = _keys_in(names, count)
    return SealFailure.HEADER if keys is None else Run(keys, block_bytes, size)


def _keys_in(names: bytes, count: int) -> tuple[OffloadKey, ...] | None:
    """The keys in a header; None if they do not fill it. Everyone who can write the object can
    make a checksum for any header."""
    keys = []
    at = 0
    for _ in range(count):
        start = at + _KEY_LENGTH.size
        if start > len(names):
            return None
        at = start + _KEY_LENGTH.unpack_from(names, start - _KEY_LENGTH.size)[0]
        keys.append(OffloadKey(names[start:at]))
    return tuple(keys) if at == len(names) else None


class RunIndex:
    """In which run a block is, as far as this engine has seen. Any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._runs: OrderedDict[tuple[str, OffloadKey], Run] = OrderedDict()
        self._by_block: dict[tuple[str, OffloadKey], Run] = {}

    def run_of(self, folder: str, key: OffloadKey) -> Run | None:
        return self._by_block.get((folder, key))

    def first_of(self, folder: str, key: OffloadKey) -> OffloadKey:
        """The block that names the object in which this one is, or would be."""
        run = self._by_block.get((folder, key))
        return key if run is None else run.first

    def learn(self, folder: str, run: Run) -> None:
        with self._lock:
            self._forget(folder, run.first)
            self._runs[folder, run.first] = run
            for key in run.keys:
                self._by_block[folder, key] = run
            while len(self._runs) > _MAX_RUNS:
                self._forget(*next(iter(self._runs)))

    def forget(self, folder: str, first: OffloadKey) -> None:
        """The object is gone."""
        with self._lock:
            self._forget(folder, first)

    def _forget(self, folder: str, first: OffloadKey) -> None:
        run = self._runs.pop((folder, first), None)
        for key in run.keys if run is not None else ():
            if self._by_block.get((folder, key)) is run:
                del self._by_block[folder, key]
