"""Blocks go whichever way is quicker, and the other one is tried now and then."""

from __future__ import annotations

import logging
from collections import deque

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtier.tiering.io.route import _EVERY, _TRIAL_BYTES, Route, Trial

UNIT_BYTES = _TRIAL_BYTES // 8


class Disk:
    """Ends what is under way in order; how long it takes for a byte is said for each way."""

    def __init__(self, buffered_s: float, straight_s: float, in_flight: int = 8) -> None:
        self.seconds = {True: buffered_s, False: straight_s}
        self.time = 0.0
        self.in_flight = in_flight
        self.under_way: deque[Trial] = deque()
        self.route = Route("loads", lambda: self.time)
        self.went: list[bool] = []

    def move(self, num_units: int) -> list[bool]:
        """Which way units go that are there all at once."""
        start = len(self.went)
        for _ in range(num_units):
            if len(self.under_way) == self.in_flight:
                self.end_one()
            trial = self.route.begin(UNIT_BYTES)
            self.went.append(trial.is_buffered)
            self.under_way.append(trial)
        return self.went[start:]

    def end_one(self) -> None:
        trial = self.under_way.popleft()
        self.time += self.seconds[trial.is_buffered]
        self.route.end(trial)

    def idle(self) -> None:
        while self.under_way:
            self.end_one()
        self.time += 100.0


@pytest.mark.parametrize(
    ("buffered_s", "is_buffered"), [(0.5, True), (2.0, False), (1.0, False), (0.95, False)]
)
def test_the_quicker_way_is_taken(buffered_s: float, is_buffered: bool) -> None:
    """Alike, they go straight: that costs no copy."""
    disk = Disk(buffered_s, 1.0)
    disk.move(200)
    went = disk.move(8 * _EVERY * 4)
    assert went.count(is_buffered) / len(went) == pytest.approx(1 - 1 / _EVERY, abs=0.02)


def test_a_machine_that_changes_is_noticed(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    disk = Disk(0.5, 1.0)
    disk.move(200)
    disk.seconds = {True: 4.0, False: 1.0}
    disk.move(8 * _EVERY * 20)
    assert disk.move(8).count(False) >= 7
    said = [record.message for record in caplog.records]
    assert len(said) == 2
    assert "loads go through buffers" in said[0]
    assert "loads go straight" in said[1]


def test_pauses_say_nothing_of_the_disk() -> None:
    disk = Disk(0.5, 1.0)
    for _ in range(100):
        disk.move(12)
        disk.idle()
    assert disk.route._rates == {}
    assert set(disk.went) == {True}, "until it is known, blocks pass through buffers"


def test_one_at_a_time_says_nothing_of_the_disk() -> None:
    disk = Disk(0.5, 1.0, in_flight=1)
    disk.move(1000)
    assert disk.route._rates == {}


@settings(max_examples=200)
@given(st.lists(st.tuples(st.integers(1, 3 * _TRIAL_BYTES), st.integers(0, 5)), max_size=80))
def test_any_order_of_ends(steps: list[tuple[int, int]]) -> None:
    clock = iter(range(1, 10**6))
    route = Route("loads", lambda: float(next(clock)))
    under_way: list[Trial] = []
    for num_bytes, which in steps:
        under_way.append(route.begin(num_bytes))
        if which < len(under_way):
            route.end(under_way.pop(which))
    for trial in under_way:
        route.end(trial)
    assert route._num_open == 0
    assert len(route._trials) == 1
    assert all(rate > 0 for rate in route._rates.values())
