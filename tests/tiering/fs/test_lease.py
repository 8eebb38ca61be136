"""Room in an engine's hands: nothing of it is lost, and nothing invented."""

from __future__ import annotations

import threading
from collections import deque
from itertools import count
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from kvtier.tiering.fs.lease import Lease, NoRoom, Room, Shut
from tests.tiering.patience import PATIENCE_S, wait_until

CHARGE = 100


def make(target: int = 4) -> tuple[Lease, list[None]]:
    """A lease, and how often it has asked."""
    asked: list[None] = []
    numbers = count()
    return Lease(CHARGE, target, lambda: f"new-{next(numbers)}", lambda: asked.append(None)), asked


def recycled(number: int, charge: int = CHARGE + 7) -> Room:
    return Room(f"old-{number}", False, charge)


class Machine(RuleBasedStateMachine):
    """What goes in comes out, once."""

    @initialize(size=st.integers(1, 9))
    def start(self, size: int) -> None:
        self.target = size
        self.lease, self.asked = make(size)
        self.funds = 0
        self.files: deque[Room] = deque()
        self.is_closed = False
        self.numbers = count()
        self.paths: set[str] = set()

    @property
    def num_available(self) -> int:
        return 0 if self.is_closed else len(self.files) + self.funds // CHARGE

    @property
    def is_short(self) -> bool:
        """Whether there is too little, though nobody waits. A target of one is for those who do."""
        return not self.is_closed and self.target > 1 and self.num_available <= self.target // 2

    @rule(num_bytes=st.integers(0, 5 * CHARGE), num_files=st.integers(0, 4))
    def put(self, num_bytes: int, num_files: int) -> None:
        files = [recycled(next(self.numbers)) for _ in range(num_files)]
        self.lease.put(num_bytes, files)
        self.funds += num_bytes
        self.files += files

    @rule()
    def take(self) -> None:
        num_asked = len(self.asked)
        if not self.num_available:
            if self.is_closed:
                with pytest.raises(Shut):
                    self.lease.take()
            return
        room = self.lease.take()
        assert room.path not in self.paths
        self.paths.add(room.path)
        if self.files:
            assert room == self.files.popleft()
        else:
            assert room.is_new
            self.funds -= room.charge
        assert len(self.asked) == num_asked + self.is_short

    @rule()
    def refuse(self) -> None:
        self.lease.refuse()

    @rule()
    def empty(self) -> None:
        assert self.lease.empty() == (self.funds, list(self.files))
        self.funds = 0
        self.files.clear()

    @rule()
    def close(self) -> None:
        self.lease.close()
        self.is_closed = True

    @invariant()
    def no_more_is_wanted_than_is_missing(self) -> None:
        available = self.num_available
        assert self.lease.num_wanted == (self.target - available if self.is_short else 0)
        assert not self.lease.is_waited_for

    def teardown(self) -> None:
        if hasattr(self, "lease"):
            assert self.lease.empty() == (self.funds, list(self.files))


TestLease = Machine.TestCase


@given(st.randoms(use_true_random=False))
def test_taken_and_left_is_what_was_put(chance: Random) -> None:
    """Threads take, while others put, refuse, and close."""
    lease, _ = make()
    taken: deque[Room] = deque()

    def take() -> None:
        for _ in range(12):
            try:
                taken.append(lease.take())
            except (NoRoom, Shut):
                continue

    threads = [threading.Thread(target=take) for _ in range(3)]
    for thread in threads:
        thread.start()
    total = 0
    for number in range(12):
        num_bytes = chance.randint(0, 3 * CHARGE)
        files = [recycled(10 * number + each) for each in range(chance.randint(0, 2))]
        lease.put(num_bytes, files)
        total += num_bytes + sum(file.charge for file in files)
        if chance.random() < 0.3:
            lease.refuse()
        if chance.random() < 0.2:
            num_bytes, files = lease.empty()
            total -= num_bytes + sum(file.charge for file in files)
    lease.close()
    for thread in threads:
        thread.join(PATIENCE_S)
        assert not thread.is_alive()
    num_bytes, files = lease.empty()
    left = num_bytes + sum(file.charge for file in files)
    assert left + sum(room.charge for room in taken) == total
    paths = [room.path for room in taken] + [room.path for room in files]
    assert len(set(paths)) == len(paths)
    assert lease.is_idle == (not taken)
    lease.settle(taken)
    lease.settle(taken)
    assert lease.is_idle


def waiting(lease: Lease, how_many: int = 1) -> tuple[list[threading.Thread], list[Room | None]]:
    """Threads that wait for room, and what they have got: None is a refusal."""
    got: list[Room | None] = []

    def take() -> None:
        try:
            got.append(lease.take())
        except (NoRoom, Shut):
            got.append(None)

    threads = [threading.Thread(target=take) for _ in range(how_many)]
    for thread in threads:
        thread.start()
    wait_until(lambda: lease._num_waiting == how_many, "they wait")
    return threads, got


def joined(threads: list[threading.Thread]) -> None:
    for thread in threads:
        thread.join(PATIENCE_S)
        assert not thread.is_alive()


def test_who_waits_gets_what_comes() -> None:
    lease, asked = make()
    threads, got = waiting(lease)
    assert asked
    assert lease.is_waited_for
    lease.put(CHARGE - 1, [])
    assert lease.is_waited_for, "that is not enough"
    lease.put(1, [])
    joined(threads)
    assert got == [Room("new-0", True, CHARGE)]
    assert lease.empty() == (0, [])


@pytest.mark.parametrize(("has_failed", "raised"), [(True, Shut), (False, NoRoom)])
def test_no_room_is_not_said_where_the_root_has_failed(
    has_failed: bool, raised: type[Exception]
) -> None:
    lease = Lease(CHARGE, 1, lambda: "w1", lambda: None)
    lease.put(CHARGE, [])
    lease.shut(has_failed=has_failed)
    with pytest.raises(raised):
        lease.take()
    lease.open()
    assert lease.take().path == "w1"


@pytest.mark.parametrize("end", ["refuse", "close"])
def test_a_refusal_is_for_all_who_wait(end: str) -> None:
    lease, _ = make()
    threads, got = waiting(lease, 3)
    getattr(lease, end)()
    joined(threads)
    assert got == [None] * 3
    assert lease.is_idle


def test_a_refusal_is_not_for_those_who_come_later() -> None:
    lease, _ = make()
    lease.refuse()
    threads, got = waiting(lease)
    lease.put(0, [recycled(1)])
    joined(threads)
    assert got == [recycled(1)]


def test_as_much_is_wanted_as_there_are_who_wait() -> None:
    lease, _ = make(target=1)
    threads, got = waiting(lease, 3)
    assert lease.num_wanted == 3
    lease.put(3 * CHARGE, [])
    joined(threads)
    assert len(got) == 3


def test_after_the_end_nothing_is_wanted_and_nothing_lost() -> None:
    lease, _ = make()
    lease.put(2 * CHARGE + 5, [recycled(1)])
    lease.close()
    assert lease.num_wanted == 0
    with pytest.raises(Shut):
        lease.take()
    lease.put(1, [])
    assert lease.empty() == (2 * CHARGE + 6, [recycled(1)])
