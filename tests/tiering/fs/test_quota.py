"""The pool of reservations: none is lost, and none is made up."""

from __future__ import annotations

import threading
from collections import deque
from itertools import count
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from kvtier.tiering.fs.quota import NoSpace, Reservation, ReservationPool, StoresSuspended
from tests.tiering.patience import PATIENCE_S, wait_until

CHARGE = 100


def make(target: int = 4) -> tuple[ReservationPool, list[None]]:
    """A pool, and a list that grows each time the pool asks for space."""
    asked: list[None] = []
    numbers = count()
    return ReservationPool(
        CHARGE, target, lambda: f"new-{next(numbers)}", lambda: asked.append(None)
    ), asked


def recycled(number: int, charge: int = CHARGE + 7) -> Reservation:
    return Reservation(f"old-{number}", False, charge)


class Machine(RuleBasedStateMachine):
    """Every byte and file that is put in comes out once."""

    @initialize(size=st.integers(1, 9))
    def start(self, size: int) -> None:
        self.target = size
        self.pool, self.asked = make(size)
        self.funds = 0
        self.files: deque[Reservation] = deque()
        self.is_closed = False
        self.numbers = count()
        self.paths: set[str] = set()

    @property
    def num_available(self) -> int:
        return 0 if self.is_closed else len(self.files) + self.funds // CHARGE

    @property
    def is_short(self) -> bool:
        """True if the pool is too empty although no thread waits; never with a target of 1."""
        return not self.is_closed and self.target > 1 and self.num_available <= self.target // 2

    @rule(num_bytes=st.integers(0, 5 * CHARGE), num_files=st.integers(0, 4))
    def put(self, num_bytes: int, num_files: int) -> None:
        files = [recycled(next(self.numbers)) for _ in range(num_files)]
        self.pool.put(num_bytes, files)
        self.funds += num_bytes
        self.files += files

    @rule()
    def take(self) -> None:
        num_asked = len(self.asked)
        if not self.num_available:
            if self.is_closed:
                with pytest.raises(StoresSuspended):
                    self.pool.take()
            return
        reservation = self.pool.take()
        assert reservation.path not in self.paths
        self.paths.add(reservation.path)
        if self.files:
            assert reservation == self.files.popleft()
        else:
            assert reservation.is_new
            self.funds -= reservation.charge
        assert len(self.asked) == num_asked + self.is_short

    @rule()
    def refuse(self) -> None:
        self.pool.refuse()

    @rule()
    def empty(self) -> None:
        assert self.pool.empty() == (self.funds, list(self.files))
        self.funds = 0
        self.files.clear()

    @rule()
    def close(self) -> None:
        self.pool.close()
        self.is_closed = True

    @invariant()
    def no_more_is_wanted_than_is_missing(self) -> None:
        available = self.num_available
        assert self.pool.num_wanted == (self.target - available if self.is_short else 0)
        assert not self.pool.is_waited_for

    def teardown(self) -> None:
        if hasattr(self, "pool"):
            assert self.pool.empty() == (self.funds, list(self.files))


TestLease = Machine.TestCase


@given(st.randoms(use_true_random=False))
def test_taken_and_left_is_what_was_put(chance: Random) -> None:
    """Threads take while others put, refuse and close."""
    pool, _ = make()
    taken: deque[Reservation] = deque()

    def take() -> None:
        for _ in range(12):
            try:
                taken.append(pool.take())
            except (NoSpace, StoresSuspended):
                continue

    threads = [threading.Thread(target=take) for _ in range(3)]
    for thread in threads:
        thread.start()
    total = 0
    for number in range(12):
        num_bytes = chance.randint(0, 3 * CHARGE)
        files = [recycled(10 * number + each) for each in range(chance.randint(0, 2))]
        pool.put(num_bytes, files)
        total += num_bytes + sum(file.charge for file in files)
        if chance.random() < 0.3:
            pool.refuse()
        if chance.random() < 0.2:
            num_bytes, files = pool.empty()
            total -= num_bytes + sum(file.charge for file in files)
    pool.close()
    for thread in threads:
        thread.join(PATIENCE_S)
        assert not thread.is_alive()
    num_bytes, files = pool.empty()
    left = num_bytes + sum(file.charge for file in files)
    assert left + sum(reservation.charge for reservation in taken) == total
    paths = [reservation.path for reservation in taken] + [
        reservation.path for reservation in files
    ]
    assert len(set(paths)) == len(paths)
    assert pool.is_idle == (not taken)
    pool.settle(taken)
    pool.settle(taken)
    assert pool.is_idle


def waiting(
    pool: ReservationPool, how_many: int = 1
) -> tuple[list[threading.Thread], list[Reservation | None]]:
    """Threads that wait for space, and their reservations; None for a refusal."""
    got: list[Reservation | None] = []

    def take() -> None:
        try:
            got.append(pool.take())
        except (NoSpace, StoresSuspended):
            got.append(None)

    threads = [threading.Thread(target=take) for _ in range(how_many)]
    for thread in threads:
        thread.start()
    wait_until(lambda: pool._num_waiting == how_many, "they wait")
    return threads, got


def joined(threads: list[threading.Thread]) -> None:
    for thread in threads:
        thread.join(PATIENCE_S)
        assert not thread.is_alive()


def test_who_waits_gets_what_comes() -> None:
    pool, asked = make()
    threads, got = waiting(pool)
    assert asked
    assert pool.is_waited_for
    pool.put(CHARGE - 1, [])
    assert pool.is_waited_for, "that is not enough"
    pool.put(1, [])
    joined(threads)
    assert got == [Reservation("new-0", True, CHARGE)]
    assert pool.empty() == (0, [])


@pytest.mark.parametrize(("has_failed", "raised"), [(True, StoresSuspended), (False, NoSpace)])
def test_no_room_is_not_said_where_the_root_has_failed(
    has_failed: bool, raised: type[Exception]
) -> None:
    pool = ReservationPool(CHARGE, 1, lambda: "w1", lambda: None)
    pool.put(CHARGE, [])
    pool.suspend(has_failed=has_failed)
    with pytest.raises(raised):
        pool.take()
    pool.resume()
    assert pool.take().path == "w1"


@pytest.mark.parametrize("end", ["refuse", "close"])
def test_a_refusal_is_for_all_who_wait(end: str) -> None:
    pool, _ = make()
    threads, got = waiting(pool, 3)
    getattr(pool, end)()
    joined(threads)
    assert got == [None] * 3
    assert pool.is_idle


def test_a_refusal_is_not_for_those_who_come_later() -> None:
    pool, _ = make()
    pool.refuse()
    threads, got = waiting(pool)
    pool.put(0, [recycled(1)])
    joined(threads)
    assert got == [recycled(1)]


def test_as_much_is_wanted_as_there_are_who_wait() -> None:
    pool, _ = make(target=1)
    threads, got = waiting(pool, 3)
    assert pool.num_wanted == 3
    pool.put(3 * CHARGE, [])
    joined(threads)
    assert len(got) == 3


def test_after_the_end_nothing_is_wanted_and_nothing_lost() -> None:
    pool, _ = make()
    pool.put(2 * CHARGE + 5, [recycled(1)])
    pool.close()
    assert pool.num_wanted == 0
    with pytest.raises(StoresSuspended):
        pool.take()
    pool.put(1, [])
    assert pool.empty() == (2 * CHARGE + 6, [recycled(1)])
