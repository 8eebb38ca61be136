"""One transaction on the ledger: the steps that change the balance and the files together.

These rules let any engine correct the ledger after another one was killed at any step:

- A block is written into the staging directory of its engine, which has reserved its bytes. It is
  published by a second link. Meanwhile the engine's account says `is_publishing`. If another engine
  takes the lock and finds `is_publishing` set, staged files with two names are published, but not
  counted yet.
- A block is evicted by moving it into the staging directory of the evicting engine, under the
  number of a batch. The account's `counted_out` says up to which batch the blocks have been
  subtracted.
- So the staging directory and the account of a dead engine together say what is left to count.
  The engine that cleans up saves the settled account first, then removes the files, and last the
  account.
"""

from __future__ import annotations

import errno
import logging
import os
import stat
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from enum import Enum, auto
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from kvtier.tiering.fs.access import NoFollowTree
from kvtier.tiering.fs.layout import (
    DESCRIPTION_FILE,
    SHARDS,
    BlockFile,
    count_blocks,
    measure_overhead,
    read_description,
)
from kvtier.tiering.fs.ledger import Account, Balance
from kvtier.tiering.fs.presence import Presence, StagedFile, is_presence_name, staged_files

if TYPE_CHECKING:
    from kvtier.tiering.fs.root import RootSession

__all__ = ["NAMESPACE_BYTES", "NAME_BYTES", "Evicted", "Outcome", "Transaction", "Written"]

logger = logging.getLogger(__name__)

NAME_BYTES = 256
"""Upper bound for the bytes that a block's name takes in its directory."""
_DESCRIPTION_BYTES = 2 * 4096
"""Bytes reserved for the description of a namespace: 4 KiB for the file, and as much for its name
and the file that it replaces."""
NAMESPACE_BYTES = (len(SHARDS) + 2) * 4096
"""Bytes reserved for the directories of a namespace, at 4 KiB for each."""
_HEADROOM = 512 << 10
"""Bytes that stay free, so that engines can still start in a full root."""
_FIRST_NAME_S = 60.0
"""Seconds. An engine removes the staged name of a block sooner than this after it has published the
block. A block that has two names for longer got one of them from something other than kvtier."""
_CERTAINLY_NOT_LINKED = (
    errno.ENOENT,
    errno.ENOSPC,
    errno.EDQUOT,
    errno.EACCES,
    errno.EROFS,
    errno.EEXIST,
    errno.ENOTDIR,
)


class Outcome(Enum):
    """The result of publishing one block."""

    PUBLISHED = auto()
    WAS_THERE = auto()
    """Another engine published this block first, and its file stays."""
    FAILED = auto()


class Written(NamedTuple):
    """A block that is written and not published yet."""

    temporary: str
    final: str
    num_bytes: int
    """Bytes on the disk, as `du` counts them."""
    charge: int
    """Bytes reserved for it."""


class Evicted(NamedTuple):
    """A block that was moved into our staging directory."""

    block: BlockFile
    presence: Presence
    temporary: str
    reserved: int
    is_linked: bool
    """True if the file has another name that no engine gave it: it must not be overwritten."""


class Transaction:
    """The locked ledger. Made by `RootSession`, which saves the balance at the end.

    Any step may raise `OSError`, or `PresenceLost` if another thread of this engine has abandoned
    the presence. The transaction then ends, and the balance is not saved at the end.
    """

    def __init__(self, session: RootSession, balance: Balance) -> None:
        self._session = session
        self._tree = session.tree
        self.balance = balance

    @property
    def account(self) -> Account:
        """The account of this engine."""
        return self.balance.accounts[self._session.presence.engine]

    def save(self) -> None:
        """Write the balance now, before the files change."""
        self._session.ledger.save(self.balance)

    # --- store ---------------------------------------------------------------------------------

    def reserve(self, count: int, charge: int, limit: int) -> int:
        """Reserve `charge` bytes for each of up to `count` blocks, but only so many that the total
        stays `_HEADROOM` below `limit`. Returns the number of reserved bytes."""
        available = limit - _HEADROOM - self.balance.total
        granted = max(0, min(count, available // charge)) * charge
        self.account.reserved += granted
        return granted

    def make_namespace(self, namespace: Path, limit: int) -> bool:
        """Make the directories of a namespace. Makes the last shard last, because a namespace that
        has its last shard counts as complete. False if `limit` leaves no space for the
        directories."""
        if self._tree.is_directory(f"{namespace}/{SHARDS[-1]}"):
            if not self._session.is_described:
                self._describe(namespace, limit)
            return True
        if self.balance.total + NAMESPACE_BYTES > limit - _HEADROOM:
            return False
        self.balance.overhead += NAMESPACE_BYTES
        self.save()  # before the directories take any space
        if namespace.parent == self._session.presence.blocks:
            with suppress(FileExistsError):
                self._tree.mkdir(namespace.parent)
        for directory in (namespace, *(namespace / shard for shard in SHARDS)):
            with suppress(FileExistsError):
                self._tree.mkdir(directory)
        self._describe(namespace, limit)
        return True

    def _describe(self, namespace: Path, limit: int) -> None:
        """Write what this engine's shared namespace is made of into its directory, unless it is
        there already. If `limit` leaves no space, the next transaction tries again. A description
        is only for people, so a failure ends nothing."""
        description = self._session.description
        if description is None or namespace != self._session.blocks / description.namespace:
            return
        if self.balance.total + _DESCRIPTION_BYTES > limit - _HEADROOM:
            return
        self._session.is_described = True
        temporary = self._session.presence.incoming()
        try:
            if read_description(self._tree, namespace) == description:
                return
            self.balance.overhead += _DESCRIPTION_BYTES
            self.save()  # before the file takes any space
            fd = self._tree.open(temporary, os.O_CREAT | os.O_EXCL | os.O_WRONLY)
            try:
                os.write(fd, description.encode())
            finally:
                os.close(fd)
            self._tree.rename(temporary, namespace / DESCRIPTION_FILE)
        except OSError as error:
            logger.debug("%s could not be described: %s", namespace, error)
            with suppress(OSError):
                self._tree.unlink(temporary)

    def publish(
        self, written: Sequence[Written], on_error: Callable[[OSError], None]
    ) -> list[Outcome]:
        """Link written blocks under their final names. After the transaction, the caller removes
        the temporary names of published blocks. The bytes of the other blocks stay reserved."""
        account = self.account
        account.is_publishing = True
        self.save()
        outcomes = [_publish(self._tree, block, on_error) for block in written]
        account.is_publishing = False
        for block, outcome in zip(written, outcomes, strict=True):
            if outcome is Outcome.PUBLISHED:
                account.reserved = max(0, account.reserved - block.charge)
                self.balance.add_blocks(block.num_bytes, 1)
                self.balance.overhead += NAME_BYTES
        return outcomes

    # --- evict ---------------------------------------------------------------------------------

    def evict(
        self,
        blocks: Iterable[BlockFile],
        on_error: Callable[[OSError], None] | None = None,
        *,
        is_forced: bool = False,
    ) -> list[Evicted]:
        """Move blocks into our staging directory. Skips files that are not evictable blocks and,
        unless `is_forced`, blocks that were used since they were listed. The bytes of evicted
        blocks stay reserved for this engine until they are given back. If a block stays because it
        cannot be moved, the error goes to `on_error`; without `on_error` it is raised."""
        presence = self._session.presence
        account = self.account
        batch = account.counted_out + 1
        gone: list[Evicted] = []
        for number, block in enumerate(blocks):
            temporary = presence.outgoing(batch, number)
            status = None
            try:
                status = self._tree.lstat(block.path)
                is_used = status.st_mtime_ns != block.used_ns
                if not _is_evictable(status) or (is_used and not is_forced):
                    continue
                self._tree.rename(block.path, temporary)
            except FileNotFoundError:
                continue
            except OSError as error:
                is_there = status is None or self._exists(block.path)
                if on_error is None or not is_there:
                    raise
                on_error(error)  # the block stays, and the next one is tried
                continue
            now = BlockFile.of(block.path, status)
            is_linked = status.st_nlink > 1
            gone.append(Evicted(now, presence, temporary, now.num_bytes + NAME_BYTES, is_linked))
        if gone:
            account.counted_out = batch
            self.balance.add_blocks(-sum(each.block.num_bytes for each in gone), -len(gone))
            # Including the bytes of their names: directories do not shrink.
            account.reserved += sum(each.reserved for each in gone)
        return gone

    def _exists(self, path: str) -> bool:
        try:
            self._tree.lstat(path)
        except OSError:
            return False
        return True

    # --- correct the balance -------------------------------------------------------------------

    def settle_interrupted(self) -> None:
        """Count the blocks of transactions that were cut short while they published."""
        for engine, account in self.balance.accounts.items():
            if account.is_publishing:
                staged = staged_files(self._tree, self._session.engines / engine.hex())
                _count_in_published(self.balance, account, staged)

    def settle(self, account: Account, directory: Path) -> None:
        """Subtract from the balance the blocks in the staging directory of a dead or ending engine
        that still count as published. The engine's account reserves the bytes of all files there
        until they are removed."""
        if account.is_settled:
            return
        staged = staged_files(self._tree, directory)
        out = [file for file in staged if (file.batch or 0) > account.counted_out]
        self.balance.add_blocks(-sum(file.num_bytes for file in out), -len(out))
        num_bytes, count = count_blocks(self._tree, directory / "blocks")
        self.balance.add_blocks(-num_bytes, -count)
        account.reserved = num_bytes + sum(file.num_bytes for file in staged)
        account.is_settled = True

    def true_up(self) -> None:
        """Reserve exactly the bytes that are in our staging directory. Corrects a reservation left
        by a damaged ledger. Called only while no thread of this engine writes a block or gives
        bytes back."""
        staged = staged_files(self._tree, self._session.presence.directory)
        self.account.reserved = sum(file.num_bytes + NAME_BYTES for file in staged)

    def measure(self) -> None:
        """Replace the upper bound of the overhead by the measured number of bytes."""
        session = self._session
        staging = [session.engines / engine.hex() for engine in self.balance.accounts]
        names = [name for name in self._tree.listdir(session.engines) if is_presence_name(name)]
        self.balance.overhead = measure_overhead(self._tree, session.path, names, staging)

    def count_again(self) -> None:
        """Set the balance to what the directories hold. Takes long in a large root."""
        session, balance = self._session, self.balance
        num_bytes, count = count_blocks(self._tree, session.blocks)
        for engine, account in balance.accounts.items():
            account.is_publishing = False
            if account.is_settled:
                continue
            directory = session.engines / engine.hex()
            more_bytes, more = count_blocks(self._tree, directory / "blocks")
            staged = staged_files(self._tree, directory)
            still_counted = [file for file in staged if (file.batch or 0) > account.counted_out]
            num_bytes += more_bytes + sum(file.num_bytes for file in still_counted)
            count += more + len(still_counted)
        balance.blocks, balance.num_blocks = num_bytes, count
        self.measure()


def _publish(tree: NoFollowTree, block: Written, on_error: Callable[[OSError], None]) -> Outcome:
    try:
        if not _link(tree, block):
            # A network file system may repeat a request, and find its own link the second time.
            is_ours = tree.lstat(block.temporary).st_nlink > 1
            return Outcome.PUBLISHED if is_ours else Outcome.WAS_THERE
    except OSError as error:
        if error.errno not in _CERTAINLY_NOT_LINKED:
            # The ledger keeps `is_publishing`, so the next holder of the lock checks for the link.
            raise
        on_error(error)
        return Outcome.FAILED
    return Outcome.PUBLISHED


def _link(tree: NoFollowTree, block: Written) -> bool:
    """Give a block its final name. False if a block of that name exists."""
    for _ in range(2):
        try:
            tree.link(block.temporary, block.final)
        except FileExistsError:
            if not stat.S_ISREG(tree.lstat(block.final).st_mode):
                raise  # it is not a block, so it is not removed
            return False
        except FileNotFoundError:
            with suppress(FileExistsError):
                tree.mkdir(os.path.dirname(block.final))  # the shard was removed
        else:
            return True
    return False


def _is_evictable(status: os.stat_result) -> bool:
    """False for anything but a regular file, and for a block that got a second name less than a
    minute ago: the engine that stored it may be about to remove the staged name."""
    if not stat.S_ISREG(status.st_mode):
        return False
    return status.st_nlink == 1 or time.time() - status.st_ctime > _FIRST_NAME_S


def _count_in_published(balance: Balance, account: Account, staged: Sequence[StagedFile]) -> None:
    """Count the staged files that were linked under their final names but not counted."""
    # An evicted file keeps its staged name, with a batch number, even if a new block overwrites it.
    # If the batch is above `counted_out`, the file was never subtracted, so do not add it again.
    named = [f for f in staged if f.is_linked and (f.batch or 0) <= account.counted_out]
    balance.add_blocks(sum(file.num_bytes for file in named), len(named))
    balance.overhead += NAME_BYTES * len(named)
    account.is_publishing = False
