"""A lane moves its units and loses none, whatever the mover or the kernel does."""

from __future__ import annotations

import errno
import gc
import os
import tempfile
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from itertools import cycle
from pathlib import Path
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtier.tiering.io import lane as lane_module
from kvtier.tiering.io.aio import AioQueue
from kvtier.tiering.io.buffers import Route
from kvtier.tiering.io.lane import CannotBegin, may_have_buffers
from kvtier.tiering.io.queue import Transfer
from tests.tiering.io.file_mover import NUM_ROWS, PIECE_BYTES, ROW_BYTES, FileMover
from tests.tiering.ways import ways

PATIENCE_S = 30.0


@pytest.fixture(params=["through buffers", "straight"])
def way(request: pytest.FixtureRequest) -> Iterator[str]:
    """Zero-copy or through buffers."""
    with ways(lambda: request.param == "through buffers"):
        yield str(request.param)


@pytest.fixture
def mover(tmp_path: Path, way: str) -> Iterator[FileMover]:
    mover = FileMover(tmp_path / "file")
    yield mover
    mover.close()
    mover.check_ends()


def numbers_of(pieces: list[tuple[int, int]]) -> list[int]:
    return sorted(number for _, number in pieces)


def wait_until(is_so: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.001)


def row_of(mover: FileMover, number: int) -> bytes:
    return bytes(mover.rows[number])


def fill(mover: FileMover, number: int) -> bytes:
    content = Random(number).randbytes(ROW_BYTES)
    mover.rows[number][:] = content
    return content


def wipe(mover: FileMover) -> None:
    mover.memory[:] = bytes(len(mover.memory))


@pytest.mark.parametrize("max_pieces", [1, 3])
def test_what_is_stored_can_be_loaded(tmp_path: Path, max_pieces: int, way: str) -> None:
    mover = FileMover(tmp_path / "file", max_pieces)
    mover.start()
    contents = [fill(mover, number) for number in range(20)]
    store = mover.store(*range(20))
    mover.work.wait_until_idle()
    assert numbers_of(store.done) == list(range(20))
    wipe(mover)
    load = mover.load(*range(20))
    mover.work.wait_until_idle()
    assert numbers_of(load.done) == list(range(20))
    assert [row_of(mover, number) for number in range(20)] == contents
    mover.close()
    mover.check_ends()
    mover.check_rows_are_free()
    assert len(mover.begun) == 2 * -(-20 // max_pieces)
    assert mover.noted == {}


@pytest.mark.parametrize("max_pieces", [1, 3])
def test_both_ways_in_turns(tmp_path: Path, max_pieces: int) -> None:
    """A unit keeps the route with which it began."""
    with ways(cycle([True, True, False]).__next__):
        mover = FileMover(tmp_path / "file", max_pieces)
        mover.start()
        contents = [fill(mover, number) for number in range(60)]
        store = mover.store(*range(60))
        mover.work.wait_until_idle()
        wipe(mover)
        loads = [mover.load(*range(start, start + 7)) for start in range(0, 49, 7)]
        mover.work.wait_until_idle()
        assert numbers_of(store.done) == list(range(60))
        assert sum(len(load.done) for load in loads) == 49
        assert [row_of(mover, number) for number in range(49)] == contents[:49]
        assert mover.went_through_buffers[True] > mover.went_through_buffers[False] > 20
        mover.close()
        mover.check_ends()
        mover.check_rows_are_free()


def test_without_buffers_nobody_is_asked_for_the_way(mover: FileMover) -> None:
    mover.has_buffers = False
    mover.start()
    mover.store(1)
    mover.work.wait_until_idle()
    assert mover.went_through_buffers == {False: 1}


@pytest.mark.parametrize(
    ("sum_of_depths", "unit_mib", "may"),
    [
        (14, 2, True),
        (16, 8, True),
        (17, 8, False),
        (1024, 1, False),
        (1, 128, True),
        (2, 128, False),
    ],
)
def test_buffers_of_all_lanes_take_a_quarter_of_a_gib_at_most(
    sum_of_depths: int, unit_mib: int, may: bool
) -> None:
    assert may_have_buffers(sum_of_depths, unit_mib << 20) is may
    if may:
        assert not may_have_buffers(sum_of_depths, 256 << 20)


def test_what_is_measured_is_what_was_moved(
    mover: FileMover, monkeypatch: pytest.MonkeyPatch
) -> None:
    moved: list[int] = []
    end = Route.end

    def noted(route: Route, num_bytes: int) -> None:
        moved.append(num_bytes)
        end(route, num_bytes)

    monkeypatch.setattr(Route, "end", noted)
    mover.start()
    mover.cannot_begin[2] = CannotBegin
    mover.places[5] = 1 << 20, 0  # no such file
    mover.store(*range(8))
    mover.work.wait_until_idle()
    assert sorted(moved) == [0, 0] + 6 * [PIECE_BYTES]


def test_memory_is_given_back_when_the_thread_ends(mover: FileMover) -> None:
    lane = mover.start()
    mover.store(*range(20))
    mover.work.wait_until_idle()
    memory = weakref.ref(lane._pages[0].obj)
    assert memory() is not None
    mover.stop()
    gc.collect()
    assert memory() is None


def test_lanes_for_loads_alone_and_for_stores_alone(mover: FileMover) -> None:
    mover.start(max_loads=0)
    fill(mover, 1)
    load = mover.load(1)
    store = mover.store(1)
    wait_until(lambda: store.has_ended)  # it overtakes the load, which no lane takes
    assert load.num_taken == 0
    mover.start(max_stores=0)
    mover.work.wait_until_idle()
    assert numbers_of(load.done) == [1]


def hold_answers(monkeypatch: pytest.MonkeyPatch) -> tuple[threading.Event, threading.Event]:
    """The kernel's answers are held back until the first event is set. A lane that waits for them
    sets the second one."""
    answers, is_waiting = threading.Event(), threading.Event()
    real_reap = AioQueue.reap

    def reap(queue: AioQueue, at_least: int = 1) -> list[tuple[int, int]]:
        is_waiting.set()
        assert answers.wait(PATIENCE_S)
        return real_reap(queue, at_least)

    monkeypatch.setattr(AioQueue, "reap", reap)
    return answers, is_waiting


def test_no_more_is_under_way_than_allowed(
    mover: FileMover, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers, is_waiting = hold_answers(monkeypatch)
    os.truncate(mover.where, 40 * PIECE_BYTES)
    mover.store(*range(10))
    mover.load(*range(10, 20))
    mover.start(depth=6, max_loads=3, max_stores=2)
    assert is_waiting.wait(PATIENCE_S)
    kinds = Counter(unit.transfer.job.is_promotion for unit in mover.begun)
    answers.set()
    assert kinds == {True: 3, False: 1}, "stores yield to loads"
    mover.work.wait_until_idle()
    assert len(mover.ended) == 20


def test_without_loads_more_stores_are_under_way(
    mover: FileMover, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers, is_waiting = hold_answers(monkeypatch)
    mover.store(*range(10))
    mover.start(depth=6, max_loads=3, max_stores=2)
    assert is_waiting.wait(PATIENCE_S)
    num_begun = len(mover.begun)
    answers.set()
    assert num_begun == 2
    mover.work.wait_until_idle()


# --- what cannot be begun ----------------------------------------------------------------------


def test_what_the_mover_cannot_begin_fails_in_silence(
    mover: FileMover, caplog: pytest.LogCaptureFixture
) -> None:
    mover.start()
    mover.cannot_begin[2] = CannotBegin
    store = mover.store(1, 2, 3)
    mover.work.wait_until_idle()
    assert numbers_of(store.done) == [1, 3]
    assert numbers_of(store.failed) == [2]
    assert caplog.messages == []
    assert mover.noted == {}
    assert [unit.pieces[0][1] for unit, _ in mover.ended] == [1, 3]


@pytest.mark.parametrize("error", [ValueError, OSError])
def test_any_other_exception_is_logged(
    mover: FileMover, caplog: pytest.LogCaptureFixture, error: type[Exception]
) -> None:
    mover.start()
    mover.cannot_begin[2] = error
    store = mover.store(1, 2, 3)
    mover.work.wait_until_idle()
    assert numbers_of(store.failed) == [2]
    assert [message.partition(": ")[2] for message in caplog.messages] == [
        "a block could not be moved"
    ]
    assert mover.noted == {}  # the mover counts it, or does not


def test_a_lane_goes_on_after_many_that_could_not_be_begun(mover: FileMover) -> None:
    mover.start(depth=2)
    mover.cannot_begin = dict.fromkeys(range(40), CannotBegin)
    store = mover.store(*range(50))
    mover.work.wait_until_idle()
    assert numbers_of(store.done) == list(range(40, 50))
    mover.close()
    mover.check_rows_are_free()


# --- what fails --------------------------------------------------------------------------------


@pytest.mark.parametrize("is_load", [False, True])
def test_what_the_kernel_refuses_is_noted_and_ended(mover: FileMover, is_load: bool) -> None:
    mover.start()
    mover.store(1, 2, 3)
    mover.work.wait_until_idle()
    closed = os.dup(mover.fd)
    os.close(closed)
    mover.places[2] = closed, 0
    again = (mover.load if is_load else mover.store)(1, 2, 3)
    mover.work.wait_until_idle()
    assert numbers_of(again.failed) == [2]
    assert mover.errors_of(again) == [0, errno.EBADF, 0]
    assert mover.noted == {(errno.EBADF, not is_load): 1}


def test_a_place_that_cannot_be_is_logged_and_ended(
    mover: FileMover, caplog: pytest.LogCaptureFixture
) -> None:
    mover.start()
    mover.places[2] = -1, 0
    store = mover.store(1, 2, 3)
    mover.work.wait_until_idle()
    assert numbers_of(store.failed) == [2]
    assert mover.errors_of(store) == [0, errno.EINVAL, 0]
    assert len(caplog.messages) == 1


def test_an_error_of_the_device_is_noted_by_number(mover: FileMover) -> None:
    mover.start()
    mover.places[2] = mover.fd, 1 << 62
    store = mover.store(1, 2, 3)
    mover.work.wait_until_idle()
    assert mover.errors_of(store) == [0, errno.EFBIG, 0]
    assert mover.noted == {(errno.EFBIG, True): 1}


@pytest.mark.parametrize("left", [0, 100, PIECE_BYTES - 1])
def test_fewer_bytes_than_asked_for_are_an_error(mover: FileMover, left: int) -> None:
    mover.start()
    mover.store(0, 1, 2)
    mover.work.wait_until_idle()
    os.truncate(mover.where, 2 * PIECE_BYTES + left)
    load = mover.load(0, 1, 2)
    mover.work.wait_until_idle()
    assert mover.errors_of(load) == [0, 0, errno.ENODATA]
    assert numbers_of(load.failed) == [2]
    assert mover.noted == {(errno.ENODATA, False): 1}


# --- how a unit ends ---------------------------------------------------------------------------


def test_a_mover_that_fails_at_the_end_fails_the_units(
    mover: FileMover, caplog: pytest.LogCaptureFixture
) -> None:
    mover.start(depth=1)  # one at a time, so that they end one by one
    mover.cannot_end = {2}
    store = mover.store(1, 2, 3)
    mover.work.wait_until_idle()
    assert numbers_of(store.done) == [1, 3]
    assert numbers_of(store.failed) == [2]
    assert len(caplog.messages) == 1


def test_units_may_be_finished_later_by_another_thread(mover: FileMover) -> None:
    mover.start(depth=2)
    mover.finished_later = set(range(20))
    store = mover.store(*range(20))
    other = mover.store(30)
    wait_until(lambda: other.has_ended)  # the lane does not wait for them
    wait_until(lambda: len(mover.ended) == 21)
    assert numbers_of(other.done) == [30]
    assert not store.has_ended
    for unit, _ in mover.ended:
        mover.work.finish([(unit, unit.pieces, ())])
    mover.work.wait_until_idle()
    assert numbers_of(store.done) == list(range(20))


def test_at_the_stop_what_is_under_way_is_ended_and_the_rest_fails(
    mover: FileMover, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers, is_waiting = hold_answers(monkeypatch)
    mover.start(depth=4)
    store = mover.store(*range(10))
    assert is_waiting.wait(PATIENCE_S)
    mover.work.stop()
    answers.set()
    mover.stop()
    mover.check_ends()
    assert [number for _, number in store.done] == [0, 1, 2, 3]
    assert numbers_of(store.failed) == list(range(4, 10))


@pytest.mark.parametrize("broken", ["reap", "submit"])
def test_a_broken_kernel_queue_ends_what_was_begun_and_fails_everything(
    mover: FileMover,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    broken: str,
) -> None:
    """No known fault causes this. But no caller may wait for a thread that has ended."""
    monkeypatch.setattr(lane_module, "_SUBMIT_BYTES", 1)  # by then, others have not begun

    def fail(*_: object) -> None:
        raise OSError(errno.EINVAL, "the queue is gone")

    lane = mover.start()
    setattr(lane._queue, broken, fail)
    store = mover.store(*range(10))
    mover.work.wait_until_idle()
    assert numbers_of(store.failed) == list(range(10))
    mover.stop()
    mover.check_ends()
    assert mover.begun
    assert {error for _, error in mover.ended} == {errno.ECANCELED}
    assert mover.noted == {}
    assert any("an I/O thread failed" in message for message in caplog.messages)
    late = mover.store(1)
    assert late.has_ended


def test_a_mover_that_cannot_even_note_an_error_hangs_nobody(
    mover: FileMover, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(error: int, is_write: bool) -> None:
        raise RuntimeError("no")

    monkeypatch.setattr(mover, "note_error", fail)
    mover.start()
    load = mover.load(*range(10))  # the file is empty
    mover.work.wait_until_idle()
    assert numbers_of(load.failed) == list(range(10))
    assert any("an I/O thread failed" in message for message in caplog.messages)


# --- everything at once ------------------------------------------------------------------------


@st.composite
def jobs(draw: st.DrawFn) -> list[tuple[bool, list[int]]]:
    """Loads and stores of neighbouring blocks. A row belongs to one job."""
    starts = range(0, NUM_ROWS, 8)
    return [
        (draw(st.booleans()), list(range(start, start + draw(st.integers(0, 8)))))
        for start in starts
    ]


@settings(max_examples=60)
@given(
    jobs=jobs(),
    max_pieces=st.integers(1, 4),
    lanes=st.lists(
        st.sampled_from([(1, 1, 1), (4, 4, 2), (4, 4, 0), (4, 0, 4)]), min_size=1, max_size=3
    ),
    faults=st.dictionaries(
        st.integers(0, NUM_ROWS - 1), st.sampled_from(["silent", "raises", "closed", "no end"])
    ),
    stop_after=st.none() | st.integers(0, 12),
)
def test_no_unit_is_lost(
    jobs: list[tuple[bool, list[int]]],
    max_pieces: int,
    lanes: list[tuple[int, int, int]],
    faults: dict[int, str],
    stop_after: int | None,
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        mover = FileMover(Path(folder) / "file", max_pieces)
        os.truncate(mover.where, NUM_ROWS * PIECE_BYTES // 2)
        contents = [fill(mover, number) for number in range(NUM_ROWS)]
        inject(mover, faults)
        # The last lane takes everything, so that all transfers end unless they are stopped.
        for depth, max_loads, max_stores in [*lanes, (2, 2, 2)]:
            mover.start(depth=depth, max_loads=max_loads, max_stores=max_stores)
        transfers: list[Transfer[int]] = []
        for count, (is_load, numbers) in enumerate(jobs):
            if count == stop_after:
                mover.work.stop()
            transfers.append((mover.load if is_load else mover.store)(*numbers))
        if stop_after is None:
            mover.work.wait_until_idle()
        mover.stop()
        mover.work.wait_until_idle()
        stored = dict(stored_in(mover, transfers))
        mover.close()
        mover.check_ends()
        if set(faults.values()) <= {"silent", "closed"}:
            mover.check_rows_are_free()
    ended = mover.work.take_ended()
    assert Counter(map(id, ended)) == Counter(map(id, transfers))
    for transfer in transfers:
        assert numbers_of(transfer.done + transfer.failed) == numbers_of(transfer.pieces)
    for number, found in stored.items():
        assert found == contents[number]


def inject(mover: FileMover, faults: dict[int, str]) -> None:
    for number, fault in faults.items():
        if fault == "silent":
            mover.cannot_begin[number] = CannotBegin
        elif fault == "raises":
            mover.cannot_begin[number] = RuntimeError
        elif fault == "closed":
            mover.places[number] = 1 << 20, 0
        else:
            mover.cannot_end.add(number)


def stored_in(mover: FileMover, transfers: list[Transfer[int]]) -> Iterator[tuple[int, bytes]]:
    for transfer in transfers:
        if not transfer.job.is_promotion:
            for _, number in transfer.done:
                block = os.pread(mover.fd, PIECE_BYTES, number * PIECE_BYTES)
                yield number, block[-ROW_BYTES:]
