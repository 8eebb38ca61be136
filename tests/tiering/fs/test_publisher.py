"""The publisher: every staged block is reported once, and no reservation is lost."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from kvtier.base import OffloadKey
from kvtier.tiering.fs import eviction, quota
from kvtier.tiering.fs import publisher as module
from kvtier.tiering.fs import transaction as transaction_module
from kvtier.tiering.fs.layout import (
    SHARDS,
    BlockFile,
    block_path,
    count_blocks,
    namespace_path,
    read_shard,
)
from kvtier.tiering.fs.ledger import Balance, LedgerBusy
from kvtier.tiering.fs.presence import EngineInfo
from kvtier.tiering.fs.publisher import Change, Publisher, StagedBlock
from kvtier.tiering.fs.quota import Limits, NoSpace, Reservation, StoresSuspended
from kvtier.tiering.fs.root import PresenceLost, RootSession
from kvtier.tiering.fs.transaction import NAME_BYTES
from tests.tiering.fs.harness import block_files, du
from tests.tiering.patience import PATIENCE_S, wait_until

BLOCK_BYTES = 8192
CHARGE = BLOCK_BYTES + 4096 + NAME_BYTES
MAX_BYTES = 4 << 20


def key(number: int) -> OffloadKey:
    return OffloadKey(b"key %06d" % number)


class PublisherRig:
    """A publisher, and the work of a lane: take a reservation, write, publish."""

    def __init__(
        self,
        root: Path,
        max_bytes: int = MAX_BYTES,
        min_free_bytes: int = 0,
        *,
        is_started: bool = True,
    ) -> None:
        """Without `is_started`, the test does the publisher's work on its own thread."""
        self.root = root
        self.session = RootSession(root, EngineInfo.here("publisher", ""), 0.05)
        self.namespace = namespace_path(self.session.blocks, bytes(16))
        self.errors: list[OSError] = []
        self.answers: list[tuple[int, bool]] = []
        limits = Limits(max_bytes, min_free_bytes)
        self.publisher: Publisher[int] = Publisher(
            self.session, limits, BLOCK_BYTES, CHARGE, self.errors.append
        )
        self.publisher.use(self.namespace, self.namespace, None)
        if is_started:
            self.publisher.start(self.on_done)
        else:
            self.publisher._on_done = self.on_done

    def on_done(self, results: Sequence[tuple[StagedBlock[int], bool]]) -> None:
        self.answers += [(block.what, is_there) for block, is_there in results]

    def write(self, number: int, namespace: Path | None = None) -> StagedBlock[int]:
        reservation = self.publisher.pool.take()
        with open(reservation.path, "xb" if reservation.is_new else "r+b") as file:
            file.write(b"%08d" % number * (BLOCK_BYTES // 8))
        num_bytes = os.stat(reservation.path).st_blocks * 512
        space = str(namespace or self.namespace)
        return StagedBlock(
            number, key(number), reservation, space, block_path(space, key(number)), num_bytes
        )

    def store(self, *numbers: int) -> list[bool]:
        """For each block, whether it is published."""
        before = len(self.answers)
        self.publisher.publish_soon([self.write(number) for number in numbers])
        wait_until(lambda: len(self.answers) == before + len(numbers), "all are answered")
        answers = dict(self.answers[before:])
        return [answers[number] for number in numbers]

    def goes_on_with(self, number: int) -> bool:
        """True once a block can be stored again."""
        try:
            return self.store(number) == [True]
        except (NoSpace, StoresSuspended, PresenceLost, OSError):
            return False

    def blocks(self) -> list[BlockFile]:
        return [
            block
            for shard in SHARDS
            for block in read_shard(self.session.tree, self.namespace, shard)
        ]

    def changes(self) -> list[tuple[set[OffloadKey], Change]]:
        return [(set(each.keys), each.change) for each in self.publisher.changes.take()]

    def wait_until_exact(self) -> None:
        """Wait until the ledger equals `du` and nothing is reserved."""

        def is_exact() -> bool:
            balance = self.session.ledger.read()
            there = count_blocks(self.session.tree, self.session.blocks)
            return balance.total == du(self.root) and there == (balance.blocks, balance.num_blocks)

        wait_until(is_exact, "the ledger says what du says")
        assert self.session.ledger.read().reserved == 0

    def stop(self) -> None:
        self.publisher.pool.close()
        self.publisher.stop()


@pytest.fixture(autouse=True)
def _in_a_hurry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_HEARTBEAT_S", 0.01)
    monkeypatch.setattr(module, "_QUIET_S", 0.1)
    monkeypatch.setattr(module, "_RETRY_S", 0.05)
    monkeypatch.setattr(quota, "_MEASURE_EVERY_S", 0.01)
    monkeypatch.setattr(quota, "_MEASURE_COST", 1)
    monkeypatch.setattr(eviction, "_RECLAIM_EVERY_S", 0.1)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "root"


@pytest.fixture
def rig(root: Path) -> Iterator[PublisherRig]:
    made = PublisherRig(root)
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
    monkeypatch.setattr(quota, "free_bytes", lambda _: 1000)
    balance = Balance(bytes(16), blocks=5000)
    assert Limits(10**6, 400).apply(tmp_path, balance) == 5600
    assert Limits(5100, 400).apply(tmp_path, balance) == 5100
    assert Limits(10**6, 1500).apply(tmp_path, balance) == 5000
    assert Limits(10**6, 400).missing_bytes(tmp_path) == 0
    assert Limits(10**6, 1500).missing_bytes(tmp_path) == 500


# --- blocks come -------------------------------------------------------------------------------


def test_what_is_written_is_published(rig: PublisherRig) -> None:
    assert rig.store(1, 2, 3) == [True] * 3
    assert {path.name for path in block_files(rig.root)} == {key(n).hex() for n in (1, 2, 3)}
    assert rig.changes() == [({key(1), key(2), key(3)}, Change.STORED)]
    rig.wait_until_exact()
    assert rig.publisher.usage.num_blocks == 3
    assert rig.errors == []


def test_what_is_there_already_is_news_of_another_kind(rig: PublisherRig) -> None:
    rig.store(1)
    assert rig.store(1, 2) == [True, True]
    assert sorted(map(str, rig.changes())) == sorted(
        map(
            str,
            [({key(1)}, Change.STORED), ({key(2)}, Change.STORED), ({key(1)}, Change.SEEN)],
        )
    )
    rig.wait_until_exact()


def test_the_quota_holds_and_blocks_leave(root: Path) -> None:
    max_bytes = 2 << 20
    rig = PublisherRig(root, max_bytes)
    try:
        for start in range(0, 200, 4):
            rig.store(*range(start, start + 4))
            assert du(root) <= max_bytes
        assert rig.publisher.num_evicted > 0
        assert 0 < rig.publisher.usage.num_bytes <= max_bytes
        rig.wait_until_exact()  # until then, blocks are still evicted in advance
        stored = sum(is_there for _, is_there in rig.answers)
        assert len(block_files(root)) == stored - rig.publisher.num_evicted
        for path in block_files(root):
            number = path.read_bytes()[:8]
            assert key(int(number)).hex() == path.name
    finally:
        rig.stop()


def test_a_file_with_another_name_is_not_overwritten(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A backup made of hard links is unchanged after all blocks were evicted."""
    monkeypatch.setattr(transaction_module, "_FIRST_NAME_S", 0.0)
    rig = PublisherRig(root, 2 << 20)
    try:
        rig.store(*range(8))
        kept = {}
        for path in block_files(root):
            os.link(path, tmp_path / path.name)
            kept[tmp_path / path.name] = path.read_bytes()
        for start in range(100, 300, 4):
            rig.store(*range(start, start + 4))
        assert not kept.keys() & {tmp_path / path.name for path in block_files(root)}, "all left"
        assert {path: path.read_bytes() for path in kept} == kept
        rig.wait_until_exact()
    finally:
        rig.stop()


def test_room_that_is_not_used_comes_back(rig: PublisherRig) -> None:
    reservations = [rig.publisher.pool.take() for _ in range(3)]
    Path(reservations[0].path).write_bytes(b"half a block")
    for reservation in reservations:
        rig.publisher.return_reservation(reservation)
    rig.wait_until_exact()
    assert not os.path.exists(reservations[0].path)


def test_a_damaged_block_leaves(rig: PublisherRig) -> None:
    rig.store(1, 2)
    bad = next(block for block in rig.blocks() if block.name == key(1).hex())
    os.utime(bad.path)  # a use does not save a damaged block
    rig.publisher.damaged.add(bad)
    wait_until(lambda: len(block_files(rig.root)) == 1, "it has left")
    rig.wait_until_exact()
    assert bad.path not in rig.publisher.damaged
    assert rig.publisher.num_evicted == 0, "it did not leave for others"
    assert rig.changes()[-1] == ({key(1)}, Change.REMOVED)


def test_where_nothing_may_leave_nobody_waits(root: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The root is full of another model's blocks."""
    other = RootSession(root, EngineInfo.here("other", ""), 5.0)
    with other.transaction() as txn:
        txn.balance.add_blocks(MAX_BYTES, 1000)
    rig = PublisherRig(root)
    try:
        with caplog.at_level(logging.WARNING), pytest.raises(NoSpace):
            rig.publisher.pool.take()
        wait_until(lambda: "kvtier store gc" in caplog.text, "it is said what to do")
        with pytest.raises(NoSpace):
            rig.publisher.pool.take()
        assert caplog.text.count("is full") == 1
    finally:
        rig.stop()
        other.close()


# --- what goes wrong ---------------------------------------------------------------------------


def test_who_has_to_wait_for_the_ledger_loses_nothing(rig: PublisherRig) -> None:
    """Another engine hangs while it holds the lock."""
    rig.store(1, 2)
    block = rig.write(3)
    other = RootSession(rig.root, EngineInfo.here("other", ""), 5.0)
    with other.transaction():
        rig.publisher.publish_soon([block])
        wait_until(lambda: (3, False) in rig.answers, "it is given up")
        seen = len(rig.errors)
        # Meanwhile the publisher tries to give back reservations.
        wait_until(lambda: len(rig.errors) > seen + 2, "it is tried again")
    assert rig.session.has_presence
    other.close()
    wait_until(lambda: not rig.publisher.pool.is_suspended, "the ledger is to be had again")
    assert rig.store(4) == [True]
    rig.wait_until_exact()


def test_a_lost_seat_is_replaced(rig: PublisherRig) -> None:
    rig.store(1)
    block = rig.write(2)
    lost = rig.session.presence
    rig.session.abandon_presence()
    rig.publisher.publish_soon([block])
    wait_until(lambda: (2, False) in rig.answers, "it has failed")
    wait_until(lambda: rig.session.has_presence, "there is another presence")
    wait_until(lambda: not os.path.exists(block.reservation.path), "the old one is cleaned up")
    assert not rig.session.presence.contains(str(lost.blocks))

    wait_until(lambda: rig.goes_on_with(3), "it goes on")
    rig.wait_until_exact()


def test_room_that_comes_back_when_the_seat_is_lost_is_not_waited_for(
    rig: PublisherRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As when a mount vanishes: one lane cannot write, while the block of another was just linked,
    and its staged name cannot be removed."""
    unused = rig.publisher.pool.take()
    link = os.link

    def link_and_vanish(source: str, target: str, **options: Any) -> None:
        link(source, target, **options)
        os.unlink(source, dir_fd=options["src_dir_fd"])
        rig.publisher.return_reservation(unused)

    with monkeypatch.context() as patched:
        patched.setattr(os, "link", link_and_vanish)
        assert rig.store(1) == [False]
    wait_until(lambda: rig.goes_on_with(2), "it goes on")
    rig.wait_until_exact()


def test_room_that_comes_back_while_the_seat_is_given_up_is_not_waited_for(
    rig: PublisherRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = rig.publisher.pool.take(), rig.publisher.pool.take()
    pool, settle = rig.publisher.pool, rig.publisher.pool.settle

    def settle_and_return(reservations: Iterable[Reservation]) -> None:
        reservations = list(reservations)
        settle(reservations)
        if first in reservations:
            rig.publisher.return_reservation(second)

    monkeypatch.setattr(pool, "settle", settle_and_return)
    rig.session.abandon_presence()
    rig.publisher.return_reservation(first)
    wait_until(lambda: rig.goes_on_with(1), "it goes on")
    rig.wait_until_exact()


def test_what_was_published_is_so_though_no_further_room_can_be_made(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another engine takes the ledger's lock in between, and hangs."""
    rig = PublisherRig(root, is_started=False)
    publisher = rig.publisher
    publisher.ask_for_space()
    publisher._work()
    block = rig.write(1)
    publisher.pool.empty()
    publisher.quota.limits = Limits(1, 0)  # so that blocks would have to be evicted

    def find_it_locked(missing: int) -> bool:
        raise LedgerBusy

    monkeypatch.setattr(publisher, "_make_free", find_it_locked)
    publisher.ask_for_space()
    publisher.publish_soon([block])
    with pytest.raises(LedgerBusy):
        publisher._work()
    assert rig.answers == [(1, True)]
    assert rig.changes() == [({key(1)}, Change.STORED)]
    publisher.quota.limits = Limits(MAX_BYTES, 0)
    publisher._retry_at = 0.0
    for _ in range(2):
        publisher._work()
    assert not publisher.pool.is_suspended
    assert publisher.pool.empty() == (0, []), "its reservation cannot be used a second time"
    rig.session.close()


def test_a_reservation_is_returned_once_when_the_ledger_stays_locked(root: Path) -> None:
    """A block arrives while stores are suspended, and another engine still holds the ledger."""
    rig = PublisherRig(root, is_started=False)
    publisher = rig.publisher
    publisher.ask_for_space()
    publisher._work()
    block = rig.write(1)
    publisher._suspend(has_failed=True)
    publisher.publish_soon([block])
    other = RootSession(root, EngineInfo.here("other", ""), 0.05)
    publisher._retry_at = 0.0
    with other.transaction(), pytest.raises(LedgerBusy):
        publisher._work()
    other.close()
    publisher._retry_at = 0.0
    for _ in range(3):
        publisher._work()
    assert rig.answers == [(1, False)]
    num_bytes, files = publisher.pool.empty()
    in_pool = num_bytes + sum(reservation.charge for reservation in files)
    assert in_pool == rig.session.ledger.read().reserved
    rig.session.close()


def test_a_new_seat_is_not_lost_for_a_namespace_in_the_old_one(rig: PublisherRig) -> None:
    """Stores go on after a reset, before the scheduler's thread uses the new presence."""
    old = namespace_path(rig.session.presence.blocks, b"o" * 16)
    rig.publisher.use(old, rig.namespace, None)
    rig.namespace = old
    assert rig.store(1, 2) == [True, True]
    rig.session.abandon_presence()
    other = RootSession(rig.root, EngineInfo.here("other", ""), PATIENCE_S)
    wait_until(lambda: other.reclaim() == 0 and not old.exists(), "the old presence is gone")
    wait_until(
        lambda: rig.session.has_presence and not rig.publisher.pool.is_suspended,
        "there is another",
    )
    presence = rig.session.presence
    for _ in range(3):
        with pytest.raises(NoSpace):
            rig.publisher.pool.take()
        wait_until(lambda: not rig.publisher.pool.is_suspended, "space may be asked for again")
    assert rig.session.presence is presence
    assert rig.publisher.private_blocks == presence.blocks
    rig.namespace = namespace_path(presence.blocks, b"n" * 16)
    rig.publisher.use(rig.namespace, rig.namespace, None)
    assert rig.store(3) == [True]
    # A store that began in the old namespace comes too late.
    rig.publisher.publish_soon([rig.write(4, old)])
    wait_until(lambda: (4, False) in rig.answers, "it is not published")
    assert rig.session.presence is presence
    assert not old.exists()
    other.close()
    assert [block.name for block in rig.blocks()] == [key(3).hex()]


def test_an_unexpected_error_is_logged_once(
    root: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    rig = PublisherRig(root)
    count = 0

    def fail() -> None:
        nonlocal count
        count += 1
        raise RuntimeError("a mistake")

    with monkeypatch.context() as patch:
        patch.setattr(rig.publisher, "_work", fail)
        wait_until(lambda: count >= 4, "it has failed a few times")
    wait_until(lambda: rig.goes_on_with(1), "it goes on")
    rig.stop()
    assert caplog.text.count("Traceback") == 1


def test_the_scheduler_may_answer_a_new_presence_at_once(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It sees the new directory, and sets a namespace in it before the publisher goes on."""
    rig = PublisherRig(root, is_started=False)
    publisher, session = rig.publisher, rig.session
    publisher.use(namespace_path(session.presence.blocks, b"o" * 16), rig.namespace, None)
    rig.session.abandon_presence()

    def set_directory(_: object, blocks: Path) -> None:
        rig.namespace = namespace_path(blocks, b"n" * 16)
        publisher.use(rig.namespace, rig.namespace, None)

    watched = property(lambda _: rig.namespace.parent, set_directory)
    monkeypatch.setattr(Publisher, "private_blocks", watched, raising=False)
    publisher._suspend(has_failed=True)
    publisher._retry_at = 0.0
    publisher._work()
    assert rig.namespace.parent == session.presence.blocks
    publisher.ask_for_space()
    publisher._work()
    publisher.publish_soon([rig.write(1)])
    publisher._work()
    assert rig.answers == [(1, True)]
    session.close()


def test_a_ledger_of_another_version_does_not_keep_an_engine_from_ending(root: Path) -> None:
    """It was replaced while the engine runs."""
    session = RootSession(root, EngineInfo.here("engine", ""), 0.05)
    directory = session.presence.directory
    head = Balance(bytes(16)).encode()[:8] + (2).to_bytes(2, "little")
    (root / "ledger").write_bytes(head.ljust(1 << 16, b"\xaa"))
    session.close()
    assert not session.has_presence
    with pytest.raises(OSError, match="Bad file descriptor"):
        session.ledger.read()
    assert directory.exists(), "other engines remove it"


@pytest.mark.parametrize("content", [b"", b"garbage" * 9000])
def test_a_lost_ledger_is_mended(rig: PublisherRig, content: bytes) -> None:
    rig.store(1, 2, 3)
    (rig.root / "ledger").write_bytes(content)

    wait_until(lambda: rig.goes_on_with(4), "it goes on")
    rig.wait_until_exact()
    assert rig.session.ledger.read().num_blocks == 4


def test_each_is_answered_once_also_at_the_end(root: Path) -> None:
    rig = PublisherRig(root)
    threads = []

    def write(first: int) -> None:
        for number in range(first, first + 20):
            try:
                rig.publisher.publish_soon([rig.write(number)])
            except (NoSpace, StoresSuspended):
                rig.answers.append((number, False))

    for first in (0, 100, 200):
        threads.append(threading.Thread(target=write, args=(first,)))
        threads[-1].start()
    for thread in threads:
        thread.join(PATIENCE_S)
    rig.stop()
    numbers = sorted(number for number, _ in rig.answers)
    assert numbers == [*range(20), *range(100, 120), *range(200, 220)]
    there = {key(number).hex() for number, is_there in rig.answers if is_there}
    assert there == {path.name for path in block_files(root)}
    assert not list((root / "engines").iterdir())


def test_stopping_twice_changes_nothing(root: Path) -> None:
    rig = PublisherRig(root)
    rig.stop()
    rig.stop()
    assert not list((root / "engines").iterdir())


def test_an_end_while_dead_engines_are_buried_is_quiet(
    root: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for _ in range(5):
        dead = RootSession(root, EngineInfo.here("dead", ""), 5.0)
        for number in range(50):
            Path(dead.presence.incoming()).write_bytes(b"%d" % number)
        dead.abandon_presence()
        dead.ledger.close()
        PublisherRig(root).stop()
    assert "Traceback" not in caplog.text
