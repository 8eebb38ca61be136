"""Removes whole namespaces, little by little: nobody has to wait long for the ledger."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from itertools import islice
from pathlib import Path

from kvtier.tiering.fs.books import Books, Evicted
from kvtier.tiering.fs.tree import read_shard, remove_directories, shards_in

__all__ = ["remove_evicted", "remove_namespace"]

_AT_ONCE = 256


def remove_namespace(
    books: Books,
    namespace: Path,
    is_stopping: Callable[[], bool],
    on_removed: Callable[[int], None] | None = None,
) -> int:
    """Remove all blocks of a namespace, and its directories if no new ones come. Returns how many
    there were. Raises `OSError` or `SeatLost`; the ledger is right then, too."""
    total = 0
    below = books.below
    for shard in [entry.name for entry in shards_in(below, namespace)]:
        blocks = read_shard(below, namespace, shard)
        while some := list(islice(blocks, _AT_ONCE)):
            if is_stopping():
                return total
            with books.transaction() as balance:
                gone = books.evict(balance, some, is_forced=True)
            remove_evicted(books, gone)
            total += len(gone)
            if on_removed is not None:
                on_removed(len(gone))
    with books.transaction() as balance:
        remove_directories(below, namespace)
        books.measure(balance)
    return total


def remove_evicted(books: Books, gone: list[Evicted]) -> None:
    """Remove the files of blocks that have left, and give back what was reserved for them."""
    for block in gone:
        with suppress(FileNotFoundError):
            books.below.unlink(block.temporary)
        books.give_back(block.seat, block.reserved)
