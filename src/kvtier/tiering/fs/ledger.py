"""The ledger of a root: how many bytes its blocks take, and how many each engine has reserved.

It is one small file. Every engine on every host changes it under the same file lock. The file holds
two copies of the ledger, which are written in turn, so one is whole even if a writer is killed.
`Transaction` makes the changes; this module reads and writes the file.
"""

from __future__ import annotations

import errno
import fcntl
import os
import random
import stat
import struct
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from weakref import WeakSet

from xxhash import xxh3_64_intdigest

__all__ = [
    "Account",
    "Balance",
    "Ledger",
    "LedgerBusy",
    "LedgerLost",
    "LedgerVersion",
    "copies_in",
]

_COPY_BYTES = 16_384
_MAGIC = b"KVTLEDG\x00"
_VERSION = 1
# magic, version, accounts, revision, root, boot, bytes of blocks, blocks, overhead
_HEAD = struct.Struct("<8sHHxxxxQ16s16sQQQ")
# engine, reserved, last batch counted out, flags
_ACCOUNT = struct.Struct("<16sQQB7x")
_PUBLISHING, _SETTLED = 1, 2
_CHECKSUM = struct.Struct("<Q")
_MAX_ACCOUNTS = (_COPY_BYTES - _HEAD.size - _CHECKSUM.size) // _ACCOUNT.size
_LIMIT = 2**63
"""A copy with a number of this size or larger is damaged."""
_PAUSES_S = (0.0005, 0.02)
"""Pauses between attempts to get the lock, in seconds: the first and the longest."""

_open_ledgers: WeakSet[Ledger] = WeakSet()


class LedgerLost(Exception):
    """A copy of the ledger is damaged. If `Ledger` raises this, both copies are damaged, and the
    blocks of the root have to be counted again."""


class LedgerVersion(Exception):
    """The ledger was written by an incompatible version of kvtier."""


class LedgerBusy(OSError):
    """Another engine or command held the lock for too long."""

    def __init__(self) -> None:
        super().__init__(errno.ETIMEDOUT, os.strerror(errno.ETIMEDOUT))


@dataclass(slots=True)
class Account:
    """One engine's entry in the ledger."""

    reserved: int = 0
    """Bytes that the engine has staged, or may still write."""
    counted_out: int = 0
    """Number of the last batch of evicted blocks that `Balance.blocks` no longer includes."""
    is_publishing: bool = False
    """The engine is linking blocks that are not counted yet. Set only while it holds the lock: if
    the next holder of the lock finds it set, the transaction was cut short."""
    is_settled: bool = False
    """`Balance.blocks` no longer includes anything in the engine's staging directory: the engine is
    dead or shutting down, or the ledger was rebuilt and the engine has to join again."""

    @property
    def flags(self) -> int:
        return self.is_publishing * _PUBLISHING | self.is_settled * _SETTLED


@dataclass(slots=True)
class Balance:
    """The content of the ledger."""

    root_id: bytes
    """Random identity of the root. It changes when the ledger is rebuilt."""
    blocks: int = 0
    """Bytes of all published blocks."""
    num_blocks: int = 0
    overhead: int = 0
    """Upper bound for the bytes of directories and of files that are not blocks."""
    boot_id: bytes = bytes(16)
    """The kernel's boot id on the machine that wrote the ledger last. Each start of a machine has a
    new one."""
    accounts: dict[bytes, Account] = field(default_factory=dict)
    revision: int = 0

    @property
    def reserved(self) -> int:
        return sum(account.reserved for account in self.accounts.values())

    @property
    def total(self) -> int:
        """Upper bound for the bytes that the root takes until the ledger changes again."""
        return self.blocks + self.overhead + self.reserved

    def add_blocks(self, num_bytes: int, count: int) -> None:
        """Add published blocks, or subtract them with negative arguments. The sums do not fall
        below 0, even if the ledger does not match the files because somebody removed some by
        hand."""
        self.blocks = max(0, self.blocks + num_bytes)
        self.num_blocks = max(0, self.num_blocks + count)

    def encode(self) -> bytes:
        if len(self.accounts) > _MAX_ACCOUNTS:
            raise OSError(errno.EUSERS, f"more than {_MAX_ACCOUNTS} engines share this directory")
        parts = [
            _HEAD.pack(
                _MAGIC,
                _VERSION,
                len(self.accounts),
                self.revision,
                self.root_id,
                self.boot_id,
                self.blocks,
                self.num_blocks,
                self.overhead,
            )
        ]
        parts += [
            _ACCOUNT.pack(engine, account.reserved, account.counted_out, account.flags)
            for engine, account in self.accounts.items()
        ]
        body = b"".join(parts)
        return body + _CHECKSUM.pack(xxh3_64_intdigest(body))

    @classmethod
    def decode(cls, copy: bytes) -> Balance:
        """Raises `LedgerLost` or `LedgerVersion`."""
        if len(copy) < _HEAD.size:
            raise LedgerLost
        magic, version, count, revision, root_id, boot_id, *sums = _HEAD.unpack_from(copy)
        if magic != _MAGIC:
            raise LedgerLost
        if version != _VERSION:
            raise LedgerVersion(f"a ledger of version {version}; this kvtier reads {_VERSION}")
        end = _HEAD.size + count * _ACCOUNT.size
        if count > _MAX_ACCOUNTS or len(copy) < end + _CHECKSUM.size:
            raise LedgerLost
        if copy[end : end + _CHECKSUM.size] != _CHECKSUM.pack(xxh3_64_intdigest(copy[:end])):
            raise LedgerLost
        accounts = {
            engine: Account(
                reserved, counted_out, bool(flags & _PUBLISHING), bool(flags & _SETTLED)
            )
            for engine, reserved, counted_out, flags in _ACCOUNT.iter_unpack(copy[_HEAD.size : end])
        }
        if max(revision, *sums, *(account.reserved for account in accounts.values())) >= _LIMIT:
            raise LedgerLost
        return cls(root_id, sums[0], sums[1], sums[2], boot_id, accounts, revision)


def copies_in(fd: int) -> list[bytes]:
    """Return the copies in a ledger's file that have been written. If there are none, the list has
    one empty copy."""
    copies = [os.pread(fd, _COPY_BYTES, offset) for offset in (0, _COPY_BYTES)]
    return [copy for copy in copies if any(copy)] or copies[:1]


def _decoded(copy: bytes) -> Balance | LedgerLost | LedgerVersion:
    try:
        return Balance.decode(copy)
    except (LedgerLost, LedgerVersion) as problem:
        return problem


def _newest(copies: Sequence[Balance | LedgerLost | LedgerVersion]) -> Balance:
    """Raises `LedgerLost`."""
    found = [copy for copy in copies if isinstance(copy, Balance)]
    if not found:
        raise LedgerLost
    return max(found, key=lambda balance: balance.revision)


class Ledger:
    """The ledger's file. Any thread may use it, but calls wait for the disk, and `lock` waits for
    other engines, so the scheduler's thread uses it only while it starts the tier."""

    def __init__(self, path: Path) -> None:
        """Creates an empty file if there is none."""
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOFOLLOW
        self.path = path
        self._fd = os.open(path, flags, 0o600)
        if not stat.S_ISREG(os.fstat(self._fd).st_mode):
            self.close()
            raise OSError(errno.EINVAL, "the ledger is not a regular file")
        self._last = b""
        """The encoded balance that was loaded or saved last."""
        self._threads = threading.Lock()  # the file lock excludes processes, not threads
        _open_ledgers.add(self)

    @contextmanager
    def lock(self, patience_s: Callable[[], float]) -> Iterator[None]:
        """Hold the ledger exclusively. Raises `LedgerBusy` after `patience_s()` seconds. Calls
        `patience_s` again after each failed attempt, because the time becomes shorter at shutdown.
        The kernel drops the lock when the process ends."""
        started = time.monotonic()
        if not self._threads.acquire(timeout=patience_s()):
            raise LedgerBusy
        try:
            if self._fd < 0:
                raise OSError(errno.EBADF, os.strerror(errno.EBADF))
            self._wait_for_lock(started, patience_s)
            try:
                yield
            finally:
                fcntl.flock(self._fd, fcntl.LOCK_UN)
        finally:
            self._threads.release()

    def _wait_for_lock(self, started: float, patience_s: Callable[[], float]) -> None:
        pause, longest = _PAUSES_S
        while True:
            try:
                fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if time.monotonic() > started + patience_s():
                    raise LedgerBusy from None
                time.sleep(pause * random.uniform(0.5, 1.0))
                pause = min(2 * pause, longest)
            else:
                return

    def load(self) -> tuple[Balance, bool]:
        """Return the balance, and True if one copy is damaged or of another version: that copy may
        have been the newer one, so the blocks have to be counted again. Called under the lock.
        Raises `LedgerLost` or `LedgerVersion`."""
        copies = [_decoded(copy) for copy in copies_in(self._fd)]
        others = [problem for problem in copies if isinstance(problem, LedgerVersion)]
        if others and not any(isinstance(copy, Balance) for copy in copies):
            raise others[0]
        balance = _newest(copies)
        self._last = balance.encode()
        return balance, not all(isinstance(copy, Balance) for copy in copies)

    def read(self) -> Balance:
        """Return the balance as last saved. Does not take the lock. Raises `LedgerLost`."""
        return _newest([_decoded(copy) for copy in copies_in(self._fd)])

    def save(self, balance: Balance) -> None:
        """Write the balance over the older copy. Called under the lock."""
        balance.revision += 1
        encoded = balance.encode()
        os.pwrite(self._fd, encoded, balance.revision % 2 * _COPY_BYTES)
        self._last = encoded

    def save_if_changed(self, balance: Balance) -> None:
        """Write the balance if it differs from the one last loaded or saved. Otherwise the revision
        stays, so that readers see that nothing has changed. Called under the lock, after `load`."""
        if balance.encode() != self._last:
            self.save(balance)

    @property
    def is_empty(self) -> bool:
        return os.fstat(self._fd).st_size == 0

    @property
    def is_in_place(self) -> bool:
        """True while the path still leads to this file."""
        try:
            return os.path.samestat(os.lstat(self.path), os.fstat(self._fd))
        except OSError:
            return False

    def retire(self) -> None:
        """Wait until no thread of this process holds the lock, then close the file."""
        with self._threads:
            self.close()

    def close(self) -> None:
        """Close the file. Idempotent."""
        if self._fd >= 0:
            fd, self._fd = self._fd, -1
            os.close(fd)


def _close_in_child() -> None:
    """Close the files in a forked child, which would otherwise hold its parent's lock after the
    parent has ended."""
    for ledger in list(_open_ledgers):
        ledger.close()


os.register_at_fork(after_in_child=_close_in_child)
