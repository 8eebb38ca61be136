"""Knows what every engine has done to a root, and so what must be found in it."""

from __future__ import annotations

import fcntl
import os
import stat
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from kvtier.tiering.fs.ledger import Balance, Ledger, LedgerLost
from tests.tiering.fs.crash.nursery import Report
from tests.tiering.sagas import Violation

_PROBES_BYTES = 32_768
"""Of files by which engines that start try out the file system, for a moment."""
_EMPTY_SEAT_BYTES = 8192


@dataclass(slots=True)
class _Tree:
    """A root as it is."""

    num_bytes: int = 0
    """As `du` counts them."""
    blocks: set[str] = field(default_factory=set)
    """Published, relative to `blocks`."""
    seats: dict[str, int] = field(default_factory=dict)
    """By name of an engine: the bytes of its seat."""
    strange_modes: list[str] = field(default_factory=list)


class Oracle:
    """Follows the reports of all lives on one root, and looks at it."""

    def __init__(self, root: Path, max_bytes: int) -> None:
        self.tally: Counter[str] = Counter()
        self._root = root
        self._max_bytes = max_bytes
        self._there: set[str] = set()
        """Blocks that must be there: published, and nobody has begun to evict them."""
        self._ever: set[tuple[str, str]] = set()
        """Namespace and name of all that was ever published, or was about to be, by engines for
        themselves too."""
        self._namespaces: dict[int, str] = {}
        """By life, the namespace that it shares with others."""
        self._disowned: set[str] = set()
        """Seats of dead engines whose accounts were lost with the ledger."""
        self._found: set[str] = set()

    # --- what a life reports -------------------------------------------------------------------

    def follow(self, report: Report) -> None:
        """Take note of a report. Raises `Violation`."""
        number, what, *rest = report
        match [what, *rest]:
            case ["opened", namespace]:
                self._namespaces[number] = namespace
            case ["publishes", paths]:
                for path in paths:
                    namespace, _, name = path.rsplit("/", 2)
                    self._ever.add((Path(namespace).name, name))
            case ["published", paths]:
                blocks = f"{self._root}/blocks/"
                public = [path for path in paths if path.startswith(blocks)]
                self._there.update(path.removeprefix(blocks) for path in public)
            case ["leaves", path]:
                self._there.discard(path)
                if path.partition("/")[0] != self._namespaces[number]:
                    raise Violation(f"life {number} has evicted {path}, of another namespace")
            case ["stored", namespace, names]:
                never = [name for name in names if (namespace, name) not in self._ever]
                if never:
                    raise Violation(f"life {number} says that it has stored {never}: it has not")
                self.tally["blocks stored"] += len(names)
            case ["found", names]:
                self._found.update(names)
                self.tally["blocks found"] += len(names)
            case ["inspected"]:
                self._check_found(self._namespaces[number])
            case ["evicted", count]:
                self.tally["evictions"] += count
            case ["epoch", _]:
                self.tally["epochs"] += 1
            case ["at", point]:
                self.tally[f"killed: {point}"] += 1
            case ["shut down"]:
                self.tally["clean ends"] += 1
            case ["wrong", text]:
                raise Violation(f"life {number}: {text}")
            case ["ended", status]:
                if status not in (0, -9):
                    raise Violation(f"life {number} has ended with status {status}")
                self.tally["kills"] += status == -9

    def _check_found(self, namespace: str) -> None:
        expected = {path for path in self._there if path.partition("/")[0] == namespace}
        lost = {path for path in expected if path.rpartition("/")[2] not in self._found}
        if lost:
            raise Violation(f"{len(lost)} of {len(expected)} blocks were not found: {sorted(lost)}")

    # --- the root ------------------------------------------------------------------------------

    def look(self) -> None:
        """At a standstill, with all that was reported followed: what holds at every moment."""
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
        # Engines that have died on their way to their seat have no account.
        strays = sum(
            num_bytes if engine in self._disowned else min(num_bytes, _EMPTY_SEAT_BYTES)
            for engine, num_bytes in tree.seats.items()
            if bytes.fromhex(engine) not in balance.accounts
        )
        if tree.num_bytes - strays > balance.total + _PROBES_BYTES:
            raise Violation(
                f"the ledger says at most {balance.total}, and du {tree.num_bytes}, with seats "
                f"{tree.seats}: {balance}"
            )

    def note_lost_ledger(self) -> None:
        """When nobody lives."""
        self.tally["ledgers lost"] += 1
        self._disowned.update(self._read_tree().seats)

    def look_at_the_end(self) -> None:
        """When all engines have left, the last one cleanly: nothing but blocks is left."""
        self.look()
        tree = self._read_tree()
        balance = self._read_balance()
        if balance is None:
            raise Violation("the ledger cannot be read, or someone has it locked")
        if tree.seats or balance.accounts:
            raise Violation(f"seats {list(tree.seats)} and accounts {balance.accounts} are left")
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
                    tree.seats[engine] = tree.seats.get(engine, 0) + num_bytes
            parts = place.split("/")
            if parts[0] == "blocks" and len(parts) == 3:
                tree.blocks.update(f"{parts[1]}/{parts[2]}/{name}" for name in files)
        return tree

    def _read_balance(self) -> Balance | None:
        """None: someone is changing it, or nobody has written it yet."""
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
