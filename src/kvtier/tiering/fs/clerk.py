"""The thread that does what needs the ledger: publish blocks, and find room for further ones."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from enum import Enum, auto
from pathlib import Path
from typing import Generic, NamedTuple, TypeVar

from kvtier.base import OffloadKey
from kvtier.tiering.fs.books import (
    NAME_BYTES,
    NAMESPACE_BYTES,
    Books,
    Evicted,
    Outcome,
    SeatLost,
    Written,
)
from kvtier.tiering.fs.clearing import remove_evicted
from kvtier.tiering.fs.lease import Lease, Room
from kvtier.tiering.fs.ledger import Balance, LedgerBusy, LedgerLost
from kvtier.tiering.fs.names import key_of
from kvtier.tiering.fs.sweeper import Sweeper
from kvtier.tiering.fs.tree import BlockFile

__all__ = ["Arrival", "Change", "Clerk", "Limits", "News", "Usage"]

logger = logging.getLogger(__name__)

T = TypeVar("T")

_HEARTBEAT_S = 0.5
_GATHER_S = 0.001
_ENOUGH_AT_ONCE = 16
"""Fewer blocks are waited for, for a moment: what the ledger costs, it costs for all of them."""
_QUIET_S = 1.0
"""After so long without a store, what was reserved is given back."""
_MEASURE_COST = 100
"""Measuring the directories takes at most one part in so many of the time."""
_RETRY_S = 1.0
_PATIENCE_S = 10.0
"""So long it is tried to let blocks leave, if none of those that were found does."""
_REMOVED_AT_ONCE = 64
_LEASE_BYTES = 64 << 20
_LEASE_BLOCKS = 64
_SMALL_PART = 10
_FEW_BLOCKS = 32
"""Of so few, all may be ours and just have left while they were counted."""
_LEASE_PART = 32
"""An engine keeps no larger part of the quota than one in so many for itself."""


@dataclass(frozen=True, slots=True)
class Limits:
    """What must never be exceeded."""

    max_bytes: int
    min_free_bytes: int

    def apply(self, path: Path, balance: Balance) -> int:
        """How large the total of the ledger may become now."""
        if not self.min_free_bytes:
            return self.max_bytes
        # What others have reserved, they may be about to write.
        spare = free_bytes(path) - self.min_free_bytes - balance.reserved
        return min(self.max_bytes, balance.total + max(0, spare))

    def missing_bytes(self, path: Path) -> int:
        """How much less than it should the file system has left."""
        if not self.min_free_bytes:
            return 0
        return max(0, self.min_free_bytes - free_bytes(path))


class Arrival(NamedTuple, Generic[T]):
    """A block that is written. `what` is handed back with what became of it."""

    what: T
    key: OffloadKey
    room: Room
    namespace: str
    """The directory of its namespace."""
    final: str
    num_bytes: int
    """As `du` counts them."""


@dataclass(frozen=True, slots=True)
class Usage:
    """What the ledger said last."""

    num_bytes: int = 0
    num_blocks: int = 0


class Change(Enum):
    """What has happened to blocks."""

    STORED = auto()
    SEEN = auto()
    """They were stored by someone else."""
    REMOVED = auto()


class News(NamedTuple):
    """What has happened, by our doing."""

    namespace: str
    """The directory of the namespace."""
    keys: list[OffloadKey]
    change: Change


class Clerk(Generic[T]):
    """Takes the ledger's lock, so that those who move blocks do not wait for other engines."""

    def __init__(
        self,
        books: Books,
        limits: Limits,
        block_bytes: int,
        charge: int,
        on_error: Callable[[OSError], None],
    ) -> None:
        """`block_bytes`: the length of a block's file. `charge`: what it may take on the disk."""
        self._books = books
        self._limits = limits
        self._block_bytes = block_bytes
        self._on_error = on_error
        self._wake = threading.Event()
        self._namespace: Path | None = None
        self._arrived: deque[Arrival[T]] = deque()
        self._damaged: deque[BlockFile] = deque()
        self._returned: deque[Room] = deque()
        self._is_asked = False
        self._is_stopping = False
        self._last_active = 0.0
        self._measured_revision = -1
        self._measure_at = 0.0
        self._retry_at = 0.0
        self._said_full = False
        self._num_missing = 0
        """Bytes that must become free before there is room for any block."""
        self._hungry_since: float | None = None
        """Since when there is no room, though it is asked for."""
        self.usage = Usage()
        self.news: deque[News] = deque()
        """In the order in which things came and went. For the scheduler to take."""
        self.num_evicted = 0
        """Since the beginning."""
        self.private_blocks = books.seat.blocks
        """The directory of namespaces that are this engine's alone."""
        most = min(_LEASE_BLOCKS, min(_LEASE_BYTES, limits.max_bytes // _LEASE_PART) // charge)
        self.lease = Lease(charge, max(1, most), self._new_path, self.ask_for_room)
        self.sweeper = Sweeper(books, self._wake.set, on_error)
        self._on_done: Callable[[Sequence[tuple[Arrival[T], bool]]], None]
        self._thread = threading.Thread(target=self._run, name="kvtier-fs-clerk", daemon=True)

    def start(self, on_done: Callable[[Sequence[tuple[Arrival[T], bool]]], None]) -> None:
        """`on_done` is called on the thread with everything that arrives, exactly once: whether it
        is there now."""
        self._on_done = on_done
        self._thread.start()
        self.sweeper.start()

    def _new_path(self) -> str:
        return self._books.seat.incoming()

    # --- any thread ----------------------------------------------------------------------------

    def use(self, namespace: Path, public: Path, junk: Path | None) -> None:
        """Blocks of this namespace come from now on. It may be one of our own, while `public` is
        that of engines like this one: room is made by removing blocks of either. Those of `junk`
        are of use to nobody."""
        self._namespace = namespace
        self.sweeper.use(tuple({namespace: None, public: None}), junk)

    def publish_soon(self, arrivals: Sequence[Arrival[T]]) -> None:
        self._arrived.extend(arrivals)
        self._wake.set()

    def remove_soon(self, block: BlockFile) -> None:
        """A block that is damaged."""
        self._damaged.append(block)
        self._wake.set()

    def return_room(self, room: Room) -> None:
        """Room that was taken, and is not going to be used."""
        self._returned.append(room)
        self._wake.set()

    def ask_for_room(self) -> None:
        self._is_asked = True
        self._wake.set()

    def stop(self) -> None:
        """Publish what has arrived, leave the seat, and end. Waits. Nothing may arrive afterwards.
        Once more, or without a start, changes nothing."""
        self._books.hurry()
        self.sweeper.stop()
        self._is_stopping = True
        self._wake.set()
        if self._thread.ident is not None:
            self._thread.join()

    # --- on the thread -------------------------------------------------------------------------

    def _run(self) -> None:
        while not self._is_stopping:
            self._wake.wait(_HEARTBEAT_S)
            if self._arrived and len(self._arrived) < _ENOUGH_AT_ONCE and not self._is_asked:
                time.sleep(_GATHER_S)
            self._wake.clear()
            self._guarded(self._work)
        self.lease.close()
        self._guarded(self._work)
        self._fail(self._take_arrivals())
        self._books.close()

    def _guarded(self, step: Callable[[], None]) -> None:
        try:
            step()
        except SeatLost:
            self._lost("this engine was taken for dead, or the directory was emptied")
        except OSError as error:
            self._on_error(error)
            if not isinstance(error, LedgerBusy):
                self._lost(str(error))
        except Exception:
            logger.exception("%s: the fs tier does not store for a moment", self._books.path)
            self._lost("an unexpected error")

    def _lost(self, why: str) -> None:
        """Start again with another seat, in a moment. Others clean up what is in the old one."""
        logger.debug("%s: the seat is given up: %s", self._books.path, why)
        self._books.give_up_seat()
        self.lease.empty()
        self._take_returned()
        self._shut(has_failed=True)
        if not self._books.ledger.is_in_place:
            self.usage = Usage()  # there is nothing, as far as we can see

    def _take_arrivals(self) -> list[Arrival[T]]:
        return [self._arrived.popleft() for _ in range(len(self._arrived))]

    def _take_returned(self) -> list[Room]:
        """Nobody writes there any more, whether or not what the caller does with it succeeds: else
        it would never be quiet again."""
        returned = [self._returned.popleft() for _ in range(len(self._returned))]
        self.lease.settle(returned)
        return returned

    def _fail(self, arrivals: Sequence[Arrival[T]]) -> None:
        if arrivals:
            self.lease.settle(arrival.room for arrival in arrivals)
            self._on_done([(arrival, False) for arrival in arrivals])

    def _work(self) -> None:
        arrivals = self._take_arrivals()
        try:
            if self.lease.is_shut:
                self._returned += (arrival.room for arrival in arrivals)
                if time.monotonic() < self._retry_at:
                    return
                self._open_again()
                return
            if arrivals or self._damaged or self._returned or self._is_asked:
                self._transact(arrivals)
            else:
                self._beat()
        except LedgerBusy:
            self._returned += (arrival.room for arrival in arrivals)
            self._shut(has_failed=True)
            raise
        finally:
            self._fail(arrivals)

    def _open_again(self) -> None:
        """After something has failed, or someone has had the ledger for long."""
        self._retry_at = time.monotonic() + _RETRY_S
        if not self._books.has_seat:
            self._books.sit_down_again()
            self.private_blocks = self._books.seat.blocks
            if self._namespace is not None and self._namespace.parent != self._books.blocks:
                self._namespace = None  # it was in the old seat; the scheduler will name another
        else:
            with self._books.transaction():
                pass
        self.lease.open()

    def _transact(self, arrivals: list[Arrival[T]]) -> None:
        """Leaves those in the list that nobody has been told of: none, unless it raises."""
        self._last_active = time.monotonic()
        is_asked, self._is_asked = self._is_asked, False
        damaged = [self._damaged.popleft() for _ in range(len(self._damaged))]
        books = self._books
        with books.transaction() as balance:
            outcomes = self._publish(balance, arrivals)
            removed = books.evict(balance, damaged, self._on_error, is_forced=True)
            granted, victims = self._find_room(balance) if is_asked else (0, [])
            if time.monotonic() >= self._measure_at:
                self._measure(balance)
            self._note_usage(balance)
        self._recycle(arrivals, outcomes, granted, removed, victims)
        ended = list(zip(arrivals, outcomes, strict=True))
        arrivals.clear()
        try:
            if is_asked:
                self._see_to_those_who_wait(has_found=bool(granted or victims))
        finally:  # what has come and gone has done so
            for outcome, change in _CHANGES.items():
                self._note_come([arrival for arrival, came in ended if came is outcome], change)
            self._note_gone(removed)
            self._note_gone(victims)
            self.num_evicted += len(victims)
            self._on_done([(arrival, outcome is not Outcome.FAILED) for arrival, outcome in ended])

    def _see_to_those_who_wait(self, has_found: bool) -> None:
        if self._num_missing:
            has_found = self._make_free(self._num_missing)
        if has_found or not self.lease.num_wanted:
            self._hungry_since = None
            if self.lease.is_waited_for:
                self.ask_for_room()
            return
        now = time.monotonic()
        if self._hungry_since is None:
            self._hungry_since = now
        if self._namespace is None or now - self._hungry_since > _PATIENCE_S:
            self._shut(has_failed=False)  # or each of those who wait would wait as long
        elif self.sweeper.is_exhausted:
            self.lease.refuse()
            self._say_full()
        else:
            self._is_asked = True  # until the sweeper has found something, or nothing

    def _shut(self, *, has_failed: bool) -> None:
        """Let nobody wait for room, for a while and until we have had the ledger again."""
        self._hungry_since = None
        self._retry_at = time.monotonic() + _RETRY_S
        self.lease.shut(has_failed=has_failed)

    def _publish(self, balance: Balance, arrivals: list[Arrival[T]]) -> list[Outcome]:
        seat = self._books.seat
        limit = self._limits.max_bytes
        possible = {
            namespace: self._is_wanted(Path(namespace))
            and self._books.make_namespace(balance, Path(namespace), limit)
            for namespace in {arrival.namespace for arrival in arrivals}
        }
        written = [
            Written(arrival.room.path, arrival.final, arrival.num_bytes, arrival.room.charge)
            for arrival in arrivals
            if seat.contains(arrival.room.path) and possible[arrival.namespace]
        ]
        if not written:
            return [Outcome.FAILED] * len(arrivals)
        published = self._books.publish(balance, written, self._on_error)
        outcome_of = {
            block.temporary: outcome for block, outcome in zip(written, published, strict=True)
        }
        return [outcome_of.get(arrival.room.path, Outcome.FAILED) for arrival in arrivals]

    def _is_wanted(self, namespace: Path) -> bool:
        """Not if it was our own, and is so no longer."""
        return namespace == self._namespace or namespace.parent == self._books.blocks

    def _find_room(self, balance: Balance) -> tuple[int, list[Evicted]]:
        """Bytes that were reserved, and blocks that have left."""
        wanted = self.lease.num_wanted
        namespace = self._namespace
        self._num_missing = 0
        if not wanted or namespace is None:
            return 0, []
        self._num_missing = self._num_over(balance)
        if self._num_missing:
            return 0, []
        limit = self._limits.apply(self._books.path, balance)
        if not self._books.make_namespace(balance, namespace, limit):
            self._num_missing = NAMESPACE_BYTES
            return 0, []
        charge = self.lease.charge
        granted = self._books.reserve(balance, wanted, charge, limit)
        missing = wanted - granted // charge
        if not missing:
            return granted, []
        self._say_full()
        return granted, self._books.evict(balance, self.sweeper.take(missing), self._on_error)

    def _num_over(self, balance: Balance) -> int:
        """How many bytes there are too many: someone has given us a smaller quota."""
        if balance.total > self._limits.max_bytes:
            self._measure(balance)  # what the directories take is known by guess until then
        return max(0, balance.total - self._limits.max_bytes)

    def _recycle(
        self,
        arrivals: Sequence[Arrival[T]],
        outcomes: Sequence[Outcome],
        granted: int,
        removed: Sequence[Evicted],
        victims: Sequence[Evicted],
    ) -> None:
        """What is in our seat and is no block is overwritten by the next ones."""
        seat = self._books.seat
        files: list[Room] = []
        returned = self._take_returned()
        for arrival, outcome in zip(arrivals, outcomes, strict=True):
            if outcome is Outcome.PUBLISHED:
                self._books.below.unlink(arrival.room.path)
            elif outcome is Outcome.WAS_THERE:
                charge = arrival.num_bytes + NAME_BYTES
                files.append(Room(arrival.room.path, False, charge))
                granted += arrival.room.charge - charge
            else:
                returned.append(arrival.room)
        self.lease.settle(arrival.room for arrival in arrivals)
        for room in returned:
            if seat.contains(room.path):
                with suppress(FileNotFoundError):
                    self._books.below.unlink(room.path)
                granted += room.charge
        for gone in (*removed, *victims):
            if self._is_recyclable(gone):
                files.append(Room(gone.temporary, False, gone.reserved))
            else:
                self._books.below.unlink(gone.temporary)
                granted += gone.reserved
        self.lease.put(granted, files)

    def _is_recyclable(self, gone: Evicted) -> bool:
        is_whole = gone.block.size == self._block_bytes <= gone.block.num_bytes
        return is_whole and not gone.is_linked

    def _note_come(self, arrivals: Sequence[Arrival[T]], change: Change) -> None:
        if arrivals:
            self.sweeper.look_again()
        for namespace in {arrival.namespace for arrival in arrivals}:
            keys = [arrival.key for arrival in arrivals if arrival.namespace == namespace]
            self.news.append(News(namespace, keys, change))

    def _note_gone(self, blocks: Sequence[Evicted]) -> None:
        by_namespace: dict[str, list[OffloadKey]] = {}
        for gone in blocks:
            namespace, _, name = gone.block.path.rsplit("/", 2)
            key = key_of(name)
            if key is not None:
                by_namespace.setdefault(namespace, []).append(key)
        for namespace, keys in by_namespace.items():
            self.news.append(News(namespace, keys, Change.REMOVED))

    def _say_full(self) -> None:
        """Once, if there is hardly anything that this engine may remove."""
        num_own, num_blocks = self.sweeper.num_own, self.sweeper.num_all
        is_small = num_own * _SMALL_PART < num_blocks
        if self._said_full or not is_small or num_blocks < _FEW_BLOCKS:
            return
        self._said_full = True
        is_too_full = self._limits.missing_bytes(self._books.path) > 0
        logger.warning(
            "%s is full%s, and of its %d blocks only %d are of this model, and may be removed for "
            "new ones. %s, or remove what is no longer used with `kvtier store gc %s`. This is "
            "said once",
            self._books.path,
            " (its file system has less than min_free_bytes left)" if is_too_full else "",
            num_blocks,
            num_own,
            "Make room there" if is_too_full else "Raise max_bytes",
            self._books.path,
        )

    # --- when there is nothing to do -----------------------------------------------------------

    def _beat(self) -> None:
        now = time.monotonic()
        self._books.below.forget()
        if not self.lease.is_idle:
            self._last_active = now
        missing = self._limits.missing_bytes(self._books.path)
        missing = max(missing, self.usage.num_bytes - self._limits.max_bytes)
        if missing > 0:
            self._make_free(missing)
        is_quiet = now - self._last_active >= _QUIET_S
        if is_quiet:
            self._give_back()
        if not (self._books.ledger.is_in_place and self._books.seat.is_in_place):
            raise SeatLost
        try:
            balance = self._books.ledger.read()
        except LedgerLost:
            with self._books.transaction():
                return  # which mends it
        has_changed = balance.revision != self._measured_revision
        if is_quiet and has_changed and now >= self._measure_at:
            with self._books.transaction() as balance:
                if self.lease.is_idle and not self.sweeper.is_removing:
                    self._books.true_up(balance)
                self._measure(balance)
            # If nothing was wrong, nothing was saved: others need not look again, either.
            self._measured_revision = balance.revision
        self._note_usage(balance)

    def _make_free(self, missing: int) -> bool:
        """Let blocks leave, and their files with them: for what is no block of ours. Answers
        whether any did."""
        self._last_active = time.monotonic()
        count = min(_REMOVED_AT_ONCE, -(-missing // self.lease.charge))
        candidates = self.sweeper.take(count)
        if not candidates:
            return False
        with self._books.transaction() as balance:
            victims = self._books.evict(balance, candidates, self._on_error)
        remove_evicted(self._books, victims)
        self._note_gone(victims)
        self.num_evicted += len(victims)
        if victims:
            self._wake.set()  # and look again
        return bool(victims)

    def _give_back(self) -> None:
        num_bytes, files = self.lease.empty()
        for room in files:
            self._books.below.unlink(room.path)
            num_bytes += room.charge
        self._books.give_back(self._books.seat, num_bytes)
        if self._books.owes:
            with self._books.transaction():
                pass  # which tells the ledger

    def _measure(self, balance: Balance) -> None:
        started = time.monotonic()
        self._books.measure(balance)
        now = time.monotonic()
        self._measure_at = now + max(_HEARTBEAT_S, _MEASURE_COST * (now - started))

    def _note_usage(self, balance: Balance) -> None:
        self.usage = Usage(balance.total, balance.num_blocks)


_CHANGES = {Outcome.PUBLISHED: Change.STORED, Outcome.WAS_THERE: Change.SEEN}


def free_bytes(path: Path) -> int:
    """What the file system has left for us."""
    answer = os.statvfs(path)
    return answer.f_bavail * answer.f_frsize
