"""An engine's seat in a root: a locked file that says that it lives, and a directory of its own.

In the directory:

w<number>             a block that is being written, or is written and has no name yet
e<batch>-<number>     a block on its way out
blocks/<fingerprint>/...    blocks of namespaces that are of use to nobody but this engine
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import shutil
import socket
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from uuid import uuid4
from weakref import WeakSet

from kvtier.tiering.fs.names import is_engine_name
from kvtier.tiering.fs.tree import bytes_taken

__all__ = [
    "Occupant",
    "Seat",
    "SeatFile",
    "StrangeSeat",
    "alive_file",
    "is_seat",
    "other_seats",
    "seat_files",
    "seats_in",
]

_ALIVE = ".alive"
_OUT = re.compile(r"e(\d+)-\d+")
_IN = re.compile(r"w\d+")
_MOST_TEXT = 128

_open_seats: WeakSet[Seat] = WeakSet()


@dataclass(frozen=True, slots=True)
class Occupant:
    """Who sits there, for people to be told."""

    engine_id: str
    pid: int
    host: str
    since_ns: int
    namespace: str
    """The fingerprint of the blocks it looks for, as hex digits."""

    @classmethod
    def here(cls, engine_id: str, namespace: str) -> Occupant:
        host = socket.gethostname()[:_MOST_TEXT]
        return cls(engine_id[:_MOST_TEXT], os.getpid(), host, time.time_ns(), namespace)

    def encode(self) -> bytes:
        fields = [self.engine_id, self.pid, self.host, self.since_ns, self.namespace]
        return json.dumps(fields).encode()

    @classmethod
    def decode(cls, text: bytes) -> Occupant | None:
        """None: it makes no sense."""
        try:
            engine_id, pid, host, since_ns, namespace = json.loads(text)
        except (ValueError, TypeError, RecursionError):
            return None
        texts = (engine_id, host, namespace)
        if not all(isinstance(text, str) for text in texts):
            return None
        if type(pid) is not int or type(since_ns) is not int:
            return None
        return cls(engine_id, pid, host, since_ns, namespace)


@dataclass(frozen=True, slots=True)
class SeatFile:
    """A file in a seat's directory."""

    path: str
    num_bytes: int
    """As `du` counts them."""
    is_linked: bool
    """Whether it has another name too."""
    batch: int | None
    """Of a block on its way out. None: it is on its way in."""


class Seat:
    """This engine's seat. It ends with the process, whatever ends that."""

    def __init__(self, engines: Path, occupant: Occupant) -> None:
        """`engines`: the directory of all of them. Under the ledger's lock: until the file is
        locked, it looks like that of a dead engine."""
        self.engine = uuid4().bytes
        self.directory = engines / self.engine.hex()
        self._alive = alive_file(engines, self.engine.hex())
        self._numbers = count(1)
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        self._fd = os.open(self._alive, flags, 0o600)
        _open_seats.add(self)
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX)  # others only look at it for a moment
            os.pwrite(self._fd, occupant.encode(), 0)
            os.mkdir(self.directory, 0o700)
        except BaseException:
            with suppress(OSError):
                self.remove()
            raise

    @property
    def blocks(self) -> Path:
        """The directory of namespaces that are this engine's alone."""
        return self.directory / "blocks"

    def incoming(self) -> str:
        """A new name for a block that is going to be written."""
        return f"{self.directory}/w{next(self._numbers)}"

    def outgoing(self, batch: int, number: int) -> str:
        """The name of a block on its way out."""
        return f"{self.directory}/e{batch}-{number}"

    @property
    def is_in_place(self) -> bool:
        """Whether it is what others find there."""
        try:
            found = os.stat(self._alive)
            return os.path.samestat(found, os.fstat(self._fd)) and os.path.isdir(self.directory)
        except OSError:
            return False

    def now_ns(self) -> int:
        """The time by the clock that new files get their time stamps from: the file server's."""
        os.utime(self._fd)
        return os.fstat(self._fd).st_mtime_ns

    def contains(self, path: str) -> bool:
        return path.startswith(f"{self.directory}/")

    def abandon(self) -> None:
        """Leave everything where it is, for whoever finds a dead engine's seat. Once more changes
        nothing."""
        if self._fd >= 0:
            fd, self._fd = self._fd, -1
            os.close(fd)

    def empty(self) -> None:
        """Remove what is in it."""
        for entry in list(os.scandir(self.directory)):
            if entry.is_dir(follow_symlinks=False):
                shutil.rmtree(entry.path)
            else:
                os.unlink(entry.path)

    def remove(self) -> None:
        """Nothing is left of it. Under the ledger's lock, or when there is no account of it."""
        _remove(self.directory, self._alive)
        self.abandon()


class StrangeSeat:
    """The seat of another engine. While it is looked at, nobody else looks at a dead one."""

    def __init__(self, directory: Path, alive: Path, fd: int) -> None:
        self.engine = bytes.fromhex(directory.name)
        self.directory = directory
        self._alive = alive
        self._fd = fd
        """Of the locked file; negative: someone has removed it, and with it the seat is lost."""
        self.is_dead = True
        try:
            if fd >= 0:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self.is_dead = False

    @property
    def blocks(self) -> Path:
        return self.directory / "blocks"

    @property
    def occupant(self) -> Occupant | None:
        return Occupant.decode(os.pread(self._fd, 4096, 0)) if self._fd >= 0 else None

    def files(self) -> list[SeatFile]:
        """The blocks on their way in or out."""
        return seat_files(self.directory)

    def remove(self) -> None:
        """Nothing is left of a dead engine's seat."""
        _remove(self.directory, self._alive)

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)


def seat_files(directory: Path) -> list[SeatFile]:
    """The blocks on their way in or out in a seat's directory."""
    found = []
    try:
        entries = list(os.scandir(directory))
    except FileNotFoundError:
        return []
    for entry in entries:
        out = _OUT.fullmatch(entry.name)
        if out is None and _IN.fullmatch(entry.name) is None:
            continue
        try:
            status = entry.stat(follow_symlinks=False)
        except FileNotFoundError:
            continue
        batch = None if out is None else int(out[1])
        found.append(SeatFile(entry.path, bytes_taken(status), status.st_nlink > 1, batch))
    return found


def is_seat(name: str) -> bool:
    """Whether something in the directory of engines belongs to a seat."""
    return is_engine_name(name.removesuffix(_ALIVE))


def seats_in(engines: Path) -> list[str]:
    """The names of the engines that have, or had, a seat there."""
    return sorted({name.removesuffix(_ALIVE) for name in os.listdir(engines) if is_seat(name)})


def alive_file(engines: Path, name: str) -> Path:
    """The file that an engine has locked for as long as it lives."""
    return engines / (name + _ALIVE)


def other_seats(engines: Path, own: Seat | None) -> Iterator[StrangeSeat]:
    """The seats of all other engines, dead or alive. Each is closed when the next is asked for."""
    for name in seats_in(engines):
        if own is not None and name == own.engine.hex():
            continue
        alive = alive_file(engines, name)
        try:
            fd = os.open(alive, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        except FileNotFoundError:
            fd = -1
        seat = StrangeSeat(engines / name, alive, fd)
        try:
            yield seat
        finally:
            seat.close()


def _remove(directory: Path, alive: Path) -> None:
    """The file goes last: as long as it is there, someone will try again."""
    while directory.exists():
        with suppress(FileNotFoundError):  # of one of its files, which others remove, too
            shutil.rmtree(directory)
    with suppress(FileNotFoundError):
        os.unlink(alive)


def _abandon_in_child() -> None:
    """A child that was forked must not keep its parent's seat taken when that has ended."""
    for seat in list(_open_seats):
        seat.abandon()


os.register_at_fork(after_in_child=_abandon_in_child)
