"""Which blocks are evicted first, and how dead engines are cleaned up after."""

from __future__ import annotations

import errno
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from random import Random

import pytest

from kvtier.base import OffloadKey
from kvtier.tiering.fs import eviction as module
from kvtier.tiering.fs.eviction import Sweeper
from kvtier.tiering.fs.layout import SHARDS, BlockFile, block_path, namespace_path
from kvtier.tiering.fs.presence import EngineInfo
from kvtier.tiering.fs.root import RootSession
from tests.tiering.fs.hardship import failing_calls
from tests.tiering.fs.harness import block_files, du
from tests.tiering.patience import wait_until

LONG_AGO_NS = 10**18


class Root:
    """A root with blocks written by hand, and a sweeper."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.session = RootSession(path, EngineInfo.here("sweeper", ""), 5.0)
        self.found = threading.Event()
        self.errors: list[OSError] = []
        self.sweeper = Sweeper(self.session, self.found.set, self.errors.append)
        self.namespace = self.make_namespace(bytes(16))
        self.sweeper.use((self.namespace,), None)

    def make_namespace(self, fingerprint: bytes) -> Path:
        namespace = namespace_path(self.session.blocks, fingerprint)
        for shard in SHARDS:
            (namespace / shard).mkdir(parents=True)
        return namespace

    def add(self, number: int, used_ns: int, namespace: Path | None = None) -> str:
        path = block_path(str(namespace or self.namespace), OffloadKey(b"key %06d" % number))
        Path(path).write_bytes(bytes(100))
        os.utime(path, ns=(used_ns, used_ns))
        return path

    def take(self, count: int) -> list[BlockFile]:
        """The blocks that may be evicted, once the sweeper has looked. It also calls `on_found`
        after other work."""
        self.found.clear()
        taken = self.sweeper.take(count)
        while count and not taken and not self.sweeper.is_exhausted:
            assert self.found.wait(30)
            self.found.clear()
            taken = self.sweeper.take(count)
        return taken


@pytest.fixture
def root(tmp_path: Path) -> Iterator[Root]:
    made = Root(tmp_path / "root")
    made.sweeper.start()
    yield made
    made.sweeper.stop()
    made.session.close()
    assert not made.errors


def test_the_least_recently_used_leave_first(root: Root) -> None:
    chance = Random(1)
    ages = chance.sample(range(10**12), 200)
    paths = {LONG_AGO_NS + age: root.add(n, LONG_AGO_NS + age) for n, age in enumerate(ages)}
    in_order = [paths[used_ns] for used_ns in sorted(paths)]
    left: list[str] = []
    while len(left) < 200:
        for block in root.take(7):
            if os.path.exists(block.path):  # as the evicting engine sees it
                os.unlink(block.path)
                left.append(block.path)
    assert left == in_order


def test_a_block_is_found_as_it_is(root: Root) -> None:
    path = root.add(1, LONG_AGO_NS)
    num_bytes = os.stat(path).st_blocks * 512
    assert root.take(1) == [BlockFile(path, LONG_AGO_NS, num_bytes, 100)]


def test_the_more_there_are_the_more_are_kept_ready(root: Root) -> None:
    """A search costs the same for one block as for many."""
    for number in range(80):
        root.add(number, LONG_AGO_NS + number)
    assert len(root.take(1)) == 1
    assert len(root.sweeper.take(80)) == 80 // module._OLD_DIVISOR - 1


def test_of_very_many_some_are_looked_at(root: Root, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_ENOUGH", 10)
    for number in range(500):
        root.add(number, LONG_AGO_NS + number)
    (block,) = root.take(1)
    assert block.used_ns < LONG_AGO_NS + 450


def test_where_there_is_nothing_it_is_said_for_a_while(
    root: Root, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert not root.sweeper.is_exhausted, "nobody has looked"
    assert root.take(3) == []
    assert root.sweeper.is_exhausted
    root.add(1, LONG_AGO_NS)
    root.sweeper.look_again()
    assert not root.sweeper.is_exhausted
    assert len(root.take(3)) == 1
    later = time.monotonic() + module._NOTHING_FOUND_S + 1
    assert root.take(0) == []
    monkeypatch.setattr(module.time, "monotonic", lambda: later)
    assert not root.sweeper.is_exhausted


def test_what_was_found_in_another_namespace_does_not_leave(root: Root) -> None:
    for number in range(40):
        root.add(number, LONG_AGO_NS + number)
    assert len(root.take(1)) == 1
    other = root.make_namespace(bytes([1]) * 16)
    root.sweeper.use((other,), None)
    assert root.take(5) == []
    path = root.add(1, LONG_AGO_NS, other)
    root.sweeper.look_again()
    assert [block.path for block in root.take(5)] == [path]


def test_of_two_namespaces_the_oldest_leave(root: Root) -> None:
    other = root.make_namespace(bytes([1]) * 16)
    root.sweeper.use((root.namespace, other), None)
    old = [
        root.add(1, LONG_AGO_NS, other),
        root.add(2, LONG_AGO_NS + 1),
        root.add(3, LONG_AGO_NS + 2, other),
    ]
    root.add(4, LONG_AGO_NS + 3)
    assert [block.path for block in root.take(3)] == old


def test_what_is_used_after_it_was_found_stays(root: Root) -> None:
    first, second = (root.add(number, LONG_AGO_NS + number) for number in range(2))
    found = root.take(2)
    os.utime(first)
    with root.session.transaction() as txn:
        gone = txn.evict(found)
    assert [each.block.path for each in gone] == [second]
    assert os.path.exists(first)


def test_blocks_from_the_future_leave_too(root: Root) -> None:
    """Blocks of a host whose clock is fast must not stay for ever."""
    fast = root.add(1, time.time_ns() + 10**18)
    assert [block.path for block in root.take(1)] == [fast]


def test_blocks_from_the_future_do_not_outlive_all_others(root: Root) -> None:
    fast = root.add(1, time.time_ns() + 10**18)
    for number in range(2, 12):
        root.add(number, time.time_ns())
    assert fast in [block.path for block in root.take(5)]


def test_junk_is_removed_with_its_directories(root: Root) -> None:
    junk = root.make_namespace(bytes([1]) * 16)
    other = root.make_namespace(bytes([2]) * 16)
    for number in range(30):
        root.add(number, LONG_AGO_NS, junk)
    kept = [root.add(1, LONG_AGO_NS), root.add(1, LONG_AGO_NS, other)]
    root.session.count_again()
    root.sweeper.use((root.namespace,), junk)
    wait_until(lambda: not root.sweeper._junk, "it is removed")
    assert not junk.exists()
    with root.session.transaction() as txn:  # tells the ledger what was given back
        txn.measure()
    assert {str(path) for path in block_files(root.path)} == set(kept)
    assert root.session.ledger.read().total == du(root.path)
    assert root.session.ledger.read().num_blocks == 2


def test_dead_engines_are_buried(tmp_path: Path) -> None:
    root = Root(tmp_path / "root")
    dead = RootSession(root.path, EngineInfo.here("dead", ""), 5.0)
    with dead.transaction() as txn:
        txn.reserve(10, 10**5, 10**9)
    dead.abandon_presence()
    dead.ledger.close()
    root.sweeper.start()
    wait_until(lambda: len(root.session.ledger.read().accounts) == 1, "its account is gone")
    assert root.found.wait(30), "there may be space now"
    assert root.session.ledger.read().reserved == 0
    root.sweeper.stop()
    root.session.close()


def test_an_error_is_told_and_nobody_waits_for_ever(tmp_path: Path) -> None:
    root = Root(tmp_path / "root")
    (root.namespace / "00").rmdir()
    (root.namespace / "00").touch()  # to read it is an error
    root.sweeper.start()
    root.sweeper.take(1)
    wait_until(lambda: bool(root.errors), "it is told")
    wait_until(lambda: root.sweeper.is_exhausted, "it is known that there is nothing")
    root.sweeper.stop()
    root.session.close()


def test_a_directory_that_cannot_be_read_keeps_no_other_from_being_looked_into(
    tmp_path: Path,
) -> None:
    root = Root(tmp_path / "root")
    paths = [root.add(number, LONG_AGO_NS + number) for number in range(20)]
    bad = next(shard for shard in SHARDS if not any((root.namespace / shard).iterdir()))
    (root.namespace / bad).rmdir()
    (root.namespace / bad).touch()
    root.sweeper.start()
    assert [block.path for block in root.take(20)] == paths
    assert root.errors, "and it is told"
    root.sweeper.stop()
    root.session.close()


def test_junk_that_cannot_be_removed_keeps_nothing_else_from_being_done(tmp_path: Path) -> None:
    root = Root(tmp_path / "root")
    bad, good = (root.make_namespace(bytes([number]) * 16) for number in (1, 2))
    for number in range(5):
        root.add(number, LONG_AGO_NS, good)
    path = root.add(1, LONG_AGO_NS)
    for junk in (bad, good):
        root.sweeper.use((root.namespace,), junk)
    with failing_calls(errno.EIO, lambda path: path == str(bad / "80"), "open"):
        root.sweeper.start()
        assert [block.path for block in root.take(1)] == [path]
        wait_until(lambda: bool(root.errors), "it is told")

        def is_removed() -> bool:
            root.sweeper.take(1)  # wakes the thread
            return not good.exists()

        wait_until(is_removed, "what can be removed is removed")
        root.sweeper.stop()
    root.session.close()


def test_an_unexpected_error_is_logged_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    root = Root(tmp_path / "root")
    count = 0

    def fail() -> None:
        nonlocal count
        count += 1
        raise RuntimeError("a mistake")

    monkeypatch.setattr(root.sweeper, "_reclaim", fail)
    root.sweeper.start()

    def has_failed_often() -> bool:
        root.sweeper.take(1)  # wakes the thread
        return count >= 4

    wait_until(has_failed_often, "it has failed a few times")
    root.sweeper.stop()
    root.session.close()
    assert caplog.text.count("Traceback") == 1


def test_stopping_without_a_start_and_twice(tmp_path: Path) -> None:
    root = Root(tmp_path / "root")
    root.sweeper.stop()
    root.sweeper.stop()
    root.session.close()
