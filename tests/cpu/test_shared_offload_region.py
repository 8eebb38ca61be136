"""Rows, cells and views of a region, and how they end."""

from __future__ import annotations

import errno
import gc
import mmap
import os
import re
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvtier.cpu.shared_offload_region import SharedOffloadRegion
from tests.cpu.kernel_view import (
    assert_nothing_left,
    mapped,
    open_files,
    resident_kib,
)
from tests.cpu.region_process import Lend, RegionMaker, RegionProcess

PAGE = mmap.PAGESIZE


# ---------------------------------------------------------------------------------------------
# Rows, cells and views
# ---------------------------------------------------------------------------------------------


def test_a_rank_writes_its_cell_of_every_row_and_nothing_else(make: RegionMaker) -> None:
    scheduler = make(num_blocks=3, kv_bytes_per_block=PAGE, cpu_page_size=1000)
    workers = [
        make(num_blocks=3, rank=rank, kv_bytes_per_block=PAGE, cpu_page_size=1000)
        for rank in range(4)
    ]
    expected = np.zeros((3, PAGE), np.uint8)
    for rank, worker in enumerate(workers):
        for part, (start, size) in enumerate([(0, 600), (600, 300)]):
            view = worker.create_next_worker_view(size)
            assert view.shape == (3, size)
            view[:] = expected[:, 1000 * rank + start :][:, :size] = 10 * rank + part + 1
    np.testing.assert_array_equal(np.asarray(scheduler.create_kv_memoryview()), expected)


def test_the_memoryview_is_the_shared_memory(make: RegionMaker) -> None:
    scheduler, worker = make(num_blocks=3), make(num_blocks=3, rank=0)
    view, cell = scheduler.create_kv_memoryview(), worker.create_next_worker_view(8)
    assert (view.shape, view.readonly, view.c_contiguous) == ((3, 2 * PAGE), False, True)
    view[1, 3] = 77
    assert cell[1].tolist() == [0, 0, 0, 77, 0, 0, 0, 0]
    cell[2, 5] = 88
    assert view[2, 5] == 88
    del cell


def test_a_memoryview_elsewhere_is_noticed(make: RegionMaker) -> None:
    region = make()
    region.address += PAGE
    with pytest.raises(AssertionError, match="a copy instead of the shared memory"):
        region.create_kv_memoryview()


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        ({"num_blocks": 0}, r"num_blocks=0: .*at least one block.*cpu_bytes_to_use"),
        (
            {"kv_bytes_per_block": PAGE + 1},
            rf"kv_bytes_per_block={PAGE + 1} .*page size {PAGE}: round it up to {2 * PAGE}",
        ),
        ({"kv_bytes_per_block": 0}, rf"kv_bytes_per_block=0 .*round it up to {PAGE}"),
        ({"cpu_page_size": 0}, "cpu_page_size=0: .*at least one byte"),
        (
            {"kv_bytes_per_block": PAGE, "cpu_page_size": PAGE + 1},
            rf"cpu_page_size={PAGE + 1}: .*kv_bytes_per_block={PAGE}",
        ),
        (
            {"kv_bytes_per_block": PAGE, "cpu_page_size": PAGE // 2, "rank": 2},
            rf"rank=2: .*holds 2 cells of cpu_page_size={PAGE // 2}, so ranks are 0 to 1",
        ),
        ({"rank": -1}, "rank=-1: "),
    ],
)
def test_impossible_arguments_are_refused(
    make: RegionMaker, arguments: dict[str, int], complaint: str
) -> None:
    with pytest.raises(ValueError, match=complaint):
        make(**arguments)


def test_a_cell_cannot_overflow(make: RegionMaker) -> None:
    worker = make(rank=1, cpu_page_size=100)
    worker.create_next_worker_view(60)
    with pytest.raises(ValueError, match=r"page_bytes=41: rank 1 has 40 .*=100, 60 are taken"):
        worker.create_next_worker_view(41)
    with pytest.raises(ValueError, match="page_bytes=0"):
        worker.create_next_worker_view(0)
    assert worker.create_next_worker_view(40).shape == (2, 40)


def test_the_scheduler_has_no_cell(make: RegionMaker) -> None:
    with pytest.raises(RuntimeError, match=r"rank=None.*create_kv_memoryview"):
        make().create_next_worker_view(1)


def test_what_a_process_will_touch_is_mapped_from_the_start(make: RegionMaker) -> None:
    scheduler = make(num_blocks=64)
    assert resident_kib(scheduler.path) == 64 * 2 * PAGE // 1024
    scheduler.cleanup()
    worker = make(num_blocks=64, rank=0)
    assert resident_kib(worker.path) >= 64 * PAGE // 1024


def test_kernels_without_populate_map_it_too(
    make: RegionMaker, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = make(num_blocks=64)
    np.asarray(first.create_kv_memoryview())[:] = 7
    path = first.path
    monkeypatch.setattr(
        "kvtier.cpu.shared_offload_region._MADV_POPULATE_WRITE", 9999
    )  # no such advice
    second = make(num_blocks=64)
    assert (np.asarray(second.create_kv_memoryview()) == 7).all()
    first.cleanup()
    assert resident_kib(path) == 64 * 2 * PAGE // 1024


def test_regions_live_in_dev_shm() -> None:
    region = SharedOffloadRegion(f"engine-{os.getpid()}", 1, 0, PAGE, PAGE)
    assert os.path.dirname(region.path) == "/dev/shm"
    assert os.path.basename(region.path).startswith("kvtier-")
    region.cleanup()
    assert not os.path.exists(region.path)


# ---------------------------------------------------------------------------------------------
# The end of a region
# ---------------------------------------------------------------------------------------------


def test_after_cleanup_the_view_raises_and_nothing_is_left(make: RegionMaker) -> None:
    before = open_files()
    region = make()
    views = [region.create_kv_memoryview() for _ in range(2)]
    assert mapped(region.path)
    region.cleanup()
    region.cleanup()
    for view in views:
        with pytest.raises(ValueError, match="released"):
            view[0, 0]
    for method in (region.create_kv_memoryview, lambda: make_worker_view(region)):
        with pytest.raises(RuntimeError, match="'engine' has been cleaned up"):
            method()
    assert not mapped(region.path)
    assert open_files() == before


def make_worker_view(region: SharedOffloadRegion) -> None:
    region.rank = 0
    region.create_next_worker_view(1)


class Tier:
    """Keeps its view for longer than it should."""

    def __init__(self, part: Any) -> None:
        self.part = part


HELD: list[Any] = []


def test_those_who_still_hold_slices_keep_them_and_are_named(
    make: RegionMaker, shm: Path, caplog: pytest.LogCaptureFixture
) -> None:
    region = make()
    path = region.path
    view = region.create_kv_memoryview()
    flat = view.cast("B")
    flat[100:103] = b"abc"
    tier = Tier(flat[100:103])
    HELD.append(flat[100:102])
    local_slice = flat[101:103]
    flat.release()

    region.cleanup()

    (warning,) = caplog.messages
    assert "memoryview in tests.cpu.test_shared_offload_region.Tier.part" in warning
    assert "a list in tests.cpu.test_shared_offload_region.HELD" in warning
    assert "memoryview 'local_slice' in test_those_who_still_hold_slices" in warning
    assert "thread MainThread" in warning
    assert f"{4 * PAGE} bytes" in warning
    with pytest.raises(ValueError, match="released"):
        view[0, 0]
    assert (bytes(tier.part), bytes(HELD[0]), bytes(local_slice)) == (b"abc", b"ab", b"bc")
    assert list(shm.iterdir()) == []
    assert mapped(path)

    HELD.clear()
    del tier, local_slice
    assert not mapped(path)


def test_a_thread_that_holds_a_slice_is_named(
    make: RegionMaker, caplog: pytest.LogCaptureFixture
) -> None:
    region = make()
    has_it, may_go = threading.Event(), threading.Event()

    def read_slowly() -> None:
        part = region.create_kv_memoryview().cast("B")[5:9]
        has_it.set()
        may_go.wait()
        part.release()

    thread = threading.Thread(target=read_slowly, name="slow-reader")
    thread.start()
    try:
        has_it.wait()
        region.cleanup()
    finally:
        may_go.set()
        thread.join()
    assert re.search(r"'part' in .*read_slowly\(\) .*thread slow-reader", caplog.text)
    assert not mapped(region.path)


def test_arrays_keep_the_memory_too(make: RegionMaker, caplog: pytest.LogCaptureFixture) -> None:
    region = make(rank=0)
    cell, rows = region.create_next_worker_view(4), np.asarray(region.create_kv_memoryview())
    cell[1] = 9
    region.cleanup()
    assert "ndarray 'cell' in " in caplog.text
    assert "ndarray 'rows' in " in caplog.text
    assert rows[1, :4].tolist() == cell[1].tolist() == [9] * 4
    del cell, rows
    assert not mapped(region.path)


def test_garbage_is_nobodys_fault(make: RegionMaker, caplog: pytest.LogCaptureFixture) -> None:
    region = make(rank=0)
    cycle: list[Any] = [region.create_next_worker_view(4)]
    cycle.append(cycle)
    del cycle
    region.cleanup()
    assert caplog.messages == []
    assert not mapped(region.path)


def test_a_forgotten_region_is_removed_with_its_last_reference(shm: Path) -> None:
    region = SharedOffloadRegion("engine", 1, 0, PAGE, PAGE, directory=str(shm))
    path = region.path
    assert os.path.exists(path)
    del region
    gc.collect()
    assert not os.path.exists(path)


def test_a_process_that_just_ends_leaves_nothing(shm: Path) -> None:
    process = RegionProcess()
    process.directory = str(shm)
    process.open("engine")
    assert len(list(shm.iterdir())) == 1
    assert process.end() == 0
    assert list(shm.iterdir()) == []


def test_the_last_user_removes_the_file(make: RegionMaker, shm: Path, lend: Lend) -> None:
    with lend(str(shm), 2) as processes:
        for rank, process in enumerate(processes):
            process.open("engine", rank)
        here = make()
        processes[0].call("cleanup")
        here.cleanup()
        assert len(list(shm.iterdir())) == 1
        processes[1].call("cleanup")
        assert list(shm.iterdir()) == []


# ---------------------------------------------------------------------------------------------
# A start that fails
# ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "step", ["os.fchmod", "fcntl.flock", "os.pwrite", "os.link", "os.posix_fallocate", "mmap.mmap"]
)
def test_a_start_that_fails_at_any_step_leaves_nothing(
    step: str, shm: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*args: Any, **kwargs: Any) -> None:
        raise OSError(errno.EIO, "injected")

    before = open_files()
    with monkeypatch.context() as patch:
        patch.setattr(step, fail)
        with pytest.raises(OSError, match="injected") as kept:
            SharedOffloadRegion("engine", 2, 0, PAGE, PAGE, directory=str(shm))
    assert_nothing_left(str(shm), before)
    del kept  # not even its traceback had a hold on anything


def test_pages_that_cannot_be_had_fail_the_start(
    shm: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvtier.cpu.shared_offload_region._MADV_POPULATE_WRITE", 9999)

    def fail(*args: int) -> None:
        raise OSError(errno.EIO, "injected")

    monkeypatch.setattr("kvtier.cpu.shared_offload_region._read_every_page", fail)
    before = open_files()
    with pytest.raises(OSError, match="injected") as kept:
        SharedOffloadRegion("engine", 2, 0, PAGE, PAGE, directory=str(shm))
    assert_nothing_left(str(shm), before)
    del kept


def test_a_filesystem_without_nameless_files_is_refused() -> None:
    with pytest.raises(ValueError, match="/proc is on a filesystem without O_TMPFILE"):
        SharedOffloadRegion("engine", 2, 0, PAGE, PAGE, directory="/proc")
