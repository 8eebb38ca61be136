"""A job of a tier while it is being carried out."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Generic, NamedTuple, TypeAlias, TypeVar

from kvtier.base import OffloadKey
from kvtier.tiering.base import TransferJob

__all__ = ["Piece", "Transfer", "Unit"]

B = TypeVar("B")
"""What the tier knows of a block."""

Piece: TypeAlias = tuple[int, B]
"""One block of a job: the row of the primary tier, and what the tier knows of the block."""


class Unit(NamedTuple, Generic[B]):
    """Pieces that lie side by side: one read or write."""

    transfer: Transfer[B]
    pieces: Sequence[Piece[B]]


@dataclass(slots=True, eq=False)
class Transfer(Generic[B]):
    """A job on its way. The scheduler's thread makes it and gets it back; in between it belongs to
    whoever holds the work queue's lock."""

    job: TransferJob
    pieces: list[Piece[B]]
    """What is to be moved, in this order."""
    here: list[OffloadKey] = field(default_factory=list)
    """A store: blocks that need no move."""
    done: list[Piece[B]] = field(default_factory=list)
    failed: list[Piece[B]] = field(default_factory=list)
    """Could not be moved, or were not what they should be."""
    num_taken: int = 0
    """How many pieces are in the hands of an I/O thread, or were."""
    started: float | None = None
    """When the first piece was taken."""
    ended: float = 0.0

    def take_unit(self, max_pieces: int) -> Unit[B]:
        """The next pieces to be moved by one read or write. There must be some."""
        if self.started is None:
            self.started = time.perf_counter()
        first = self.num_taken
        self.num_taken = self._unit_end(first, min(len(self.pieces), first + max_pieces))
        return Unit(self, self.pieces[first : self.num_taken])

    def _unit_end(self, first: int, last: int) -> int:
        """Where the unit that begins with piece `first` ends: after it, and not after `last`. For
        tiers that know which pieces lie side by side; here all do."""
        return last

    @property
    def has_more(self) -> bool:
        return self.num_taken < len(self.pieces)

    @property
    def has_ended(self) -> bool:
        return len(self.done) + len(self.failed) == len(self.pieces)

    def give_up(self) -> None:
        """What has not been taken will not be moved."""
        self.failed += self.pieces[self.num_taken :]
        self.num_taken = len(self.pieces)

    @property
    def seconds(self) -> float | None:
        return None if self.started is None else self.ended - self.started
