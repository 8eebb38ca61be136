"""Reads every block of an fs root and checks it, while engines may be at work."""

from __future__ import annotations

import errno
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from kvtier.base import OffloadKey
from kvtier.seal import SealFailure
from kvtier.tiering.fs.access import NoFollowTree
from kvtier.tiering.fs.layout import BlockFile, check_block, key_of
from kvtier.tiering.fs.survey import SeenNamespace
from kvtier.tiering.inspection import Progress, Scrub
from kvtier.tiering.io.page import PAGE_BYTES
from kvtier.tiering.scrubber import UNREADABLE, Scrubber, Verdict

__all__ = ["FsScrubber"]

_NUM_TRIES = 5
_LONGEST_FILE = (1 << 30) + PAGE_BYTES
"""No block is longer. A longer file is damaged, and no memory is allocated for it."""
_OPEN = os.O_RDONLY | os.O_NONBLOCK
_GONE = (errno.ENOENT, errno.ESTALE)
_FORBIDDEN = (errno.EACCES, errno.EPERM)


@dataclass(frozen=True, slots=True)
class _Found:
    reason: str | None
    """What is wrong with the bytes that were read; None if they are intact."""
    is_there: bool
    """True if the name still belongs to the file that was read. Not checked, but True, if the bytes
    are intact."""
    is_unchanged: bool
    """True if `is_there`, and the file has not changed since it was opened."""


class FsScrubber(Scrubber):
    """One pass over a root. A block never changes after it was published, but an engine may evict
    it and overwrite its file during the read. If a block seems damaged, and its file was changed or
    replaced during the read, the block is read again, at most five times."""

    def __init__(self, root: Path, max_rate: int | None, on_progress: Progress) -> None:
        super().__init__(max_rate, on_progress)
        self._root = root
        self._tree = NoFollowTree(root)
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
            now = self._tree.lstat(path) if reason is not None else before
        finally:
            os.close(fd)
        is_there = os.path.samestat(before, now)
        return _Found(reason, is_there, is_there and before.st_ctime_ns == now.st_ctime_ns)

    def _open(self, path: str) -> int:
        """Open a file so that reads bypass the page cache, if the file system allows it: the scrub
        reads each block once, and would only push out pages that engines use."""
        try:
            return self._tree.open(path, _OPEN | self._o_direct)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            self._o_direct = 0
            return self._tree.open(path, _OPEN)

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
