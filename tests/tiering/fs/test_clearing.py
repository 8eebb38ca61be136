"""Whole namespaces are removed little by little, and the ledger stays right."""

from __future__ import annotations

import os
from collections.abc import Iterator
from itertools import count as naturals
from itertools import islice
from pathlib import Path

import pytest

from kvtier.base import OffloadKey
from kvtier.tiering.fs import clearing
from kvtier.tiering.fs.books import Books, SeatLost
from kvtier.tiering.fs.clearing import remove_evicted, remove_namespace
from kvtier.tiering.fs.names import SHARDS, block_path, namespace_path
from kvtier.tiering.fs.seat import Occupant
from kvtier.tiering.fs.tree import count_blocks, read_shard
from tests.tiering.fs.rig import block_files, du


def never() -> bool:
    return False


@pytest.fixture
def books(tmp_path: Path) -> Iterator[Books]:
    made = Books(tmp_path / "root", Occupant.here("clearing", ""), 5.0)
    with made.transaction():
        pass  # the ledger has all its copies then, and is as long as it will be
    yield made
    made.close()


def fill(books: Books, fingerprint: bytes, count: int, in_one: bool = False) -> Path:
    """A namespace with so many blocks; perhaps all in one directory."""
    namespace = namespace_path(books.blocks, fingerprint)
    for shard in SHARDS:
        (namespace / shard).mkdir(parents=True)
    paths = (block_path(str(namespace), OffloadKey(b"key %06d" % number)) for number in naturals())
    if in_one:
        paths = (path for path in paths if path.startswith(f"{namespace}/07/"))
    for path in islice(paths, count):
        Path(path).write_bytes(bytes(5000))
    books.count_again()
    return namespace


def assert_right(books: Books) -> None:
    with books.transaction():
        pass  # tells the ledger what was given back
    balance = books.ledger.read()
    assert (balance.blocks, balance.num_blocks) == count_blocks(books.below, books.blocks)
    assert balance.reserved == 0


@pytest.mark.parametrize("in_one", [False, True])
def test_nothing_is_left_of_a_namespace(books: Books, in_one: bool) -> None:
    namespace = fill(books, bytes(16), 300, in_one)
    other = fill(books, bytes([1]) * 16, 3)
    told: list[int] = []
    assert remove_namespace(books, namespace, never, told.append) == 300
    assert sum(told) == 300
    assert max(told) <= clearing._AT_ONCE
    assert not namespace.exists()
    assert len(block_files(books.path)) == len(list(other.glob("*/*"))) == 3
    assert_right(books)
    with books.transaction() as balance:
        books.measure(balance)
    assert books.ledger.read().total == du(books.path)


def test_blocks_in_use_are_removed_too(books: Books) -> None:
    namespace = fill(books, bytes(16), 3)
    for path in block_files(books.path):
        os.utime(path)
    assert remove_namespace(books, namespace, never) == 3


def test_to_remove_what_is_not_there_is_nothing(books: Books) -> None:
    namespace = namespace_path(books.blocks, bytes(16))
    assert remove_namespace(books, namespace, never) == 0
    assert_right(books)


def test_an_end_in_the_middle_is_no_harm(books: Books) -> None:
    namespace = fill(books, bytes(16), 20)
    calls = 0

    def is_stopping() -> bool:
        nonlocal calls
        calls += 1
        return calls > 4

    removed = remove_namespace(books, namespace, is_stopping)
    assert 0 < removed < 20
    assert len(block_files(books.path)) == 20 - removed
    assert_right(books)
    assert remove_namespace(books, namespace, never) == 20 - removed


def test_directories_with_other_things_stay(books: Books) -> None:
    namespace = fill(books, bytes(16), 5)
    (namespace / "notes").write_text("mine")
    assert remove_namespace(books, namespace, never) == 5
    assert (namespace / "notes").read_text() == "mine"
    assert_right(books)


def test_who_has_no_seat_removes_nothing(books: Books) -> None:
    namespace = fill(books, bytes(16), 5)
    books.give_up_seat()
    with pytest.raises(SeatLost):
        remove_namespace(books, namespace, never)
    assert len(block_files(books.path)) == 5
    books.sit_down_again()
    assert remove_namespace(books, namespace, never) == 5
    books.reclaim()
    assert_right(books)


def test_what_has_left_is_given_back_once_it_is_removed(books: Books) -> None:
    namespace = fill(books, bytes(16), 10)
    blocks = [block for shard in SHARDS for block in read_shard(books.below, namespace, shard)]
    with books.transaction() as balance:
        gone = books.evict(balance, blocks)
    assert books.ledger.read().reserved == sum(block.reserved for block in gone) > 0
    assert du(books.path) <= books.ledger.read().total
    os.unlink(gone[0].temporary)  # someone was quicker
    remove_evicted(books, gone)
    remove_evicted(books, [])
    assert_right(books)
    assert not [block for block in gone if os.path.exists(block.temporary)]
