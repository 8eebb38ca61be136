"""What goes to the disk by one read or write: neighbours, up to a size."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from kvtier.base import OffloadKey, ReqContext
from kvtier.tiering.base import TransferJob
from kvtier.tiering.disk.transfer import SlabBlock, SlabTransfer


def transfer(*slots: int) -> SlabTransfer:
    keys = [OffloadKey(b"%d" % slot) for slot in slots]
    job = TransferJob(1, keys, np.arange(len(keys)), True, ReqContext("request"))
    blocks = zip(slots, keys, strict=True)
    return SlabTransfer(
        job, [(row, SlabBlock(slot, key, 1)) for row, (slot, key) in enumerate(blocks)]
    )


def units_of(transfer: SlabTransfer, max_pieces: int) -> list[list[int]]:
    units = []
    while transfer.has_more:
        unit = transfer.take_unit(max_pieces)
        assert unit.transfer is transfer
        units.append([block.block_id for _, block in unit.pieces])
    return units


def test_neighbours_go_together_up_to_a_size() -> None:
    assert units_of(transfer(0, 1, 2, 3, 4, 8, 9, 11), 3) == [[0, 1, 2], [3, 4], [8, 9], [11]]


@given(slots=st.lists(st.integers(0, 20), unique=True), max_pieces=st.integers(1, 5))
def test_every_piece_is_in_one_unit_of_neighbours(slots: list[int], max_pieces: int) -> None:
    units = units_of(transfer(*slots), max_pieces)
    assert [slot for unit in units for slot in unit] == slots
    for unit in units:
        assert unit == list(range(unit[0], unit[0] + len(unit)))
        assert len(unit) <= max_pieces
    for unit, following in pairwise(units):
        assert len(unit) == max_pieces or following[0] != unit[-1] + 1, "torn apart"
