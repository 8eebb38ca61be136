"""Notes from an engine's ranks to its scheduler: which ranks are here, and which stores failed.

An engine may have no other way to pass them on. vLLM's offloading connector asserts that every
transfer succeeds, so a rank must report a failed store as done. Nor does the connector say whether
a rank runs on this host. Without the notes, the scheduler would serve blocks that were never
stored. The notes are in the file of the shared host memory (`region_file`), in a few pages before
the slots.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from kvtier.cpu.region_file import RegionShape

__all__ = ["NoticeBoard"]


class NoticeBoard:
    """One process's view of the board. For one thread; no method waits or does I/O.

    A rank writes a note before it reports the transfer to the engine, and the scheduler reads the
    board after that report has arrived, so it sees the note.
    """

    def __init__(self, memory: mmap.mmap, shape: RegionShape) -> None:
        """`memory`: from `RegionFile.map_board`; `close` closes it."""
        self._memory = memory
        self._num_bytes_of_tallies = 8 * shape.num_cells
        # Each rank has a tally: 0 until it signs in, then 1, plus 1 for every failure. Only that
        # rank changes it.
        self._tallies: NDArray[np.uint64] = np.frombuffer(memory, np.uint64, shape.num_cells)
        self._poisoned: NDArray[np.uint8] = np.frombuffer(
            memory, np.uint8, shape.num_blocks, offset=self._num_bytes_of_tallies
        )
        self._seen = self._tallies.tobytes()

    # --- a rank's side ------------------------------------------------------------------------

    def sign_in(self, rank: int) -> bool:
        """Record that this rank uses this memory, until it signs out.

        Returns False, and records nothing, if another process has signed in as the same rank and
        has not signed out. That process may have been killed.
        """
        if self._tallies[rank]:
            return False
        self._tallies[rank] = 1
        return True

    def sign_out(self, rank: int) -> None:
        """Record that this rank no longer uses this memory."""
        self._tallies[rank] = 0

    def poison(self, rank: int, slots: Iterable[int]) -> None:
        """Record that this rank failed to store into these slots."""
        for slot in slots:
            self._poisoned[slot] = 1
        self._tallies[rank] += np.uint64(1)

    # --- the scheduler's side -----------------------------------------------------------------

    def missing_ranks(self, world_size: int) -> list[int]:
        """The ranks from 0 to `world_size - 1` that have not signed in."""
        return np.flatnonzero(self._tallies[:world_size] == 0).tolist()

    def has_news(self) -> bool:
        """True if a slot may be poisoned, or a rank has signed in or out. The scheduler calls this
        for every completion, so it is fast."""
        return self._memory[: self._num_bytes_of_tallies] != self._seen

    def take_poisoned(self, slots: Iterable[int]) -> set[int]:
        """Return those of `slots` that are poisoned, and clear their flags.

        Call it after every rank has reported the store into these slots, and before the slots are
        reused.
        """
        # The tallies are read before the flags, so that a failure noted in between counts as news.
        tallies = self._tallies.tobytes()
        found = {slot for slot in slots if self._poisoned[slot]}
        self._poisoned[list(found)] = 0
        if not self._poisoned.any():
            self._seen = tallies
        return found

    def forget(self) -> None:
        """Clear all flags. Call it only if every store under way began before a reset."""
        self._seen = self._tallies.tobytes()
        self._poisoned[:] = 0

    def close(self) -> None:
        """Unmap the memory. Idempotent."""
        del self._tallies, self._poisoned
        self._tallies = np.zeros(0, np.uint64)
        self._poisoned = np.zeros(0, np.uint8)
        self._memory.close()
