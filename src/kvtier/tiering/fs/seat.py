"""An engine's seat in a root: a locked file that says that it lives, and a directory of its own.

In the directory:

w<number>             a block that is being written, or is written and has no name yet
e<batch>-<number>     a block on its way out
blocks/<fingerprint>/...    blocks of namespaces that are of use to nobody but this engine
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import re
import socket
import stat
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from uuid import uuid4
from weakref import WeakSet

from kvtier.tiering.fs.below import Below
from kvtier.tiering.fs.names import is_engine_name
from kvtier.tiering.fs.tree import (
    bytes_taken,
    namespaces_in,
    read_shard,
    remove_directories,
    shards_in,
)

__all__ = [
    "Occupant",
    "Seat",
    "SeatFile",
    "StrangeSeat",
    "alive_file",
    "is_in_seat",
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

    def __init__(self, below: Below, engines: Path, occupant: Occupant) -> None:
        """`engines`: the directory of all of them. Under the ledger's lock: until the file is
        locked, it looks like that of a dead engine."""
        self._below = below
        self.engine = uuid4().bytes
        self.directory = engines / self.engine.hex()
        self._alive = alive_file(engines, self.engine.hex())
        self._numbers = count(1)
        self._fd = below.open(self._alive, os.O_RDWR | os.O_CREAT | os.O_EXCL)
        _open_seats.add(self)
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX)  # others only look at it for a moment
            os.pwrite(self._fd, occupant.encode(), 0)
            below.mkdir(self.directory)
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
            found = self._below.lstat(self._alive)
            is_ours = os.path.samestat(found, os.fstat(self._fd))
            return is_ours and self._below.is_directory(self.directory)
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
        """Remove the blocks in it."""
        _empty(self._below, self.directory)

    def remove(self) -> None:
        """Nothing is left of it. Under the ledger's lock, or when there is no account of it."""
        _remove(self._below, self.directory, self._alive)
        self.abandon()


class StrangeSeat:
    """The seat of another engine. While it is looked at, nobody else looks at a dead one."""

    def __init__(self, below: Below, directory: Path, alive: Path, fd: int | None) -> None:
        """`fd`: of the file that says that it lives; negative: someone has removed it, and with it
        the seat is lost. None: it cannot be opened, and so the engine is not taken for dead."""
        self._below = below
        self.engine = bytes.fromhex(directory.name)
        self.directory = directory
        self._alive = alive
        self._fd = -1 if fd is None else fd
        self.is_dead = fd is not None
        try:
            if self._fd >= 0:
                fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
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
        return seat_files(self._below, self.directory)

    def remove(self) -> None:
        """Nothing is left of a dead engine's seat."""
        _remove(self._below, self.directory, self._alive)

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)


def seat_files(below: Below, directory: Path) -> list[SeatFile]:
    """The blocks on their way in or out in a seat's directory."""
    found = []
    try:
        for entry in below.scan(directory):
            out = _OUT.fullmatch(entry.name)
            if out is None and _IN.fullmatch(entry.name) is None:
                continue
            try:
                status = entry.stat(follow_symlinks=False)
            except FileNotFoundError:
                continue
            if stat.S_ISREG(status.st_mode):
                batch = None if out is None else int(out[1])
                path = f"{directory}/{entry.name}"
                found.append(SeatFile(path, bytes_taken(status), status.st_nlink > 1, batch))
    except FileNotFoundError:
        return []
    return found


def is_seat(name: str) -> bool:
    """Whether something in the directory of engines belongs to a seat."""
    return is_engine_name(name.removesuffix(_ALIVE))


def is_in_seat(name: str) -> bool:
    """Whether something in the directory of a seat was put there by an engine."""
    return name == "blocks" or bool(_IN.fullmatch(name) or _OUT.fullmatch(name))


def seats_in(below: Below, engines: Path) -> list[str]:
    """The names of the engines that have, or had, a seat there."""
    names = below.listdir(engines)
    return sorted({name.removesuffix(_ALIVE) for name in names if is_seat(name)})


def alive_file(engines: Path, name: str) -> Path:
    """The file that an engine has locked for as long as it lives."""
    return engines / (name + _ALIVE)


def other_seats(below: Below, engines: Path, own: Seat | None) -> Iterator[StrangeSeat]:
    """The seats of all other engines, dead or alive. Each is closed when the next is asked for.
    What is called like a seat and is none, such as a link or a pipe, is left out: it is not ours,
    and must not keep the seats after it from being looked at."""
    for name in seats_in(below, engines):
        if own is not None and name == own.engine.hex():
            continue
        fd: int | None = -1
        try:
            if not _is_like_a_seat(below, engines, name):
                continue
            with suppress(FileNotFoundError):
                fd = below.open(alive_file(engines, name), os.O_RDWR | os.O_NONBLOCK)
        except OSError:
            fd = None
        seat = StrangeSeat(below, engines / name, alive_file(engines, name), fd)
        try:
            yield seat
        finally:
            seat.close()


def _is_like_a_seat(below: Below, engines: Path, name: str) -> bool:
    """Whether a name in the directory of engines is that of a seat, or of what is left of one."""
    file, directory = _mode_of(below, alive_file(engines, name)), _mode_of(below, engines / name)
    if directory is not None and not stat.S_ISDIR(directory):
        return False
    if file is not None:
        return stat.S_ISREG(file)
    # A directory without its file is left when other things are in it, too: those are not ours.
    names = [] if directory is None else below.listdir(engines / name)
    return not names or any(map(is_in_seat, names))


def _mode_of(below: Below, path: Path) -> int | None:
    try:
        return below.lstat(path).st_mode
    except FileNotFoundError:
        return None


def _remove(below: Below, directory: Path, alive: Path) -> None:
    """Remove a seat, as far as there is nothing of others in it. The file goes last: as long as it
    is there, someone will try again."""
    while _empty(below, directory):
        pass  # others remove it, too, or its engine is not as dead as it seemed
    try:
        below.rmdir(directory)
    except FileNotFoundError:
        pass
    except OSError as error:
        if error.errno != errno.ENOTEMPTY:
            raise
    with suppress(FileNotFoundError):
        below.unlink(alive)


def _empty(below: Below, directory: Path) -> int:
    """Remove what an engine puts into a seat. Returns how many blocks there were."""
    files = [file.path for file in seat_files(below, directory)]
    blocks = directory / "blocks"
    namespaces = namespaces_in(below, blocks) if below.is_directory(blocks) else []
    for namespace in namespaces:
        for shard in [entry.name for entry in shards_in(below, namespace)]:
            files += (block.path for block in read_shard(below, namespace, shard))
    for path in files:
        with suppress(FileNotFoundError):
            below.unlink(path)
    for namespace in namespaces:
        remove_directories(below, namespace)
    with suppress(OSError):
        below.rmdir(blocks)
    return len(files)


def _abandon_in_child() -> None:
    """A child that was forked must not keep its parent's seat taken when that has ended."""
    for seat in list(_open_seats):
        seat.abandon()


os.register_at_fork(after_in_child=_abandon_in_child)
