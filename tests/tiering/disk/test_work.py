"""What waits for the disk: loads first, neighbours together, and every transfer ends once."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from kvtier.base import OffloadKey, ReqContext
from kvtier.tiering.base import TransferJob
from kvtier.tiering.disk.transfer import SlabBlock, Transfer, Unit
from kvtier.tiering.disk.work import WorkQueue


def transfer(*slots: int, is_load: bool = False) -> Transfer:
    keys = [OffloadKey(b"%d" % slot) for slot in slots]
    job = TransferJob(1, keys, np.arange(len(keys)), is_load, ReqContext("request"))
    blocks = zip(slots, keys, strict=True)
    pieces = [(row, SlabBlock(slot, key, 1)) for row, (slot, key) in enumerate(blocks)]
    return Transfer(job, pieces)


def slots_of(units: Sequence[Unit]) -> list[list[int]]:
    return [[block.block_id for _, block in unit.pieces] for unit in units]


def take(work: WorkQueue, max_units: int = 8, max_stores: int = 8) -> list[Unit]:
    return work.take(max_units, max_stores, may_wait=False)


def finish(work: WorkQueue, unit: Unit, num_failed: int = 0) -> None:
    pieces = list(unit.pieces)
    split = len(pieces) - num_failed
    work.finish([(unit, pieces[:split], pieces[split:])])


def test_neighbours_go_together_up_to_a_size() -> None:
    work = WorkQueue(max_pieces=3)
    work.submit(transfer(0, 1, 2, 3, 4, 8, 9, 11))
    assert slots_of(take(work)) == [[0, 1, 2], [3, 4], [8, 9], [11]]
    assert take(work) == []


def test_loads_come_before_stores() -> None:
    work = WorkQueue(max_pieces=1)
    work.submit(transfer(1, 2))
    work.submit(transfer(11, 12, is_load=True))
    assert slots_of(take(work, max_units=3)) == [[11], [12], [1]]


def test_stores_leave_room_for_loads() -> None:
    work = WorkQueue(max_pieces=1)
    work.submit(transfer(1, 2, 3))
    assert slots_of(take(work, max_stores=2)) == [[1], [2]]
    assert take(work, max_stores=0) == []
    assert take(work, max_stores=-1) == []
    work.submit(transfer(11, is_load=True))
    assert slots_of(take(work, max_stores=0)) == [[11]]


def test_a_transfer_ends_with_its_last_piece() -> None:
    work = WorkQueue(max_pieces=1)
    work.submit(transfer(1, 2))
    first, second = take(work)
    finish(work, second)
    assert work.take_ended() == []
    finish(work, first, num_failed=1)
    (ended,) = work.take_ended()
    assert [block.block_id for _, block in ended.done] == [2]
    assert [block.block_id for _, block in ended.failed] == [1]
    assert ended.seconds is not None
    assert ended.seconds >= 0
    assert work.take_ended() == []


def test_a_transfer_of_nothing_has_ended() -> None:
    work = WorkQueue(max_pieces=1)
    work.submit(transfer())
    (ended,) = work.take_ended()
    assert ended.seconds is None
    work.wait_until_idle()


def test_after_the_stop_everything_fails() -> None:
    work = WorkQueue(max_pieces=1)
    work.submit(transfer(1, 2))
    work.submit(transfer(3, is_load=True))
    (load,) = take(work, max_units=1)
    (store,) = take(work, max_units=1)
    work.stop()
    work.stop()
    assert take(work) == []
    assert work.take(1, 1, may_wait=True) == []  # and nobody waits
    work.submit(transfer(9))
    assert [len(ended.failed) for ended in work.take_ended()] == [1]
    finish(work, load)
    finish(work, store)
    ended = work.take_ended()
    assert [(len(each.done), len(each.failed)) for each in ended] == [(1, 0), (1, 1)]
    work.wait_until_idle()


def test_whoever_waits_is_woken() -> None:
    work = WorkQueue(max_pieces=1)
    taken: list[Unit] = []
    lock = threading.Lock()

    def carry_out() -> None:
        while units := work.take(4, 4, may_wait=True):
            with lock:
                taken.extend(units)
            for unit in units:
                finish(work, unit)

    threads = [threading.Thread(target=carry_out) for _ in range(3)]
    for thread in threads:
        thread.start()
    for number in range(200):
        work.submit(transfer(3 * number, 3 * number + 2, is_load=number % 2 == 0))
    work.wait_until_idle()
    work.stop()
    for thread in threads:
        thread.join()
    assert sorted(slots_of(taken)) == sorted(
        [slot] for number in range(200) for slot in (3 * number, 3 * number + 2)
    )
    assert len(work.take_ended()) == 200


@given(
    slots=st.lists(st.sets(st.integers(0, 30), max_size=12), max_size=5),
    max_pieces=st.integers(1, 5),
    stop_after=st.none() | st.integers(0, 6),
)
def test_every_piece_is_moved_or_failed_once(
    slots: list[set[int]], max_pieces: int, stop_after: int | None
) -> None:
    work = WorkQueue(max_pieces)
    transfers = [transfer(*sorted(some), is_load=len(some) % 2 == 0) for some in slots]
    for each in transfers:
        work.submit(each)
    num_units = 0
    while units := take(work, max_units=2):
        for unit in units:
            assert 1 <= len(unit.pieces) <= max_pieces
            finish(work, unit, num_failed=num_units % 2)
            num_units += 1
        if stop_after is not None and num_units >= stop_after:
            work.stop()
    ended = work.take_ended()
    assert sorted(map(id, ended)) == sorted(map(id, transfers))
    for each in ended:
        moved = [block.block_id for _, block in each.done + each.failed]
        assert sorted(moved) == [block.block_id for _, block in each.pieces]
