"""Finds the blocks that were not used for the longest time, and what dead engines have left.

When a block was used stands in the time stamp of its file, which every engine on every host sees.
Nobody keeps a list of all blocks: where there are many, some of the directories are looked into,
chosen at random, and the oldest of what is found there leave.
"""

from __future__ import annotations

import logging
import random
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path

from kvtier.tiering.fs.books import Books, SeatLost
from kvtier.tiering.fs.clearing import remove_namespace
from kvtier.tiering.fs.names import SHARDS
from kvtier.tiering.fs.tree import BlockFile, read_shard

__all__ = ["Sweeper"]

logger = logging.getLogger(__name__)

_ENOUGH = 20_000
"""How many blocks are looked at to find the oldest."""
_OLD_PART = 3
"""Of those, one in so many may leave before others are looked at."""
_CLOCKS_DIFFER_NS = 60 * 10**9
_RECLAIM_EVERY_S = 5.0
_NOTHING_FOUND_S = 1.0
"""So long after nothing was found, nothing is looked for."""


class Sweeper:
    """A thread for what takes long. The clerk takes what it has found."""

    def __init__(
        self,
        books: Books,
        on_found: Callable[[], None],
        on_error: Callable[[OSError], None],
    ) -> None:
        """Both are called on the thread."""
        self._books = books
        self._on_found = on_found
        self._on_error = on_error
        self._wake = threading.Event()
        self._lock = threading.Lock()
        self._namespaces: Sequence[Path] = ()
        self._junk: deque[Path] = deque()
        self._stock: deque[BlockFile] = deque()
        self._num_asked = 0
        self.num_own, self.num_all = 1, 1
        """How many blocks there were that may leave, and in all, when all were looked at last."""
        self._nothing_until = 0.0
        self._reclaim_at = 0.0
        self._is_stopping = False
        self._chance = random.Random()
        self._thread = threading.Thread(target=self._run, name="kvtier-fs-sweeper", daemon=True)

    def start(self) -> None:
        self._thread.start()

    # --- any thread ----------------------------------------------------------------------------

    def use(self, namespaces: Sequence[Path], junk: Path | None) -> None:
        """From now on blocks leave from these. Those of `junk` are of use to nobody."""
        with self._lock:
            self._namespaces = namespaces
            if junk is not None:
                self._junk.append(junk)
            self._stock.clear()
            self._nothing_until = 0.0
        self._wake.set()

    def take(self, count: int) -> list[BlockFile]:
        """Blocks that may leave, oldest first. Where they are fewer than asked for, more are looked
        for, and `on_found` is called."""
        with self._lock:
            taken = [self._stock.popleft() for _ in range(min(count, len(self._stock)))]
            self._num_asked = count - len(taken)
            if self._num_asked:
                self._wake.set()
        return taken

    @property
    def is_exhausted(self) -> bool:
        """Whether there is nothing that may leave, as far as is known."""
        return not self._stock and time.monotonic() < self._nothing_until

    @property
    def is_removing(self) -> bool:
        """Whether there is, or was a moment ago, something in our seat that is being removed."""
        return bool(self._junk)

    def look_again(self) -> None:
        """There are new blocks: that nothing was found says nothing any more."""
        self._nothing_until = 0.0

    def stop(self) -> None:
        """Waits for what it is at. Once more, or without a start, changes nothing."""
        self._is_stopping = True
        self._wake.set()
        if self._thread.ident is not None:
            self._thread.join()

    # --- on the thread -------------------------------------------------------------------------

    def _run(self) -> None:
        while not self._is_stopping:
            for chore in (self._look_if_asked, self._reclaim, self._remove_junk):
                self._do(chore)
            self._wake.wait(_RECLAIM_EVERY_S)
            self._wake.clear()

    def _do(self, chore: Callable[[], None]) -> None:
        """One that fails must not keep the others from being done."""
        try:
            chore()
        except SeatLost:
            pass  # the clerk takes another
        except OSError as error:
            self._on_error(error)
        except Exception:
            logger.exception("%s: sweeping has failed", self._books.path)

    def _reclaim(self) -> None:
        if time.monotonic() >= self._reclaim_at:
            self._reclaim_at = time.monotonic() + _RECLAIM_EVERY_S
            if self._books.reclaim():
                self._nothing_until = 0.0
                self._on_found()

    def _remove_junk(self) -> None:
        for _ in range(len(self._junk)):
            if self._is_stopping:
                return
            namespace = self._junk[0]
            try:
                remove_namespace(self._books, namespace, lambda: self._is_stopping)
            except OSError:
                self._junk.rotate(-1)  # it ends with our seat
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
            # Also after an error: whoever waits must not wait for ever.
            with self._lock:
                self._num_asked = 0
                if namespaces is self._namespaces:
                    self._stock.extend(found)
                    self._nothing_until = 0.0 if found else time.monotonic() + _NOTHING_FOUND_S

    def _oldest(self, namespaces: Sequence[Path], count: int) -> list[BlockFile]:
        """The oldest of what is found; all of it, where that is little."""
        num_all = self._books.ledger.read().num_blocks  # before those who come meanwhile
        shards = list(SHARDS)
        self._chance.shuffle(shards)
        found: list[BlockFile] = []
        for shard in shards:
            if self._is_stopping:
                break
            for namespace in namespaces:
                try:
                    found += read_shard(self._books.below, namespace, shard)
                except OSError as error:  # of one directory; the others are as good as before
                    self._on_error(error)
            if len(found) >= max(_ENOUGH, 2 * _OLD_PART * count):
                break
        else:
            self.num_own, self.num_all = len(found), num_all
        # A clock that was far ahead somewhere must not make blocks immortal.
        latest = self._books.seat.now_ns() + _CLOCKS_DIFFER_NS
        found.sort(key=lambda block: block.used_ns if block.used_ns <= latest else 0)
        return found[: max(count, len(found) // _OLD_PART)]
