"""Blocks go whichever way is quicker, and the other one is tried now and then."""

from __future__ import annotations

import logging
import random
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtier.tiering.io.route import _EVERY, _WINDOW_BYTES, Route

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
        self.time += self.seconds[self.under_way.pop(which)]
        self.route.end(num_bytes)

    def idle(self) -> None:
        while self.under_way:
            self.end_one()
        self.time += 100.0

    def rates(self) -> dict[bool, float]:
        """Measured, in units a second."""
        return {way: rate / UNIT_BYTES for way, rate in self.route._rates.items()}


def is_mostly(went: list[bool], is_buffered: bool) -> bool:
    return went.count(is_buffered) > 0.95 * len(went)


def test_until_it_is_known_blocks_go_straight() -> None:
    """That costs no copy."""
    disk = Disk(0.5, 1.0)
    assert disk.move(WINDOW) == [False] * WINDOW


@pytest.mark.parametrize("in_flight", [3, 6, 40])
@pytest.mark.parametrize("in_order", [True, False])
@pytest.mark.parametrize(
    ("buffered_s", "is_buffered"),
    [(0.5, True), (0.85, True), (0.95, False), (1.0, False), (2.0, False)],
)
def test_the_quicker_way_is_taken(
    buffered_s: float, is_buffered: bool, in_order: bool, in_flight: int
) -> None:
    """Buffers only if they are worth a copy."""
    disk = Disk(buffered_s, 1.0, in_flight, None if in_order else random.Random(0))
    disk.move(60 * max(WINDOW, in_flight))
    assert is_mostly(disk.move(2 * WINDOW * _EVERY), is_buffered)
    tolerance = 0.1 if in_order else 0.35  # some that went the other way end late
    assert disk.rates()[False] == pytest.approx(1.0, rel=tolerance)
    assert disk.rates()[True] == pytest.approx(1 / buffered_s, rel=tolerance)


@pytest.mark.parametrize("was_buffered", [True, False])
def test_the_other_way_is_noticed_when_it_becomes_quicker(
    was_buffered: bool, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    disk = Disk(0.5 if was_buffered else 2.0, 1.0)
    disk.move(40 * WINDOW)
    assert is_mostly(disk.move(WINDOW * _EVERY // 2), was_buffered)
    disk.seconds[not was_buffered] = 0.1
    disk.move(10 * WINDOW * _EVERY)
    assert is_mostly(disk.move(WINDOW * _EVERY // 2), not was_buffered)
    names = ["through buffers" if way else "straight" for way in (was_buffered, not was_buffered)]
    assert [message.split(":")[0] for message in caplog.messages] == [
        f"loads go {name}" for name in names
    ]


@pytest.mark.parametrize(
    ("is_buffered", "slower_s", "rarely"),
    [
        (False, 1.01, 1),
        (False, 1.11, 1),
        *((way, *slower) for way in (True, False) for slower in ((1.3, 2.4), (1.5, 4), (2.0, 8))),
        (True, 5.0, 32),
        (False, 5.0, 32),
    ],
)
def test_the_slower_way_is_tried_the_more_rarely_the_slower_it_is(
    is_buffered: bool, slower_s: float, rarely: float
) -> None:
    disk = Disk(1.0, slower_s) if is_buffered else Disk(slower_s, 1.0)
    disk.move(40 * WINDOW)
    went = disk.move(20_000 * WINDOW)
    num_trials = sum(a is is_buffered is not b for a, b in pairwise(went))
    assert num_trials == pytest.approx(20_000 / (128 * rarely), rel=0.25, abs=1)


@pytest.mark.parametrize("slower_s", [10.0, 100.0])
def test_a_very_slow_way_costs_little(slower_s: float) -> None:
    disk = Disk(slower_s, 1.0)
    disk.move(40 * WINDOW)
    began = disk.time
    disk.move(40_000 * WINDOW)
    assert disk.time - began < 1.03 * 40_000 * WINDOW


def test_a_way_that_was_measured_far_too_slow_is_found_out_with_its_next_trial() -> None:
    disk = Disk(4.0, 1.0)
    disk.move(40 * WINDOW)
    disk.seconds[True] = 0.5
    while disk.move(1) == [False]:
        pass
    disk.move(8 * WINDOW)
    assert is_mostly(disk.move(WINDOW * _EVERY), True)


def test_the_way_that_is_taken_is_left_when_it_becomes_slower() -> None:
    disk = Disk(0.5, 1.0)
    disk.move(40 * WINDOW)
    disk.seconds[True] = 4.0
    disk.move(40 * WINDOW)
    assert is_mostly(disk.move(WINDOW * _EVERY // 2), False)


def test_a_little_more_or_less_changes_nothing(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    disk = Disk(0.8, 1.0)
    disk.move(40 * WINDOW)
    for buffered_s in (0.95, 0.85) * 3:
        disk.seconds[True] = buffered_s
        disk.move(20 * WINDOW)
    assert len(caplog.messages) == 1


def test_bursts_of_any_length_notice_a_change() -> None:
    """However the time to try the other way falls."""
    for length in (2 * WINDOW, 3 * WINDOW, 4 * WINDOW, 4 * WINDOW + 3):
        disk = Disk(2.0, 1.0)
        for _ in range(40):
            disk.move(length)
            disk.idle()
        disk.seconds[True] = 0.1
        went: list[bool] = []
        for _ in range(8 * _EVERY):
            went += disk.move(length)
            disk.idle()
        assert is_mostly(went[-20 * length :], True), length


def test_a_way_that_cannot_be_measured_is_given_up() -> None:
    """What is tried in vain is not tried for ever."""
    disk = Disk(4.0, 1.0)
    disk.move(40 * WINDOW)
    while disk.move(1) == [False]:
        pass
    went: list[bool] = []
    for _ in range(200):  # far too little in a burst
        disk.idle()
        went += disk.move(3)
    assert went.count(True) < 100
    assert is_mostly(went[-300:], False)


def test_before_anything_is_known_what_cannot_be_measured_is_given_up_too() -> None:
    disk = Disk(4.0, 1.0)
    while disk.move(1) == [False]:
        pass
    disk.idle()
    went: list[bool] = []
    for _ in range(200):  # far too little in a burst
        went += disk.move(3)
        disk.idle()
    assert 0 < went.count(True) < 100
    assert is_mostly(went[-300:], False)


@pytest.mark.parametrize("in_flight", [1, 2])
def test_what_waits_for_something_else_says_nothing_of_the_disk(in_flight: int) -> None:
    disk = Disk(0.5, 1.0, in_flight)
    for _ in range(100):
        disk.move(WINDOW)
    assert disk.rates() == {}


def test_pauses_say_nothing_of_the_disk() -> None:
    disk = Disk(0.5, 1.0)
    for _ in range(100):
        disk.move(3 * WINDOW)
        disk.idle()
    assert disk.rates() == {False: pytest.approx(1.0, rel=0.2), True: pytest.approx(2.0, rel=0.2)}


def test_what_was_not_moved_is_not_counted() -> None:
    disk = Disk(1.0, 1.0)
    for _ in range(200):
        disk.move(2)
        disk.seconds = {True: 0.0, False: 0.0}
        disk.move(6, num_bytes=0)
        disk.seconds = {True: 1.0, False: 1.0}
    assert all(rate < 1.5 for rate in disk.rates().values())


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
        assert disk.route._num_open == num_open
        assert disk.route._num_to_skip <= 200
    assert all(rate <= 4 * _WINDOW_BYTES for rate in disk.route._rates.values())
