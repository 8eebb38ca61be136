"""Every change of the ledger, and of what it counts.

Rules that make the ledger right again, whoever is killed when:

- A block is written in the seat of its engine, for which there is a reservation. It gets its name
  as a second link. The account says meanwhile that it is publishing; if it still says so when
  someone else has the lock, files in that seat with two names are published, and not yet counted.
- A block leaves by being moved to the seat of whoever evicts it, under the number of a batch. The
  account says up to which batch they have been counted out.
- So a dead engine's seat and account say together what is still to be counted. That is written
  down first, and then its files are removed, and then its account.
"""

from __future__ import annotations

import errno
import os
import stat
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from enum import Enum, auto
from functools import cache
from pathlib import Path
from typing import NamedTuple
from uuid import uuid4

from kvtier.tiering.fs.below import Below
from kvtier.tiering.fs.ledger import Account, Balance, Ledger, LedgerLost
from kvtier.tiering.fs.names import SHARDS
from kvtier.tiering.fs.ownership import require_own
from kvtier.tiering.fs.seat import (
    Occupant,
    Seat,
    SeatFile,
    StrangeSeat,
    is_seat,
    other_seats,
    seat_files,
)
from kvtier.tiering.fs.tree import BlockFile, count_blocks, measure_overhead

__all__ = ["NAMESPACE_BYTES", "NAME_BYTES", "Books", "Evicted", "Outcome", "SeatLost", "Written"]

NAME_BYTES = 256
"""What a block's name takes in its directory, at most."""
NAMESPACE_BYTES = (len(SHARDS) + 2) * 4096
"""What the directories of a namespace take."""
_SEAT_BYTES = 16_384
_HEADROOM = 512 << 10
"""Kept free for the seats of engines that start when there is no room."""
_HURRIED_PATIENCE_S = 1.0
_FIRST_NAME_S = 60.0
"""So long after it was published, another name of a block is not the one it was written under."""
_CERTAINLY_NOT_LINKED = (
    errno.ENOENT,
    errno.ENOSPC,
    errno.EDQUOT,
    errno.EACCES,
    errno.EROFS,
    errno.EEXIST,
    errno.ENOTDIR,
)
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


class SeatLost(Exception):
    """This engine's account is gone: it was taken for dead, or someone has emptied the root."""


class Outcome(Enum):
    """What became of a block that was to be published."""

    PUBLISHED = auto()
    WAS_THERE = auto()
    """Another engine was quicker, and its block stays."""
    FAILED = auto()


class Written(NamedTuple):
    """A block that is written and has no name yet."""

    temporary: str
    final: str
    num_bytes: int
    """As `du` counts them."""
    charge: int
    """What was reserved for it."""


class Evicted(NamedTuple):
    """A block that has left, and is in our seat now."""

    block: BlockFile
    seat: Seat
    temporary: str
    reserved: int
    is_linked: bool
    """Someone has given the file another name: it must not be overwritten."""


class Books:
    """One engine's, or one command's, way to change the root. Any thread but the scheduler's."""

    def __init__(
        self,
        path: Path,
        occupant: Occupant,
        patience_s: float,
    ) -> None:
        """Makes what the root lacks, and takes a seat. Raises `OSError`, of which `NotOurs` is one,
        or `LedgerVersion`."""
        self.path = path
        self.below = Below(path)
        self.blocks = path / "blocks"
        self.engines = path / "engines"
        self._occupant = occupant
        self._patience_s = patience_s
        self._seat: Seat | None = None
        self._is_closed = False
        self._owed = 0
        self._owed_lock = threading.Lock()
        try:
            self._make_root()
            self.ledger = Ledger(path / "ledger")
            try:
                with self._locked() as balance:
                    self._root_id = balance.root_id
                    self._sit_down(balance)
            except BaseException:
                self.ledger.close()
                raise
        except BaseException:
            self.below.forget()
            raise

    def _make_root(self) -> None:
        with suppress(FileExistsError):
            self.path.mkdir(mode=0o700)
        require_own(self.below, self.path)
        for directory in (self.blocks, self.engines):
            with suppress(FileExistsError):
                self.below.mkdir(directory)

    # --- transactions --------------------------------------------------------------------------

    @contextmanager
    def transaction(self) -> Iterator[Balance]:
        """The balance, for nobody else to change meanwhile; it is saved at the end. If that fails,
        or anything before it, the seat is given up: then the rules for dead engines' seats make
        the ledger right. Raises `SeatLost` or `OSError`."""
        with self._locked() as balance:
            if self._seat is None or balance.root_id != self._root_id:
                raise SeatLost
            account = balance.accounts.get(self._seat.engine)
            if account is None or not self._seat.is_in_place:
                raise SeatLost  # an account pays for what is in the seat until it is reclaimed
            with self._owed_lock:
                owed, self._owed = self._owed, 0
            account.reserved = max(0, account.reserved - owed)
            yield balance

    @contextmanager
    def _locked(self) -> Iterator[Balance]:
        with self.ledger.lock(lambda: self._patience_s):
            try:
                self.below.forget()
                if not self.ledger.is_in_place:
                    raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(self.path))
                balance = self._load()
                self._settle_interrupted(balance)
                yield balance
                self.ledger.save_if_changed(balance)
            except BaseException:
                self.give_up_seat()
                raise

    def _load(self) -> Balance:
        try:
            balance, is_doubtful = self.ledger.load()
        except LedgerLost:
            balance = Balance(uuid4().bytes, boot_id=_boot_id(), accounts=self._old_accounts())
            self._count_again(balance)
            for _ in range(2):  # both copies, whichever was damaged
                self.ledger.save(balance)
            self.measure(balance)
            return balance
        if _boot_id() != balance.boot_id:
            balance.boot_id = _boot_id()
            # If the machine has gone down, what was written last may be lost, here or in the
            # directories. Where others live, it has not: this is another machine.
            is_anyone_here = self._seat is not None or any(
                not seat.is_dead for seat in self._other_seats()
            )
            is_doubtful |= not is_anyone_here
        if is_doubtful:
            self._count_again(balance)
        return balance

    def _old_accounts(self) -> dict[bytes, Account]:
        """For the seats in a root whose ledger is lost. Those who live will notice, and take new
        ones."""
        accounts = {}
        for seat in self._other_seats():
            num_bytes, _ = count_blocks(self.below, seat.blocks)
            num_bytes += sum(file.num_bytes for file in seat.files())
            accounts[seat.engine] = Account(num_bytes, is_settled=True)
        return accounts

    def _settle_interrupted(self, balance: Balance) -> None:
        """Count what was published by someone who did not come to the end of it."""
        for engine, account in balance.accounts.items():
            if account.is_publishing:
                files = seat_files(self.below, self.engines / engine.hex())
                _count_in_published(balance, account, files)

    # --- the seat ------------------------------------------------------------------------------

    @property
    def seat(self) -> Seat:
        """Raises `SeatLost`."""
        seat = self._seat
        if seat is None:
            raise SeatLost
        return seat

    @property
    def has_seat(self) -> bool:
        return self._seat is not None

    def sit_down_again(self) -> None:
        """Take a new seat after the old one was lost or given up. Raises `OSError`; ENOENT where
        the root is not what it was, because it is not mounted, say."""
        self.give_up_seat()
        if not self.ledger.is_in_place:
            self._open_again()
        with self._locked() as balance:
            self._root_id = balance.root_id
            self._sit_down(balance)

    def _open_again(self) -> None:
        """Someone has put another directory in the place of the root. If it is the same root,
        mounted again, go on with it; a new one is not made, for it may be on a disk that nobody
        has set aside for this."""
        if not (self.path / "ledger").exists():
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(self.path))
        self.below.forget()
        require_own(self.below, self.path)
        ledger = Ledger(self.path / "ledger")
        self.ledger.retire()
        self.ledger = ledger

    def _sit_down(self, balance: Balance) -> None:
        seat = Seat(self.below, self.engines, self._occupant)
        balance.accounts[seat.engine] = Account()
        balance.overhead += _SEAT_BYTES
        try:
            self.ledger.save(balance)
        except BaseException:
            with suppress(OSError):
                seat.remove()
            raise
        self._seat = seat

    def give_up_seat(self) -> None:
        """Leave what is in the seat to whoever finds it. Once more changes nothing."""
        with self._owed_lock:
            seat, self._seat = self._seat, None
            self._owed = 0
        if seat is not None:
            seat.abandon()
        self.below.forget()  # whatever was wrong, directories are looked for anew

    def hurry(self) -> None:
        """From now on, wait for other engines hardly at all."""
        self._patience_s = min(self._patience_s, _HURRIED_PATIENCE_S)

    def close(self) -> None:
        """Leave nothing behind in the seat; private namespaces are blocks that nobody can find any
        more. Raises nothing: what could not be removed is found by others. Once more changes
        nothing."""
        if self._is_closed:
            return
        self._is_closed = True
        with suppress(OSError, SeatLost):
            with self.transaction() as balance:
                seat = self.seat
                self._settle(balance, self.account(balance), seat.directory)
            seat.empty()
            with self.transaction() as balance:
                seat.remove()
                del balance.accounts[seat.engine]
                self.measure(balance)
        self.give_up_seat()
        self.ledger.close()

    def account(self, balance: Balance) -> Account:
        """This engine's, in a transaction."""
        return balance.accounts[self.seat.engine]

    def _other_seats(self) -> Iterator[StrangeSeat]:
        return other_seats(self.below, self.engines, self._seat)

    # --- blocks come ---------------------------------------------------------------------------

    def reserve(self, balance: Balance, count: int, charge: int, limit: int) -> int:
        """Room for so many blocks, or for as many as there is room for below `limit`. Returns the
        bytes."""
        room = limit - _HEADROOM - balance.total
        granted = max(0, min(count, room // charge)) * charge
        self.account(balance).reserved += granted
        return granted

    def make_namespace(self, balance: Balance, namespace: Path, limit: int) -> bool:
        """Make the directories of a namespace, the last one last. False: there is no room."""
        if self.below.is_directory(f"{namespace}/{SHARDS[-1]}"):
            return True
        if balance.total + NAMESPACE_BYTES > limit - _HEADROOM:
            return False
        balance.overhead += NAMESPACE_BYTES
        self.ledger.save(balance)  # before there is anything to pay for
        if namespace.parent == self.seat.blocks:
            with suppress(FileExistsError):
                self.below.mkdir(namespace.parent)
        for directory in (namespace, *(namespace / shard for shard in SHARDS)):
            with suppress(FileExistsError):
                self.below.mkdir(directory)
        return True

    def publish(
        self, balance: Balance, written: Sequence[Written], on_error: Callable[[OSError], None]
    ) -> list[Outcome]:
        """Give written blocks their names. Where they were published, the temporary name is to be
        removed after the transaction; otherwise the file is still reserved for."""
        account = self.account(balance)
        account.is_publishing = True
        self.ledger.save(balance)
        outcomes = [_publish(self.below, block, on_error) for block in written]
        account.is_publishing = False
        for block, outcome in zip(written, outcomes, strict=True):
            if outcome is Outcome.PUBLISHED:
                account.reserved = max(0, account.reserved - block.charge)
                balance.add_blocks(block.num_bytes, 1)
                balance.overhead += NAME_BYTES
        return outcomes

    def give_back(self, seat: Seat, num_bytes: int) -> None:
        """What was reserved while we had this seat is not going to be written, or was removed. The
        ledger is told with the next transaction."""
        with self._owed_lock:
            if seat is self._seat:
                self._owed += num_bytes

    @property
    def owes(self) -> bool:
        """Whether the ledger has not been told yet that something was given back."""
        return self._owed > 0

    # --- blocks go -----------------------------------------------------------------------------

    def evict(
        self,
        balance: Balance,
        blocks: Iterable[BlockFile],
        on_error: Callable[[OSError], None] | None = None,
        *,
        is_forced: bool = False,
    ) -> list[Evicted]:
        """Move blocks to our seat, unless they were used since they were looked at, or are not
        what they were; with `is_forced` only the latter. What they take is then reserved for us,
        until it is given back. `on_error` is told of blocks that cannot be moved; without it, such
        an error is raised."""
        seat = self.seat
        account = self.account(balance)
        batch = account.counted_out + 1
        gone: list[Evicted] = []
        for number, block in enumerate(blocks):
            temporary = seat.outgoing(batch, number)
            status = None
            try:
                status = self.below.lstat(block.path)
                is_used = status.st_mtime_ns != block.used_ns
                if not _may_leave(status) or (is_used and not is_forced):
                    continue
                self.below.rename(block.path, temporary)
            except FileNotFoundError:
                continue
            except OSError as error:
                is_there = status is None or self._is_there(block.path)
                if on_error is None or not is_there:
                    raise
                on_error(error)  # it stays where it is, and so do we
                continue
            now = BlockFile.of(block.path, status)
            is_linked = status.st_nlink > 1
            gone.append(Evicted(now, seat, temporary, now.num_bytes + NAME_BYTES, is_linked))
        if gone:
            account.counted_out = batch
            balance.add_blocks(-sum(block.block.num_bytes for block in gone), -len(gone))
            # With their names: directories do not grow smaller.
            account.reserved += sum(block.reserved for block in gone)
        return gone

    def _is_there(self, path: str) -> bool:
        try:
            self.below.lstat(path)
        except OSError:
            return False
        return True

    def reclaim(self) -> int:
        """Take back what dead engines had reserved, and remove what they left. Returns how many
        there were. Raises `OSError` or `SeatLost`."""
        if not self._is_anything_to_reclaim():
            return 0
        dead: set[bytes] = set()
        with self.transaction() as balance:
            seats = set()
            for seat in self._other_seats():
                seats.add(seat.engine)
                if seat.is_dead:
                    account = balance.accounts.get(seat.engine)
                    if account is not None:
                        self._settle(balance, account, seat.directory)
                    dead.add(seat.engine)
            seats.add(self.seat.engine)
            lost = balance.accounts.keys() - seats
            for engine in lost:
                del balance.accounts[engine]
        removed: list[bytes] = []
        for seat in self._other_seats():
            if seat.engine in dead and seat.is_dead:
                # Nobody else does it: we have it locked. Meanwhile its account pays for it.
                seat.remove()
                removed.append(seat.engine)
        with self.transaction() as balance:
            for engine in removed:
                balance.accounts.pop(engine, None)
            self.measure(balance)
        return len(removed) + len(lost)

    def _is_anything_to_reclaim(self) -> bool:
        seats = {self.seat.engine}
        for seat in self._other_seats():
            if seat.is_dead:
                return True
            seats.add(seat.engine)
        try:
            return not self.ledger.read().accounts.keys() <= seats
        except LedgerLost:
            return True

    def true_up(self, balance: Balance) -> None:
        """Have no more reserved than what is in our seat: nobody of ours is about to write, or to
        give anything back. It is so, unless a ledger was damaged."""
        files = seat_files(self.below, self.seat.directory)
        self.account(balance).reserved = sum(file.num_bytes + NAME_BYTES for file in files)

    def _settle(self, balance: Balance, account: Account, directory: Path) -> None:
        """Let nothing in the seat of an engine that is gone, or goes, count as published any more:
        its account says what it takes, until it is removed."""
        if account.is_settled:
            return
        files = seat_files(self.below, directory)
        out = [file for file in files if (file.batch or 0) > account.counted_out]
        balance.add_blocks(-sum(file.num_bytes for file in out), -len(out))
        num_bytes, count = count_blocks(self.below, directory / "blocks")
        balance.add_blocks(-num_bytes, -count)
        account.reserved = num_bytes + sum(file.num_bytes for file in files)
        account.is_settled = True

    # --- all of it -----------------------------------------------------------------------------

    def measure(self, balance: Balance) -> None:
        """Replace what the overhead is at most by what it is."""
        seats = [self.engines / engine.hex() for engine in balance.accounts]
        names = [name for name in self.below.listdir(self.engines) if is_seat(name)]
        balance.overhead = measure_overhead(self.below, self.path, names, seats)

    def count_again(self) -> tuple[int, int]:
        """Make the ledger say what is there, whatever it said. May take long. Returns how many more
        bytes, and blocks, there were than it said."""
        self.reclaim()
        with self.transaction() as balance:
            before = balance.blocks, balance.num_blocks
            self._count_again(balance)
            return balance.blocks - before[0], balance.num_blocks - before[1]

    def _count_again(self, balance: Balance) -> None:
        num_bytes, count = count_blocks(self.below, self.blocks)
        for engine, account in balance.accounts.items():
            account.is_publishing = False
            if account.is_settled:
                continue
            seat = self.engines / engine.hex()
            more_bytes, more = count_blocks(self.below, seat / "blocks")
            files = seat_files(self.below, seat)
            still_counted = [file for file in files if (file.batch or 0) > account.counted_out]
            num_bytes += more_bytes + sum(file.num_bytes for file in still_counted)
            count += more + len(still_counted)
        balance.blocks, balance.num_blocks = num_bytes, count
        self.measure(balance)


def _may_leave(status: os.stat_result) -> bool:
    """Not what is no block, nor a block whose engine may be about to remove its first name."""
    if not stat.S_ISREG(status.st_mode):
        return False
    return status.st_nlink == 1 or time.time() - status.st_ctime > _FIRST_NAME_S


def _publish(below: Below, block: Written, on_error: Callable[[OSError], None]) -> Outcome:
    try:
        if not _link(below, block):
            # A network may have asked twice, and been told that it is there the second time.
            is_ours = below.lstat(block.temporary).st_nlink > 1
            return Outcome.PUBLISHED if is_ours else Outcome.WAS_THERE
    except OSError as error:
        if error.errno not in _CERTAINLY_NOT_LINKED:
            raise  # and whoever settles it will see
        on_error(error)
        return Outcome.FAILED
    return Outcome.PUBLISHED


def _link(below: Below, block: Written) -> bool:
    """Give a block its name. False: there is a block of that name."""
    for _ in range(2):
        try:
            below.link(block.temporary, block.final)
        except FileExistsError:
            if not stat.S_ISREG(below.lstat(block.final).st_mode):
                raise  # it is not ours, and stays
            return False
        except FileNotFoundError:
            with suppress(FileExistsError):
                below.mkdir(os.path.dirname(block.final))  # someone has removed it
        else:
            return True
    return False


def _count_in_published(balance: Balance, account: Account, files: Sequence[SeatFile]) -> None:
    """Of the files in a seat, those that have got their names, but were not counted."""
    # A block that has left is overwritten by a new one under the name it left by.
    named = [f for f in files if f.is_linked and (f.batch or 0) <= account.counted_out]
    balance.add_blocks(sum(file.num_bytes for file in named), len(named))
    balance.overhead += NAME_BYTES * len(named)
    account.is_publishing = False


@cache
def _boot_id() -> bytes:
    try:
        return bytes.fromhex(_BOOT_ID.read_text().strip().replace("-", ""))[:16].ljust(16, b"\0")
    except (OSError, ValueError):
        return bytes(16)
