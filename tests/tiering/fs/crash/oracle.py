"""The oracle of the fs tier: from what all engines did to a root, what must be found in it."""

from __future__ import annotations

import fcntl
import os
import stat
from dataclasses import dataclass, field
from pathlib import Path

from kvtier.tiering.fs.ledger import Balance, Ledger, LedgerLost
from tests.tiering.crash.oracle import ReportFollower, Violation

_PROBES_BYTES = 32_768
"""Temporary files with which an engine that starts tries out the file system."""
_EMPTY_PRESENCE_BYTES = 8192


@dataclass(slots=True)
class _Tree:
    """A root as it is."""

    num_bytes: int = 0
    """As `du` counts them."""
    blocks: set[str] = field(default_factory=set)
    """Paths of published blocks, relative to `blocks`."""
    presences: dict[str, int] = field(default_factory=dict)
    """Bytes of each engine's presence, by its name."""
    strange_modes: list[str] = field(default_factory=list)


class Oracle(ReportFollower):
    """Follows the reports of all lives on one root, and checks the root itself."""

    def __init__(self, root: Path, max_bytes: int) -> None:
        super().__init__()
        self._root = root
        self._max_bytes = max_bytes
        self._there: set[str] = set()
        """Blocks that must be there: published, and their eviction has not begun."""
        self._ever: set[tuple[str, str]] = set()
        """(Namespace, name) of every block that was published or about to be, also in private
        namespaces."""
        self._namespaces: dict[int, str] = {}
        """The shared namespace of each life."""
        self._disowned: set[str] = set()
        """Presences of dead engines whose accounts were lost with the ledger."""
        self._found: set[str] = set()

    # --- what a life reports -------------------------------------------------------------------

    def on_opened(self, number: int, namespace: str) -> None:
        self._namespaces[number] = namespace

    def on_publishes(self, number: int, paths: list[str]) -> None:
        for path in paths:
            namespace, _, name = path.rsplit("/", 2)
            self._ever.add((Path(namespace).name, name))

    def on_published(self, number: int, paths: list[str]) -> None:
        blocks = f"{self._root}/blocks/"
        public = [path for path in paths if path.startswith(blocks)]
        self._there.update(path.removeprefix(blocks) for path in public)

    def on_leaves(self, number: int, path: str) -> None:
        self._there.discard(path)
        if path.partition("/")[0] != self._namespaces[number]:
            raise Violation(f"life {number} has evicted {path}, of another namespace")

    def on_stored(self, number: int, namespace: str, names: list[str]) -> None:
        never = [name for name in names if (namespace, name) not in self._ever]
        if never:
            raise Violation(f"life {number} says that it has stored {never}: it has not")
        self.tally["blocks stored"] += len(names)

    def on_found(self, number: int, names: list[str]) -> None:
        self._found.update(names)
        self.tally["blocks found"] += len(names)

    def on_inspected(self, number: int) -> None:
        self._check_found(self._namespaces[number])

    def on_evicted(self, number: int, count: int) -> None:
        self.tally["evictions"] += count

    def on_epoch(self, number: int, namespace: str) -> None:
        self.tally["epochs"] += 1

    def _check_found(self, namespace: str) -> None:
        expected = {path for path in self._there if path.partition("/")[0] == namespace}
        lost = {path for path in expected if path.rpartition("/")[2] not in self._found}
        if lost:
            raise Violation(f"{len(lost)} of {len(expected)} blocks were not found: {sorted(lost)}")

    # --- the root ------------------------------------------------------------------------------

    def look(self) -> None:
        """Check what must hold at any moment. Called at a standstill, after all reports."""
        if not self._root.exists():
            return
        self.tally["looks"] += 1
        tree = self._read_tree()
        if tree.num_bytes > self._max_bytes:
            raise Violation(
                f"du says {tree.num_bytes}, more than max_bytes {self._max_bytes}: "
                f"{self._read_balance()}"
            )
        lost = self._there - tree.blocks
        if lost:
            raise Violation(f"{len(lost)} blocks have gone, and nobody evicted them: {lost}")
        if tree.strange_modes:
            raise Violation(f"others may read {tree.strange_modes}")
        balance = self._read_balance()
        if balance is None:
            return
        # An engine that was killed while it made its presence has no account.
        strays = sum(
            num_bytes if engine in self._disowned else min(num_bytes, _EMPTY_PRESENCE_BYTES)
            for engine, num_bytes in tree.presences.items()
            if bytes.fromhex(engine) not in balance.accounts
        )
        if tree.num_bytes - strays > balance.total + _PROBES_BYTES:
            raise Violation(
                f"the ledger says at most {balance.total}, and du {tree.num_bytes}, with presences "
                f"{tree.presences}: {balance}"
            )

    def note_lost_ledger(self) -> None:
        """Called when no life runs."""
        self.tally["ledgers lost"] += 1
        self._disowned.update(self._read_tree().presences)

    def look_at_the_end(self) -> None:
        """Check that only blocks are left. Called when all lives have ended, the last one by a
        shutdown."""
        self.look()
        tree = self._read_tree()
        balance = self._read_balance()
        if balance is None:
            raise Violation("the ledger cannot be read, or someone has it locked")
        if tree.presences or balance.accounts:
            raise Violation(
                f"presences {list(tree.presences)} and accounts {balance.accounts} are left"
            )
        if balance.total != tree.num_bytes:
            raise Violation(f"the ledger says {balance.total}, and du {tree.num_bytes}: {balance}")
        if balance.num_blocks != len(tree.blocks):
            raise Violation(
                f"{balance.num_blocks} blocks by the ledger, in fact {len(tree.blocks)}"
            )
        self.tally["blocks left"] += len(tree.blocks)

    def _read_tree(self) -> _Tree:
        tree = _Tree(os.lstat(self._root).st_blocks * 512)
        seen: set[int] = set()
        for directory, directories, files in os.walk(self._root):
            place = os.path.relpath(directory, self._root)
            for name in directories + files:
                path = f"{place}/{name}".removeprefix("./")
                status = os.lstat(f"{directory}/{name}")
                expected = 0o700 if stat.S_ISDIR(status.st_mode) else 0o600
                if stat.S_IMODE(status.st_mode) != expected:
                    tree.strange_modes.append(path)
                if status.st_ino in seen:
                    continue
                seen.add(status.st_ino)
                num_bytes = status.st_blocks * 512
                tree.num_bytes += num_bytes
                parts = path.split("/")
                if parts[0] == "engines" and len(parts) > 1:
                    engine = parts[1].removesuffix(".alive")
                    tree.presences[engine] = tree.presences.get(engine, 0) + num_bytes
            parts = place.split("/")
            if parts[0] == "blocks" and len(parts) == 3:
                tree.blocks.update(f"{parts[1]}/{parts[2]}/{name}" for name in files)
        return tree

    def _read_balance(self) -> Balance | None:
        """None: the ledger is locked, or was never written."""
        ledger = self._root / "ledger"
        if not ledger.exists():
            return None
        with open(ledger, "rb") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return None
            opened = Ledger(ledger)
            try:
                return opened.read()
            except LedgerLost:
                return None
            finally:
                opened.close()
