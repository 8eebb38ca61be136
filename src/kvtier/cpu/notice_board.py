"""What the ranks of an engine tell its scheduler past the engine: who is here, and what failed.

An engine may have no words for either. vLLM's offloading connector asserts that every transfer
succeeds, so that a store that failed in a rank's process must be reported as done; and it does not
say whether a rank is on this host at all. The scheduler must know both, or it would serve what is
not there. So the region's file has a few pages beside the rows in which each rank leaves a note.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from kvtier.cpu.region_file import RegionShape

__all__ = ["NoticeBoard"]


class NoticeBoard:
    """One process's view of the board. One thread; nothing here waits or does I/O.

    A rank writes, before it reports the transfer it writes about through the engine. The scheduler
    reads, after it has got that report. So what it reads is at least as new as the report.
    """

    def __init__(self, memory: mmap.mmap, shape: RegionShape) -> None:
        """`memory` is what `RegionFile.map_board` gives; it is closed by `close`."""
        self._memory = memory
        self._num_bytes_of_tallies = 8 * shape.num_cells
        # Each rank has a number of its own: 0 until it signs in, and one more with every failure.
        # So no two processes ever change the same one.
        self._tallies: NDArray[np.uint64] = np.frombuffer(memory, np.uint64, shape.num_cells)
        self._poisoned: NDArray[np.uint8] = np.frombuffer(
            memory, np.uint8, shape.num_blocks, offset=self._num_bytes_of_tallies
        )
        self._seen = self._tallies.tobytes()

    # --- a rank's side ------------------------------------------------------------------------

    def sign_in(self, rank: int) -> bool:
        """This rank uses this memory, until it signs out. False: another process does, as the same
        rank, or did so when it was killed."""
        if self._tallies[rank]:
            return False
        self._tallies[rank] = 1
        return True

    def sign_out(self, rank: int) -> None:
        """This rank uses this memory no longer."""
        self._tallies[rank] = 0

    def poison(self, rank: int, slots: Iterable[int]) -> None:
        """What this rank has in these slots is not what it was to store there."""
        for slot in slots:
            self._poisoned[slot] = 1
        self._tallies[rank] += np.uint64(1)

    # --- the scheduler's side -----------------------------------------------------------------

    def missing_ranks(self, world_size: int) -> list[int]:
        """Those of ranks 0 to `world_size - 1` that have not signed in."""
        return np.flatnonzero(self._tallies[:world_size] == 0).tolist()

    def has_news(self) -> bool:
        """Whether a slot may be poisoned, or a rank has come or gone. Cheap, for every
        completion."""
        return self._memory[: self._num_bytes_of_tallies] != self._seen

    def take_poisoned(self, slots: Iterable[int]) -> set[int]:
        """Those of these slots that are poisoned; they no longer are, and can be used again.

        Called when every rank has reported the store of these slots, and before they are given
        to another one.
        """
        # Before the flags: a failure that is noted meanwhile is news again.
        tallies = self._tallies.tobytes()
        found = {slot for slot in slots if self._poisoned[slot]}
        self._poisoned[list(found)] = 0
        if not self._poisoned.any():
            self._seen = tallies
        return found

    def forget(self) -> None:
        """No store is under way whose failure anybody would be told of: whatever is poisoned is of
        no interest."""
        self._seen = self._tallies.tobytes()
        self._poisoned[:] = 0

    def close(self) -> None:
        """Let go of the memory. Idempotent."""
        del self._tallies, self._poisoned
        self._tallies = np.zeros(0, np.uint64)
        self._poisoned = np.zeros(0, np.uint8)
        self._memory.close()
