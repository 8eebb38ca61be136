"""Planted bugs, each of which the oracle has to notice. They are planted in the child alone."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import kvtier.tiering.fs.books as books_module
from kvtier.tiering.fs.below import Below
from kvtier.tiering.fs.books import Books, Evicted, Outcome, Written
from kvtier.tiering.fs.clerk import Clerk
from kvtier.tiering.fs.ledger import Account, Balance, Ledger
from kvtier.tiering.fs.names import SHARDS
from kvtier.tiering.fs.seat import Seat, StrangeSeat
from kvtier.tiering.fs.sweeper import Sweeper
from kvtier.tiering.fs.tree import BlockFile, namespaces_in, read_shard
from tests.tiering.disk.crash.planting import plant
from tests.tiering.fs.crash.orders import Bias


@dataclass(frozen=True, slots=True)
class Mutant:
    """One planted bug, and the lives in which it shows."""

    plant: Callable[[], None]
    bias: Bias
    first_seed: int
    """From here on, it is not long before it does."""


MUTANTS: dict[str, Mutant] = {}


def _mutant(first_seed: int = 0, **bias: Any) -> Callable[[Callable[[], None]], Callable[[], None]]:
    def register(bug: Callable[[], None]) -> Callable[[], None]:
        MUTANTS[bug.__name__] = Mutant(bug, Bias(**bias), first_seed)
        return bug

    return register


# --- blocks come --------------------------------------------------------------------------------


@_mutant(point="publish: link after")
def nobody_writes_down_that_blocks_are_being_published() -> None:
    plant(Account, flags=property(lambda account: 2 * account.is_settled))


@_mutant(point="publish: link after")
def what_was_published_is_counted_again_and_again() -> None:
    real = books_module._count_in_published

    def count_in_published(balance: Balance, account: Account, files: Any) -> None:
        real(balance, account, files)
        account.is_publishing = True

    plant(books_module, _count_in_published=count_in_published)


@_mutant(num_blocks=12)
def a_block_is_published_over_another() -> None:
    real = books_module._publish

    def publish(below: Below, block: Written, on_error: Any) -> Outcome:
        with suppress(FileNotFoundError):
            os.unlink(block.final)
        return real(below, block, on_error)

    plant(books_module, _publish=publish)


@_mutant()
def a_published_file_is_written_to_again() -> None:
    real = Clerk._recycle

    def recycle(clerk: Clerk[Any], arrivals: Any, outcomes: Sequence[Outcome], *rest: Any) -> None:
        real(clerk, arrivals, [_as_if_there(outcome) for outcome in outcomes], *rest)

    plant(Clerk, _recycle=recycle)


def _as_if_there(outcome: Outcome) -> Outcome:
    return Outcome.WAS_THERE if outcome is Outcome.PUBLISHED else outcome


@_mutant()
def blocks_are_reported_before_they_are_published() -> None:
    real = Clerk.publish_soon

    def publish_soon(clerk: Clerk[Any], arrivals: Sequence[Any]) -> None:
        clerk._on_done([(arrival, True) for arrival in arrivals])
        real(clerk, arrivals)

    plant(Clerk, publish_soon=publish_soon)


# --- blocks go ----------------------------------------------------------------------------------


@_mutant(num_blocks=12)
def what_leaves_is_still_counted() -> None:
    real = Books.evict

    def evict(books: Books, balance: Balance, *args: Any, **kwargs: Any) -> list[Evicted]:
        before = balance.blocks, balance.num_blocks
        gone = real(books, balance, *args, **kwargs)
        balance.blocks, balance.num_blocks = before
        return gone

    plant(Books, evict=evict)


@_mutant(num_blocks=12)
def what_was_just_used_leaves_too() -> None:
    real = Books.evict

    def evict(
        books: Books, balance: Balance, blocks: Any, on_error: Any = None, is_forced: bool = False
    ) -> list[Evicted]:
        return real(books, balance, blocks, on_error, is_forced=True)

    plant(Books, evict=evict)


@_mutant(num_blocks=40)
def the_newest_leave_first() -> None:
    def oldest(sweeper: Sweeper, namespaces: Sequence[Path], count: int) -> list[BlockFile]:
        found = _blocks_of(sweeper._books, namespaces)
        return sorted(found, key=lambda block: -block.used_ns)[:count]

    plant(Sweeper, _oldest=oldest)


@_mutant(num_blocks=12, foreign_rate=0.5)
def blocks_of_others_leave() -> None:
    def oldest(sweeper: Sweeper, namespaces: Sequence[Path], count: int) -> list[BlockFile]:
        books = sweeper._books
        return _blocks_of(books, namespaces_in(books.below, books.blocks))[:count]

    plant(Sweeper, _oldest=oldest)


def _blocks_of(books: Books, namespaces: Sequence[Path]) -> list[BlockFile]:
    return [
        block
        for namespace in namespaces
        for shard in SHARDS
        for block in read_shard(books.below, namespace, shard)
    ]


# --- what engines leave behind ------------------------------------------------------------------


@_mutant(num_blocks=12, point="evict: rename after")
def the_dead_are_not_settled() -> None:
    plant(Books, _settle=lambda books, balance, account, directory: None)


@_mutant(quiet_patience_s=3.0)
def nobody_reclaims() -> None:
    plant(Books, reclaim=lambda books: 0)


@_mutant()
def everyone_is_taken_for_dead() -> None:
    real = StrangeSeat.__init__

    def init(seat: StrangeSeat, *args: Any) -> None:
        real(seat, *args)
        seat.is_dead = True

    plant(StrangeSeat, __init__=init)


@_mutant(epoch_rate=0.1, point="remove seat: unlink after")
def accounts_go_before_their_files() -> None:
    real = Books.reclaim

    def reclaim(books: Books) -> int:
        if not books._is_anything_to_reclaim():
            return 0
        with books.transaction() as balance:
            for seat in books._other_seats():
                account = balance.accounts.get(seat.engine)
                if seat.is_dead and account is not None:
                    books._settle(balance, account, seat.directory)
                    del balance.accounts[seat.engine]
        return real(books)

    plant(Books, reclaim=reclaim)


@_mutant()
def a_seat_is_left_behind() -> None:
    plant(Seat, remove=Seat.abandon)


@_mutant(epoch_rate=0.1)
def private_blocks_are_not_counted_out() -> None:
    plant(books_module, count_blocks=lambda below, blocks: (0, 0))


# --- the quota ----------------------------------------------------------------------------------


@_mutant(num_blocks=12)
def nobody_asks_how_much_room_there_is() -> None:
    real = Books.reserve

    def reserve(books: Books, balance: Balance, count: int, charge: int, limit: int) -> int:
        return real(books, balance, count, charge, 2 * limit)

    plant(Books, reserve=reserve)


@_mutant(quiet_patience_s=3.0)
def what_is_given_back_stays_reserved() -> None:
    plant(Books, give_back=lambda *_: None, true_up=lambda *_: None)


@_mutant(point="transact: save half")
def there_is_one_copy_of_the_ledger() -> None:
    def save(ledger: Ledger, balance: Balance) -> None:
        balance.revision += 1
        os.pwrite(ledger._fd, balance.encode(), 0)

    plant(Ledger, save=save)


@_mutant()
def everyone_may_read_the_blocks() -> None:
    real = os.open

    def open_for_all(path: Any, flags: int, mode: int = 0o777, **options: Any) -> int:
        return real(path, flags, mode | 0o044, **options)

    plant(os, open=open_for_all)
