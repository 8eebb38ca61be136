"""Disk usage of a slab, and the blocks that stay when it shrinks."""

from __future__ import annotations

import os
import tracemalloc
from collections.abc import Sequence
from pathlib import Path

import pytest

from kvtier.base import OffloadKey
from kvtier.testing import TierHarness
from kvtier.tiering.disk.file import SlabFile
from kvtier.tiering.disk.layout import Geometry, Superblock
from kvtier.tiering.io.page import PAGE_BYTES
from tests.tiering.disk.harness import ROW_BYTES, bytes_for, disk_harness, disk_of, du
from tests.tiering.disk.small_disk import loop_disk

_AT_ONCE = 25


def store(harness: TierHarness, keys: Sequence[OffloadKey]) -> None:
    for start in range(0, len(keys), _AT_ONCE):
        (report,) = harness.wait_for(harness.store(keys[start : start + _AT_ONCE]))
        assert report.result.success


def loaded(harness: TierHarness, keys: Sequence[OffloadKey]) -> set[OffloadKey]:
    moved: set[OffloadKey] = set()
    for start in range(0, len(keys), _AT_ONCE):
        (report,) = harness.wait_for(harness.load(keys[start : start + _AT_ONCE]))
        moved |= report.moved
    return moved


# --- how much it takes -------------------------------------------------------------------------


def test_free_space_in_small_parts_does_not_make_it_larger(tmp_path: Path) -> None:
    """The file system then keeps thousands of extents, which `du` counts."""
    row_bytes = 64 << 10
    max_bytes = bytes_for(150, row_bytes)
    with loop_disk(tmp_path, 32 << 20) as disk:
        disk.fragment()
        path = disk.root / "kv.slab"
        with disk_harness(path, row_bytes=row_bytes, max_bytes=max_bytes, num_rows=25) as harness:
            assert du(path) <= max_bytes
            num_slots = disk_of(harness)._table.num_slots
            assert 140 < num_slots < 150
            keys = harness.keys(num_slots)
            store(harness, keys)
            assert du(path) <= max_bytes
        with disk_harness(path, row_bytes=row_bytes, max_bytes=max_bytes, num_rows=25) as harness:
            assert du(path) <= max_bytes
            assert harness.hits(keys) == set(keys)


def test_slots_written_here_and_there_do_not_make_it_larger(tmp_path: Path) -> None:
    """Written and unwritten parts are separate extents."""
    num_blocks = 3000
    with (
        loop_disk(tmp_path, 64 << 20) as disk,
        disk_harness(disk.root / "kv.slab", num_blocks, row_bytes=4096) as harness,
    ):
        path = disk.root / "kv.slab"
        before = du(path)
        slots = list(range(num_blocks))
        disk_of(harness)._table.set_free(slots[::2], slots[1::2])
        store(harness, harness.keys(num_blocks // 2))
        assert before < du(path) <= bytes_for(num_blocks, 4096)


@pytest.mark.parametrize("num_blocks", [80, 100, 120])
def test_a_copy_without_its_zeroes_is_allocated_again(tmp_path: Path, num_blocks: int) -> None:
    path, copy = tmp_path / "kv.slab", tmp_path / "copy.slab"
    with disk_harness(path, 100) as harness:
        keys = harness.keys(20)
        store(harness, keys)
    copy_sparsely(path, copy)
    assert du(copy) < copy.stat().st_size / 2
    with disk_harness(copy, num_blocks) as harness:
        assert copy.stat().st_size <= du(copy) <= bytes_for(num_blocks)
        assert loaded(harness, keys) == set(keys)


def copy_sparsely(source: Path, target: Path) -> None:
    """As backups restore it: pages of zeros are holes."""
    content = source.read_bytes()
    with target.open("wb") as file:
        for offset in range(0, len(content), PAGE_BYTES):
            page = content[offset : offset + PAGE_BYTES]
            if any(page):
                file.seek(offset)
                file.write(page)
        file.truncate(len(content))


MANY_SLOTS = 4_000_000


def sparse_slab(path: Path) -> None:
    """A few pages that claim an index of 256 MiB."""
    geometry = Geometry(ROW_BYTES, MANY_SLOTS)
    page = Superblock(bytes(range(16)), geometry, clock=10).encode()
    with path.open("wb") as file:
        file.write(page + page)
        file.truncate(geometry.file_bytes)
    path.chmod(0o600)


@pytest.mark.parametrize("is_cut_off", [False, True])
def test_a_slab_that_is_one_large_hole_costs_an_engine_no_memory(
    tmp_path: Path, is_cut_off: bool
) -> None:
    path = tmp_path / "kv.slab"
    sparse_slab(path)
    if is_cut_off:
        os.truncate(path, path.stat().st_size * 9 // 10)
    tracemalloc.start()
    try:
        with disk_harness(path, 8) as harness:
            store(harness, harness.keys(8))
        _, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert most < 64 << 20
    assert du(path) <= bytes_for(8)


# --- what it keeps -----------------------------------------------------------------------------


def test_shrinking_keeps_our_own_blocks_first(tmp_path: Path) -> None:
    path = tmp_path / "kv.slab"
    with disk_harness(path, 100) as harness:
        ours = harness.keys(50)
        store(harness, ours)
    with disk_harness(path, 100, namespace="other weights") as harness:
        store(harness, harness.keys(50))
    with disk_harness(path, 60) as harness:
        assert loaded(harness, ours) == set(ours)
    with disk_harness(path, 60, namespace="other weights") as harness:
        assert len(harness.hits(harness.keys(50))) == 10


class Killed(BaseException):
    """The simulated end of the engine."""


@pytest.mark.parametrize("is_torn", [False, True])
@pytest.mark.parametrize("num_writes", [1, 2, 4, 50, 102, 103, 104])
def test_an_engine_killed_while_it_shrinks_loses_nothing_that_was_to_stay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, num_writes: int, is_torn: bool
) -> None:
    """The blocks that stay are behind the new end, so all of them are moved. `is_torn`: one page of
    the last write still reaches the disk."""
    path = tmp_path / "kv.slab"
    with disk_harness(path, 200, row_bytes=4096) as harness:
        keys = harness.keys(200)
        store(harness, keys)
    write = SlabFile.write_aligned
    num_left = num_writes

    def write_or_die(file: SlabFile, offset: int, data: memoryview) -> None:
        nonlocal num_left
        if not num_left:
            if is_torn:
                write(file, offset, data[:PAGE_BYTES])
            raise Killed
        num_left -= 1
        write(file, offset, data)

    with monkeypatch.context() as patch:
        patch.setattr(SlabFile, "write_aligned", write_or_die)
        with pytest.raises(Killed):
            disk_harness(path, 100, row_bytes=4096)
    with disk_harness(path, 100, row_bytes=4096) as harness:
        assert loaded(harness, keys) == set(keys[100:])
