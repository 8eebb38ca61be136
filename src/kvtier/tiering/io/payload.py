"""The bytes of a block on their way between a file and a row of the primary tier."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

__all__ = ["Payload"]

_LONG_BYTES = 256 << 10
"""To copy less takes no longer than to let go of the interpreter and get it back."""


class Payload(NamedTuple):
    """One block's. On the thread of a lane."""

    memory: memoryview
    """What is read from the file or written to it: a buffer of the lane's, or the row itself."""
    row: memoryview

    def collect(self) -> None:
        """Have `memory` hold what is in the row: the block is about to be written."""
        self._copy(self.memory, self.row)

    def deliver(self) -> None:
        """Have the row hold what is in `memory`: the block was read, and is what it should be."""
        self._copy(self.row, self.memory)

    def _copy(self, target: memoryview, source: memoryview) -> None:
        if self.memory is self.row:
            return
        if len(source) < _LONG_BYTES:
            target[:] = source
        else:
            np.copyto(np.frombuffer(target, np.uint8), np.frombuffer(source, np.uint8))
