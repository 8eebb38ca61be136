"""Which of two is the newer one: numbers that never come back, even after a kill."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest

from kvtier.cpu.policies.lru import LRUCachePolicy
from kvtier.testing import TierHarness
from kvtier.tiering.disk import keeper, slab
from kvtier.tiering.disk.layout import Superblock
from kvtier.tiering.disk.population import populate
from kvtier.tiering.disk.residents import Residents
from tests.tiering.disk.crash.image import Image
from tests.tiering.disk.rig import ROW_BYTES, bytes_for, disk_harness, disk_of
from tests.tiering.patience import wait_until

_STEP = 64


def test_a_killed_engine_had_no_number_that_the_next_one_gives(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(slab, "_CLOCK_STEP", _STEP)
    monkeypatch.setattr(keeper, "_LOOK_EVERY_S", 0.01)
    path, killed = tmp_path / "kv.slab", tmp_path / "killed.slab"
    with disk_harness(path) as harness:
        residents = disk_of(harness)._residents
        for start in range(0, 10 * _STEP, 16):  # blocks come and go
            harness.wait_for(harness.store(harness.keys(16, start)))

        def is_noted() -> bool:
            shutil.copy(path, killed)
            return superblock_of(killed).clock + _STEP > residents.next_seq

        wait_until(is_noted, "the clock is in the file")
        last = residents.next_seq
    with disk_harness(killed) as harness:
        assert disk_of(harness)._residents.next_seq > last


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
        residents = Residents(LRUCachePolicy, 10, opened.first_seq)
        populate(residents, opened, 7)
    finally:
        opened.close()
    assert {key: block.block_id for key, block in residents.readable.items()} == {
        key: newer,
        other: 1,
    }
    assert residents.num_used == 2
