"""The thread that publishes written blocks and refills the pool of reservations, in transactions on
the ledger.

A store, from the file to the published block:

1. A lane (an I/O thread of the tier) takes a reservation, writes the block to the reserved path in
   the staging directory, and passes it to `publish_soon`: see the module `mover`.
2. The publisher takes all blocks that wait, and opens one transaction for them (`_transact`).
3. The transaction links each block under its final name and counts it (`Transaction.publish`).
4. The staged names are removed, or their files kept to be overwritten (`_recycle`).
5. `on_done` reports each block exactly once, and `changes` carries the keys to the scheduler.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from enum import Enum, auto
from pathlib import Path
from typing import Generic, NamedTuple, TypeVar

from kvtier.base import OffloadKey
from kvtier.tiering.fs.eviction import DamagedBlocks, Sweeper
from kvtier.tiering.fs.layout import key_of
from kvtier.tiering.fs.ledger import Balance, LedgerBusy, LedgerLost
from kvtier.tiering.fs.quota import (
    Limits,
    Quota,
    Reservation,
    ReservationPool,
    Space,
    pool_target,
)
from kvtier.tiering.fs.root import PresenceLost, RootSession
from kvtier.tiering.fs.transaction import NAME_BYTES, Evicted, Outcome, Transaction, Written
from kvtier.tiering.io.metrics import UnexpectedErrors

__all__ = ["BlockChange", "Change", "ChangeLog", "Publisher", "StagedBlock", "Usage"]

logger = logging.getLogger(__name__)

T = TypeVar("T")
X = TypeVar("X")

_HEARTBEAT_S = 0.5
_GATHER_S = 0.001
_ENOUGH_AT_ONCE = 16
"""With fewer staged blocks, the thread waits `_GATHER_S` for more, because a transaction costs the
same for one block as for many."""
_QUIET_S = 1.0
"""Seconds without a store after which unused reservations are given back."""
_RETRY_S = 1.0
"""Pause, in seconds, before the root is tried again after a failure."""
_PATIENCE_S = 10.0
"""Seconds that lanes wait for space while blocks are found, but none of them can be evicted."""


class StagedBlock(NamedTuple, Generic[T]):
    """A block that is written and waits to be published."""

    what: T
    """Any object of the caller; `on_done` returns it with the result."""
    key: OffloadKey
    reservation: Reservation
    namespace: str
    """The directory of its namespace."""
    final: str
    num_bytes: int
    """Bytes on the disk, as `du` counts them."""


@dataclass(frozen=True, slots=True)
class Usage:
    """What the ledger said when the publisher's thread last read it."""

    num_bytes: int = 0
    num_blocks: int = 0

    @classmethod
    def of(cls, balance: Balance) -> Usage:
        return cls(balance.total, balance.num_blocks)


class Change(Enum):
    """What happened to blocks."""

    STORED = auto()
    SEEN = auto()
    """Another engine stored them."""
    REMOVED = auto()


class BlockChange(NamedTuple):
    """Blocks that this engine stored, saw or removed."""

    namespace: str
    """The directory of the namespace."""
    keys: list[OffloadKey]
    change: Change


class ChangeLog:
    """What happened to blocks, in order. The publisher's thread and lanes add to it; the
    scheduler's thread takes from it."""

    def __init__(self) -> None:
        self._changes: deque[BlockChange] = deque()

    def add(self, blocks: Iterable[tuple[str, OffloadKey]], change: Change) -> None:
        """`blocks`: (directory of the namespace, key) of each."""
        by_namespace: dict[str, list[OffloadKey]] = {}
        for namespace, key in blocks:
            by_namespace.setdefault(namespace, []).append(key)
        for namespace, keys in by_namespace.items():
            self._changes.append(BlockChange(namespace, keys, change))

    def add_removed(self, blocks: Iterable[Evicted]) -> None:
        named = ((gone.block.namespace, key_of(gone.block.name)) for gone in blocks)
        self.add(((namespace, key) for namespace, key in named if key is not None), Change.REMOVED)

    def take(self) -> list[BlockChange]:
        return _take_all(self._changes)


_CHANGES = {Outcome.PUBLISHED: Change.STORED, Outcome.WAS_THERE: Change.SEEN}


class Publisher(Generic[T]):
    """Takes the ledger's lock on a thread of its own. So a lane waits for other engines only while
    the pool of reservations is empty."""

    def __init__(
        self,
        session: RootSession,
        limits: Limits,
        block_bytes: int,
        charge: int,
        on_error: Callable[[OSError], None],
    ) -> None:
        """`block_bytes`: the length of a block's file. `charge`: upper bound for the bytes that it
        takes on the disk. `on_error`: called on the publisher's and the sweeper's thread."""
        self._session = session
        self._block_bytes = block_bytes
        self._on_error = on_error
        self._unexpected = UnexpectedErrors(
            session.path, "the fs tier stores nothing for about 1 s, then tries again"
        )
        self._wake = threading.Event()
        self._namespace: Path | None = None
        self._staged: deque[StagedBlock[T]] = deque()
        self._returned: deque[Reservation] = deque()
        self._is_asked = False
        self._is_stopping = False
        self._last_active = 0.0
        self._measured_revision = -1
        self._retry_at = 0.0
        self._short_since: float | None = None
        """Monotonic time since which no space was found for the lanes that wait. None if no lane
        waits, or space was found."""
        self.usage = Usage()
        self.changes = ChangeLog()
        self.damaged = DamagedBlocks(self._wake.set)
        self.num_evicted = 0
        """Blocks that were evicted for new ones, since the start."""
        self.private_blocks = session.presence.blocks
        """The directory of the namespaces that only this engine reads."""
        target = pool_target(limits.max_bytes, charge)
        self.pool = ReservationPool(charge, target, self._new_path, self.ask_for_space)
        self.sweeper = Sweeper(session, self._wake.set, on_error)
        self.quota = Quota(session, limits, self.pool, self.sweeper, on_error)
        self._on_done: Callable[[Sequence[tuple[StagedBlock[T], bool]]], None]
        self._thread = threading.Thread(target=self._run, name="kvtier-fs-publisher", daemon=True)

    def start(self, on_done: Callable[[Sequence[tuple[StagedBlock[T], bool]]], None]) -> None:
        """`on_done` is called on the thread, exactly once for every staged block, with True if the
        block is in the root now."""
        self._on_done = on_done
        self._thread.start()
        self.sweeper.start()

    # --- any thread ----------------------------------------------------------------------------

    def _new_path(self) -> str:
        return self._session.presence.incoming()

    def use(self, namespace: Path, public: Path, junk: Path | None) -> None:
        """From now on, publish blocks into `namespace`, which may be private. `public`: the
        namespace that engines with the same fingerprint share; blocks are evicted from both.
        `junk`: a private namespace that this engine has left; the sweeper removes it."""
        self._namespace = namespace
        self.sweeper.use(tuple({namespace: None, public: None}), junk)

    def publish_soon(self, blocks: Sequence[StagedBlock[T]]) -> None:
        self._staged.extend(blocks)
        self._wake.set()

    def return_reservation(self, reservation: Reservation) -> None:
        """Give back a reservation that was taken and is not going to be used."""
        self._returned.append(reservation)
        self._wake.set()

    def ask_for_space(self) -> None:
        self._is_asked = True
        self._wake.set()

    def stop(self) -> None:
        """Publish what is staged, leave the root, and end the thread. Waits for it. Nothing may be
        staged afterwards. Idempotent. Before `start`, it neither publishes nor leaves the root."""
        self._session.hurry()
        self.sweeper.stop()
        self._is_stopping = True
        self._wake.set()
        if self._thread.ident is not None:
            self._thread.join()

    # --- the thread ----------------------------------------------------------------------------

    def _run(self) -> None:
        while not self._is_stopping:
            self._wake.wait(_HEARTBEAT_S)
            if self._staged and len(self._staged) < _ENOUGH_AT_ONCE and not self._is_asked:
                time.sleep(_GATHER_S)
            self._wake.clear()
            self._guarded(self._work)
        self.pool.close()
        self._guarded(self._work)
        self._fail(_take_all(self._staged))
        self._session.close()

    def _guarded(self, step: Callable[[], None]) -> None:
        try:
            step()
        except PresenceLost:
            self._lost("this engine was taken for dead, or the directory was emptied")
        except OSError as error:
            self._on_error(error)
            if not isinstance(error, LedgerBusy):
                self._lost(str(error))
        except Exception as error:
            self._unexpected.log(error)
            self._lost("an unexpected error")

    def _lost(self, why: str) -> None:
        """Abandon the presence. `_resume` joins again after a pause; other engines clean up."""
        logger.debug("%s: this engine leaves and joins again: %s", self._session.path, why)
        self._session.abandon_presence()
        self.pool.empty()
        self._take_returned()
        self._suspend(has_failed=True)
        if not self._session.ledger.is_in_place:
            self.usage = Usage()  # the root is not reachable

    def _work(self) -> None:
        blocks = _take_all(self._staged)
        try:
            if self.pool.is_suspended:
                if time.monotonic() >= self._retry_at:
                    self._resume()
                self._returned += (block.reservation for block in blocks)
                return
            if self.damaged:
                self._remove_damaged()
            if blocks or self._returned or self._is_asked:
                self._transact(blocks)
            else:
                self._idle()
        except LedgerBusy:
            self._returned += (block.reservation for block in blocks)
            self._suspend(has_failed=True)
            raise
        finally:
            self._fail(blocks)

    def _take_returned(self) -> list[Reservation]:
        """Take the reservations that lanes have returned. The pool no longer counts them as taken,
        even if the caller fails."""
        returned = _take_all(self._returned)
        self.pool.settle(returned)
        return returned

    def _fail(self, blocks: Sequence[StagedBlock[T]]) -> None:
        if blocks:
            self.pool.settle(block.reservation for block in blocks)
            self._on_done([(block, False) for block in blocks])

    def _suspend(self, *, has_failed: bool) -> None:
        """Let stores fail at once. After a pause, `_resume` tries the root again. `has_failed`: as
        for `ReservationPool.suspend`."""
        self._short_since = None
        self._retry_at = time.monotonic() + _RETRY_S
        self.pool.suspend(has_failed=has_failed)

    def _resume(self) -> None:
        """Try the root again after `_suspend`. Lets stores go on if the ledger can be locked."""
        self._retry_at = time.monotonic() + _RETRY_S
        if not self._session.has_presence:
            self._session.rejoin()
            if self._namespace is not None and self._namespace.parent != self._session.blocks:
                self._namespace = None  # it was lost with the old presence
            # Set this last: the scheduler's thread calls `use` when it sees the new directory.
            self.private_blocks = self._session.presence.blocks
        else:
            with self._session.transaction():
                pass
        self.pool.resume()

    # --- publish -------------------------------------------------------------------------------

    def _remove_damaged(self) -> None:
        """Evict damaged blocks. Uses a transaction of its own, before the one that publishes new
        blocks in their place."""
        self._last_active = time.monotonic()
        with self.damaged.taken() as blocks, self._session.transaction() as txn:
            removed = txn.evict(blocks, self._on_error, is_forced=True)
            self.usage = Usage.of(txn.balance)
        self._recycle((), (), 0, removed)
        self.changes.add_removed(removed)

    def _transact(self, blocks: list[StagedBlock[T]]) -> None:
        """Publish blocks and look for space, in one transaction. Empties the list `blocks` before
        it reports the blocks. After an error, the caller reports what is left in it as failed."""
        self._last_active = time.monotonic()
        is_asked, self._is_asked = self._is_asked, False
        with self._session.transaction() as txn:
            outcomes = self._publish(txn, blocks)
            space = self.quota.find(txn, self._namespace) if is_asked else Space()
            if self.quota.is_measure_due:
                self.quota.measure(txn)
            self.usage = Usage.of(txn.balance)
        self._recycle(blocks, outcomes, space.granted, space.victims)
        ended = list(zip(blocks, outcomes, strict=True))
        blocks.clear()
        try:
            if is_asked:
                self._serve_waiting(space)
        finally:  # the files have changed, even if `_serve_waiting` failed
            if any(outcome in _CHANGES for outcome in outcomes):
                self.sweeper.look_again()
            for outcome, change in _CHANGES.items():
                there = [(block.namespace, block.key) for block, came in ended if came is outcome]
                self.changes.add(there, change)
            self.changes.add_removed(space.victims)
            self.num_evicted += len(space.victims)
            self._on_done([(block, outcome is not Outcome.FAILED) for block, outcome in ended])

    def _publish(self, txn: Transaction, blocks: list[StagedBlock[T]]) -> list[Outcome]:
        presence = self._session.presence
        limit = self.quota.limits.max_bytes
        possible = {
            namespace: self._is_current(Path(namespace))
            and txn.make_namespace(Path(namespace), limit)
            for namespace in {block.namespace for block in blocks}
        }
        written = [
            Written(block.reservation.path, block.final, block.num_bytes, block.reservation.charge)
            for block in blocks
            if presence.contains(block.reservation.path) and possible[block.namespace]
        ]
        if not written:
            return [Outcome.FAILED] * len(blocks)
        published = txn.publish(written, self._on_error)
        outcome_of = {
            block.temporary: outcome for block, outcome in zip(written, published, strict=True)
        }
        return [outcome_of.get(block.reservation.path, Outcome.FAILED) for block in blocks]

    def _is_current(self, namespace: Path) -> bool:
        """False for a private namespace that this engine has left."""
        return namespace == self._namespace or namespace.parent == self._session.blocks

    def _recycle(
        self,
        blocks: Sequence[StagedBlock[T]],
        outcomes: Sequence[Outcome],
        granted: int,
        evicted: Sequence[Evicted],
    ) -> None:
        """Put granted bytes into the pool, and files that new blocks may overwrite: those of
        evicted blocks, and of staged blocks that another engine has published first. Remove the
        other staged files."""
        presence, tree = self._session.presence, self._session.tree
        files: list[Reservation] = []
        returned = self._take_returned()
        for block, outcome in zip(blocks, outcomes, strict=True):
            if outcome is Outcome.PUBLISHED:
                tree.unlink(block.reservation.path)
            elif outcome is Outcome.WAS_THERE:
                charge = block.num_bytes + NAME_BYTES
                files.append(Reservation(block.reservation.path, False, charge))
                granted += block.reservation.charge - charge
            else:
                returned.append(block.reservation)
        self.pool.settle(block.reservation for block in blocks)
        for reservation in returned:
            if presence.contains(reservation.path):
                with suppress(FileNotFoundError):
                    tree.unlink(reservation.path)
                granted += reservation.charge
        for gone in evicted:
            if _is_recyclable(gone, self._block_bytes):
                files.append(Reservation(gone.temporary, False, gone.reserved))
            else:
                tree.unlink(gone.temporary)
                granted += gone.reserved
        self.pool.put(granted, files)

    # --- space ---------------------------------------------------------------------------------

    def _serve_waiting(self, space: Space) -> None:
        """Called after a search for space: search again, or let the lanes that wait fail."""
        has_found = bool(space.granted or space.victims)
        if space.missing_bytes:
            has_found = self._make_free(space.missing_bytes)
        if has_found or not self.pool.num_wanted:
            self._short_since = None
            if self.pool.is_waited_for:
                self.ask_for_space()
            return
        now = time.monotonic()
        if self._short_since is None:
            self._short_since = now
        if self._namespace is None or now - self._short_since > _PATIENCE_S:
            self._suspend(has_failed=False)  # otherwise each lane would wait 10 s in turn
        elif self.sweeper.is_exhausted:
            self.pool.refuse()
            self.quota.warn_if_full()
        else:
            self._is_asked = True  # the sweeper is still looking; it wakes this thread at the end

    def _make_free(self, missing: int) -> bool:
        """Evict blocks and remove their files. Returns True if there were any."""
        self._last_active = time.monotonic()
        victims = self.quota.make_free(missing)
        self.changes.add_removed(victims)
        self.num_evicted += len(victims)
        if victims:
            self._wake.set()  # the thread then checks whether that was enough
        return bool(victims)

    # --- idle ----------------------------------------------------------------------------------

    def _idle(self) -> None:
        """Called every 0.5 s while no block is stored: keep the limits, give back reservations, and
        update the ledger's overhead and `usage`."""
        now = time.monotonic()
        self._session.tree.forget()
        if not self.pool.is_idle:
            self._last_active = now
        missing = self.quota.missing_bytes(self.usage.num_bytes)
        if missing > 0:
            self._make_free(missing)
        is_quiet = now - self._last_active >= _QUIET_S
        if is_quiet:
            self.quota.give_back()
        if not (self._session.ledger.is_in_place and self._session.presence.is_in_place):
            raise PresenceLost
        try:
            balance = self._session.ledger.read()
        except LedgerLost:
            with self._session.transaction():
                return  # the transaction rebuilds the ledger
        has_changed = balance.revision != self._measured_revision
        if is_quiet and has_changed and self.quota.is_measure_due:
            with self._session.transaction() as txn:
                balance = txn.balance
                if self.pool.is_idle and not self.sweeper.is_removing:
                    txn.true_up()
                self.quota.measure(txn)
            # If nothing was corrected, the ledger keeps its revision: engines that have measured
            # this revision do not measure again.
            self._measured_revision = balance.revision
        self.usage = Usage.of(balance)


def _take_all(queue: deque[X]) -> list[X]:
    """Empty a queue that other threads append to."""
    return [queue.popleft() for _ in range(len(queue))]


def _is_recyclable(gone: Evicted, block_bytes: int) -> bool:
    """True if the file of an evicted block can be overwritten by a new block."""
    is_whole = gone.block.size == block_bytes <= gone.block.num_bytes
    return is_whole and not gone.is_linked
