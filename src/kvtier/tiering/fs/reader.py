"""A root seen from outside: by whoever has no seat there, while engines may be at work.

Nothing is written, and no lock is waited for. What is read may change at any moment: what goes away
meanwhile is left out.
"""

from __future__ import annotations

import errno
import fcntl
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from kvtier.tiering.fs.below import Below
from kvtier.tiering.fs.ledger import Balance, LedgerLost, copies_in
from kvtier.tiering.fs.names import SHARDS, is_engine_name, is_namespace_name, key_at
from kvtier.tiering.fs.seat import Occupant, alive_file, is_in_seat, is_seat, seats_in
from kvtier.tiering.fs.tree import BlockFile, bytes_taken

__all__ = [
    "SeenNamespace",
    "SeenSeat",
    "Stray",
    "Survey",
    "disk_usage",
    "read_balance",
    "read_seats",
    "survey",
]

_NUM_TRIES = 8
_GONE = (errno.ENOENT, errno.ESTALE)
_NO_FILE = (errno.ELOOP, errno.ENXIO, errno.ENOTDIR)
"""A link, a socket, or something else that no engine has made."""
_NOT_OURS = "lost+found"
_HIDDEN = "."
"""Such names are the file system's: snapshots, and what NFS keeps of removed but open files."""
_SHARDS = frozenset(SHARDS)
_OPEN = os.O_RDONLY | os.O_NONBLOCK


@dataclass(frozen=True, slots=True)
class SeenSeat:
    """The seat of an engine, or of a command."""

    engine: str
    directory: Path
    occupant: Occupant | None
    """None: it has not said who it is, or that cannot be read."""
    is_alive: bool


@dataclass(slots=True)
class SeenNamespace:
    """Blocks of one model, layout and epoch."""

    path: Path
    owner: SeenSeat | None
    """The only engine that finds these blocks; None: all that look for this fingerprint do."""
    num_blocks: int = 0
    num_bytes: int = 0
    """As `du` counts them, directories included."""
    used_ns: int = 0
    """When a block was used last; where there is none, when the last one went."""
    blocks: list[BlockFile] = field(default_factory=list)
    """If they were asked for."""

    @property
    def name(self) -> str:
        """The fingerprint as hex digits."""
        return self.path.name


@dataclass(frozen=True, slots=True)
class Stray:
    """What no engine has put there."""

    path: str
    num_bytes: int
    """As `du` counts them, with all that is in it."""


@dataclass(slots=True)
class Survey:
    """What is in a root."""

    balance: Balance | None
    """What the ledger says; None: it cannot be read."""
    seats: list[SeenSeat]
    namespaces: list[SeenNamespace] = field(default_factory=list)
    """Without those of dead engines, which nobody finds any more."""
    strays: list[Stray] = field(default_factory=list)
    num_bytes: int = 0
    """As `du` counts them, all included but the directories that the file system itself keeps."""
    hidden_bytes: int = 0
    """The part of it in files that are the file system's own. No ledger has them."""
    is_steady: bool = False
    """Whether the ledger has not changed meanwhile."""

    @property
    def num_blocks(self) -> int:
        return sum(space.num_blocks for space in self.namespaces)

    @property
    def ledger_error(self) -> int | None:
        """How much more the ledger says than there is, strays aside, which it does not count; None:
        it cannot be said, since something is changing, or is reserved."""
        if self.balance is None or not self.is_steady or self.balance.reserved:
            return None
        strays = sum(stray.num_bytes for stray in self.strays)
        return self.balance.total - (self.num_bytes - self.hidden_bytes - strays)

    def live_users(self, name: str) -> list[SeenSeat]:
        """The engines that look for blocks of this fingerprint, or may do so: one that starts has
        not said yet which ones it looks for."""
        return [
            seat
            for seat in self.seats
            if seat.is_alive and (seat.occupant is None or seat.occupant.namespace == name)
        ]


def read_balance(root: Path) -> Balance | None:
    """What the ledger said a moment ago; None: there is none, or it cannot be read. Raises
    `OSError` or `LedgerVersion`."""
    try:
        fd = Below(root).open(root / "ledger", _OPEN)
    except FileNotFoundError:
        return None
    try:
        for _ in range(_NUM_TRIES):  # of two copies, both may be written while we read
            found = []
            for copy in copies_in(fd):
                try:
                    found.append(Balance.decode(copy))
                except LedgerLost:
                    continue
            if found:
                return max(found, key=lambda balance: balance.revision)
        return None
    finally:
        os.close(fd)


# --- who is there ------------------------------------------------------------------------------


def read_seats(root: Path) -> list[SeenSeat]:
    """The seats of all engines, dead or alive. Raises `OSError`."""
    below, engines = Below(root), root / "engines"
    try:
        names = seats_in(below, engines)
    except FileNotFoundError:
        return []
    seats = [_read_seat(below, engines, name) for name in names]
    return [seat for seat in seats if seat is not None]


def _read_seat(below: Below, engines: Path, name: str) -> SeenSeat | None:
    """None: something else has the name of a seat."""
    directory = engines / name
    try:
        fd = below.open(alive_file(engines, name), _OPEN)
    except FileNotFoundError:
        return SeenSeat(name, directory, None, False) if below.is_directory(directory) else None
    except OSError as error:
        if error.errno not in _GONE + _NO_FILE:
            raise
        return None
    try:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            return None
        return SeenSeat(name, directory, Occupant.decode(os.pread(fd, 4096, 0)), _is_locked(fd))
    finally:
        os.close(fd)


def _is_locked(fd: int) -> bool:
    """Found out by locking it together with others and letting go at once: there is no way to look
    at a lock that sees through the walls of hosts and containers."""
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:  # where it cannot be found out, nobody is taken for dead
        return True
    fcntl.flock(fd, fcntl.LOCK_UN)
    return False


# --- what is there -----------------------------------------------------------------------------


def survey(root: Path, *, keep_blocks: bool = False) -> Survey:
    """Look at every file once. `keep_blocks`: and remember each block. Raises `OSError` or
    `LedgerVersion`."""
    before = read_balance(root)
    surveyor = _Surveyor(Below(root), Survey(before, read_seats(root)), keep_blocks)
    surveyor.look_at(root)
    seen = surveyor.seen
    seen.balance = after = read_balance(root)
    seen.is_steady = before is not None and after is not None and before.revision == after.revision
    return seen


def disk_usage(below: Below, directory: Path) -> int:
    """What `du` says of a directory; 0: it has gone. Raises `OSError`."""
    surveyor = _Surveyor(below, Survey(None, []), keep_blocks=False)
    try:
        surveyor.count_all(str(directory), below.lstat(directory))
    except FileNotFoundError:
        return 0
    return surveyor.seen.num_bytes


class _Surveyor:
    def __init__(self, below: Below, seen: Survey, keep_blocks: bool) -> None:
        self._below = below
        self.seen = seen
        self._keep_blocks = keep_blocks
        self._linked: set[int] = set()
        """Files with two names that have been counted."""

    def look_at(self, root: Path) -> None:
        self.seen.num_bytes += os.stat(root).st_blocks * 512
        for path, status in self._entries(str(root), must_exist=True):
            name = _name(path)
            is_directory = stat.S_ISDIR(status.st_mode)
            if name == _NOT_OURS:
                continue
            if name.startswith(_HIDDEN):
                self._count_hidden(status)
            elif name == "blocks" and is_directory:
                self._count(status)
                self._look_at_namespaces(path, None)
            elif name == "engines" and is_directory:
                self._count(status)
                self._look_at_seats(path)
            elif name == "ledger" and not is_directory:
                self._count(status)
            else:
                self._note_stray(path, status)

    def _look_at_seats(self, engines: str) -> None:
        seats = {seat.engine: seat for seat in self.seen.seats}
        for path, status in self._entries(engines):
            name = _name(path)
            is_directory = stat.S_ISDIR(status.st_mode)
            seat = seats.get(name.removesuffix(".alive"))
            if not is_seat(name) or seat is None or is_directory is not is_engine_name(name):
                self._note_stray(path, status)
                continue
            self._count(status)
            for inner, inner_status in self._entries(path, status):
                if _name(inner) == "blocks" and seat.is_alive:
                    self._count(inner_status)
                    self._look_at_namespaces(inner, seat)
                elif is_in_seat(_name(inner)):
                    self.count_all(inner, inner_status)
                else:
                    self._note_stray(inner, inner_status)

    def _look_at_namespaces(self, blocks: str, owner: SeenSeat | None) -> None:
        for path, status in self._entries(blocks):
            if not is_namespace_name(_name(path)) or not stat.S_ISDIR(status.st_mode):
                self._note_stray(path, status)
                continue
            with self._counted_for(SeenNamespace(Path(path), owner)) as space:
                self._count(status)
                newest = status.st_mtime_ns
                for inner, inner_status in self._entries(path):
                    if _name(inner) in _SHARDS and stat.S_ISDIR(inner_status.st_mode):
                        self._count(inner_status)
                        newest = max(newest, inner_status.st_mtime_ns)
                        self._look_at_shard(inner, space)
                    else:
                        self._note_stray(inner, inner_status)
                if not space.num_blocks:
                    space.used_ns = newest

    @contextmanager
    def _counted_for(self, space: SeenNamespace) -> Iterator[SeenNamespace]:
        before = self.seen.num_bytes
        yield space
        space.num_bytes = self.seen.num_bytes - before
        self.seen.namespaces.append(space)

    def _look_at_shard(self, shard: str, space: SeenNamespace) -> None:
        for path, status in self._entries(shard):
            if not stat.S_ISREG(status.st_mode) or key_at(_name(shard), _name(path)) is None:
                self._note_stray(path, status)
                continue
            self._count(status, bytes_taken(status))
            space.num_blocks += 1
            space.used_ns = max(space.used_ns, status.st_mtime_ns)
            if self._keep_blocks:
                space.blocks.append(BlockFile.of(path, status))

    def _note_stray(self, path: str, status: os.stat_result) -> None:
        if _name(path).startswith(_HIDDEN):
            self._count_hidden(status)
            return
        before = self.seen.num_bytes
        self.count_all(path, status)
        self.seen.strays.append(Stray(path, self.seen.num_bytes - before))

    def _count_hidden(self, status: os.stat_result) -> None:
        """A directory of snapshots has all of it once more for each: nobody looks into it."""
        if not stat.S_ISDIR(status.st_mode):
            before = self.seen.num_bytes
            self._count(status)
            self.seen.hidden_bytes += self.seen.num_bytes - before

    def count_all(self, path: str, status: os.stat_result) -> None:
        """A file, or a directory with all that is in it."""
        self._count(status)
        for inner, inner_status in self._entries(path, status):
            if _name(inner).startswith(_HIDDEN):
                self._count_hidden(inner_status)
            else:
                self.count_all(inner, inner_status)

    def _count(self, status: os.stat_result, num_bytes: int | None = None) -> None:
        if status.st_nlink > 1 and not stat.S_ISDIR(status.st_mode):
            if status.st_ino in self._linked:
                return
            self._linked.add(status.st_ino)
        self.seen.num_bytes += status.st_blocks * 512 if num_bytes is None else num_bytes

    def _entries(
        self, directory: str, status: os.stat_result | None = None, *, must_exist: bool = False
    ) -> Iterator[tuple[str, os.stat_result]]:
        """The paths of what is in a directory; none, if `status` says that it is no directory, or
        if it has gone, or something else is in its place by now."""
        if status is not None and not stat.S_ISDIR(status.st_mode):
            return
        try:
            for entry in self._below.scan(directory):
                try:
                    entry_status = entry.stat(follow_symlinks=False)
                except OSError as error:
                    if error.errno not in _GONE:
                        raise
                    continue
                yield f"{directory}/{entry.name}", entry_status
        except OSError as error:
            if must_exist or error.errno not in (*_GONE, errno.ENOTDIR):
                raise


def _name(path: str) -> str:
    return path.rpartition("/")[2]
