"""Notes of ranks to the scheduler through the region's file: real files, real processes."""

from __future__ import annotations

import mmap
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtier.cpu.notice_board import NoticeBoard
from kvtier.cpu.region_file import RegionFile, RegionShape
from kvtier.cpu.shared_offload_region import SharedOffloadRegion
from tests.cpu.kernel_view import assert_nothing_left, open_files

PAGE = mmap.PAGESIZE
SHAPE = RegionShape(num_blocks=300, kv_bytes_per_block=4 * PAGE, cpu_page_size=PAGE)


def region_of(rank: int | None, directory: Path) -> SharedOffloadRegion:
    return SharedOffloadRegion(
        "engine",
        SHAPE.num_blocks,
        rank,
        SHAPE.kv_bytes_per_block,
        SHAPE.cpu_page_size,
        directory=str(directory),
    )


def board_in(directory: Path) -> NoticeBoard | None:
    """As a scheduler that has no rows of its own reads it."""
    file = RegionFile.join(str(directory), "engine", SHAPE)
    if file is None:
        return None
    try:
        return NoticeBoard(file.map_board(), SHAPE)
    finally:
        file.leave()


def test_ranks_that_are_not_there_are_missing(shm: Path) -> None:
    before = open_files()
    first = region_of(0, shm)
    board = board_in(shm)
    assert board is not None
    assert board.missing_ranks(3) == [1, 2]
    third = region_of(2, shm)
    assert board.missing_ranks(3) == [1]
    assert board.missing_ranks(1) == []
    first.cleanup()
    third.cleanup()
    board.close()
    assert_nothing_left(str(shm), before)


def test_a_scheduler_is_no_rank(shm: Path) -> None:
    scheduler = region_of(None, shm)
    board = board_in(shm)
    assert board is not None
    assert board.missing_ranks(4) == [0, 1, 2, 3]
    board.close()
    scheduler.cleanup()


def test_without_a_rank_there_is_no_board_and_none_is_made(shm: Path) -> None:
    assert board_in(shm) is None
    assert list(shm.iterdir()) == []


def test_the_region_of_a_killed_engine_is_no_board(shm: Path) -> None:
    code = (
        "from tests.cpu.test_notice_board import *\n"
        f"region = region_of(0, Path({str(shm)!r}))\n"
        "print('there', flush=True); signal.pause()"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as rank:
        assert rank.stdout is not None
        rank.stdout.readline()
        board = board_in(shm)
        assert board is not None
        assert board.missing_ranks(1) == []
        board.close()
        os.kill(rank.pid, signal.SIGKILL)
    assert board_in(shm) is None


def test_a_board_does_not_keep_the_file_in_place(shm: Path) -> None:
    rank = region_of(0, shm)
    board = board_in(shm)
    assert board is not None
    rank.cleanup()
    assert list(shm.iterdir()) == []
    assert board.missing_ranks(1) == [0]
    board.close()
    board.close()


def test_a_rank_is_there_once(shm: Path) -> None:
    before = open_files()
    rank = region_of(0, shm)
    with pytest.raises(ValueError, match="rank 0 of engine 'engine' is already in use: give each"):
        region_of(0, shm)
    rank.cleanup()
    region_of(0, shm).cleanup()
    assert_nothing_left(str(shm), before)


def test_a_failure_in_another_process_is_news(shm: Path) -> None:
    rank = region_of(0, shm)
    board = board_in(shm)
    assert board is not None
    assert not board.has_news()
    code = (
        "from tests.cpu.test_notice_board import *\n"
        f"region = region_of(1, Path({str(shm)!r}))\n"
        "region.board.poison(1, [7, 299])"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
    assert board.has_news()
    assert board.take_poisoned([6, 7]) == {7}
    assert board.has_news()  # 299 has not been asked for
    assert board.take_poisoned([299]) == {299}
    assert not board.has_news()
    assert board.take_poisoned(range(300)) == set()
    rank.cleanup()
    board.close()


def test_rows_and_notices_do_not_overlap(shm: Path) -> None:
    rank = region_of(3, shm)
    rank.create_next_worker_view(PAGE)[:] = 255
    board = board_in(shm)
    assert board is not None
    assert board.missing_ranks(4) == [0, 1, 2]
    assert board.take_poisoned(range(300)) == set()
    rank.board.poison(3, range(300))
    assert (rank.create_kv_memoryview().cast("B")[: 3 * PAGE]) == bytes(3 * PAGE)
    board.close()
    rank.cleanup()


def test_what_nobody_will_ask_for_can_be_forgotten() -> None:
    shape = RegionShape(10, 4 * PAGE, PAGE)
    board = NoticeBoard(mmap.mmap(-1, shape.board_bytes), shape)
    board.poison(2, [3, 4])
    board.forget()
    assert not board.has_news()
    assert board.take_poisoned(range(10)) == set()
    board.poison(2, [3])
    assert board.has_news()
    board.close()


_STEPS = st.lists(
    st.tuples(st.sampled_from(["poison", "take"]), st.integers(0, 3), st.sets(st.integers(0, 9))),
    max_size=30,
)


@given(_STEPS)
def test_every_poisoned_slot_is_found_once_and_no_other(
    steps: list[tuple[str, int, set[int]]],
) -> None:
    shape = RegionShape(10, 4 * PAGE, PAGE)
    memory = mmap.mmap(-1, shape.board_bytes)
    board = NoticeBoard(memory, shape)
    expected: set[int] = set()
    for action, rank, slots in steps:
        if action == "poison":
            board.poison(rank, slots)
            expected |= slots
        else:
            assert board.take_poisoned(slots) == slots & expected
            expected -= slots
        if expected:
            assert board.has_news()
    assert board.take_poisoned(range(10)) == expected
    assert not board.has_news()
    board.close()


@pytest.mark.parametrize("num_blocks", [1, PAGE - 32, PAGE - 31, 100_000])
def test_the_board_has_room_for_every_slot(num_blocks: int) -> None:
    shape = RegionShape(num_blocks, 4 * PAGE, PAGE)
    board = NoticeBoard(mmap.mmap(-1, shape.board_bytes), shape)
    board.poison(3, [num_blocks - 1])
    assert board.take_poisoned([num_blocks - 1]) == {num_blocks - 1}
    board.close()
