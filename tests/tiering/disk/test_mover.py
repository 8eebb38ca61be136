"""How blocks are combined into reads and writes, and the memory that I/O threads take."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtier.base import OffloadKey, ReqContext
from kvtier.tiering.base import TransferJob
from kvtier.tiering.disk.manager import DiskSecondaryTierManager
from kvtier.tiering.disk.mover import SlabTransfer
from kvtier.tiering.disk.slots import SlabBlock
from tests.tiering.disk.harness import disk_harness

# --- units ---------------------------------------------------------------------------------------


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


# --- buffers -------------------------------------------------------------------------------------

MIB = 1 << 20


@pytest.mark.parametrize(
    ("row_bytes", "io_threads", "has_buffers"),
    [
        (64 << 10, None, True),
        (2 * MIB, None, True),
        (8 * MIB, None, True),
        (14 * MIB, None, False),
        (2 * MIB, 8, True),
        (2 * MIB, 64, False),
        (4096, 1, True),
    ],
)
def test_all_threads_have_buffers_or_none(
    tmp_path: Path, row_bytes: int, io_threads: int | None, has_buffers: bool
) -> None:
    """All lanes together take at most 256 MiB."""
    options: dict[str, Any] = {} if io_threads is None else {"io_threads": io_threads}
    path = tmp_path / "kv.slab"
    with disk_harness(path, 2, row_bytes=row_bytes, num_rows=2, **options) as harness:
        assert isinstance(harness.tier, DiskSecondaryTierManager)
        lanes = harness.tier._mover.lanes
        taken = sum(len(lane._pages) * lane._stride for lane in lanes)
        assert {lane._has_buffers for lane in lanes} == {has_buffers}
        keys = harness.keys(2)
        for job in (harness.store(keys), harness.load(keys)):
            [report] = harness.wait_for(job)
            assert report.result.success
    assert taken <= (256 * MIB if has_buffers else 4 * MIB)
