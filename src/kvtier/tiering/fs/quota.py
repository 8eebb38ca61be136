"""Space for new blocks: the limits, reservations made in advance, and eviction.

Lanes, the tier's I/O threads, take a `Reservation` for each block from the `ReservationPool`,
without the ledger's lock. The publisher's thread refills the pool with the space that `Quota` finds
within the limits.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from kvtier.tiering.fs.eviction import Sweeper, remove_evicted
from kvtier.tiering.fs.ledger import Balance
from kvtier.tiering.fs.root import RootSession
from kvtier.tiering.fs.transaction import NAMESPACE_BYTES, Evicted, Transaction

__all__ = [
    "Limits",
    "NoSpace",
    "Quota",
    "Reservation",
    "ReservationPool",
    "Space",
    "StoresSuspended",
    "pool_target",
    "warn_of_limits",
]

logger = logging.getLogger(__name__)

_MEASURE_COST = 100
"""After a measurement of the directories that took t seconds, the next one starts 100 t seconds
later at the earliest."""
_MEASURE_EVERY_S = 0.5
_REMOVED_AT_ONCE = 64
_POOL_BYTES = 64 << 20
_POOL_BLOCKS = 64
_POOL_DIVISOR = 32
"""One engine's pool holds at most 1/32 of the quota."""
_SMALL_DIVISOR = 10
_FEW_BLOCKS = 32
"""With fewer blocks in the root, `warn_if_full` logs nothing. Blocks that are evicted during the
count are missing in `num_own`, and in a small root that error is too large."""


# --- limits ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Limits:
    """The limits that the user has set for the root."""

    max_bytes: int
    min_free_bytes: int

    def apply(self, path: Path, balance: Balance) -> int:
        """Return the number of bytes that the ledger's total may reach now."""
        if not self.min_free_bytes:
            return self.max_bytes
        # Other engines may be about to write all that they have reserved.
        spare = free_bytes(path) - self.min_free_bytes - balance.reserved
        return min(self.max_bytes, balance.total + max(0, spare))

    def missing_bytes(self, path: Path) -> int:
        """Return how many more bytes must become free for the file system to have `min_free_bytes`
        free."""
        if not self.min_free_bytes:
            return 0
        return max(0, self.min_free_bytes - free_bytes(path))


def free_bytes(path: Path) -> int:
    """Free bytes of the file system that this user may use."""
    answer = os.statvfs(path)
    return answer.f_bavail * answer.f_frsize


def warn_of_limits(session: RootSession, limits: Limits) -> None:
    """Log a warning for each limit that is probably a mistake. Called once, when the tier
    starts."""
    answer = os.statvfs(session.path)
    size, free = answer.f_blocks * answer.f_frsize, answer.f_bavail * answer.f_frsize
    total = session.ledger.read().total
    if total > limits.max_bytes:
        logger.warning(
            "%s holds %d bytes, and max_bytes is %d: blocks of this model are removed until they "
            "fit, including those of other engines. Give all engines the same max_bytes",
            session.path,
            total,
            limits.max_bytes,
        )
    if limits.max_bytes > size:
        logger.warning(
            "%s: max_bytes is %d, and its file system has %d bytes: it will run full. Give less, "
            "or set min_free_bytes",
            session.path,
            limits.max_bytes,
            size,
        )
    if limits.min_free_bytes > free + total:
        logger.warning(
            "%s: min_free_bytes is %d, and its file system has %d bytes free: nothing can be "
            "stored. Give less, or make room",
            session.path,
            limits.min_free_bytes,
            free,
        )


# --- reservations ------------------------------------------------------------------------------


class NoSpace(Exception):
    """There is no space for a block, and none can be made now."""


class StoresSuspended(Exception):
    """Nothing can be stored now because the root has failed, or because the tier shuts down."""


class Reservation(NamedTuple):
    """Space for one block: a file in our staging directory."""

    path: str
    is_new: bool
    """False if there is a file at the path, which is overwritten: that of an evicted block, or of a
    block that another engine published first."""
    charge: int
    """Bytes that the ledger has reserved for it."""


def pool_target(max_bytes: int, charge: int) -> int:
    """Return the number of reservations of `charge` bytes that a pool holds in advance."""
    return max(1, min(_POOL_BLOCKS, min(_POOL_BYTES, max_bytes // _POOL_DIVISOR) // charge))


class ReservationPool:
    """Reserved bytes, and files that new blocks may overwrite.

    Lanes call `take`, and wait while there are no reservations. The publisher's thread adds them.
    """

    def __init__(
        self, charge: int, target: int, new_path: Callable[[], str], ask: Callable[[], None]
    ) -> None:
        """`charge`: bytes to reserve for a new block. `target`: how many reservations to hold in
        advance; with 1, none is requested before a lane waits. `ask`: called on the lane's thread,
        under this pool's lock, when there are too few reservations."""
        self.charge = charge
        self._target = target
        self._new_path = new_path
        self._ask = ask
        self._changed = threading.Condition()
        self._bytes = 0
        self._files: deque[Reservation] = deque()
        self._num_waiting = 0
        self._num_refusals = 0
        self._is_closed = False
        self.is_suspended = False
        self._has_failed = False
        self._taken: set[str] = set()
        """Paths of the reservations that lanes have taken and the publisher has not settled."""

    def take(self) -> Reservation:
        """Return space for one block. Waits for the publisher if there is none. Raises `NoSpace` or
        `StoresSuspended`."""
        with self._changed:
            if not self._num_available:
                self._wait()
            if self._files:
                reservation = self._files.popleft()
            else:
                reservation = Reservation(self._new_path(), True, self.charge)
                self._bytes -= self.charge
            self._taken.add(reservation.path)
            if self._num_short:  # also counts lanes that still wait
                self._ask()
            return reservation

    def _wait(self) -> None:
        refusals = self._num_refusals
        self._num_waiting += 1
        try:
            self._ask()
            self._changed.wait_for(
                lambda: self._num_available or self._is_over or self._num_refusals != refusals
            )
        finally:
            self._num_waiting -= 1
        if not self._num_available:
            raise StoresSuspended if self._is_closed or self._has_failed else NoSpace

    @property
    def num_wanted(self) -> int:
        """Number of reservations that are missing."""
        with self._changed:
            return self._num_short

    @property
    def is_waited_for(self) -> bool:
        return self._num_waiting > 0

    def put(self, num_bytes: int, files: Sequence[Reservation]) -> None:
        """Add reserved bytes, and files to overwrite."""
        if num_bytes or files:
            with self._changed:
                self._bytes += num_bytes
                self._files += files
                self._changed.notify_all()

    def settle(self, reservations: Iterable[Reservation]) -> None:
        """Record that no lane writes to the paths of these reservations any more. Idempotent."""
        with self._changed:
            self._taken.difference_update(reservation.path for reservation in reservations)

    @property
    def is_idle(self) -> bool:
        """True while no reservation is taken."""
        return not self._taken

    def refuse(self) -> None:
        """Let the lanes that wait now fail with `NoSpace`."""
        with self._changed:
            self._num_refusals += 1
            self._changed.notify_all()

    def suspend(self, *, has_failed: bool) -> None:
        """Let `take` fail at once until `resume`: with `StoresSuspended` if `has_failed`, because
        the root cannot be used; otherwise with `NoSpace`."""
        with self._changed:
            self.is_suspended = True
            self._has_failed = has_failed
            self._changed.notify_all()

    def resume(self) -> None:
        with self._changed:
            self.is_suspended = self._has_failed = False

    def empty(self) -> tuple[int, list[Reservation]]:
        """Remove and return all bytes and files that no lane has taken."""
        with self._changed:
            unused = self._bytes, list(self._files)
            self._bytes = 0
            self._files.clear()
        return unused

    def close(self) -> None:
        """Let `take` fail from now on."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()

    @property
    def _num_short(self) -> int:
        if self._is_over:
            return 0
        available = self._num_available
        short = self._num_waiting - available
        if self._target > 1 and available <= self._target // 2:
            short = max(short, self._target - available)
        return max(0, short)

    @property
    def _num_available(self) -> int:
        return 0 if self._is_over else len(self._files) + self._bytes // self.charge

    @property
    def _is_over(self) -> bool:
        return self._is_closed or self.is_suspended


# --- finding space -----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Space:
    """The result of a search for space."""

    granted: int = 0
    """Bytes that were reserved."""
    victims: list[Evicted] = field(default_factory=list)
    """Blocks that were evicted. Their files are in the staging directory, not removed yet."""
    missing_bytes: int = 0
    """Bytes that must become free before anything can be reserved."""


class Quota:
    """Finds space within the limits. Used on the publisher's thread only."""

    def __init__(
        self,
        session: RootSession,
        limits: Limits,
        pool: ReservationPool,
        sweeper: Sweeper,
        on_error: Callable[[OSError], None],
    ) -> None:
        self._session = session
        self.limits = limits
        self._pool = pool
        self._sweeper = sweeper
        self._on_error = on_error
        self._measure_at = 0.0
        self._said_full = False

    def find(self, txn: Transaction, namespace: Path | None) -> Space:
        """Reserve bytes for the reservations that the pool lacks. For each one that the limits do
        not allow, evict a block, if one is found. `namespace`: where the new blocks will be."""
        wanted = self._pool.num_wanted
        if not wanted or namespace is None:
            return Space()
        excess = self._excess(txn)
        if excess:
            return Space(missing_bytes=excess)
        limit = self.limits.apply(self._session.path, txn.balance)
        if not txn.make_namespace(namespace, limit):
            return Space(missing_bytes=NAMESPACE_BYTES)
        charge = self._pool.charge
        granted = txn.reserve(wanted, charge, limit)
        missing = wanted - granted // charge
        if not missing:
            return Space(granted)
        self.warn_if_full()
        return Space(granted, txn.evict(self._sweeper.take(missing), self._on_error))

    def _excess(self, txn: Transaction) -> int:
        """Return the bytes by which the root exceeds `max_bytes`, which may be lower now than when
        the blocks were stored."""
        if txn.balance.total > self.limits.max_bytes:
            self.measure(txn)  # the overhead was only an upper bound
        return max(0, txn.balance.total - self.limits.max_bytes)

    def missing_bytes(self, used_bytes: int) -> int:
        """Return how many bytes must become free if the root takes `used_bytes`; 0 if none."""
        missing = self.limits.missing_bytes(self._session.path)
        return max(missing, used_bytes - self.limits.max_bytes)

    def make_free(self, missing: int) -> list[Evicted]:
        """Evict blocks and remove their files, because the file system or the quota needs the bytes
        back. Returns the evicted blocks, possibly none."""
        count = min(_REMOVED_AT_ONCE, -(-missing // self._pool.charge))
        candidates = self._sweeper.take(count)
        if not candidates:
            return []
        with self._session.transaction() as txn:
            victims = txn.evict(candidates, self._on_error)
        remove_evicted(self._session, victims)
        return victims

    def give_back(self) -> None:
        """Return the unused reservations to the ledger."""
        num_bytes, files = self._pool.empty()
        for reservation in files:
            self._session.tree.unlink(reservation.path)
            num_bytes += reservation.charge
        self._session.give_back(self._session.presence, num_bytes)
        if self._session.owes:
            with self._session.transaction():
                pass  # the transaction subtracts what was given back

    @property
    def is_measure_due(self) -> bool:
        return time.monotonic() >= self._measure_at

    def measure(self, txn: Transaction) -> None:
        started = time.monotonic()
        txn.measure()
        now = time.monotonic()
        self._measure_at = now + max(_MEASURE_EVERY_S, _MEASURE_COST * (now - started))

    def warn_if_full(self) -> None:
        """Log once if this engine may evict less than a tenth of the blocks in the full root."""
        num_own, num_blocks = self._sweeper.num_own, self._sweeper.num_all
        is_small = num_own * _SMALL_DIVISOR < num_blocks
        if self._said_full or not is_small or num_blocks < _FEW_BLOCKS:
            return
        self._said_full = True
        is_too_full = self.limits.missing_bytes(self._session.path) > 0
        logger.warning(
            "%s is full%s, and only %d of its %d blocks belong to this model and can be evicted "
            "for new ones. %s, or remove unused models with `kvtier store gc %s`. This is logged "
            "once",
            self._session.path,
            " (its file system has less than min_free_bytes left)" if is_too_full else "",
            num_own,
            num_blocks,
            "Make room there" if is_too_full else "Raise max_bytes",
            self._session.path,
        )
