"""Finds blocks to evict, lists damaged blocks until they are removed, removes whole namespaces, and
has the files of dead engines removed.

The time of a block's last use is the mtime of its file, which every engine on every host sees. No
engine keeps a list of all blocks. To evict, an engine lists the shards (subdirectories) of its
namespaces in random order, until it has found 20,000 blocks or has listed all shards. It evicts the
oldest of the blocks found.
"""

from __future__ import annotations

import random
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import islice
from pathlib import Path

from kvtier.tiering.fs.layout import SHARDS, BlockFile, read_shard, remove_directories, shards_in
from kvtier.tiering.fs.root import PresenceLost, RootSession
from kvtier.tiering.fs.transaction import Evicted
from kvtier.tiering.io.metrics import UnexpectedErrors

__all__ = ["DamagedBlocks", "Sweeper", "remove_evicted", "remove_namespace"]

_ENOUGH = 20_000
"""Blocks to list before the oldest of them are chosen."""
_OLD_DIVISOR = 3
"""The oldest third of the listed blocks may be evicted before blocks are listed again; more of them
only if more are needed at once."""
_CLOCKS_DIFFER_NS = 60 * 10**9
"""A time stamp further in the future than this is wrong, and its block counts as the oldest."""
_RECLAIM_EVERY_S = 5.0
_NOTHING_FOUND_S = 1.0
"""Pause after a search that found nothing."""
_AT_ONCE = 256
"""Blocks of a namespace removed in one transaction, so that other engines get the ledger soon."""


class Sweeper:
    """A thread for slow work: it lists blocks that may be evicted, cleans up after dead engines,
    and removes private namespaces that this engine has left. (A namespace is private if the engine
    has begun it at a reset: no other engine reads it.) The publisher's thread takes the listed
    blocks and evicts them."""

    def __init__(
        self,
        session: RootSession,
        on_found: Callable[[], None],
        on_error: Callable[[OSError], None],
    ) -> None:
        """Both callbacks run on the sweeper's thread. `on_found`: called after each search, and
        when space was freed. `on_error`: called for every `OSError`."""
        self._session = session
        self._on_found = on_found
        self._on_error = on_error
        self._unexpected = UnexpectedErrors(
            session.path,
            "no block was found to evict, or nothing was cleaned up; tried again within 5 s",
        )
        self._wake = threading.Event()
        self._lock = threading.Lock()
        self._namespaces: Sequence[Path] = ()
        self._junk: deque[Path] = deque()
        self._stock: deque[BlockFile] = deque()
        self._num_asked = 0
        self.num_own, self.num_all = 1, 1
        """Blocks that this engine may evict, and blocks in the root, at the last complete
        listing."""
        self._nothing_until = 0.0
        self._reclaim_at = 0.0
        self._is_stopping = False
        self._chance = random.Random()
        self._thread = threading.Thread(target=self._run, name="kvtier-fs-sweeper", daemon=True)

    def start(self) -> None:
        self._thread.start()

    # --- any thread ----------------------------------------------------------------------------

    def use(self, namespaces: Sequence[Path], junk: Path | None) -> None:
        """From now on, look for blocks to evict in these namespaces. Remove the namespace `junk`,
        if given."""
        with self._lock:
            self._namespaces = namespaces
            if junk is not None:
                self._junk.append(junk)
            self._stock.clear()
            self._nothing_until = 0.0
        self._wake.set()

    def take(self, count: int) -> list[BlockFile]:
        """Take up to `count` blocks that may be evicted, oldest first. If fewer are listed, the
        thread looks for more and then calls `on_found`."""
        with self._lock:
            taken = [self._stock.popleft() for _ in range(min(count, len(self._stock)))]
            self._num_asked = count - len(taken)
            if self._num_asked:
                self._wake.set()
        return taken

    @property
    def is_exhausted(self) -> bool:
        """True if the last search found nothing to evict."""
        return not self._stock and time.monotonic() < self._nothing_until

    @property
    def is_removing(self) -> bool:
        """True while a private namespace of this engine waits to be removed or is being removed."""
        return bool(self._junk)

    def look_again(self) -> None:
        """End the pause after a search that found nothing, because new blocks were stored."""
        self._nothing_until = 0.0

    def stop(self) -> None:
        """End the thread after its current step. Waits. Idempotent; does nothing before `start`."""
        self._is_stopping = True
        self._wake.set()
        if self._thread.ident is not None:
            self._thread.join()

    # --- the thread ----------------------------------------------------------------------------

    def _run(self) -> None:
        while not self._is_stopping:
            for chore in (self._look_if_asked, self._reclaim, self._remove_junk):
                self._do(chore)
            self._wake.wait(_RECLAIM_EVERY_S)
            self._wake.clear()

    def _do(self, chore: Callable[[], None]) -> None:
        """Run one chore. If it fails, the others still run."""
        try:
            chore()
        except PresenceLost:
            pass  # the publisher joins again
        except OSError as error:
            self._on_error(error)
        except Exception as error:
            self._unexpected.log(error)

    def _reclaim(self) -> None:
        if time.monotonic() >= self._reclaim_at:
            self._reclaim_at = time.monotonic() + _RECLAIM_EVERY_S
            if self._session.reclaim():
                self._nothing_until = 0.0
                self._on_found()

    def _remove_junk(self) -> None:
        for _ in range(len(self._junk)):
            if self._is_stopping:
                return
            namespace = self._junk[0]
            try:
                remove_namespace(self._session, namespace, lambda: self._is_stopping)
            except OSError:
                self._junk.rotate(-1)  # retried later; at the latest, `RootSession.close` does it
                raise
            self._junk.popleft()
            self._on_found()

    def _look_if_asked(self) -> None:
        if self._num_asked and time.monotonic() >= self._nothing_until:
            try:
                self._look()
            finally:
                self._on_found()

    def _look(self) -> None:
        with self._lock:
            namespaces, count = self._namespaces, self._num_asked
        found: list[BlockFile] = []
        try:
            found = self._oldest(namespaces, count)
        finally:
            # Also after an error: otherwise threads would wait for space for ever.
            with self._lock:
                self._num_asked = 0
                if namespaces is self._namespaces:
                    self._stock.extend(found)
                    self._nothing_until = 0.0 if found else time.monotonic() + _NOTHING_FOUND_S

    def _oldest(self, namespaces: Sequence[Path], count: int) -> list[BlockFile]:
        """Return the oldest blocks found: a third of them, but at least `count` if there are as
        many."""
        num_all = self._session.ledger.read().num_blocks  # before the listing
        shards = list(SHARDS)
        self._chance.shuffle(shards)
        found: list[BlockFile] = []
        for shard in shards:
            if self._is_stopping:
                break
            for namespace in namespaces:
                try:
                    found += read_shard(self._session.tree, namespace, shard)
                except OSError as error:  # in one directory; the others can still be listed
                    self._on_error(error)
            if len(found) >= max(_ENOUGH, 2 * _OLD_DIVISOR * count):
                break
        else:
            self.num_own, self.num_all = len(found), num_all
        # A time stamp far in the future must not protect its block from eviction.
        latest = self._session.presence.now_ns() + _CLOCKS_DIFFER_NS
        found.sort(key=lambda block: block.used_ns if block.used_ns <= latest else 0)
        return found[: max(count, len(found) // _OLD_DIVISOR)]


class DamagedBlocks:
    """Damaged blocks that wait to be removed. Any thread adds them; the publisher's thread takes
    and evicts them."""

    def __init__(self, on_added: Callable[[], None]) -> None:
        self._on_added = on_added
        self._waiting: deque[BlockFile] = deque()
        self._paths: set[str] = set()
        """Paths of the blocks that are not removed yet."""

    def add(self, block: BlockFile) -> None:
        self._paths.add(block.path)
        self._waiting.append(block)
        self._on_added()

    def __bool__(self) -> bool:
        return bool(self._waiting)

    def __contains__(self, path: str) -> bool:
        """True until the block at this path is removed. A new block for this path is published
        after the removal."""
        return path in self._paths

    @contextmanager
    def taken(self) -> Iterator[list[BlockFile]]:
        """Take the blocks that wait. They count as removed at the end of the context, even if it
        fails: the next load of such a block finds the damage again."""
        blocks = [self._waiting.popleft() for _ in range(len(self._waiting))]
        try:
            yield blocks
        finally:
            self._paths.difference_update(block.path for block in blocks)


def remove_namespace(
    session: RootSession,
    namespace: Path,
    is_stopping: Callable[[], bool],
    on_removed: Callable[[int], None] | None = None,
) -> int:
    """Remove all blocks of a namespace, and its directories unless new blocks were stored in them.
    Stops early once `is_stopping` returns True. `on_removed` is called with the number of blocks
    after each batch. Returns the number of removed blocks. Raises `OSError` or `PresenceLost`; the
    ledger stays correct."""
    total = 0
    tree = session.tree
    for shard in [entry.name for entry in shards_in(tree, namespace)]:
        blocks = read_shard(tree, namespace, shard)
        while some := list(islice(blocks, _AT_ONCE)):
            if is_stopping():
                return total
            with session.transaction() as txn:
                gone = txn.evict(some, is_forced=True)
            remove_evicted(session, gone)
            total += len(gone)
            if on_removed is not None:
                on_removed(len(gone))
    with session.transaction() as txn:
        remove_directories(tree, namespace)
        txn.measure()
    return total


def remove_evicted(session: RootSession, gone: list[Evicted]) -> None:
    """Remove the files of evicted blocks, and give back the bytes that were reserved for them."""
    for block in gone:
        with suppress(FileNotFoundError):
            session.tree.unlink(block.temporary)
        session.give_back(block.presence, block.reserved)
