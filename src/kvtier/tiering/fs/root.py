"""An engine's session in a root directory: opens the root, joins it, runs transactions, and leaves.

Every engine, and every command that changes a root, holds one `RootSession`.
"""

from __future__ import annotations

import errno
import mmap
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from uuid import uuid4

from kvtier.config import NamespaceDescription
from kvtier.tiering.fs.access import (
    NoFollowTree,
    RootRefused,
    refusal_for,
    require_ours,
    require_own,
)
from kvtier.tiering.fs.layout import count_blocks
from kvtier.tiering.fs.ledger import Account, Balance, Ledger, LedgerLost, LedgerVersion
from kvtier.tiering.fs.presence import EngineInfo, Peer, Presence, peers_in
from kvtier.tiering.fs.transaction import Transaction
from kvtier.tiering.io.page import PAGE_BYTES

__all__ = ["PresenceLost", "RootSession", "allows_o_direct", "open_root"]

_PATIENCE_S = 10.0
"""How long an engine waits for the ledger's lock, in seconds."""
_HURRIED_PATIENCE_S = 1.0
"""How long an engine waits for the ledger's lock while it shuts down, in seconds."""
_PRESENCE_BYTES = 16_384
"""Upper bound for the bytes on disk of a new presence: its file and its staging directory."""
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


# --- opening -----------------------------------------------------------------------------------


def open_root(path: Path, info: EngineInfo, patience_s: float = _PATIENCE_S) -> RootSession:
    """Open a root, which is created if it does not exist, and join it. `patience_s`: how long to
    wait for the ledger's lock, in seconds. Raises `RootRefused`."""
    try:
        if path.exists():
            require_ours(path)
        session = RootSession(path, info, patience_s)
    except LedgerVersion as problem:
        raise RootRefused(
            f"{path}: {problem}. Use that version, or give another directory"
        ) from None
    except OSError as error:
        raise refusal_for(path, error) from error
    try:
        _require_hard_links(session)
    except BaseException:
        session.close()
        raise
    return session


def _require_hard_links(session: RootSession) -> None:
    """Raise `RootRefused` if the file system has no hard links. A block is published by a second
    link to its file, which fails if the block exists already."""
    first, second = session.presence.incoming(), session.presence.incoming()
    try:
        os.close(session.tree.open(first, os.O_CREAT | os.O_EXCL | os.O_WRONLY))
        session.tree.link(first, second)
    except OSError as error:
        if error.errno not in (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK):
            raise refusal_for(session.path, error) from error
        raise RootRefused(
            f"{session.path}: its file system does not support hard links, which the fs tier "
            "needs: use one that does, such as NFS, ext4, XFS, Lustre or CephFS"
        ) from None
    finally:
        for path in (first, second):
            with suppress(FileNotFoundError):
                session.tree.unlink(path)


def allows_o_direct(session: RootSession) -> bool:
    """True if files in the root can bypass the page cache. Tries it with a temporary file."""
    path = session.presence.incoming()
    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_DIRECT
    fd = -1
    try:
        fd = session.tree.open(path, flags)
        with mmap.mmap(-1, PAGE_BYTES) as page:
            return os.pwritev(fd, [page], 0) == PAGE_BYTES
    except OSError as error:
        if error.errno in (errno.EINVAL, errno.EOPNOTSUPP):
            return False
        raise refusal_for(session.path, error) from error
    finally:
        if fd >= 0:
            os.close(fd)
        with suppress(FileNotFoundError):
            session.tree.unlink(path)


# --- the session -------------------------------------------------------------------------------


class PresenceLost(Exception):
    """This engine's account or presence is gone: another engine took it for dead, or somebody
    emptied the root."""


class RootSession:
    """Access of one engine or command to a root: the ledger, and this engine's own presence there
    (see the module `presence`). Any thread may use it. Its methods may wait for the disk and for
    other engines, so the scheduler's thread calls them only while it starts the tier."""

    def __init__(self, path: Path, info: EngineInfo, patience_s: float) -> None:
        """Create missing parts of the root, and join it. Raises `OSError`, including `NotOurs`, or
        `LedgerVersion`."""
        self.path = path
        self.tree = NoFollowTree(path)
        self.blocks = path / "blocks"
        self.engines = path / "engines"
        self.description: NamespaceDescription | None = None
        """What this engine's shared namespace is made of. Set before blocks are published; None in
        commands, which publish none."""
        self.is_described = False
        """True once a transaction has written the description, or has failed to."""
        self._info = info
        self._patience_s = patience_s
        self._presence: Presence | None = None
        self._is_closed = False
        self._owed = 0
        """Bytes that were given back since the last transaction, which the next one subtracts."""
        self._owed_lock = threading.Lock()
        try:
            self._make_root()
            self.ledger = Ledger(path / "ledger")
            try:
                self._join()
            except BaseException:
                self.ledger.close()
                raise
        except BaseException:
            self.tree.forget()
            raise

    def _make_root(self) -> None:
        with suppress(FileExistsError):
            self.path.mkdir(mode=0o700)
        require_own(self.tree, self.path)
        for directory in (self.blocks, self.engines):
            with suppress(FileExistsError):
                self.tree.mkdir(directory)

    # --- transactions --------------------------------------------------------------------------

    @contextmanager
    def transaction(self) -> Iterator[Transaction]:
        """Lock the ledger, and save it at the end if it changed. If anything fails in between, this
        engine abandons its presence. Another engine, or this one after it has joined again, then
        corrects the ledger by the rules in the module `transaction`. Raises `PresenceLost`,
        `OSError`, or `LedgerVersion` if the ledger was replaced by one of another version."""
        with self._locked() as txn:
            if self._presence is None or txn.balance.root_id != self._root_id:
                raise PresenceLost
            account = txn.balance.accounts.get(self._presence.engine)
            if account is None or not self._presence.is_in_place:
                raise PresenceLost  # the account stays until the presence is reclaimed
            with self._owed_lock:
                owed, self._owed = self._owed, 0
            account.reserved = max(0, account.reserved - owed)
            yield txn

    @contextmanager
    def _locked(self) -> Iterator[Transaction]:
        with self.ledger.lock(lambda: self._patience_s):
            try:
                self.tree.forget()
                if not self.ledger.is_in_place:
                    raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(self.path))
                txn = self._load()
                txn.settle_interrupted()
                yield txn
                self.ledger.save_if_changed(txn.balance)
            except BaseException:
                self.abandon_presence()
                raise

    def _load(self) -> Transaction:
        try:
            balance, is_doubtful = self.ledger.load()
        except LedgerLost:
            return self._rebuild_ledger()
        txn = Transaction(self, balance)
        if _boot_id() != balance.boot_id:
            balance.boot_id = _boot_id()
            # After a crash of the machine, the last writes to the ledger or the directories may be
            # lost. If any engine is alive, there was no crash: another machine wrote the boot id.
            is_anyone_alive = self._presence is not None or any(
                not peer.is_dead for peer in self._peers()
            )
            is_doubtful |= not is_anyone_alive
        if is_doubtful:
            txn.count_again()
        return txn

    def _rebuild_ledger(self) -> Transaction:
        """Make a new ledger, because both copies are lost. Live engines find another root id in it,
        and join again."""
        accounts = {}
        for peer in self._peers():
            num_bytes, _ = count_blocks(self.tree, peer.blocks)
            num_bytes += sum(file.num_bytes for file in peer.files())
            accounts[peer.engine] = Account(num_bytes, is_settled=True)
        balance = Balance(uuid4().bytes, boot_id=_boot_id(), accounts=accounts)
        txn = Transaction(self, balance)
        txn.count_again()
        for _ in range(2):  # both copies
            self.ledger.save(balance)
        txn.measure()
        return txn

    def give_back(self, presence: Presence, num_bytes: int) -> None:
        """Give back bytes that were reserved under this presence, because nothing is written to
        them or their file was removed. The next transaction subtracts them. Ignored if the presence
        was lost."""
        with self._owed_lock:
            if presence is self._presence:
                self._owed += num_bytes

    @property
    def owes(self) -> bool:
        """True if a transaction still has to subtract bytes that were given back."""
        return self._owed > 0

    # --- this engine's presence ----------------------------------------------------------------

    @property
    def presence(self) -> Presence:
        """Raises `PresenceLost`."""
        presence = self._presence
        if presence is None:
            raise PresenceLost
        return presence

    @property
    def has_presence(self) -> bool:
        return self._presence is not None

    def rejoin(self) -> None:
        """Join again after the presence was lost or abandoned. Raises `OSError`; ENOENT if the root
        is missing or empty, for example because it is not mounted."""
        self.abandon_presence()
        if not self.ledger.is_in_place:
            self._reopen()
        self._join()

    def _reopen(self) -> None:
        """Another directory has replaced the root. If it has a ledger (the same root, mounted
        again), use that. Never make a new root here: the path may be an empty mount point, on a
        disk that the operator did not choose."""
        if not (self.path / "ledger").exists():
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(self.path))
        self.tree.forget()
        require_own(self.tree, self.path)
        ledger = Ledger(self.path / "ledger")
        self.ledger.retire()
        self.ledger = ledger

    def _join(self) -> None:
        with self._locked() as txn:
            self._root_id = txn.balance.root_id
            self._make_presence(txn)

    def _make_presence(self, txn: Transaction) -> None:
        presence = Presence(self.tree, self.engines, self._info)
        txn.balance.accounts[presence.engine] = Account()
        txn.balance.overhead += _PRESENCE_BYTES
        try:
            txn.save()
        except BaseException:
            with suppress(OSError):
                presence.remove()
            raise
        self._presence = presence

    def abandon_presence(self) -> None:
        """Unlock this engine's presence, and leave its staged files to other engines.
        Idempotent."""
        with self._owed_lock:
            presence, self._presence = self._presence, None
            self._owed = 0
        if presence is not None:
            presence.abandon()
        self.tree.forget()  # a directory may have been replaced

    def hurry(self) -> None:
        """From now on, wait for the ledger's lock for at most 1 s."""
        self._patience_s = min(self._patience_s, _HURRIED_PATIENCE_S)

    def close(self) -> None:
        """Remove this engine's presence, including its private blocks, which no other engine reads.
        Raises none of `OSError`, `PresenceLost` and `LedgerVersion`: other engines remove what is
        left. Idempotent."""
        if self._is_closed:
            return
        self._is_closed = True
        with suppress(OSError, PresenceLost, LedgerVersion):
            with self.transaction() as txn:
                presence = self.presence
                txn.settle(txn.account, presence.directory)
            presence.empty()
            with self.transaction() as txn:
                presence.remove()
                del txn.balance.accounts[presence.engine]
                txn.measure()
        self.abandon_presence()
        self.ledger.close()

    # --- other engines -------------------------------------------------------------------------

    def _peers(self) -> Iterator[Peer]:
        return peers_in(self.tree, self.engines, self._presence)

    def reclaim(self) -> int:
        """Free what dead engines reserved, and remove their files. Returns the number of dead
        engines. Raises `OSError` or `PresenceLost`."""
        if not self._has_reclaimable():
            return 0
        dead: set[bytes] = set()
        with self.transaction() as txn:
            present = set()
            for peer in self._peers():
                present.add(peer.engine)
                if peer.is_dead:
                    account = txn.balance.accounts.get(peer.engine)
                    if account is not None:
                        txn.settle(account, peer.directory)
                    dead.add(peer.engine)
            present.add(self.presence.engine)
            lost = txn.balance.accounts.keys() - present
            for engine in lost:
                del txn.balance.accounts[engine]
        removed: list[bytes] = []
        for peer in self._peers():
            if peer.engine in dead and peer.is_dead:
                # The object `peer` holds the lock of the dead engine's file, so no other engine
                # removes this presence. The dead engine's account still reserves the bytes.
                peer.remove()
                removed.append(peer.engine)
        with self.transaction() as txn:
            for engine in removed:
                txn.balance.accounts.pop(engine, None)
            txn.measure()
        return len(removed) + len(lost)

    def _has_reclaimable(self) -> bool:
        present = {self.presence.engine}
        for peer in self._peers():
            if peer.is_dead:
                return True
            present.add(peer.engine)
        try:
            return not self.ledger.read().accounts.keys() <= present
        except LedgerLost:
            return True

    def count_again(self) -> tuple[int, int]:
        """Reclaim dead engines, then correct the ledger by counting all blocks, which takes long in
        a large root. Returns how many more bytes and blocks there are than the ledger said."""
        self.reclaim()
        with self.transaction() as txn:
            balance = txn.balance
            before = balance.blocks, balance.num_blocks
            txn.count_again()
            return balance.blocks - before[0], balance.num_blocks - before[1]


@cache
def _boot_id() -> bytes:
    try:
        return bytes.fromhex(_BOOT_ID.read_text().strip().replace("-", ""))[:16].ljust(16, b"\0")
    except (OSError, ValueError):
        return bytes(16)
