"""Reads every block of an fs root and checks it, while engines may be at work."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from kvtier.base import OffloadKey
from kvtier.cli.store.fs_ledger import ledger_remark
from kvtier.cli.store.scrubbing import UNREADABLE, Scrubber, Verdict
from kvtier.cli.store.store import Scrub
from kvtier.seal import SealFailure
from kvtier.tiering.fs.below import Below
from kvtier.tiering.fs.block_file import check_block
from kvtier.tiering.fs.names import key_of
from kvtier.tiering.fs.reader import SeenNamespace, Survey
from kvtier.tiering.fs.tree import BlockFile
from kvtier.tiering.io.page import PAGE_BYTES

__all__ = ["FsScrubber"]

_NUM_TRIES = 5
_LONGEST_FILE = (1 << 30) + PAGE_BYTES
"""Longer than any block; no memory is taken for it."""
_SHOWN_STRAYS = 20
_OPEN = os.O_RDONLY | os.O_NONBLOCK
_GONE = (errno.ENOENT, errno.ESTALE)
_FORBIDDEN = (errno.EACCES, errno.EPERM)


@dataclass(frozen=True, slots=True)
class _Found:
    reason: str | None
    """Why it is damaged."""
    is_there: bool
    """Whether the file still has its name."""
    is_unchanged: bool
    """And nobody has done anything to it since."""


class FsScrubber(Scrubber):
    """One pass over a root. A block never changes once it has its name; but it may leave, and its
    file be overwritten, while it is read: then it is looked for again."""

    def __init__(
        self, root: Path, max_rate: int | None, on_progress: Callable[[int, int], None]
    ) -> None:
        super().__init__(max_rate, on_progress)
        self._root = root
        self._below = Below(root)
        self._o_direct = os.O_DIRECT

    def run(self, namespaces: Sequence[SeenNamespace]) -> Scrub:
        """Raises `OSError`."""
        blocks = [
            (block, bytes.fromhex(space.name)) for space in namespaces for block in space.blocks
        ]
        blocks.sort(key=lambda each: each[0].path)
        return self._judge_all(
            sum(block.size for block, _ in blocks),
            self._read_all(blocks, lambda each: each[0].size, lambda each: self._check(*each)),
            lambda suspects: suspects,
        )

    def remark(self, seen: Survey) -> None:
        """Say what is wrong with the root itself."""
        remarks = self._scrub.remarks
        for stray in seen.strays[:_SHOWN_STRAYS]:
            where = os.path.relpath(stray.path, self._root)
            remarks.append(f"{where} is no block, nor anything else of an fs tier: remove it")
        if len(seen.strays) > _SHOWN_STRAYS:
            remarks.append(f"{len(seen.strays) - _SHOWN_STRAYS} more such files")
        if not seen.seats and (remark := ledger_remark(seen)) is not None:
            remarks.append(remark)

    # --- on a thread of the pool ---------------------------------------------------------------

    def _check(self, block: BlockFile, fingerprint: bytes) -> list[Verdict]:
        key = key_of(block.name)
        assert key is not None
        place = os.path.relpath(block.path, self._root)
        try:
            found = self._look(block.path, key, fingerprint)
            for _ in range(_NUM_TRIES):
                if found.reason is None or found.is_unchanged:
                    break
                found = self._look(block.path, key, fingerprint)
        except OSError as error:
            if error.errno in _GONE:
                return [Verdict(place, key, is_gone=True)]
            if error.errno in _FORBIDDEN:
                return [Verdict(place, key, is_forbidden=True)]
            return [Verdict(place, key, UNREADABLE)]
        if found.reason is not None and not found.is_there:
            return [Verdict(place, key, is_gone=True)]
        return [Verdict(place, key, found.reason)]

    def _look(self, path: str, key: OffloadKey, fingerprint: bytes) -> _Found:
        """Raises `OSError`."""
        fd = self._open(path)
        try:
            before = os.fstat(fd)
            reason = self._reason(fd, before, key, fingerprint)
            now = self._below.lstat(path) if reason is not None else before
        finally:
            os.close(fd)
        is_there = os.path.samestat(before, now)
        return _Found(reason, is_there, is_there and before.st_ctime_ns == now.st_ctime_ns)

    def _open(self, path: str) -> int:
        """Past the page cache where that can be done: what is read once would only drive others out
        of it."""
        try:
            return self._below.open(path, _OPEN | self._o_direct)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            self._o_direct = 0
            return self._below.open(path, _OPEN)

    def _reason(
        self, fd: int, status: os.stat_result, key: OffloadKey, fingerprint: bytes
    ) -> str | None:
        size = status.st_size
        if not PAGE_BYTES <= size <= _LONGEST_FILE:
            return SealFailure.LENGTH
        memory = self._buffer(-(-size // PAGE_BYTES) * PAGE_BYTES)
        if os.preadv(fd, [memory], 0) != size:
            return SealFailure.LENGTH
        return check_block(memory[:PAGE_BYTES], memory[PAGE_BYTES:size], key, fingerprint)
