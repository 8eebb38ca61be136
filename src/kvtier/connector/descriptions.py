"""What routers need to know about an offloaded block besides its hash.

A `DescriptionBook` remembers it for the blocks of recent requests, and encodes it for tiers that
keep it with the block. Connectors fill the book on the scheduler thread; tiers read it on their I/O
threads.
"""

from __future__ import annotations

import json
import struct
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from kvtier.base import OffloadKey, get_offload_block_hash

__all__ = ["BlockDescription", "DescribedRun", "DescriptionBook"]

_LEAST_TOKENS = 1 << 21
"""Each of the two halves of a book holds descriptions of at least this number of tokens, at four
bytes each."""

_FORMAT = 1
# format, bytes of a hash, whether there is a parent, number of blocks, number of tokens
_HEAD = struct.Struct("<BBBxII")
_TOKEN = "I"
_TOKEN_BYTES = 4
_MOST_BLOCKS, _MOST_TOKENS = 1 << 16, 1 << 20


class BlockDescription(NamedTuple):
    """An offloaded block, or several: device blocks of one group that follow each other in a
    prompt."""

    block_hashes: list[bytes]
    """The hash of each device block. The last one is in the key of the last offloaded block."""
    parent: bytes | None
    """The hash of the device block before them; None at the start of a prompt."""
    token_ids: array[int]
    block_size: int
    """Tokens of one device block."""
    kind: str | None
    """The attention kind of the group, in the engine's words; None if it does not say."""
    window: int | None
    """Tokens of the attention window, if the group has one."""
    lora_name: str | None
    lora_id: int | None
    extra_keys: list[list[Any] | None] | None
    """As in `BlockStored`."""


@dataclass(slots=True, eq=False)
class DescribedRun:
    """Consecutive offloaded blocks of one request and one group. Made by a connector."""

    token_ids: array[int]
    """The tokens of all blocks."""
    block_hashes: Sequence[bytes]
    """The hashes of all device blocks."""
    parent: bytes | None
    blocks_per_chunk: int
    """Device blocks of one offloaded block."""
    block_size: int
    """Tokens of one device block."""
    kind: str | None
    window: int | None = None
    lora_name: str | None = None
    lora_id: int | None = None
    extra_keys: list[list[Any] | None] | None = None
    """One entry for each device block, or None if all are None."""
    _common: bytes | None = field(default=None, init=False)
    """The end of the encoded descriptions of blocks without extra keys."""

    def encoded(self, chunk: int) -> bytes:
        """The encoded description of the offloaded block at this index of the run. Takes about a
        microsecond, since tiers call it for every block that they store."""
        if self.extra_keys is not None:
            return encode(self[chunk])
        first, num, hashes = chunk * self.blocks_per_chunk, self.blocks_per_chunk, self.block_hashes
        common = self._common
        if common is None:
            common = self._common = _encode_rest(self[chunk])
        parent = hashes[first - 1] if first else self.parent
        size = self.block_size * num
        tokens = self.token_ids[chunk * size : (chunk + 1) * size].tobytes()
        last = first + num - 1
        head = _HEAD.pack(_FORMAT, len(hashes[last]), parent is not None, num, size)
        if num == 1:
            return b"".join((head, parent or b"", tokens, common))
        return b"".join((head, parent or b"", *hashes[first:last], tokens, common))

    def __getitem__(self, chunk: int) -> BlockDescription:
        """Describe the offloaded block at this index of the run."""
        return self.span(chunk, chunk + 1)

    def span(self, start: int, end: int) -> BlockDescription:
        """Describe the offloaded blocks from `start` to `end` as one."""
        first, last = start * self.blocks_per_chunk, end * self.blocks_per_chunk
        extra = None if self.extra_keys is None else self.extra_keys[first:last]
        if extra is not None and all(keys is None for keys in extra):
            extra = None
        size = self.block_size
        return BlockDescription(
            list(self.block_hashes[first:last]),
            self.block_hashes[first - 1] if first else self.parent,
            self.token_ids[first * size : last * size],
            size,
            self.kind,
            self.window,
            self.lora_name,
            self.lora_id,
            extra,
        )


class DescriptionBook:
    """Descriptions of the blocks that were added last: those of `num_tokens` tokens, or of two
    million, and at most twice as many. `add` is for the scheduler thread; any thread may call the
    other methods."""

    def __init__(self, num_tokens: int = 0) -> None:
        """`num_tokens`: tokens whose blocks fit into host memory."""
        self._most_tokens = max(num_tokens, _LEAST_TOKENS)
        # Two halves: when the newer one is full, it becomes the older one, which is dropped. So
        # old entries leave without being searched for.
        self._newer: dict[OffloadKey, tuple[DescribedRun, int]] = {}
        self._older: dict[OffloadKey, tuple[DescribedRun, int]] = {}
        self._num_tokens = 0

    def add(self, keys: Sequence[OffloadKey], run: DescribedRun) -> None:
        """Remember the blocks of a run. Takes about 0.1 µs a block."""
        self._newer.update(zip(keys, [(run, chunk) for chunk in range(len(keys))], strict=True))
        self._num_tokens += len(run.token_ids)
        if self._num_tokens > self._most_tokens:
            self._older, self._newer = self._newer, {}
            self._num_tokens = 0

    def find(self, key: OffloadKey) -> tuple[DescribedRun, int] | None:
        """The run that has a block, and the block's index in it, if that is still remembered."""
        return self._newer.get(key) or self._older.get(key)

    def describe(self, key: OffloadKey) -> bytes | None:
        """The encoded description of a block, for `read` in a later process."""
        found = self.find(key)
        if found is None:
            return None
        run, chunk = found
        return run.encoded(chunk)

    def read(self, key: OffloadKey, data: bytes) -> BlockDescription | None:
        """Decode what `describe` has returned for this key, maybe in another process. None if it
        is damaged, or in another format."""
        return decode(key, data)


def encode(block: BlockDescription) -> bytes:
    """The description as bytes."""
    hashes, tokens = block.block_hashes, block.token_ids
    has_parent = block.parent is not None
    head = _HEAD.pack(_FORMAT, len(hashes[-1]), has_parent, len(hashes), len(tokens))
    first = block.parent or b""
    return b"".join((head, first, *hashes[:-1], tokens.tobytes(), _encode_rest(block)))


def _encode_rest(block: BlockDescription) -> bytes:
    """What is not the same kind of thing for every engine, as JSON."""
    rest = {
        name: value
        for name, value in (
            ("kind", block.kind),
            ("window", block.window),
            ("lora_name", block.lora_name),
            ("lora_id", block.lora_id),
            ("extra_keys", block.extra_keys),
        )
        if value is not None
    }
    return json.dumps(rest, default=_as_json, separators=(",", ":")).encode()


def decode(key: OffloadKey, data: bytes) -> BlockDescription | None:
    """The reverse of `encode`. None if `data` is no description of the block `key`."""
    last = get_offload_block_hash(key)
    try:
        form, hash_bytes, has_parent, num_blocks, num_tokens = _HEAD.unpack_from(data)
        if form != _FORMAT or hash_bytes != len(last):
            return None
        if not 0 < num_blocks <= _MOST_BLOCKS or not 0 < num_tokens <= _MOST_TOKENS:
            return None
        if num_tokens % num_blocks:
            return None
        place = _HEAD.size
        hashes = []
        for _ in range(num_blocks - 1 + has_parent):
            hashes.append(data[place : place + hash_bytes])
            place += hash_bytes
        parent = hashes.pop(0) if has_parent else None
        tokens = array(_TOKEN)
        tokens.frombytes(data[place : place + num_tokens * _TOKEN_BYTES])
        rest = json.loads(data[place + num_tokens * _TOKEN_BYTES :], object_hook=_from_json)
        return BlockDescription(
            [*hashes, last],
            parent,
            tokens,
            num_tokens // num_blocks,
            rest.get("kind"),
            rest.get("window"),
            rest.get("lora_name"),
            rest.get("lora_id"),
            rest.get("extra_keys"),
        )
    except (struct.error, ValueError, AttributeError, RecursionError):
        return None


_BYTES = "bytes"


def _as_json(value: object) -> object:
    """Digests of prompt embeddings are bytes, which JSON does not have."""
    if isinstance(value, bytes):
        return {_BYTES: value.hex()}
    return str(value)


def _from_json(value: dict[str, Any]) -> Any:
    if value.keys() == {_BYTES}:
        return bytes.fromhex(value[_BYTES])
    return value
