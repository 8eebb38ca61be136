"""An engine's presence in a root: a file that it keeps locked while it lives, and its staging
directory.

engines/<engine>.alive    locked by the engine; unlocked means that the engine is dead
engines/<engine>/         its staging directory:
    w<number>             a block being written, or written and not yet published
    e<batch>-<number>     an evicted block
    blocks/<fingerprint>/...    blocks of namespaces that only this engine reads

Only the engine itself writes into its staging directory. After it has died, another engine or a
command settles its account in the ledger and removes its files: see `RootSession.reclaim`.
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

from kvtier.tiering.fs.access import NoFollowTree
from kvtier.tiering.fs.layout import (
    bytes_taken,
    is_engine_name,
    namespaces_in,
    read_shard,
    remove_directories,
    shards_in,
)

__all__ = [
    "EngineInfo",
    "Peer",
    "Presence",
    "StagedFile",
    "alive_file",
    "engines_in",
    "is_presence_name",
    "is_staged_name",
    "peers_in",
    "staged_files",
]

_ALIVE = ".alive"
_OUT = re.compile(r"e(\d+)-\d+")
_IN = re.compile(r"w\d+")
_LONGEST_TEXT = 128

_open_presences: WeakSet[Presence] = WeakSet()


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """Names an engine or command for operators who list the root. Stored in the `.alive` file."""

    engine_id: str
    pid: int
    host: str
    since_ns: int
    namespace: str
    """The fingerprint of the blocks it reads, as hex digits; empty for a command."""

    @classmethod
    def here(cls, engine_id: str, namespace: str) -> EngineInfo:
        host = socket.gethostname()[:_LONGEST_TEXT]
        return cls(engine_id[:_LONGEST_TEXT], os.getpid(), host, time.time_ns(), namespace)

    def encode(self) -> bytes:
        fields = [self.engine_id, self.pid, self.host, self.since_ns, self.namespace]
        return json.dumps(fields).encode()

    @classmethod
    def decode(cls, text: bytes) -> EngineInfo | None:
        """None if the text is damaged or not written yet."""
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


class Presence:
    """This engine's own presence. It ends when the kernel unlocks the file: at the end of the
    process, even after `kill -9`."""

    def __init__(self, tree: NoFollowTree, engines: Path, info: EngineInfo) -> None:
        """`engines`: the root's directory of engines. Called under the ledger's lock, because the
        new file looks like that of a dead engine until it is locked."""
        self._tree = tree
        self.engine = uuid4().bytes
        self.directory = engines / self.engine.hex()
        self._alive = alive_file(engines, self.engine.hex())
        self._numbers = count(1)
        self._fd = tree.open(self._alive, os.O_RDWR | os.O_CREAT | os.O_EXCL)
        _open_presences.add(self)
        try:
            # Waits for a moment at most: others lock a new file only to test if its engine is dead.
            fcntl.flock(self._fd, fcntl.LOCK_EX)
            os.pwrite(self._fd, info.encode(), 0)
            tree.mkdir(self.directory)
        except BaseException:
            with suppress(OSError):
                self.remove()
            raise

    @property
    def blocks(self) -> Path:
        """The directory of the namespaces that only this engine reads."""
        return self.directory / "blocks"

    def incoming(self) -> str:
        """A new path to write a block to."""
        return f"{self.directory}/w{next(self._numbers)}"

    def outgoing(self, batch: int, number: int) -> str:
        """The path that a block is evicted to."""
        return f"{self.directory}/e{batch}-{number}"

    @property
    def is_in_place(self) -> bool:
        """True while the `.alive` file and the staging directory still have their names in the
        root."""
        try:
            found = self._tree.lstat(self._alive)
            is_same = os.path.samestat(found, os.fstat(self._fd))
            return is_same and self._tree.is_directory(self.directory)
        except OSError:
            return False

    def now_ns(self) -> int:
        """The present time in nanoseconds since 1970, by the clock that stamps new files: the file
        server's."""
        os.utime(self._fd)
        return os.fstat(self._fd).st_mtime_ns

    def contains(self, path: str) -> bool:
        return path.startswith(f"{self.directory}/")

    def abandon(self) -> None:
        """Unlock the file and leave everything in place, so that other engines take this one for
        dead and clean up. Idempotent."""
        if self._fd >= 0:
            fd, self._fd = self._fd, -1
            os.close(fd)

    def empty(self) -> None:
        """Remove all staged and private blocks."""
        _empty(self._tree, self.directory)

    def remove(self) -> None:
        """Remove the presence. Called under the ledger's lock."""
        _remove(self._tree, self.directory, self._alive)
        self.abandon()


class Peer:
    """The presence of another engine. If that engine is dead, this object holds its lock until
    `close`, so that no two engines clean up after it at the same time."""

    def __init__(self, tree: NoFollowTree, directory: Path, alive: Path, fd: int | None) -> None:
        """`fd`: the open `.alive` file; negative if it was removed, which ends the presence; None
        if it cannot be opened. An engine whose file cannot be opened or locked counts as alive."""
        self._tree = tree
        self.engine = bytes.fromhex(directory.name)
        self.directory = directory
        self._alive = alive
        self._fd = -1 if fd is None else fd
        self.is_dead = fd is not None
        try:
            if self._fd >= 0:
                fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:  # another engine holds the lock, or nobody can lock the file now
            self.is_dead = False

    @property
    def blocks(self) -> Path:
        return self.directory / "blocks"

    @property
    def info(self) -> EngineInfo | None:
        return EngineInfo.decode(os.pread(self._fd, 4096, 0)) if self._fd >= 0 else None

    def files(self) -> list[StagedFile]:
        """Its staged and evicted blocks."""
        return staged_files(self._tree, self.directory)

    def remove(self) -> None:
        """Remove everything that a dead engine left."""
        _remove(self._tree, self.directory, self._alive)

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)


@dataclass(frozen=True, slots=True)
class StagedFile:
    """A file in a staging directory."""

    path: str
    num_bytes: int
    """Bytes on the disk, as `du` counts them."""
    is_linked: bool
    """True if the file has a second name."""
    batch: int | None
    """Number of the batch it was evicted in; None for a block that was written here."""


def staged_files(tree: NoFollowTree, directory: Path) -> list[StagedFile]:
    """The files in a staging directory; empty if the directory is missing."""
    found = []
    try:
        for entry in tree.scan(directory):
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
                found.append(StagedFile(path, bytes_taken(status), status.st_nlink > 1, batch))
    except FileNotFoundError:
        return []
    return found


# --- who is there ------------------------------------------------------------------------------


def is_presence_name(name: str) -> bool:
    """True for the name of an `.alive` file or a staging directory."""
    return is_engine_name(name.removesuffix(_ALIVE))


def is_staged_name(name: str) -> bool:
    """True for a name that an engine uses in its staging directory."""
    return name == "blocks" or bool(_IN.fullmatch(name) or _OUT.fullmatch(name))


def alive_file(engines: Path, name: str) -> Path:
    """The file that the engine of this name keeps locked."""
    return engines / (name + _ALIVE)


def engines_in(tree: NoFollowTree, engines: Path) -> list[str]:
    """The names of all engines with a presence, dead or alive."""
    names = tree.listdir(engines)
    return sorted({name.removesuffix(_ALIVE) for name in names if is_presence_name(name)})


def peers_in(tree: NoFollowTree, engines: Path, own: Presence | None) -> Iterator[Peer]:
    """Yield all other engines, dead or alive. Each is closed when the next one is requested. Skips
    links, pipes and anything else that is not a presence but has the name of one."""
    for name in engines_in(tree, engines):
        if own is not None and name == own.engine.hex():
            continue
        fd: int | None = -1
        try:
            if not _is_presence(tree, engines, name):
                continue
            with suppress(FileNotFoundError):
                fd = tree.open(alive_file(engines, name), os.O_RDWR | os.O_NONBLOCK)
        except OSError:
            fd = None
        peer = Peer(tree, engines / name, alive_file(engines, name), fd)
        try:
            yield peer
        finally:
            peer.close()


def _is_presence(tree: NoFollowTree, engines: Path, name: str) -> bool:
    """True if the file and the directory of this name are a presence, or what is left of one."""
    file, directory = _mode_of(tree, alive_file(engines, name)), _mode_of(tree, engines / name)
    if directory is not None and not stat.S_ISDIR(directory):
        return False
    if file is not None:
        return stat.S_ISREG(file)
    # Without an `.alive` file, a directory with foreign files alone is no presence: `_remove` has
    # left it in place. An empty directory, or one with staged files, is still to be removed.
    names = [] if directory is None else tree.listdir(engines / name)
    return not names or any(map(is_staged_name, names))


def _mode_of(tree: NoFollowTree, path: Path) -> int | None:
    try:
        return tree.lstat(path).st_mode
    except FileNotFoundError:
        return None


# --- cleaning up -------------------------------------------------------------------------------


def _remove(tree: NoFollowTree, directory: Path, alive: Path) -> None:
    """Remove a presence, except foreign files. Removes the `.alive` file last: while it exists,
    other engines try again."""
    while _empty(tree, directory):
        pass  # until nothing is left: an engine that was taken for dead may still write
    try:
        tree.rmdir(directory)
    except FileNotFoundError:
        pass
    except OSError as error:
        if error.errno != errno.ENOTEMPTY:
            raise
    with suppress(FileNotFoundError):
        tree.unlink(alive)


def _empty(tree: NoFollowTree, directory: Path) -> int:
    """Remove the files that an engine puts into its staging directory. Returns their number."""
    paths = [file.path for file in staged_files(tree, directory)]
    blocks = directory / "blocks"
    namespaces = namespaces_in(tree, blocks) if tree.is_directory(blocks) else []
    for namespace in namespaces:
        for shard in [entry.name for entry in shards_in(tree, namespace)]:
            paths += (block.path for block in read_shard(tree, namespace, shard))
    for path in paths:
        with suppress(FileNotFoundError):
            tree.unlink(path)
    for namespace in namespaces:
        remove_directories(tree, namespace)
    with suppress(OSError):
        tree.rmdir(blocks)
    return len(paths)


def _abandon_in_child() -> None:
    """Close the files in a forked child. It shares its parent's locks: the parent would seem alive
    after its end."""
    for presence in list(_open_presences):
        presence.abandon()


os.register_at_fork(after_in_child=_abandon_in_child)
