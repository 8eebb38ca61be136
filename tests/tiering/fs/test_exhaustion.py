"""No space: a quota, a file system that others fill, and too many stores at once. No wrong byte is
served, no file is left over, errors are counted by name, and the tier works again when there is
space."""

from __future__ import annotations

import os
import random
import stat
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import pytest

from kvtier.testing import TierHarness
from kvtier.tiering.fs import manager
from tests.tiering.disk.small_disk import LoopDisk
from tests.tiering.fs.accounts import (
    Figures,
    load_all,
    load_some,
    store_all,
    store_some,
    wait_until_stored,
    wait_until_the_gauge_is_right,
)
from tests.tiering.fs.harness import block_files, bytes_for, du, fs_harness, silent_files
from tests.tiering.fs.mounts import DISKS, bind_mounted_by_fuse, mounted_by_nfs, small_disk
from tests.tiering.fs.pauses import shorten_pauses
from tests.tiering.patience import wait_until

KEYS = TierHarness.keys(8)
LATER = TierHarness.keys(8, start=100_000)
DISK_BYTES = 40 << 20


@pytest.fixture(autouse=True)
def _short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    shorten_pauses(monkeypatch)


@pytest.fixture
def disk(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[LoopDisk]:
    """An ext4, unless the test asks for another kind."""
    with small_disk(tmp_path, getattr(request, "param", "ext4"), DISK_BYTES) as disk:
        yield disk


def demand_no_leftovers(root: Path) -> None:
    """An idle root holds blocks, and empty staging directories."""
    wait_until(
        lambda: not [path for path in (root / "engines").glob("*/*") if path.is_file()],
        "no unfinished file is left",
    )


# --- others fill the file system ---------------------------------------------------------------


@pytest.mark.parametrize("disk", DISKS, indirect=True)
def test_a_file_system_that_others_fill_and_empty(disk: LoopDisk) -> None:
    root = disk.root / "root"
    with fs_harness(root, max_bytes="1GiB") as harness:
        figures = Figures(harness)
        store_all(harness, KEYS)
        disk.fill()
        starts = iter(range(1000, 100_000, 60))
        wait_until(
            lambda: not store_some(harness, harness.keys(60, next(starts))), "nothing can be stored"
        )
        assert figures.errors("ENOSPC") > 0
        load_all(harness, KEYS)
        demand_no_leftovers(root)
        (disk.root / "of-others").unlink()
        wait_until_stored(harness, LATER)
        load_all(harness, KEYS)
        demand_no_leftovers(root)
        wait_until_the_gauge_is_right(harness, root)
    with fs_harness(root, max_bytes="1GiB") as harness:
        load_all(harness, KEYS)
        load_all(harness, LATER)


def test_a_file_system_that_the_tier_itself_fills(disk: LoopDisk) -> None:
    """With a quota larger than the disk, blocks are lost, and none is wrong."""
    root = disk.root / "root"
    with fs_harness(root, max_bytes="1GiB", num_rows=128) as harness:
        figures = Figures(harness)
        starts = iter(range(0, 100_000, 60))
        stored: list[int] = []

        def is_full() -> bool:
            start = next(starts)
            if len(store_some(harness, harness.keys(60, start))) == 60:
                stored.append(start)
            return figures.errors("ENOSPC") > 0

        wait_until(is_full, "the disk is full")
        for start in stored[:: max(1, len(stored) // 8)]:
            load_all(harness, harness.keys(60, start))
        demand_no_leftovers(root)
        harness.drain()
        harness.shut_down()
    for path in block_files(root)[:200]:
        path.unlink()
    with fs_harness(root, max_bytes="1GiB", num_rows=128) as harness:
        wait_until_stored(harness, LATER)


def test_enough_stays_free_for_others(disk: LoopDisk) -> None:
    """Blocks are evicted when others need the space, and stored again afterwards."""
    root = disk.root / "root"
    reserve = 8 << 20
    with fs_harness(root, max_bytes="1GiB", min_free_bytes=reserve, num_rows=128) as harness:
        figures = Figures(harness)
        for start in range(0, 3000, 60):
            store_some(harness, harness.keys(60, start))
            assert disk.free_bytes >= reserve
        count = len(block_files(root))
        assert count > 500
        assert figures[manager.EVICTED] > 0
        with (disk.root / "of-others").open("wb", buffering=0) as others:

            def are_fewer() -> bool:
                if disk.free_bytes >= reserve:
                    others.write(random.randbytes(1 << 18))
                    os.fsync(others.fileno())
                return len(block_files(root)) < count

            wait_until(are_fewer, "blocks leave for others")
        wait_until(lambda: disk.free_bytes >= reserve, "so much is free again")
        wait_until_stored(harness, harness.keys(8, start=50_000))
        assert figures.errors("ENOSPC") == 0
        demand_no_leftovers(root)
        wait_until_the_gauge_is_right(harness, root)


def test_nothing_is_stored_where_less_than_enough_is_free(disk: LoopDisk) -> None:
    root = disk.root / "root"
    with fs_harness(root, max_bytes="1GiB", min_free_bytes="1GiB") as harness:
        figures = Figures(harness)
        assert not store_some(harness, KEYS)
        assert figures[manager.REFUSED] == 8
        assert not block_files(root)


# --- the quota ---------------------------------------------------------------------------------


def test_the_least_quota_is_enough_to_go_on(tmp_path: Path) -> None:
    """The smallest accepted quota: the blocks stored last are there."""
    root = tmp_path / "root"
    charge = 3 * 4096 + 8192
    with fs_harness(root, max_bytes=(2 << 20) + 8 * charge) as harness:
        for start in range(0, 200, 4):
            store_all(harness, harness.keys(4, start))
            load_all(harness, harness.keys(4, start))
        wait_until_the_gauge_is_right(harness, root)


def test_the_first_burst_is_larger_than_the_quota(tmp_path: Path) -> None:
    """Before the namespace has a directory."""
    root = tmp_path / "root"
    with fs_harness(root, 20, row_bytes=65_536, num_rows=200) as harness:
        jobs = [harness.store(harness.keys(50, start)) for start in range(0, 200, 50)]
        kept = set[bytes]().union(*(report.moved for report in harness.wait_for(*jobs)))
        assert len(kept) > 20
        last = harness.keys(8, start=1000)
        store_all(harness, last)
        load_all(harness, last)
        wait_until_the_gauge_is_right(harness, root)


def test_who_is_alone_is_not_told_that_others_take_the_room(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Stores wait before the first block is published, and go on when blocks are evicted."""
    with fs_harness(tmp_path / "root", 12, row_bytes=1 << 19) as harness:
        for start in range(0, 256, 64):
            with silent_files(harness.tier):
                job = harness.store(harness.keys(64, start))
            harness.wait_for(job)
        assert block_files(tmp_path / "root")
    assert "is full" not in caplog.text


def test_a_quota_that_has_been_made_smaller(tmp_path: Path) -> None:
    """Blocks are evicted until the smaller quota holds."""
    root = tmp_path / "root"
    with fs_harness(root, 400) as harness:
        for start in range(0, 400, 20):
            store_all(harness, harness.keys(20, start))
    with fs_harness(root, 40) as harness:
        for start in range(1000, 2000, 20):
            store_some(harness, harness.keys(20, start))
        wait_until_stored(harness, harness.keys(8, start=5000))
        wait_until_the_gauge_is_right(harness, root)


def test_the_smallest_quota_of_all_engines_is_kept(tmp_path: Path) -> None:
    """Even if the engine with the smaller quota stores nothing."""
    root = tmp_path / "root"
    with fs_harness(root, 400) as large:
        for start in range(0, 400, 20):
            store_all(large, large.keys(20, start))
        with fs_harness(root, 40) as small:
            limit = bytes_for(40)
            assert du(root) > limit
            wait_until(lambda: du(root) <= limit, "the rest has left")
            wait_until_the_gauge_is_right(small, root)
            assert block_files(root)


def test_the_quota_is_kept_where_files_say_late_what_they_take(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """ZFS reports the size after seconds, NFS after writing back."""
    root = tmp_path / "root"
    real = os.fstat

    def too_early(fd: int) -> os.stat_result:
        status = real(fd)
        if not stat.S_ISREG(status.st_mode):
            return status
        return os.stat_result(tuple(status), {**_fields(status), "st_blocks": 1})

    with fs_harness(root, 20) as harness:
        monkeypatch.setattr(os, "fstat", too_early)
        for start in range(0, 400, 20):
            store_some(harness, harness.keys(20, start))
            assert du(root) <= bytes_for(20)
        monkeypatch.undo()


def _fields(status: os.stat_result) -> dict[str, float]:
    return {name: getattr(status, name) for name in dir(status) if name.startswith("st_")}


# --- more than the file system takes -----------------------------------------------------------


def test_a_burst_reaches_files_that_were_silent_meanwhile(tmp_path: Path) -> None:
    """Waiting stores hold slots of the primary tier, which bounds them."""
    with fs_harness(tmp_path / "root", 512, num_rows=300) as harness:
        figures = Figures(harness)
        with silent_files(harness.tier):
            jobs = [harness.store(harness.keys(6, start=6 * n)) for n in range(40)]
            harness.step()
            assert harness.call("get_stats").gauges[manager.QUEUED] == 240
        harness.wait_for(*jobs)
        load_all(harness, harness.keys(240))
        assert harness.call("get_stats").gauges[manager.QUEUED] == 0
        assert figures[manager.REFUSED] == 0


# --- other file systems ------------------------------------------------------------------------


@contextmanager
def _xfs(directory: Path) -> Iterator[Path]:
    with small_disk(directory, "xfs", 64 << 20) as disk:
        yield disk.root


@contextmanager
def _btrfs(directory: Path) -> Iterator[Path]:
    with small_disk(directory, "btrfs", 64 << 20) as disk:
        yield disk.root


@pytest.mark.parametrize("file_system", [_xfs, _btrfs, bind_mounted_by_fuse, mounted_by_nfs])
def test_two_engines_on_another_file_system(
    tmp_path: Path, file_system: Callable[[Path], AbstractContextManager[Path]]
) -> None:
    """Each engine finds the blocks of the other, damage is refused, and the quota holds."""
    with file_system(tmp_path) as mounted:
        root = mounted / "root"
        with fs_harness(root, 100) as one, fs_harness(root, 100) as two:
            store_all(one, KEYS)
            load_all(one, KEYS)
            assert two.hits(KEYS) == set(KEYS)
            load_all(two, KEYS)
            jobs = one.store(LATER), two.store(LATER)
            for report in (*one.wait_for(jobs[0]), *two.wait_for(jobs[1])):
                assert report.moved == set(LATER)
            with block_files(root)[0].open("r+b") as file:
                file.write(b"damaged")
            assert len(load_some(two, KEYS + LATER)) == 15
            assert two.tier.take_seal_failures().total() == 1
            for start in range(0, 400, 20):
                # Some may be refused if the client caches link counts: blocks that were just
                # published then still seem to have two names, and are not evicted.
                store_some(one, one.keys(20, start=1000 + start))
                store_some(two, two.keys(20, start=5000 + start))
            assert du(root) <= bytes_for(100)
            wait_until_stored(one, one.keys(20, start=20_000))
            wait_until_stored(two, two.keys(20, start=30_000))
            wait_until_the_gauge_is_right(one, root)
            wait_until_the_gauge_is_right(two, root)
        with fs_harness(root, 100) as three:
            assert three.hits(three.keys(20, start=30_000))
            wait_until(lambda: len(os.listdir(root / "engines")) == 2, "nobody else has a presence")


def test_the_bytes_for_so_many_blocks_are_enough(tmp_path: Path) -> None:
    with fs_harness(tmp_path / "root", max_bytes=bytes_for(100)) as harness:
        for start in range(0, 100, 20):
            store_all(harness, harness.keys(20, start))
        for start in range(0, 100, 20):
            load_all(harness, harness.keys(20, start))
