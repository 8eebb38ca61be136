"""Bounce buffers: their memory, the copies, and the choice of a route."""

from __future__ import annotations

import logging
import mmap
import os
import random
import threading

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtier.tiering.io.aio import address_of
from kvtier.tiering.io.buffers import _NUM_PAIRS, _WINDOW_BYTES, Payload, Route, make_buffers

# --- memory and copies ------------------------------------------------------------------------


@pytest.mark.parametrize("num_bytes", [4096, 3 << 20])
def test_buffers_are_zero_aligned_and_in_large_pieces(num_bytes: int) -> None:
    memory = make_buffers(num_bytes)
    assert len(memory) == num_bytes
    assert address_of(memory) % (2 << 20) == 0
    assert bytes(memory) == bytes(num_bytes)
    is_huge = num_bytes > 2 << 20 and os.path.exists("/sys/kernel/mm/transparent_hugepage")
    assert ("hg" in _flags_of(address_of(memory))) == is_huge


def test_a_child_has_zeros_and_may_let_go_of_them() -> None:
    """Not a copy-on-write page: if the parent wrote first, the disk would use a page that is now
    the child's."""
    memory = make_buffers(1 << 20)
    memory[:] = b"?" * len(memory)
    child = os.fork()
    if child == 0:
        has_zeros = bytes(memory) == bytes(len(memory))
        others = [mmap.mmap(-1, 1 << 20) for _ in range(8)]
        del memory
        for other in others:
            other[:] = b"!" * len(other)
        os._exit(0 if has_zeros else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert bytes(memory) == b"?" * len(memory)


def _flags_of(address: int) -> list[str]:
    """Flags of the mapping at this address."""
    is_here = False
    with open("/proc/self/smaps") as mappings:
        for line in mappings:
            bounds, *_ = line.split()
            if "-" in bounds and not bounds.endswith(":"):
                start, end = (int(bound, 16) for bound in bounds.split("-"))
                is_here = start <= address < end
            elif is_here and bounds == "VmFlags:":
                return line.split()[1:]
    raise AssertionError("not mapped")


@pytest.mark.parametrize("size", [1, 4096, (256 << 10) - 1, 256 << 10, 1 << 20])
def test_a_payload_goes_both_ways(size: int) -> None:
    row, memory = os.urandom(size), bytearray(size)
    Payload(memoryview(memory), memoryview(bytearray(row))).collect()
    assert memory == row
    target = bytearray(size)
    Payload(memoryview(memory), memoryview(target)).deliver()
    assert target == row


def test_a_payload_in_its_row_stays_where_it_is() -> None:
    row = memoryview(bytearray(b"here"))
    payload = Payload(row, row)
    payload.collect()
    payload.deliver()
    assert bytes(row) == b"here"


# --- the choice of a route -------------------------------------------------------------------

UNIT_BYTES = _WINDOW_BYTES // 8
WINDOW = 8
"""Units of one measurement."""


class Disk:
    """Ends units one after the other, with a given duration for each route."""

    def __init__(
        self,
        buffered_s: float = 1.0,
        zero_copy_s: float = 1.0,
        in_flight: int = 6,
        disorder: random.Random | None = None,
    ) -> None:
        self.seconds = {True: buffered_s, False: zero_copy_s}
        self.time = 0.0
        self.load = 1.0
        """Slowdown by other load."""
        self.in_flight = in_flight
        self.disorder = disorder
        self.under_way: list[bool] = []
        self.route = Route("loads", self.now)

    def now(self) -> float:
        self.time += 1e-7  # as a real clock advances between two calls
        return self.time

    def move(self, num_units: int, num_bytes: int = UNIT_BYTES) -> list[bool]:
        """The routes of units that are submitted together."""
        went = []
        for _ in range(num_units):
            if len(self.under_way) == self.in_flight:
                self.end_one(num_bytes)
            went.append(self.route.begin())
            self.under_way.append(went[-1])
        return went

    def end_one(self, num_bytes: int = UNIT_BYTES) -> None:
        which = self.disorder.randrange(len(self.under_way)) if self.disorder else 0
        self.time += self.seconds[self.under_way.pop(which)] * self.load
        self.route.end(num_bytes)

    def idle(self) -> None:
        while self.under_way:
            self.end_one()
        self.time += 100.0

    def calibrate(self) -> None:
        self.move(4 * _NUM_PAIRS * max(WINDOW, self.in_flight))


def test_until_it_is_known_blocks_go_straight() -> None:
    """Zero-copy costs least."""
    disk = Disk(0.5, 1.0)
    assert disk.move(WINDOW) == [False] * WINDOW


@pytest.mark.parametrize("in_flight", [3, 6, 40])
@pytest.mark.parametrize("in_order", [True, False])
@pytest.mark.parametrize(
    ("buffered_s", "is_buffered"),
    [(0.5, True), (0.6, True), (0.95, False), (1.0, False), (2.0, False)],
)
def test_the_quicker_way_is_taken(
    buffered_s: float, is_buffered: bool, in_order: bool, in_flight: int
) -> None:
    """Buffers must be faster by more than a copy costs."""
    disk = Disk(buffered_s, 1.0, in_flight, None if in_order else random.Random(0))
    disk.calibrate()
    assert set(disk.move(1000 * WINDOW)) == {is_buffered}


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize(("buffered_s", "is_buffered"), [(0.5, True), (1.0, False)])
def test_a_busy_machine_changes_neither_the_choice_nor_its_mind(
    buffered_s: float, is_buffered: bool, seed: int, caplog: pytest.LogCaptureFixture
) -> None:
    """Everything takes up to eight times as long, in phases."""
    caplog.set_level(logging.INFO)
    disk = Disk(buffered_s, 1.0)
    draw = random.Random(seed)
    went: list[bool] = []
    for _ in range(200):
        disk.load = draw.choice((1.0, 1.0, 2.0, 8.0))
        went += disk.move(draw.randint(2, 12) * WINDOW)
    assert set(went[-500:]) == {is_buffered}
    name = "copied through buffers" if is_buffered else "zero-copy"
    assert [message.split(":")[0] for message in caplog.messages] == [f"loads are {name}"]


def test_what_is_chosen_is_said_once_and_kept(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    disk = Disk(0.5, 1.0)
    disk.calibrate()
    disk.seconds = {True: 8.0, False: 1.0}
    assert set(disk.move(10_000)) == {True}
    assert len(caplog.messages) == 1
    assert caplog.messages[0].startswith("loads are copied through buffers: ")


def test_bursts_are_enough_if_each_is_a_few_windows() -> None:
    for length in (2 * WINDOW, 3 * WINDOW, 4 * WINDOW + 3):
        disk = Disk(0.5, 1.0)
        for _ in range(200):
            disk.move(length)
            disk.idle()
        assert set(disk.move(length)) == {True}, length


def test_buffers_that_cannot_be_measured_are_left() -> None:
    disk = Disk(4.0, 1.0)
    while disk.move(1) == [False]:
        pass
    disk.idle()
    went: list[bool] = []
    for _ in range(200):  # too few units in a burst
        went += disk.move(3)
        disk.idle()
    assert 0 < went.count(True) < 100
    assert set(went[-300:]) == {False}


@pytest.mark.parametrize("in_flight", [1, 2])
def test_what_waits_for_something_else_says_nothing_of_the_disk(in_flight: int) -> None:
    disk = Disk(0.5, 1.0, in_flight)
    for _ in range(100):
        assert set(disk.move(WINDOW)) == {False}


def test_what_was_not_moved_is_not_counted(caplog: pytest.LogCaptureFixture) -> None:
    """Units that fail at once must not make a route look fast."""
    caplog.set_level(logging.INFO)
    disk = Disk(1.0, 1.0)
    for _ in range(400):
        disk.move(2)
        disk.seconds = {True: 0.0, False: 1.0}
        disk.move(6, num_bytes=0)
        disk.seconds = {True: 1.0, False: 1.0}
    assert all(max(pair) < 1.5 * UNIT_BYTES for pair in disk.route._pairs)


@settings(max_examples=200)
@given(
    st.lists(st.tuples(st.integers(0, 3 * _WINDOW_BYTES), st.integers(0, 3)), max_size=200),
)
def test_nothing_is_lost_whatever_ends_when(steps: list[tuple[int, int]]) -> None:
    disk = Disk()
    num_open = 0
    for num_bytes, num_ends in steps:
        disk.route.begin()
        num_open += 1
        for _ in range(min(num_ends, num_open)):
            disk.time += 1.0
            disk.route.end(num_bytes)
            num_open -= 1
        if disk.route._is_chosen:
            break
        assert disk.route._num_open == num_open
        assert disk.route._num_to_skip <= 200


def test_many_threads_choose_once(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    route = Route("loads")

    def move() -> None:
        for _ in range(2000):
            route.begin()
            route.end(UNIT_BYTES)

    for _ in range(8):
        route.begin()  # so that units are always in flight
    threads = [threading.Thread(target=move) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(caplog.messages) == 1
