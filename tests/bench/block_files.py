"""The files of a tier that keeps each block in one, as a benchmark treats them between rounds."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

SPARE_BYTES = 1 << 30


class BlockFiles:
    """Files that the tier itself never removes."""

    def __init__(self, path_of: Callable[[Any], str], block_bytes: int, is_direct: bool) -> None:
        """`is_direct`: the tier bypasses the page cache."""
        self._path_of = path_of
        self._block_bytes = block_bytes
        self._is_direct = is_direct
        self._doomed: list[Any] = []

    def forget(self, keys: list[Any]) -> None:
        """Remove blocks, when there are many of them; the directories stay, as they would in a
        store that has been in use for a while."""
        self._doomed.extend(keys)
        if len(self._doomed) * self._block_bytes > SPARE_BYTES:
            for key in self._doomed:
                os.unlink(self._path_of(key))
            self._doomed.clear()
            os.sync()  # or the next in turn would wait for it

    def cool(self, keys: list[Any]) -> None:
        """Let them be read from the disk."""
        if self._is_direct:  # then nothing was ever in the page cache
            return
        for key in keys:
            fd = os.open(self._path_of(key), os.O_RDONLY)
            try:
                os.fsync(fd)
                os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            finally:
                os.close(fd)
