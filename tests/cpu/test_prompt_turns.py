"""Threads get the interpreter quickly while blocks are moved, and as before afterwards."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from kvtier.cpu.job_thread import JobThread, prompt_turns

PYTHONS = 0.005


@pytest.fixture(autouse=True)
def _interval() -> Iterator[None]:
    before = sys.getswitchinterval()
    sys.setswitchinterval(PYTHONS)
    yield
    assert sys.getswitchinterval() == pytest.approx(PYTHONS)
    sys.setswitchinterval(before)


def test_as_long_as_anyone_is_within() -> None:
    with ExitStack() as first:
        first.enter_context(prompt_turns)
        with prompt_turns:
            assert sys.getswitchinterval() == pytest.approx(0.0001)
            first.close()
            assert sys.getswitchinterval() == pytest.approx(0.0001)
        assert sys.getswitchinterval() == pytest.approx(PYTHONS)


@pytest.mark.parametrize("interval_s", [0.0001, 0.00002])
def test_what_is_shorter_already_stays(interval_s: float) -> None:
    sys.setswitchinterval(interval_s)
    for _ in range(3):
        with prompt_turns:
            assert sys.getswitchinterval() == pytest.approx(interval_s)
        assert sys.getswitchinterval() == pytest.approx(interval_s)
    sys.setswitchinterval(PYTHONS)


def test_what_somebody_else_has_set_meanwhile_stays() -> None:
    with prompt_turns:
        sys.setswitchinterval(PYTHONS)
    assert sys.getswitchinterval() == pytest.approx(PYTHONS)


def test_a_lane_asks_for_it_while_it_works() -> None:
    seen: list[float] = []
    lane = JobThread("lane")
    lane.put(lambda: seen.append(sys.getswitchinterval()))
    deadline = time.monotonic() + 30
    while not seen or sys.getswitchinterval() < PYTHONS / 2:
        assert time.monotonic() < deadline, "it waits for work, and keeps the interval"
        time.sleep(0.001)
    lane.close()
    assert seen == [pytest.approx(0.0001)]
