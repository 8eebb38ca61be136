"""The work queue: loads first, limits are kept, and every transfer ends once."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import TypeAlias

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from kvtier.base import OffloadKey, ReqContext
from kvtier.tiering.base import TransferJob
from kvtier.tiering.io.queue import Transfer, Unit, WorkQueue

# This tier describes a block by a number.
Work: TypeAlias = WorkQueue[int]


def transfer(*numbers: int, is_load: bool = False) -> Transfer[int]:
    keys = [OffloadKey(b"%d" % number) for number in numbers]
    job = TransferJob(1, keys, np.arange(len(keys)), is_load, ReqContext("request"))
    return Transfer(job, list(enumerate(numbers)))


def numbers_of(units: Sequence[Unit[int]]) -> list[list[int]]:
    return [[number for _, number in unit.pieces] for unit in units]


def take(work: Work, max_loads: int = 8, max_stores: int = 8) -> list[Unit[int]]:
    return work.take(max_loads, max_stores, may_wait=False)


def finish(work: Work, unit: Unit[int], num_failed: int = 0) -> None:
    pieces = list(unit.pieces)
    split = len(pieces) - num_failed
    work.finish([(unit, pieces[:split], pieces[split:])])


def test_a_unit_is_of_so_many_pieces_at_most() -> None:
    work = Work(max_pieces=3)
    work.submit(transfer(0, 1, 2, 13, 4))
    assert numbers_of(take(work)) == [[0, 1, 2], [13, 4]]
    assert take(work) == []


def test_loads_come_before_stores() -> None:
    work = Work(max_pieces=1)
    work.submit(transfer(1, 2))
    work.submit(transfer(11, 12, is_load=True))
    assert numbers_of(take(work, 3, 3)) == [[11], [12], [1]]


def test_stores_leave_room_for_loads() -> None:
    work = Work(max_pieces=1)
    work.submit(transfer(1, 2, 3))
    assert numbers_of(take(work, max_stores=2)) == [[1], [2]]
    assert take(work, max_stores=0) == []
    assert take(work, max_stores=-1) == []
    work.submit(transfer(11, is_load=True))
    assert numbers_of(take(work, max_stores=0)) == [[11]]


def test_who_takes_stores_alone_leaves_the_loads_to_others() -> None:
    work = Work(max_pieces=1)
    work.submit(transfer(11, 12, is_load=True))
    assert take(work, max_loads=0) == []
    work.submit(transfer(1, 2))
    assert numbers_of(take(work, max_loads=0)) == [[1], [2]]
    assert numbers_of(take(work, max_loads=1)) == [[11]]
    assert numbers_of(take(work)) == [[12]]


def test_no_more_is_taken_than_the_larger_number() -> None:
    work = Work(max_pieces=1)
    work.submit(transfer(*range(10)))
    work.submit(transfer(*range(10, 13), is_load=True))
    assert numbers_of(take(work, max_loads=2, max_stores=3)) == [[10], [11], [0]]
    assert numbers_of(take(work, max_loads=3, max_stores=1)) == [[12], [1]]
    assert take(work, max_loads=0, max_stores=0) == []


def test_a_transfer_ends_with_its_last_piece() -> None:
    work = Work(max_pieces=1)
    work.submit(transfer(1, 2))
    first, second = take(work)
    finish(work, second)
    assert work.take_ended() == []
    finish(work, first, num_failed=1)
    (ended,) = work.take_ended()
    assert [number for _, number in ended.done] == [2]
    assert [number for _, number in ended.failed] == [1]
    assert ended.seconds is not None
    assert ended.seconds >= 0
    assert work.take_ended() == []


def test_of_a_unit_that_is_finished_twice_the_first_word_counts() -> None:
    work = Work(max_pieces=1)
    work.submit(transfer(1, 2))
    first, second = take(work)
    finish(work, first)
    finish(work, first, num_failed=1)
    assert work.take_ended() == []
    finish(work, second)
    finish(work, second, num_failed=1)
    (ended,) = work.take_ended()
    assert [number for _, number in ended.done] == [1, 2]
    assert ended.failed == []
    work.wait_until_idle()


def test_it_is_loading_until_the_last_load_has_ended() -> None:
    """Also while a load is in hand, and however it ends."""
    work = Work(max_pieces=1)
    assert not work.is_loading
    work.submit(transfer(1))
    assert not work.is_loading
    work.submit(transfer(2, is_load=True))
    work.submit(transfer(3, is_load=True))
    work.submit(transfer(is_load=True))
    good, bad = take(work, max_stores=0)
    finish(work, good)
    assert work.is_loading
    finish(work, bad, num_failed=1)
    assert not work.is_loading
    work.submit(transfer(4, is_load=True))
    assert work.is_loading
    work.stop()
    assert not work.is_loading


def test_a_transfer_of_nothing_has_ended() -> None:
    work = Work(max_pieces=1)
    work.submit(transfer())
    (ended,) = work.take_ended()
    assert ended.seconds is None
    work.wait_until_idle()


def test_after_the_stop_everything_fails() -> None:
    work = Work(max_pieces=1)
    work.submit(transfer(1, 2))
    work.submit(transfer(3, is_load=True))
    (load,) = take(work, 1, 1)
    (store,) = take(work, 1, 1)
    work.stop()
    work.stop()
    assert take(work) == []
    assert work.take(1, 1, may_wait=True) == []  # does not wait
    work.submit(transfer(9))
    assert [len(ended.failed) for ended in work.take_ended()] == [1]
    finish(work, load)
    finish(work, store)
    ended = work.take_ended()
    assert [(len(each.done), len(each.failed)) for each in ended] == [(1, 0), (1, 1)]
    work.wait_until_idle()


def test_whoever_waits_is_woken() -> None:
    work = Work(max_pieces=1)
    taken: list[Unit[int]] = []
    lock = threading.Lock()

    def carry_out(max_loads: int, max_stores: int) -> None:
        while units := work.take(max_loads, max_stores, may_wait=True):
            with lock:
                taken.extend(units)
            for unit in units:
                finish(work, unit)

    threads = [threading.Thread(target=carry_out, args=rooms) for rooms in ((4, 4), (4, 0), (0, 4))]
    for thread in threads:
        thread.start()
    for number in range(200):
        work.submit(transfer(2 * number, 2 * number + 1, is_load=number % 2 == 0))
    work.wait_until_idle()
    work.stop()
    for thread in threads:
        thread.join()
    assert sorted(numbers_of(taken)) == [[number] for number in range(400)]
    assert len(work.take_ended()) == 200


@given(
    numbers=st.lists(st.sets(st.integers(0, 30), max_size=12), max_size=5),
    max_pieces=st.integers(1, 5),
    rooms=st.lists(
        st.tuples(st.integers(0, 3), st.integers(0, 3)).filter(any), min_size=1, max_size=3
    ),
    stop_after=st.none() | st.integers(0, 6),
)
def test_every_piece_is_moved_or_failed_once(
    numbers: list[set[int]],
    max_pieces: int,
    rooms: list[tuple[int, int]],
    stop_after: int | None,
) -> None:
    work = Work(max_pieces)
    transfers = [transfer(*sorted(some), is_load=len(some) % 2 == 0) for some in numbers]
    for each in transfers:
        work.submit(each)
    num_units = 0
    rooms = [*rooms, (1, 1)]  # the last one takes the rest
    is_idle = False
    while not is_idle:
        is_idle = True
        for max_loads, max_stores in rooms:
            units = take(work, max_loads, max_stores)
            is_idle = is_idle and not units
            kinds = [unit.transfer.job.is_promotion for unit in units]
            assert kinds == sorted(kinds, reverse=True)
            assert kinds.count(True) <= max_loads
            assert kinds.count(False) <= max_stores
            assert len(units) <= max(max_loads, max_stores)
            for unit in units:
                assert 1 <= len(unit.pieces) <= max_pieces
                finish(work, unit, num_failed=num_units % 2)
                num_units += 1
        if stop_after is not None and num_units >= stop_after:
            work.stop()
    ended = work.take_ended()
    assert sorted(map(id, ended)) == sorted(map(id, transfers))
    for each in ended:
        moved = [number for _, number in each.done + each.failed]
        assert sorted(moved) == [number for _, number in each.pieces]
