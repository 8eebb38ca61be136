"""The queues get no more than they have room for, and no thread waits if there is room."""

from __future__ import annotations

import itertools
from typing import Any

from hypothesis import example, given
from hypothesis import strategies as st

from kvtier.cpu.cuda.resources import _MOST_ENTRIES, _OF_EVENTS, QueueRoom

STREAM = 77
LARGEST_PART = _MOST_ENTRIES // 2 - _OF_EVENTS
"""Copies for which there is room when half of the entries have ended."""


class Driver:
    """A stream whose events are reached in order, when a test says so or a thread waits."""

    def __init__(self) -> None:
        self._handles = itertools.count()
        self.ahead: list[int] = []
        """Events whose last record is not reached yet."""
        self.alive: set[int] = set()
        self.num_waits = self.num_created = 0

    def create_event(self, *, is_timed: bool) -> int:
        assert not is_timed
        self.num_created += 1
        handle = next(self._handles)
        self.alive.add(handle)
        return handle

    def destroy_event(self, event: int) -> None:
        self.alive.remove(event)

    def record_event(self, event: int, stream: int) -> None:
        assert stream == STREAM
        assert event in self.alive
        assert event not in self.ahead, "its last record is still waited for"
        self.ahead.append(event)

    def is_reached(self, event: int) -> bool:
        return event not in self.ahead

    def synchronize_event(self, event: int) -> None:
        self.num_waits += 1
        self.reach(self.ahead.index(event) + 1)

    def reach(self, count: int) -> None:
        del self.ahead[:count]


PARTS = st.tuples(
    st.just("part"), st.one_of(st.sampled_from([64, LARGEST_PART]), st.integers(1, LARGEST_PART))
)
REACHED = st.tuples(st.just("reached"), st.one_of(st.integers(0, 3), st.just(1000)))
SETTLED = st.tuples(st.just("settled"), st.just(0))


@given(st.lists(st.one_of(PARTS, PARTS, PARTS, REACHED, SETTLED), max_size=80))
@example([("part", LARGEST_PART)] * 3)
def test_as_much_as_there_is_room_for_is_under_way(actions: list[tuple[str, int]]) -> None:
    """Events are reused, but not before they were reached."""
    driver: Any = Driver()
    watched = QueueRoom(driver)
    sizes: list[int] = []  # of the parts that are not done, with their events
    for action, number in actions:
        if action == "part":
            is_too_much = sum(sizes) + number + _OF_EVENTS > _MOST_ENTRIES
            assert watched.is_full(number) == is_too_much
            watched.await_room(number)
            assert (driver.num_waits > 0) == is_too_much
            driver.num_waits = 0
            del sizes[: len(sizes) - len(driver.ahead)]
            if is_too_much:
                assert sum(sizes) <= _MOST_ENTRIES // 2
            watched.add(number, STREAM)
            sizes.append(number + _OF_EVENTS)
            assert sum(sizes) <= _MOST_ENTRIES
        elif action == "reached":
            driver.reach(number)
            del sizes[:number]
        else:
            driver.reach(len(sizes))
            sizes.clear()
            watched.forget()
            assert not watched.is_full(_MOST_ENTRIES - _OF_EVENTS)


@given(st.integers(1, LARGEST_PART))
def test_events_are_used_again(num_copies: int) -> None:
    """Entries of ended parts are dropped at the next check for room."""
    driver: Any = Driver()
    watched = QueueRoom(driver)
    entries = num_copies + _OF_EVENTS
    for _ in range(3 * _MOST_ENTRIES // entries):
        watched.await_room(num_copies)
        watched.add(num_copies, STREAM)
        driver.reach(1)
    assert driver.num_created <= _MOST_ENTRIES // entries


def test_what_is_not_needed_any_more_is_destroyed() -> None:
    driver: Any = Driver()
    watched = QueueRoom(driver)
    for _ in range(5):
        watched.add(1, STREAM)
    driver.reach(5)
    watched.forget()
    watched.add(1, STREAM)
    assert len(driver.alive) == 5
    del watched
    assert driver.alive == set()
