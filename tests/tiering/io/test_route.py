"""Both ways are measured with the first blocks, and the quicker one is taken for good."""

from __future__ import annotations

import logging
import random
import threading

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtier.tiering.io.route import _NUM_PAIRS, _WINDOW_BYTES, Route

UNIT_BYTES = _WINDOW_BYTES // 8
WINDOW = 8
"""Units of one measurement."""


class Disk:
    """Ends one unit after the other; how long each takes is said for each way."""

    def __init__(
        self,
        buffered_s: float = 1.0,
        straight_s: float = 1.0,
        in_flight: int = 6,
        disorder: random.Random | None = None,
    ) -> None:
        self.seconds = {True: buffered_s, False: straight_s}
        self.time = 0.0
        self.load = 1.0
        """How many times as long everything takes, because of others."""
        self.in_flight = in_flight
        self.disorder = disorder
        self.under_way: list[bool] = []
        self.route = Route("loads", self.now)

    def now(self) -> float:
        self.time += 1e-7  # as a real clock does, whenever it is asked
        return self.time

    def move(self, num_units: int, num_bytes: int = UNIT_BYTES) -> list[bool]:
        """Which way units go that are there all at once."""
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
    """That costs no copy."""
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
    """Buffers only if they are worth a copy."""
    disk = Disk(buffered_s, 1.0, in_flight, None if in_order else random.Random(0))
    disk.calibrate()
    assert set(disk.move(1000 * WINDOW)) == {is_buffered}


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize(("buffered_s", "is_buffered"), [(0.5, True), (1.0, False)])
def test_a_busy_machine_changes_neither_the_choice_nor_its_mind(
    buffered_s: float, is_buffered: bool, seed: int, caplog: pytest.LogCaptureFixture
) -> None:
    """Everything takes up to eight times as long, for a while at a time."""
    caplog.set_level(logging.INFO)
    disk = Disk(buffered_s, 1.0)
    draw = random.Random(seed)
    went: list[bool] = []
    for _ in range(200):
        disk.load = draw.choice((1.0, 1.0, 2.0, 8.0))
        went += disk.move(draw.randint(2, 12) * WINDOW)
    assert set(went[-500:]) == {is_buffered}
    name = "through buffers" if is_buffered else "straight"
    assert [message.split(":")[0] for message in caplog.messages] == [f"loads go {name}"]


def test_what_is_chosen_is_said_once_and_kept(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    disk = Disk(0.5, 1.0)
    disk.calibrate()
    disk.seconds = {True: 8.0, False: 1.0}
    assert set(disk.move(10_000)) == {True}
    assert len(caplog.messages) == 1
    assert caplog.messages[0].startswith("loads go through buffers: ")


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
    for _ in range(200):  # far too little in a burst
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
    """Units that fail at once must not make a way look quick."""
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
        route.begin()  # so that there is always something under way
    threads = [threading.Thread(target=move) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(caplog.messages) == 1
