"""A job of the disk tier while it is being carried out."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from operator import attrgetter

from kvtier.base import OffloadKey
from kvtier.cpu.policies.base import BlockStatus
from kvtier.tiering.base import TransferJob

__all__ = ["Piece", "Transfer", "Unit"]


@dataclass(slots=True, eq=False)
class Piece:
    """One block of a job."""

    key: OffloadKey
    row: int
    """The slot of the primary tier."""
    slot: int
    """The slot of the slab."""
    block: BlockStatus
    """What the tier knows of the block; for the scheduler's thread alone."""
    seq: int
    """The block's sequence number: what the slot's header says, or will say."""


@dataclass(slots=True, eq=False)
class Unit:
    """Pieces in neighbouring slots: one read or write."""

    transfer: Transfer
    pieces: Sequence[Piece]


@dataclass(slots=True, eq=False)
class Transfer:
    """A job on its way. The scheduler's thread makes it and gets it back; in between it belongs to
    the I/O threads, and its lists to whoever holds the work queue's lock."""

    job: TransferJob
    pieces: list[Piece]
    """What is to be moved. Nothing to move: the job has ended when it begins."""
    here: list[OffloadKey] = field(default_factory=list)
    """A store: blocks that need no move."""
    done: list[Piece] = field(default_factory=list)
    failed: list[Piece] = field(default_factory=list)
    """Could not be moved, or were not what they should be."""
    num_taken: int = 0
    """How many pieces are in the hands of an I/O thread, or were."""
    started: float | None = None
    """When the first piece was taken."""
    ended: float = 0.0

    def __post_init__(self) -> None:
        self.pieces.sort(key=attrgetter("slot"))  # neighbours go together

    def take_unit(self, max_pieces: int) -> Unit:
        """The next pieces to be moved by one read or write. There must be some."""
        if self.started is None:
            self.started = time.perf_counter()
        first = end = self.num_taken
        pieces = self.pieces
        last = min(len(pieces), first + max_pieces)
        while end < last and pieces[end].slot - pieces[first].slot == end - first:
            end += 1
        self.num_taken = end
        return Unit(self, pieces[first:end])

    @property
    def has_more(self) -> bool:
        return self.num_taken < len(self.pieces)

    @property
    def has_ended(self) -> bool:
        return len(self.done) + len(self.failed) == len(self.pieces)

    def give_up(self) -> None:
        """What has not been taken will not be moved."""
        rest = self.pieces[self.num_taken :]
        self.num_taken = len(self.pieces)
        self.failed += rest

    @property
    def seconds(self) -> float | None:
        return None if self.started is None else self.ended - self.started
