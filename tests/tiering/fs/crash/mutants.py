"""Bugs planted in the fs tier, each of which a run has to notice."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import kvtier.tiering.fs.root as root_module
import kvtier.tiering.fs.transaction as transaction_module
from kvtier.tiering.fs.access import NoFollowTree
from kvtier.tiering.fs.eviction import Sweeper
from kvtier.tiering.fs.layout import SHARDS, BlockFile, namespaces_in, read_shard
from kvtier.tiering.fs.ledger import Account, Balance, Ledger
from kvtier.tiering.fs.presence import Peer, Presence
from kvtier.tiering.fs.publisher import Publisher
from kvtier.tiering.fs.root import RootSession
from kvtier.tiering.fs.transaction import Evicted, Outcome, Transaction, Written
from tests.tiering.crash.mutants import Mutants
from tests.tiering.crash.points import plant
from tests.tiering.fs.crash.orders import Bias

MUTANTS = Mutants(Bias)


# --- blocks come --------------------------------------------------------------------------------


@MUTANTS.mutant(point="publish: link after")
def nobody_writes_down_that_blocks_are_being_published() -> None:
    plant(Account, flags=property(lambda account: 2 * account.is_settled))


@MUTANTS.mutant(point="publish: link after")
def what_was_published_is_counted_again_and_again() -> None:
    real = transaction_module._count_in_published

    def count_in_published(balance: Balance, account: Account, files: Any) -> None:
        real(balance, account, files)
        account.is_publishing = True

    plant(transaction_module, _count_in_published=count_in_published)


@MUTANTS.mutant(num_blocks=12)
def a_block_is_published_over_another() -> None:
    real = transaction_module._publish

    def publish(tree: NoFollowTree, block: Written, on_error: Any) -> Outcome:
        with suppress(FileNotFoundError):
            os.unlink(block.final)
        return real(tree, block, on_error)

    plant(transaction_module, _publish=publish)


@MUTANTS.mutant()
def a_published_file_is_written_to_again() -> None:
    real = Publisher._recycle

    def recycle(
        publisher: Publisher[Any], blocks: Any, outcomes: Sequence[Outcome], *rest: Any
    ) -> None:
        real(publisher, blocks, [_as_if_there(outcome) for outcome in outcomes], *rest)

    plant(Publisher, _recycle=recycle)


def _as_if_there(outcome: Outcome) -> Outcome:
    return Outcome.WAS_THERE if outcome is Outcome.PUBLISHED else outcome


@MUTANTS.mutant()
def blocks_are_reported_before_they_are_published() -> None:
    real = Publisher.publish_soon

    def publish_soon(publisher: Publisher[Any], blocks: Sequence[Any]) -> None:
        publisher._on_done([(block, True) for block in blocks])
        real(publisher, blocks)

    plant(Publisher, publish_soon=publish_soon)


# --- blocks go ----------------------------------------------------------------------------------


@MUTANTS.mutant(num_blocks=12)
def what_leaves_is_still_counted() -> None:
    real = Transaction.evict

    def evict(txn: Transaction, *args: Any, **kwargs: Any) -> list[Evicted]:
        before = txn.balance.blocks, txn.balance.num_blocks
        gone = real(txn, *args, **kwargs)
        txn.balance.blocks, txn.balance.num_blocks = before
        return gone

    plant(Transaction, evict=evict)


@MUTANTS.mutant(num_blocks=12)
def what_was_just_used_leaves_too() -> None:
    real = Transaction.evict

    def evict(
        txn: Transaction, blocks: Any, on_error: Any = None, is_forced: bool = False
    ) -> list[Evicted]:
        return real(txn, blocks, on_error, is_forced=True)

    plant(Transaction, evict=evict)


@MUTANTS.mutant(num_blocks=40)
def the_newest_leave_first() -> None:
    def oldest(sweeper: Sweeper, namespaces: Sequence[Path], count: int) -> list[BlockFile]:
        found = _blocks_of(sweeper._session, namespaces)
        return sorted(found, key=lambda block: -block.used_ns)[:count]

    plant(Sweeper, _oldest=oldest)


@MUTANTS.mutant(num_blocks=12, foreign_rate=0.5)
def blocks_of_others_leave() -> None:
    def oldest(sweeper: Sweeper, namespaces: Sequence[Path], count: int) -> list[BlockFile]:
        session = sweeper._session
        return _blocks_of(session, namespaces_in(session.tree, session.blocks))[:count]

    plant(Sweeper, _oldest=oldest)


def _blocks_of(session: RootSession, namespaces: Sequence[Path]) -> list[BlockFile]:
    return [
        block
        for namespace in namespaces
        for shard in SHARDS
        for block in read_shard(session.tree, namespace, shard)
    ]


# --- what engines leave behind ------------------------------------------------------------------


@MUTANTS.mutant(num_blocks=12, point="evict: rename after")
def the_dead_are_not_settled() -> None:
    plant(Transaction, settle=lambda txn, account, directory: None)


@MUTANTS.mutant(quiet_patience_s=3.0)
def nobody_reclaims() -> None:
    plant(RootSession, reclaim=lambda session: 0)


@MUTANTS.mutant()
def everyone_is_taken_for_dead() -> None:
    real = Peer.__init__

    def init(peer: Peer, *args: Any) -> None:
        real(peer, *args)
        peer.is_dead = True

    plant(Peer, __init__=init)


@MUTANTS.mutant(epoch_rate=0.1, point="remove presence: unlink after")
def accounts_go_before_their_files() -> None:
    real = RootSession.reclaim

    def reclaim(session: RootSession) -> int:
        if not session._has_reclaimable():
            return 0
        with session.transaction() as txn:
            for peer in session._peers():
                account = txn.balance.accounts.get(peer.engine)
                if peer.is_dead and account is not None:
                    txn.settle(account, peer.directory)
                    del txn.balance.accounts[peer.engine]
        return real(session)

    plant(RootSession, reclaim=reclaim)


@MUTANTS.mutant()
def a_presence_is_left_behind() -> None:
    plant(Presence, remove=Presence.abandon)


@MUTANTS.mutant(epoch_rate=0.1)
def private_blocks_are_not_counted_out() -> None:
    for module in (root_module, transaction_module):
        plant(module, count_blocks=lambda tree, blocks: (0, 0))


# --- the quota ----------------------------------------------------------------------------------


@MUTANTS.mutant(num_blocks=12)
def nobody_asks_how_much_room_there_is() -> None:
    real = Transaction.reserve

    def reserve(txn: Transaction, count: int, charge: int, limit: int) -> int:
        return real(txn, count, charge, 2 * limit)

    plant(Transaction, reserve=reserve)


@MUTANTS.mutant(quiet_patience_s=3.0)
def what_is_given_back_stays_reserved() -> None:
    plant(RootSession, give_back=lambda *_: None)
    plant(Transaction, true_up=lambda *_: None)


@MUTANTS.mutant(point="transact: save half")
def there_is_one_copy_of_the_ledger() -> None:
    def save(ledger: Ledger, balance: Balance) -> None:
        balance.revision += 1
        os.pwrite(ledger._fd, balance.encode(), 0)

    plant(Ledger, save=save)


@MUTANTS.mutant()
def everyone_may_read_the_blocks() -> None:
    real = os.open

    def open_for_all(path: Any, flags: int, mode: int = 0o777, **options: Any) -> int:
        return real(path, flags, mode | 0o044, **options)

    plant(os, open=open_for_all)
