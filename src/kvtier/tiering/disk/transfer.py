"""A job of the disk tier while it is being carried out."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, TypeAlias

from kvtier.base import OffloadKey
from kvtier.cpu.policies.base import WRITING, BlockStatus
from kvtier.tiering.base import TransferJob

__all__ = ["Piece", "SlabBlock", "Transfer", "Unit"]


class SlabBlock(BlockStatus):
    """A block in a slot of the slab. `block_id` is the slot, and `generation` the sequence number
    in the slot's header. Key, slot and number never change, and so may be read by any thread."""

    __slots__ = ()

    def __init__(self, slot: int, key: OffloadKey, seq: int, ref_cnt: int = WRITING) -> None:
        self.block_id = slot
        self.key = key
        self.generation = seq
        self.ref_cnt = ref_cnt
        self.place = None


Piece: TypeAlias = tuple[int, SlabBlock]
"""One block of a job: the row of the primary tier, and what the tier knows of the block."""


class Unit(NamedTuple):
    """Pieces in neighbouring slots: one read or write."""

    transfer: Transfer
    pieces: Sequence[Piece]


@dataclass(slots=True, eq=False)
class Transfer:
    """A job on its way. The scheduler's thread makes it and gets it back; in between it belongs to
    whoever holds the work queue's lock."""

    job: TransferJob
    pieces: list[Piece]
    """What is to be moved, in the order of the slots."""
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

    def take_unit(self, max_pieces: int) -> Unit:
        """The next pieces to be moved by one read or write. There must be some."""
        if self.started is None:
            self.started = time.perf_counter()
        pieces = self.pieces
        first = self.num_taken
        last = min(len(pieces), first + max_pieces)
        end = first + 1
        expected = pieces[first][1].block_id + 1
        while end < last and pieces[end][1].block_id == expected:
            end += 1
            expected += 1
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
        self.failed += self.pieces[self.num_taken :]
        self.num_taken = len(self.pieces)

    @property
    def seconds(self) -> float | None:
        return None if self.started is None else self.ended - self.started
