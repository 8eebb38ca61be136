"""The clerk: everything that arrives is answered once, and nothing that is reserved is lost."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from kvtier.base import OffloadKey
from kvtier.tiering.fs import books as books_module
from kvtier.tiering.fs import clerk as module
from kvtier.tiering.fs import sweeper
from kvtier.tiering.fs.books import NAME_BYTES, Books, SeatLost
from kvtier.tiering.fs.clerk import Arrival, Change, Clerk, Limits
from kvtier.tiering.fs.lease import NoRoom, Room, Shut
from kvtier.tiering.fs.ledger import Balance, LedgerBusy
from kvtier.tiering.fs.names import SHARDS, block_path, namespace_path
from kvtier.tiering.fs.seat import Occupant
from kvtier.tiering.fs.tree import BlockFile, count_blocks, read_shard
from tests.tiering.fs.rig import block_files, du
from tests.tiering.patience import PATIENCE_S, wait_until

BLOCK_BYTES = 8192
CHARGE = BLOCK_BYTES + 4096 + NAME_BYTES
MAX_BYTES = 4 << 20


def key(number: int) -> OffloadKey:
    return OffloadKey(b"key %06d" % number)


class Desk:
    """A clerk, and what writers do: take room, write, hand in."""

    def __init__(
        self,
        root: Path,
        max_bytes: int = MAX_BYTES,
        min_free_bytes: int = 0,
        *,
        is_started: bool = True,
    ) -> None:
        """Without a start, the test does the clerk's work on its own thread."""
        self.root = root
        self.books = Books(root, Occupant.here("clerk", ""), 0.05)
        self.namespace = namespace_path(self.books.blocks, bytes(16))
        self.errors: list[OSError] = []
        self.answers: list[tuple[int, bool]] = []
        limits = Limits(max_bytes, min_free_bytes)
        self.clerk: Clerk[int] = Clerk(self.books, limits, BLOCK_BYTES, CHARGE, self.errors.append)
        self.clerk.use(self.namespace, self.namespace, None)
        if is_started:
            self.clerk.start(self.on_done)
        else:
            self.clerk._on_done = self.on_done

    def on_done(self, results: Sequence[tuple[Arrival[int], bool]]) -> None:
        self.answers += [(arrival.what, is_there) for arrival, is_there in results]

    def write(self, number: int, namespace: Path | None = None) -> Arrival[int]:
        room = self.clerk.lease.take()
        with open(room.path, "xb" if room.is_new else "r+b") as file:
            file.write(b"%08d" % number * (BLOCK_BYTES // 8))
        num_bytes = os.stat(room.path).st_blocks * 512
        space = str(namespace or self.namespace)
        return Arrival(number, key(number), room, space, block_path(space, key(number)), num_bytes)

    def store(self, *numbers: int) -> list[bool]:
        """Whether each is there afterwards."""
        before = len(self.answers)
        self.clerk.publish_soon([self.write(number) for number in numbers])
        wait_until(lambda: len(self.answers) == before + len(numbers), "all are answered")
        answers = dict(self.answers[before:])
        return [answers[number] for number in numbers]

    def goes_on_with(self, number: int) -> bool:
        """Whether a block can be stored again."""
        try:
            return self.store(number) == [True]
        except (NoRoom, Shut, SeatLost, OSError):
            return False

    def blocks(self) -> list[BlockFile]:
        return [
            block
            for shard in SHARDS
            for block in read_shard(self.books.below, self.namespace, shard)
        ]

    def news(self) -> list[tuple[set[OffloadKey], Change]]:
        news = self.clerk.news
        taken = [news.popleft() for _ in range(len(news))]
        return [(set(each.keys), each.change) for each in taken]

    def wait_until_exact(self) -> None:
        """When all is quiet, the ledger says what there is."""

        def is_exact() -> bool:
            balance = self.books.ledger.read()
            there = count_blocks(self.books.below, self.books.blocks)
            return balance.total == du(self.root) and there == (balance.blocks, balance.num_blocks)

        wait_until(is_exact, "the ledger says what du says")
        assert self.books.ledger.read().reserved == 0

    def stop(self) -> None:
        self.clerk.lease.close()
        self.clerk.stop()


@pytest.fixture(autouse=True)
def _in_a_hurry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_HEARTBEAT_S", 0.01)
    monkeypatch.setattr(module, "_QUIET_S", 0.1)
    monkeypatch.setattr(module, "_RETRY_S", 0.05)
    monkeypatch.setattr(module, "_MEASURE_COST", 1)
    monkeypatch.setattr(sweeper, "_RECLAIM_EVERY_S", 0.1)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "root"


@pytest.fixture
def desk(root: Path) -> Iterator[Desk]:
    made = Desk(root)
    yield made
    made.stop()


# --- limits ------------------------------------------------------------------------------------


def test_without_a_reserve_of_the_file_system_the_quota_alone_counts(tmp_path: Path) -> None:
    limits = Limits(10**6, 0)
    assert limits.apply(tmp_path, Balance(bytes(16), blocks=5)) == 10**6
    assert limits.missing_bytes(tmp_path) == 0


def test_what_the_file_system_has_left_limits_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "free_bytes", lambda _: 1000)
    balance = Balance(bytes(16), blocks=5000)
    assert Limits(10**6, 400).apply(tmp_path, balance) == 5600
    assert Limits(5100, 400).apply(tmp_path, balance) == 5100
    assert Limits(10**6, 1500).apply(tmp_path, balance) == 5000
    assert Limits(10**6, 400).missing_bytes(tmp_path) == 0
    assert Limits(10**6, 1500).missing_bytes(tmp_path) == 500


# --- blocks come -------------------------------------------------------------------------------


def test_what_is_written_is_published(desk: Desk) -> None:
    assert desk.store(1, 2, 3) == [True] * 3
    assert {path.name for path in block_files(desk.root)} == {key(n).hex() for n in (1, 2, 3)}
    assert desk.news() == [({key(1), key(2), key(3)}, Change.STORED)]
    desk.wait_until_exact()
    assert desk.clerk.usage.num_blocks == 3
    assert desk.errors == []


def test_what_is_there_already_is_news_of_another_kind(desk: Desk) -> None:
    desk.store(1)
    assert desk.store(1, 2) == [True, True]
    assert sorted(map(str, desk.news())) == sorted(
        map(
            str,
            [({key(1)}, Change.STORED), ({key(2)}, Change.STORED), ({key(1)}, Change.SEEN)],
        )
    )
    desk.wait_until_exact()


def test_the_quota_holds_and_blocks_leave(root: Path) -> None:
    max_bytes = 2 << 20
    desk = Desk(root, max_bytes)
    try:
        for start in range(0, 200, 4):
            desk.store(*range(start, start + 4))
            assert du(root) <= max_bytes
        num_there = len(block_files(root))
        assert desk.clerk.num_evicted > 0
        stored = sum(is_there for _, is_there in desk.answers)
        assert num_there == stored - desk.clerk.num_evicted
        assert 0 < desk.clerk.usage.num_bytes <= max_bytes
        desk.wait_until_exact()
        for path in block_files(root):
            number = path.read_bytes()[:8]
            assert key(int(number)).hex() == path.name
    finally:
        desk.stop()


def test_a_file_with_another_name_is_not_overwritten(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A backup made of hard links is as it was, after all blocks have left."""
    monkeypatch.setattr(books_module, "_FIRST_NAME_S", 0.0)
    desk = Desk(root, 2 << 20)
    try:
        desk.store(*range(8))
        kept = {}
        for path in block_files(root):
            os.link(path, tmp_path / path.name)
            kept[tmp_path / path.name] = path.read_bytes()
        for start in range(100, 300, 4):
            desk.store(*range(start, start + 4))
        assert not kept.keys() & {tmp_path / path.name for path in block_files(root)}, "all left"
        assert {path: path.read_bytes() for path in kept} == kept
        desk.wait_until_exact()
    finally:
        desk.stop()


def test_room_that_is_not_used_comes_back(desk: Desk) -> None:
    rooms = [desk.clerk.lease.take() for _ in range(3)]
    Path(rooms[0].path).write_bytes(b"half a block")
    for room in rooms:
        desk.clerk.return_room(room)
    desk.wait_until_exact()
    assert not os.path.exists(rooms[0].path)


def test_a_damaged_block_leaves(desk: Desk) -> None:
    desk.store(1, 2)
    bad = next(block for block in desk.blocks() if block.name == key(1).hex())
    os.utime(bad.path)  # someone uses it; that does not help it
    desk.clerk.remove_soon(bad)
    wait_until(lambda: len(block_files(desk.root)) == 1, "it has left")
    desk.wait_until_exact()
    assert desk.clerk.num_evicted == 0, "it did not leave for others"
    assert desk.news()[-1] == ({key(1)}, Change.REMOVED)


def test_where_nothing_may_leave_nobody_waits(root: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The root is full of another model's blocks."""
    other = Books(root, Occupant.here("other", ""), 5.0)
    with other.transaction() as balance:
        balance.add_blocks(MAX_BYTES, 1000)
    desk = Desk(root)
    try:
        with caplog.at_level(logging.WARNING), pytest.raises(NoRoom):
            desk.clerk.lease.take()
        wait_until(lambda: "kvtier store gc" in caplog.text, "it is said what to do")
        with pytest.raises(NoRoom):
            desk.clerk.lease.take()
        assert caplog.text.count("is full") == 1
    finally:
        desk.stop()
        other.close()


# --- what goes wrong ---------------------------------------------------------------------------


def test_who_has_to_wait_for_the_ledger_loses_nothing(desk: Desk) -> None:
    """Another engine hangs while it has the lock."""
    desk.store(1, 2)
    arrival = desk.write(3)
    other = Books(desk.root, Occupant.here("other", ""), 5.0)
    with other.transaction():
        desk.clerk.publish_soon([arrival])
        wait_until(lambda: (3, False) in desk.answers, "it is given up")
        seen = len(desk.errors)
        # Meanwhile what was reserved should be given back.
        wait_until(lambda: len(desk.errors) > seen + 2, "it is tried again")
    assert desk.books.has_seat
    other.close()
    wait_until(lambda: not desk.clerk.lease.is_shut, "the ledger is to be had again")
    assert desk.store(4) == [True]
    desk.wait_until_exact()


def test_a_lost_seat_is_replaced(desk: Desk) -> None:
    desk.store(1)
    arrival = desk.write(2)
    lost = desk.books.seat
    desk.books.give_up_seat()
    desk.clerk.publish_soon([arrival])
    wait_until(lambda: (2, False) in desk.answers, "it has failed")
    wait_until(lambda: desk.books.has_seat, "there is another seat")
    wait_until(lambda: not os.path.exists(arrival.room.path), "the old one is cleaned up")
    assert not desk.books.seat.contains(str(lost.blocks))

    wait_until(lambda: desk.goes_on_with(3), "it goes on")
    desk.wait_until_exact()


def test_room_that_comes_back_when_the_seat_is_lost_is_not_waited_for(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where a mount vanishes: one writer finds no place to write, while what another has
    written has just got its name, and cannot be cleared up after."""
    unused = desk.clerk.lease.take()
    link = os.link

    def link_and_vanish(source: str, target: str, **options: Any) -> None:
        link(source, target, **options)
        os.unlink(source, dir_fd=options["src_dir_fd"])
        desk.clerk.return_room(unused)

    with monkeypatch.context() as patched:
        patched.setattr(os, "link", link_and_vanish)
        assert desk.store(1) == [False]
    wait_until(lambda: desk.goes_on_with(2), "it goes on")
    desk.wait_until_exact()


def test_room_that_comes_back_while_the_seat_is_given_up_is_not_waited_for(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = desk.clerk.lease.take(), desk.clerk.lease.take()
    lease, settle = desk.clerk.lease, desk.clerk.lease.settle

    def settle_and_return(rooms: Iterable[Room]) -> None:
        rooms = list(rooms)
        settle(rooms)
        if first in rooms:
            desk.clerk.return_room(second)

    monkeypatch.setattr(lease, "settle", settle_and_return)
    desk.books.give_up_seat()
    desk.clerk.return_room(first)
    wait_until(lambda: desk.goes_on_with(1), "it goes on")
    desk.wait_until_exact()


def test_what_was_published_is_so_though_no_further_room_can_be_made(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another engine gets hold of the ledger in between, and hangs."""
    desk = Desk(root, is_started=False)
    clerk = desk.clerk
    clerk.ask_for_room()
    clerk._work()
    arrival = desk.write(1)
    clerk.lease.empty()
    clerk._limits = Limits(1, 0)  # so that blocks would have to leave

    def find_it_locked(missing: int) -> bool:
        raise LedgerBusy

    monkeypatch.setattr(clerk, "_make_free", find_it_locked)
    clerk.ask_for_room()
    clerk.publish_soon([arrival])
    with pytest.raises(LedgerBusy):
        clerk._work()
    assert desk.answers == [(1, True)]
    assert desk.news() == [({key(1)}, Change.STORED)]
    clerk._limits = Limits(MAX_BYTES, 0)
    clerk._retry_at = 0.0
    for _ in range(2):
        clerk._work()
    assert not clerk.lease.is_shut
    assert clerk.lease.empty() == (0, []), "its room cannot be used a second time"
    desk.books.close()


def test_a_new_seat_is_not_lost_for_a_namespace_in_the_old_one(desk: Desk) -> None:
    """Stores keep coming after a reset, before the scheduler has heard of the new seat."""
    old = namespace_path(desk.books.seat.blocks, b"o" * 16)
    desk.clerk.use(old, desk.namespace, None)
    desk.namespace = old
    assert desk.store(1, 2) == [True, True]
    desk.books.give_up_seat()
    other = Books(desk.root, Occupant.here("other", ""), PATIENCE_S)
    wait_until(lambda: other.reclaim() == 0 and not old.exists(), "the old seat is gone")
    wait_until(lambda: desk.books.has_seat and not desk.clerk.lease.is_shut, "there is another")
    seat = desk.books.seat
    for _ in range(3):
        with pytest.raises(NoRoom):
            desk.clerk.lease.take()
        wait_until(lambda: not desk.clerk.lease.is_shut, "room may be asked for again")
    assert desk.books.seat is seat
    assert desk.clerk.private_blocks == seat.blocks
    desk.namespace = namespace_path(seat.blocks, b"n" * 16)
    desk.clerk.use(desk.namespace, desk.namespace, None)
    assert desk.store(3) == [True]
    # What was begun before it was known comes too late.
    desk.clerk.publish_soon([desk.write(4, old)])
    wait_until(lambda: (4, False) in desk.answers, "it is not published")
    assert desk.books.seat is seat
    assert not old.exists()
    other.close()
    assert [block.name for block in desk.blocks()] == [key(3).hex()]


@pytest.mark.parametrize("content", [b"", b"garbage" * 9000])
def test_a_lost_ledger_is_mended(desk: Desk, content: bytes) -> None:
    desk.store(1, 2, 3)
    (desk.root / "ledger").write_bytes(content)

    wait_until(lambda: desk.goes_on_with(4), "it goes on")
    desk.wait_until_exact()
    assert desk.books.ledger.read().num_blocks == 4


def test_each_is_answered_once_also_at_the_end(root: Path) -> None:
    desk = Desk(root)
    threads = []

    def write(first: int) -> None:
        for number in range(first, first + 20):
            try:
                desk.clerk.publish_soon([desk.write(number)])
            except (NoRoom, Shut):
                desk.answers.append((number, False))

    for first in (0, 100, 200):
        threads.append(threading.Thread(target=write, args=(first,)))
        threads[-1].start()
    for thread in threads:
        thread.join(PATIENCE_S)
    desk.stop()
    numbers = sorted(number for number, _ in desk.answers)
    assert numbers == [*range(20), *range(100, 120), *range(200, 220)]
    there = {key(number).hex() for number, is_there in desk.answers if is_there}
    assert there == {path.name for path in block_files(root)}
    assert not list((root / "engines").iterdir())


def test_stopping_twice_changes_nothing(root: Path) -> None:
    desk = Desk(root)
    desk.stop()
    desk.stop()
    assert not list((root / "engines").iterdir())


def test_an_end_while_dead_engines_are_buried_is_quiet(
    root: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for _ in range(5):
        dead = Books(root, Occupant.here("dead", ""), 5.0)
        for number in range(50):
            Path(dead.seat.incoming()).write_bytes(b"%d" % number)
        dead.give_up_seat()
        dead.ledger.close()
        Desk(root).stop()
    assert "Traceback" not in caplog.text
