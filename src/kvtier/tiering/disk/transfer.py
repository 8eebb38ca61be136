"""A block in the slab, and a job of the disk tier while it is being carried out."""

from __future__ import annotations

from kvtier.base import OffloadKey
from kvtier.cpu.policies.base import WRITING, BlockStatus
from kvtier.tiering.io.transfer import Transfer

__all__ = ["SlabBlock", "SlabTransfer"]


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


class SlabTransfer(Transfer[SlabBlock]):
    """Moves blocks in the order of their slots; those in neighbouring slots go together."""

    __slots__ = ()

    def _unit_end(self, first: int, last: int) -> int:
        pieces = self.pieces
        end = first + 1
        expected = pieces[first][1].block_id + 1
        while end < last and pieces[end][1].block_id == expected:
            end += 1
            expected += 1
        return end
