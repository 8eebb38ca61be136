"""Namespaces are removed in batches, and the ledger stays correct."""

from __future__ import annotations

import os
from collections.abc import Iterator
from itertools import count as naturals
from itertools import islice
from pathlib import Path

import pytest

from kvtier.base import OffloadKey
from kvtier.tiering.fs import eviction
from kvtier.tiering.fs.eviction import remove_evicted, remove_namespace
from kvtier.tiering.fs.layout import SHARDS, block_path, count_blocks, namespace_path, read_shard
from kvtier.tiering.fs.presence import EngineInfo
from kvtier.tiering.fs.root import PresenceLost, RootSession
from tests.tiering.fs.harness import block_files, du


def never() -> bool:
    return False


@pytest.fixture
def session(tmp_path: Path) -> Iterator[RootSession]:
    made = RootSession(tmp_path / "root", EngineInfo.here("clearing", ""), 5.0)
    with made.transaction():
        pass  # the ledger has all its copies then, and is as long as it will be
    yield made
    made.close()


def fill(session: RootSession, fingerprint: bytes, count: int, in_one: bool = False) -> Path:
    """A namespace with `count` blocks, if wanted all in one directory."""
    namespace = namespace_path(session.blocks, fingerprint)
    for shard in SHARDS:
        (namespace / shard).mkdir(parents=True)
    paths = (block_path(str(namespace), OffloadKey(b"key %06d" % number)) for number in naturals())
    if in_one:
        paths = (path for path in paths if path.startswith(f"{namespace}/07/"))
    for path in islice(paths, count):
        Path(path).write_bytes(bytes(5000))
    session.count_again()
    return namespace


def assert_right(session: RootSession) -> None:
    with session.transaction():
        pass  # tells the ledger what was given back
    balance = session.ledger.read()
    assert (balance.blocks, balance.num_blocks) == count_blocks(session.tree, session.blocks)
    assert balance.reserved == 0


@pytest.mark.parametrize("in_one", [False, True])
def test_nothing_is_left_of_a_namespace(session: RootSession, in_one: bool) -> None:
    namespace = fill(session, bytes(16), 300, in_one)
    other = fill(session, bytes([1]) * 16, 3)
    told: list[int] = []
    assert remove_namespace(session, namespace, never, told.append) == 300
    assert sum(told) == 300
    assert max(told) <= eviction._AT_ONCE
    assert not namespace.exists()
    assert len(block_files(session.path)) == len(list(other.glob("*/*"))) == 3
    assert_right(session)
    with session.transaction() as txn:
        txn.measure()
    assert session.ledger.read().total == du(session.path)


def test_blocks_in_use_are_removed_too(session: RootSession) -> None:
    namespace = fill(session, bytes(16), 3)
    for path in block_files(session.path):
        os.utime(path)
    assert remove_namespace(session, namespace, never) == 3


def test_to_remove_what_is_not_there_is_nothing(session: RootSession) -> None:
    namespace = namespace_path(session.blocks, bytes(16))
    assert remove_namespace(session, namespace, never) == 0
    assert_right(session)


def test_an_end_in_the_middle_is_no_harm(session: RootSession) -> None:
    namespace = fill(session, bytes(16), 20)
    calls = 0

    def is_stopping() -> bool:
        nonlocal calls
        calls += 1
        return calls > 4

    removed = remove_namespace(session, namespace, is_stopping)
    assert 0 < removed < 20
    assert len(block_files(session.path)) == 20 - removed
    assert_right(session)
    assert remove_namespace(session, namespace, never) == 20 - removed


def test_directories_with_other_things_stay(session: RootSession) -> None:
    namespace = fill(session, bytes(16), 5)
    (namespace / "notes").write_text("mine")
    assert remove_namespace(session, namespace, never) == 5
    assert (namespace / "notes").read_text() == "mine"
    assert_right(session)


def test_who_has_no_seat_removes_nothing(session: RootSession) -> None:
    namespace = fill(session, bytes(16), 5)
    session.abandon_presence()
    with pytest.raises(PresenceLost):
        remove_namespace(session, namespace, never)
    assert len(block_files(session.path)) == 5
    session.rejoin()
    assert remove_namespace(session, namespace, never) == 5
    session.reclaim()
    assert_right(session)


def test_what_has_left_is_given_back_once_it_is_removed(session: RootSession) -> None:
    namespace = fill(session, bytes(16), 10)
    blocks = [block for shard in SHARDS for block in read_shard(session.tree, namespace, shard)]
    with session.transaction() as txn:
        gone = txn.evict(blocks)
    assert session.ledger.read().reserved == sum(block.reserved for block in gone) > 0
    assert du(session.path) <= session.ledger.read().total
    os.unlink(gone[0].temporary)  # another engine removed it first
    remove_evicted(session, gone)
    remove_evicted(session, [])
    assert_right(session)
    assert not [block for block in gone if os.path.exists(block.temporary)]
