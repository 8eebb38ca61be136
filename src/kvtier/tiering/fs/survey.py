"""Surveys a root (the directory of an `fs` tier) from a process that has not joined it, while
engines may use it.

The survey writes nothing and never waits for a lock. It leaves out files that disappear meanwhile.
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

from kvtier.config import NamespaceDescription
from kvtier.tiering.fs.access import NoFollowTree
from kvtier.tiering.fs.layout import (
    DESCRIPTION_FILE,
    SHARDS,
    BlockFile,
    bytes_taken,
    is_engine_name,
    is_namespace_name,
    key_at,
    read_description,
)
from kvtier.tiering.fs.ledger import Balance, LedgerLost, copies_in
from kvtier.tiering.fs.presence import (
    EngineInfo,
    alive_file,
    engines_in,
    is_presence_name,
    is_staged_name,
)

__all__ = [
    "SeenEngine",
    "SeenNamespace",
    "Stray",
    "Survey",
    "disk_usage",
    "ledger_remark",
    "read_balance",
    "read_engines",
    "survey",
]

_NUM_TRIES = 8
_GONE = (errno.ENOENT, errno.ESTALE)
_NO_FILE = (errno.ELOOP, errno.ENXIO, errno.ENOTDIR)
"""Errors for a link, a socket, or anything else that no engine has made."""
_NOT_OURS = "lost+found"
_HIDDEN = "."
"""Names that begin with it belong to the file system: snapshots, and files that NFS keeps while
they are open."""
_SHARDS = frozenset(SHARDS)
_OPEN = os.O_RDONLY | os.O_NONBLOCK


@dataclass(frozen=True, slots=True)
class SeenEngine:
    """An engine or a command with a presence in the root, dead or alive."""

    name: str
    directory: Path
    """Its staging directory."""
    info: EngineInfo | None
    """None if the `.alive` file cannot be read or was not written yet."""
    is_alive: bool


@dataclass(slots=True)
class SeenNamespace:
    """Blocks of one model, layout and epoch."""

    path: Path
    owner: SeenEngine | None
    """The only engine that reads these blocks; None if all engines with this fingerprint read
    them."""
    num_blocks: int = 0
    num_bytes: int = 0
    """Disk usage of everything in `path`, including directories, in bytes."""
    used_ns: int = 0
    """When a block was last used, in nanoseconds since 1970. In an empty namespace, when its
    directories last changed."""
    description: NamespaceDescription | None = None
    """What it is made of; None if that is not known."""
    blocks: list[BlockFile] = field(default_factory=list)
    """All blocks, if `survey` was called with `keep_blocks`; otherwise empty."""

    @property
    def name(self) -> str:
        """The fingerprint as hex digits."""
        return self.path.name


@dataclass(frozen=True, slots=True)
class Stray:
    """A file or directory that no engine has made."""

    path: str
    num_bytes: int
    """As `du` counts them. For a directory: with everything below it, except hidden files."""


@dataclass(slots=True)
class Survey:
    """The content of a root."""

    balance: Balance | None
    """The content of the ledger; None if it cannot be read."""
    engines: list[SeenEngine]
    namespaces: list[SeenNamespace] = field(default_factory=list)
    """Without the private namespaces of dead engines, which no engine reads any more."""
    strays: list[Stray] = field(default_factory=list)
    num_bytes: int = 0
    """As `du` counts them, except for directories of the file system itself (`lost+found`,
    snapshots)."""
    hidden_bytes: int = 0
    """The part of `num_bytes` in the file system's own files, which the ledger does not count."""
    is_steady: bool = False
    """True if the ledger did not change during the survey."""

    @property
    def num_blocks(self) -> int:
        return sum(space.num_blocks for space in self.namespaces)

    @property
    def ledger_error(self) -> int | None:
        """The bytes in the ledger minus the bytes found, without strays and hidden files. None if
        the difference says nothing, because the ledger cannot be read, the root was changing, or
        bytes are reserved."""
        if self.balance is None or not self.is_steady or self.balance.reserved:
            return None
        strays = sum(stray.num_bytes for stray in self.strays)
        return self.balance.total - (self.num_bytes - self.hidden_bytes - strays)

    def live_users(self, name: str) -> list[SeenEngine]:
        """The live engines that read the namespace `name`, and live engines without `info`, which
        may read it."""
        return [
            engine
            for engine in self.engines
            if engine.is_alive and (engine.info is None or engine.info.namespace == name)
        ]


def ledger_remark(seen: Survey) -> str | None:
    """Say what is wrong with the ledger, and the remedy. None if no error is known."""
    if seen.balance is None:
        return (
            "the ledger cannot be read: the next engine that starts counts again, or "
            "`kvtier store gc` does"
        )
    error = seen.ledger_error
    if not error:
        return None
    remark = (
        f"the ledger says {abs(error)} bytes {'more' if error > 0 else 'less'} than there are: "
        "`kvtier store gc` counts again"
    )
    if any(engine.is_alive for engine in seen.engines):
        return f"{remark}. Engines measure it when they have stored nothing for a second"
    return remark


def read_balance(root: Path) -> Balance | None:
    """Return the last saved balance. Takes no lock. None if there is no ledger, or if it cannot be
    read. Raises `OSError` or `LedgerVersion`."""
    try:
        fd = NoFollowTree(root).open(root / "ledger", _OPEN)
    except FileNotFoundError:
        return None
    try:
        for _ in range(_NUM_TRIES):  # both copies may be overwritten while we read them
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


def read_engines(root: Path) -> list[SeenEngine]:
    """All engines with a presence, dead or alive. Raises `OSError`."""
    tree, engines = NoFollowTree(root), root / "engines"
    try:
        names = engines_in(tree, engines)
    except FileNotFoundError:
        return []
    found = [_read_engine(tree, engines, name) for name in names]
    return [engine for engine in found if engine is not None]


def _read_engine(tree: NoFollowTree, engines: Path, name: str) -> SeenEngine | None:
    """Return None if the entry `name` has an engine's name but was made by something else."""
    directory = engines / name
    try:
        fd = tree.open(alive_file(engines, name), _OPEN)
    except FileNotFoundError:
        return SeenEngine(name, directory, None, False) if tree.is_directory(directory) else None
    except OSError as error:
        if error.errno not in _GONE + _NO_FILE:
            raise
        return None
    try:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            return None
        return SeenEngine(name, directory, EngineInfo.decode(os.pread(fd, 4096, 0)), _is_locked(fd))
    finally:
        os.close(fd)


def _is_locked(fd: int) -> bool:
    """True if an engine holds the lock. Takes a shared lock for a moment to find out: no other
    query of a lock works across hosts and containers."""
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:  # if the lock cannot be tested, the engine counts as alive
        return True
    fcntl.flock(fd, fcntl.LOCK_UN)
    return False


# --- what is there -----------------------------------------------------------------------------


def survey(root: Path, *, keep_blocks: bool = False) -> Survey:
    """Look at every file once. `keep_blocks`: keep a list of all blocks. Raises `OSError` or
    `LedgerVersion`."""
    before = read_balance(root)
    walk = _SurveyWalk(NoFollowTree(root), Survey(before, read_engines(root)), keep_blocks)
    walk.look_at(root)
    seen = walk.seen
    seen.balance = after = read_balance(root)
    seen.is_steady = before is not None and after is not None and before.revision == after.revision
    return seen


def disk_usage(tree: NoFollowTree, directory: Path) -> int:
    """Bytes of a directory as `du` counts them; 0 if it is missing. Raises `OSError`."""
    walk = _SurveyWalk(tree, Survey(None, []), keep_blocks=False)
    try:
        walk.count_all(str(directory), tree.lstat(directory))
    except FileNotFoundError:
        return 0
    return walk.seen.num_bytes


class _SurveyWalk:
    """Walks through a root, and adds up in `seen` what it finds."""

    def __init__(self, tree: NoFollowTree, seen: Survey, keep_blocks: bool) -> None:
        self._tree = tree
        self.seen = seen
        self._keep_blocks = keep_blocks
        self._linked: set[int] = set()
        """Inodes of files with more than one name that were counted already."""

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
                self._look_at_engines(path)
            elif name == "ledger" and not is_directory:
                self._count(status)
            else:
                self._note_stray(path, status)

    def _look_at_engines(self, engines: str) -> None:
        by_name = {engine.name: engine for engine in self.seen.engines}
        for path, status in self._entries(engines):
            name = _name(path)
            is_directory = stat.S_ISDIR(status.st_mode)
            engine = by_name.get(name.removesuffix(".alive"))
            is_ours = is_presence_name(name) and is_directory is is_engine_name(name)
            if engine is None or not is_ours:
                self._note_stray(path, status)
                continue
            self._count(status)
            for inner, inner_status in self._entries(path, status):
                if _name(inner) == "blocks" and engine.is_alive:
                    self._count(inner_status)
                    self._look_at_namespaces(inner, engine)
                elif is_staged_name(_name(inner)):
                    self.count_all(inner, inner_status)
                else:
                    self._note_stray(inner, inner_status)

    def _look_at_namespaces(self, blocks: str, owner: SeenEngine | None) -> None:
        for path, status in self._entries(blocks):
            if not is_namespace_name(_name(path)) or not stat.S_ISDIR(status.st_mode):
                self._note_stray(path, status)
                continue
            with self._counted_for(SeenNamespace(Path(path), owner)) as space:
                self._count(status)
                newest = status.st_mtime_ns
                for inner, inner_status in self._entries(path):
                    if _name(inner) == DESCRIPTION_FILE and stat.S_ISREG(inner_status.st_mode):
                        self._count(inner_status)
                        space.description = read_description(self._tree, space.path)
                    elif _name(inner) in _SHARDS and stat.S_ISDIR(inner_status.st_mode):
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
        seen = self.seen
        before = seen.num_bytes - seen.hidden_bytes
        self.count_all(path, status)
        seen.strays.append(Stray(path, seen.num_bytes - seen.hidden_bytes - before))

    def _count_hidden(self, status: os.stat_result) -> None:
        """Count a hidden file. Hidden directories are skipped: a directory of snapshots repeats the
        whole root."""
        if not stat.S_ISDIR(status.st_mode):
            before = self.seen.num_bytes
            self._count(status)
            self.seen.hidden_bytes += self.seen.num_bytes - before

    def count_all(self, path: str, status: os.stat_result) -> None:
        """Count a file, or a directory with everything below."""
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
        """Yield the path and the status of each entry of a directory. Yields nothing if `status`
        says that it is not a directory, or if the directory has disappeared or was replaced by
        something else."""
        if status is not None and not stat.S_ISDIR(status.st_mode):
            return
        try:
            for entry in self._tree.scan(directory):
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
