"""Reads request traces: Mooncake's JSON lines, and numpy archives with a tree of blocks.

Both may be compressed with xz. The content decides which form a file has, not its name. Requests
are read one at a time. A prompt's trailing tokens that fill no whole block are dropped from its
blocks, because engines share whole blocks only; they still count as prompt tokens.
"""

from __future__ import annotations

import io
import json
import lzma
import os
import re
import stat
import zipfile
import zlib
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import IO, Any, NamedTuple, cast

import numpy as np
from numpy.typing import NDArray

from kvtier.base import OffloadKey, make_offload_key

__all__ = ["DEFAULT_BLOCK_TOKENS", "Request", "Trace", "TraceError", "open_trace"]

DEFAULT_BLOCK_TOKENS = 512
"""Tokens per block in the traces that Mooncake has published."""

_LONGEST_LINE = 64 << 20
_LARGEST_ID = 2**64 - 1
_LARGEST_NUMBER = 10**15
"""Of tokens, and of milliseconds: 30,000 years."""
_XZ, _ZIP = b"\xfd7zXZ\x00", b"PK\x03\x04"
_RECORDED = b'{"kvtier_recording":'
_TIMESTAMP = re.compile(rb'{"timestamp":(\d{1,15}),')
_NPZ_ERRORS = (
    zipfile.BadZipFile,
    zlib.error,
    OSError,
    ValueError,
    KeyError,
    EOFError,
    RuntimeError,  # encrypted
    NotImplementedError,  # compressed in a way that Python does not know
    MemoryError,  # a size that is damaged
)
"""What a damaged archive can end in."""
_REMEMBERED_PROMPTS = 1024
"""Prompts whose blocks are kept, so that a later prompt that continues one need not be walked."""
_FORMS = (
    "give a JSONL file in Mooncake's form or an npz archive, plain or with .xz; docs/replay.md "
    "describes both"
)


class TraceError(ValueError):
    """The file is not a trace. The message names the file, the line or array, and the remedy."""


class Request(NamedTuple):
    """One request of a trace."""

    arrives_s: float
    """Seconds since the start of the trace."""
    prompt_tokens: int
    output_tokens: int
    keys: list[OffloadKey]
    """The whole blocks of the prompt, in order. Equal keys mean equal prompts up to their end."""


class Trace(ABC):
    """An open trace. `requests` can be called once."""

    def __init__(self, name: str, block_tokens: int) -> None:
        self.name = name
        self.block_tokens = block_tokens

    @abstractmethod
    def requests(self) -> Iterator[Request]:
        """The requests, in order of arrival. Raises `TraceError` at the first invalid one."""

    @abstractmethod
    def progress(self) -> tuple[int, int]:
        """What was read, and all there is to read, in the same unit."""


@contextmanager
def open_trace(path: str, block_tokens: int | None = None) -> Iterator[Trace]:
    """Open a trace. `block_tokens`: tokens per block; None: what the file says, or else 512.

    Raises `TraceError`, and `OSError` if the file cannot be opened.
    """
    with ExitStack() as stack:
        raw = stack.enter_context(open(path, "rb"))
        status = os.fstat(raw.fileno())
        if not stat.S_ISREG(status.st_mode):
            raise TraceError(f"{path} is not a regular file: save the trace in a file first")
        if status.st_size == 0:
            raise TraceError(f"{path} is empty: {_FORMS}")
        data: IO[bytes] = raw
        if raw.read(len(_XZ)) == _XZ:
            raw.seek(0)
            data = cast("IO[bytes]", stack.enter_context(lzma.open(raw)))
        else:
            raw.seek(0)
        with _damage_explained(path):
            head = data.read(len(_ZIP))
            data.seek(0)
        if head == _ZIP:
            with _damage_explained(path):
                content = io.BytesIO(data.read())
            yield _BlockTree(path, content, block_tokens)
        else:
            with _damage_explained(path):
                is_recording = data.read(len(_RECORDED)) == _RECORDED
                data.seek(0)
            if is_recording:
                yield _Recording(path, data, raw, status.st_size, block_tokens)
            else:
                tokens = block_tokens or DEFAULT_BLOCK_TOKENS
                yield _JsonLines(path, data, raw, status.st_size, tokens)


@contextmanager
def _damage_explained(path: str) -> Iterator[None]:
    try:
        yield
    except (lzma.LZMAError, EOFError) as error:
        raise TraceError(f"{path} is damaged or cut off ({error}): get the file again") from None


# --- Mooncake's form: one JSON object in each line ---------------------------------------------


class _KeysById(dict[int, OffloadKey]):
    """One key object for each block id. Python caches the hash of each object."""

    def __missing__(self, block_id: int) -> OffloadKey:
        if not 0 <= block_id <= _LARGEST_ID:
            raise _Unfit(f"hash_ids has {block_id}: ids are from 0 to {_LARGEST_ID}")
        key = self[block_id] = make_offload_key(block_id.to_bytes(8, "big"), 0)
        return key


class _Unfit(Exception):
    """A request is not valid. The message says why."""


class _JsonLines(Trace):
    def __init__(
        self, name: str, data: IO[bytes], raw: IO[bytes], size: int, block_tokens: int
    ) -> None:
        super().__init__(name, block_tokens)
        self._data, self._raw, self._size = data, raw, size
        self._keys = _KeysById()

    def progress(self) -> tuple[int, int]:
        return min(self._raw.tell(), self._size), self._size

    def requests(self) -> Iterator[Request]:
        number, last_ms, is_empty = 0, 0.0, True
        while line := self._next_line(number + 1):
            number += 1
            if line.isspace():
                continue
            is_empty = False
            try:
                request, last_ms = self._parse(line, last_ms)
            except _Unfit as unfit:
                raise TraceError(f"{self.name}, line {number}: {unfit}") from None
            yield request
        if is_empty:
            raise TraceError(f"{self.name} has no requests: {_FORMS}")

    def _next_line(self, number: int) -> bytes:
        with _damage_explained(self.name):
            line = self._data.readline(_LONGEST_LINE + 1)
        if len(line) > _LONGEST_LINE:
            raise TraceError(
                f"{self.name}, line {number} is longer than {_LONGEST_LINE >> 20} MiB: {_FORMS}"
            )
        return line

    def _parse(self, line: bytes, last_ms: float) -> tuple[Request, float]:
        try:
            record = json.loads(line)
        except (ValueError, RecursionError):
            raise _Unfit(f"this is not JSON; {_FORMS}") from None
        if not isinstance(record, dict):
            raise _Unfit(f"this is not a JSON object; {_FORMS}")
        arrives_ms = _field(record, "timestamp", (int, float))
        prompt_tokens = _field(record, "input_length", (int,))
        output_tokens = _field(record, "output_length", (int,))
        if arrives_ms < last_ms:
            raise _Unfit(
                f"timestamp {arrives_ms} comes after {last_ms:g}: sort the lines by timestamp"
            )
        keys = self._keys_of(record, prompt_tokens)
        return Request(arrives_ms / 1000, prompt_tokens, output_tokens, keys), arrives_ms

    def _keys_of(self, record: dict[str, Any], prompt_tokens: int) -> list[OffloadKey]:
        ids = record.get("hash_ids")
        if not isinstance(ids, list) or not set(map(type, ids)) <= {int}:
            raise _Unfit("hash_ids must be a list of whole numbers, one for each block")
        num_whole, rest = divmod(prompt_tokens, self.block_tokens)
        if not num_whole <= len(ids) <= num_whole + bool(rest):
            raise _Unfit(
                f"{len(ids)} hash_ids for {prompt_tokens} tokens, but blocks of "
                f"{self.block_tokens} tokens would be {num_whole + bool(rest)}: give the size of "
                "the trace's blocks with --block-tokens"
            )
        del ids[num_whole:]
        if len(set(ids)) < len(ids):
            raise _Unfit("hash_ids has an id twice: the blocks of one prompt all differ")
        return list(map(self._keys.__getitem__, ids))


class _Recording(_JsonLines):
    """What an engine has written with `record_trace`. The first line describes the engine. The
    others are in order of the requests' ends, so all are read before the first request. The last
    one may be cut off, if the engine was killed."""

    def __init__(
        self, name: str, data: IO[bytes], raw: IO[bytes], size: int, block_tokens: int | None
    ) -> None:
        super().__init__(name, data, raw, size, DEFAULT_BLOCK_TOKENS)
        try:
            self.block_tokens = _field(json.loads(self._next_line(1)), "block_tokens", (int,))
            if not self.block_tokens:
                raise ValueError
        except (ValueError, RecursionError, _Unfit):
            raise TraceError(f"{name}, line 1 is damaged: get the file again") from None
        if block_tokens not in (None, self.block_tokens):
            raise TraceError(
                f"{name} has blocks of {self.block_tokens} tokens, not {block_tokens}: leave "
                "--block-tokens out"
            )

    def requests(self) -> Iterator[Request]:
        lines: list[tuple[int, int, bytes]] = []
        number = 1
        while (line := self._next_line(number + 1)).endswith(b"\n"):
            number += 1
            timestamp = _TIMESTAMP.match(line)
            if timestamp is None:
                raise TraceError(f"{self.name}, line {number} is damaged: get the file again")
            lines.append((int(timestamp[1]), number, line))
        if not lines:
            raise TraceError(f"{self.name} has no requests: let the engine serve some first")
        lines.sort(reverse=True)
        while lines:
            _, number, line = lines.pop()
            try:
                yield self._parse(line, 0.0)[0]
            except _Unfit as unfit:
                raise TraceError(f"{self.name}, line {number}: {unfit}") from None


def _field(record: dict[str, Any], name: str, types: tuple[type, ...]) -> Any:
    if name not in record:
        raise _Unfit(f"{name} is missing; {_FORMS}")
    value = record[name]
    if type(value) not in types or not 0 <= value <= _LARGEST_NUMBER:  # nor NaN
        kind = "a whole number" if types == (int,) else "a number"
        raise _Unfit(f"{name} is {json.dumps(value)[:40]}: write {kind}, from 0 to 1e15")
    return value


# --- the npz form: a tree of blocks -------------------------------------------------------------


class _BlockTree(Trace):
    """Arrays `ts`, `tin`, `tout`, `leaf` with one entry for each request; `dparent` with one for
    each block: how far before it its parent is, 0 for a first block; `bs`: tokens per block."""

    def __init__(self, name: str, content: io.BytesIO, block_tokens: int | None) -> None:
        arrays = self._load(name, content)
        super().__init__(name, int(arrays["bs"]))
        if block_tokens is not None and block_tokens != self.block_tokens:
            raise TraceError(
                f"{name} has blocks of {self.block_tokens} tokens, not {block_tokens}: leave "
                "--block-tokens out"
            )
        self._check(arrays)
        self._arrives_s = arrays["ts"].tolist()
        self._prompt_tokens = arrays["tin"].tolist()
        self._output_tokens = arrays["tout"].tolist()
        self._leaf = arrays["leaf"].tolist()
        to_parent = arrays["dparent"].astype(np.int64)
        self._parent: list[int] = (np.arange(len(to_parent)) - to_parent).tolist()
        """A first block is its own parent."""
        self._num_read = 0

    @staticmethod
    def _load(name: str, content: io.BytesIO) -> dict[str, NDArray[Any]]:
        wanted = ("ts", "tin", "tout", "leaf", "dparent", "bs")
        try:
            with np.load(content, allow_pickle=False) as archive:
                missing = [array for array in wanted if array not in archive.files]
                if missing:
                    raise TraceError(f"{name} has no array {' and no array '.join(missing)}")
                arrays = {array: archive[array] for array in wanted}
        except TraceError:
            raise
        except _NPZ_ERRORS as error:
            raise TraceError(f"{name} cannot be read as an npz archive ({error})") from None
        for array, values in arrays.items():
            kinds = "iuf" if array == "ts" else "iu"
            if values.dtype.kind not in kinds or values.ndim != (array != "bs"):
                raise TraceError(
                    f"{name}, array {array}: {values.ndim} dimensions of {values.dtype}; "
                    "docs/replay.md describes the arrays"
                )
        return arrays

    def _check(self, arrays: dict[str, NDArray[Any]]) -> None:
        ts, leaf, dparent = arrays["ts"], arrays["leaf"], arrays["dparent"]
        problems = {
            "bs": self.block_tokens < 1 and "tokens per block must be at least 1",
            "ts": not (np.abs(ts) <= _LARGEST_NUMBER / 1000).all()
            and "times must be numbers of seconds, up to 1e12",
            "leaf": len(leaf)
            and not (leaf.min() >= 0 and leaf.max() < len(dparent))
            and f"blocks must be from 0 to {len(dparent) - 1}, the blocks in dparent",
            "dparent": len(dparent)
            and not ((dparent >= 0).all() and (dparent <= np.arange(len(dparent))).all())
            and "a parent must be an earlier block",
            "tin": (arrays["tin"] < 0).any() and "tokens must be 0 or more",
            "tout": (arrays["tout"] < 0).any() and "tokens must be 0 or more",
        }
        for array, problem in problems.items():
            if problem:
                raise TraceError(f"{self.name}, array {array}: {problem}")
        if not (np.diff(ts) >= 0).all() or (len(ts) and ts[0] < 0):
            raise TraceError(f"{self.name}, array ts: sort the requests by time, from 0 on")
        lengths = {array: len(arrays[array]) for array in ("ts", "tin", "tout", "leaf")}
        if len(set(lengths.values())) > 1:
            raise TraceError(f"{self.name}: {lengths}: give one entry for each request")
        if not len(ts):
            raise TraceError(f"{self.name} has no requests: {_FORMS}")

    def progress(self) -> tuple[int, int]:
        return self._num_read, len(self._leaf)

    def requests(self) -> Iterator[Request]:
        prompts: OrderedDict[int, list[OffloadKey]] = OrderedDict()
        keys: list[OffloadKey] = [
            make_offload_key(block.to_bytes(8, "big"), 0) for block in range(len(self._parent))
        ]
        parent = self._parent
        for n, leaf in enumerate(self._leaf):
            block, tail = leaf, []
            while block not in prompts:
                tail.append(keys[block])
                if parent[block] == block:
                    break
                block = parent[block]
            tail.reverse()
            prompt = prompts[block] + tail if block in prompts else tail
            prompts[leaf] = prompt
            prompts.move_to_end(leaf)
            if len(prompts) > _REMEMBERED_PROMPTS:
                prompts.popitem(last=False)
            if len(prompt) * self.block_tokens > self._prompt_tokens[n]:
                raise TraceError(
                    f"{self.name}, request {n}: {len(prompt)} blocks of {self.block_tokens} "
                    f"tokens, but tin has only {self._prompt_tokens[n]} tokens"
                )
            self._num_read = n + 1
            yield Request(
                self._arrives_s[n], self._prompt_tokens[n], self._output_tokens[n], prompt
            )
