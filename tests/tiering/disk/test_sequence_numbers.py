"""Sequence numbers never repeat, even after a kill, so the newer of two blocks is known."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest

from kvtier.cpu.policies.lru import LRUCachePolicy
from kvtier.testing import TierHarness
from kvtier.tiering.disk import flusher, slab
from kvtier.tiering.disk.layout import Superblock
from kvtier.tiering.disk.recovery import populate
from kvtier.tiering.disk.slots import SlabTable
from tests.tiering.disk.crash.image import Image
from tests.tiering.disk.harness import ROW_BYTES, bytes_for, disk_harness, disk_of
from tests.tiering.patience import wait_until

_STEP = 64


def test_a_killed_engine_had_no_number_that_the_next_one_gives(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(slab, "_CLOCK_STEP", _STEP)
    monkeypatch.setattr(flusher, "_LOOK_EVERY_S", 0.01)
    path, killed = tmp_path / "kv.slab", tmp_path / "killed.slab"
    with disk_harness(path) as harness:
        table = disk_of(harness)._table
        for start in range(0, 10 * _STEP, 16):  # blocks come and go
            harness.wait_for(harness.store(harness.keys(16, start)))

        def is_noted() -> bool:
            shutil.copy(path, killed)
            return superblock_of(killed).clock + _STEP > table.next_seq

        wait_until(is_noted, "the clock is in the file")
        last = table.next_seq
    with disk_harness(killed) as harness:
        assert disk_of(harness)._table.next_seq > last


def superblock_of(path: Path) -> Superblock:
    return Image(path).superblock


@pytest.mark.parametrize("newer", [3, 5])
def test_of_two_slots_with_one_block_the_newer_counts_however_they_were_used(
    tmp_path: Path, newer: int
) -> None:
    key, other = TierHarness.keys(2)
    older = 8 - newer
    opened = slab.open_slab(tmp_path / "kv.slab", ROW_BYTES, bytes_for(10), "engine", None)
    try:
        opened.index.put(older, 10, 7, key)
        opened.index.put(newer, 20, 7, key)
        opened.index.put(1, 15, 7, other)
        opened.index.mark_used(np.array([older]), np.array([30]))
        table = SlabTable(LRUCachePolicy, 10, opened.first_seq)
        populate(table, opened.index, opened.superblock.cut, 7)
    finally:
        opened.close()
    assert {key: block.block_id for key, block in table.readable.items()} == {
        key: newer,
        other: 1,
    }
    assert table.num_used == 2
