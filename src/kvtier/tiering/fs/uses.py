"""Times of use of the blocks in a root, and which blocks have a file.

`UseStamps` writes the times of uses into the files' mtimes, where every engine sees them.
"""

from __future__ import annotations

import stat
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from math import inf

from kvtier.base import OffloadKey
from kvtier.tiering.fs.access import NoFollowTree
from kvtier.tiering.fs.layout import LONGEST_KEY, block_path
from kvtier.tiering.io.lookups import AbsentBlocks

__all__ = ["NUM_LOOKUP_THREADS", "UseStamps", "find_files"]

NUM_LOOKUP_THREADS = 4

_WRITE_EVERY_S = 0.5
_SAME_USE_NS = 10 * 10**9
"""A time stamp younger than this is not written again."""
_MAX_WAITING = 65_536
"""Blocks whose uses wait to be written; beyond that, the oldest uses are dropped."""
_MAX_KNOWN = 16_384
"""Largest number of blocks with a remembered time stamp."""
_LONGEST_END_S = 0.5
"""How long uses are still written at shutdown, in seconds."""


def find_files(
    tree: NoFollowTree,
    on_error: Callable[[OSError], None],
    namespace: str,
    keys: Sequence[OffloadKey],
) -> Iterator[bool]:
    """Yield for each block whether it has a file. A lookup thread calls this."""
    for key in keys:
        try:
            status = tree.lstat(block_path(namespace, key))
        except FileNotFoundError:
            yield False
        except OSError as error:
            on_error(error)
            yield False
        else:
            yield stat.S_ISREG(status.st_mode)


class UseStamps:
    """A thread that writes the times of uses into the files' mtimes. If uses come faster than it
    can write, the oldest are dropped. The blocks then seem to have been unused for longer than they
    really were."""

    def __init__(
        self,
        tree: NoFollowTree,
        on_error: Callable[[OSError], None],
        is_coming: Callable[[OffloadKey], bool],
    ) -> None:
        """`on_error` and `is_coming` are called on the thread. `is_coming`: returns True while this
        engine writes the block, which then has no file yet."""
        self._tree = tree
        self._on_error = on_error
        self._is_coming = is_coming
        self._lock = threading.Lock()
        """Protects `_waiting`. Never held during I/O."""
        self._waiting: deque[tuple[str, Sequence[OffloadKey], int]] = deque()
        self._num_waiting = 0
        """Number of blocks in `_waiting`."""
        self.absent = AbsentBlocks()
        """Used blocks that had no file."""
        self._stamps: dict[tuple[str, OffloadKey], int] = {}
        """Time stamps that the thread has seen or set. They save an `lstat` for blocks that are
        used often. Only the thread uses them."""
        self._stopped = threading.Event()
        self._deadline = inf
        """When the thread stops writing, in seconds on the monotonic clock."""
        self._thread = threading.Thread(target=self._run, name="kvtier-fs-uses", daemon=True)

    def start(self) -> None:
        self._thread.start()

    # --- the scheduler's thread: only `stop` waits for a file ----------------------------------

    def note(self, namespace: str, keys: Sequence[OffloadKey]) -> None:
        """Record that a request uses these blocks, in prompt order."""
        keys = keys[:_MAX_WAITING]
        with self._lock:
            self._waiting.append((namespace, keys, time.time_ns()))
            self._num_waiting += len(keys)
            while self._num_waiting > _MAX_WAITING:
                self._num_waiting -= len(self._waiting.popleft()[1])

    def stop(self) -> None:
        """Write uses for 0.5 s at most, drop the rest, and end the thread. May wait longer for one
        file that the thread is writing. Does nothing before `start`."""
        self._deadline = time.monotonic() + _LONGEST_END_S
        self._stopped.set()
        if self._thread.ident is not None:
            self._thread.join()

    # --- the thread ----------------------------------------------------------------------------

    def _run(self) -> None:
        is_last = False
        while not is_last:
            is_last = self._stopped.wait(_WRITE_EVERY_S)
            while self._waiting and time.monotonic() <= self._deadline:
                self._write(*self._take())

    def _take(self) -> tuple[str, Sequence[OffloadKey], int]:
        with self._lock:
            batch = self._waiting.popleft()
            self._num_waiting -= len(batch[1])
        return batch

    def _write(self, namespace: str, keys: Sequence[OffloadKey], when_ns: int) -> None:
        for position, key in enumerate(keys):
            if len(key) > LONGEST_KEY or self._is_coming(key):
                continue
            # Later blocks of a prompt count as older, so that its head is evicted last.
            stamp = when_ns - position
            known = self._stamps.get((namespace, key))
            if known is not None and stamp - known <= _SAME_USE_NS:
                continue
            if time.monotonic() > self._deadline:
                return
            path = block_path(namespace, key)
            try:
                known = self._tree.lstat(path).st_mtime_ns
                if stamp - known > _SAME_USE_NS:
                    self._tree.utime(path, stamp)
                    known = stamp
            except FileNotFoundError:
                self.absent.add(namespace, [key])
                continue
            except OSError as error:
                self._on_error(error)
                return
            if len(self._stamps) >= _MAX_KNOWN:
                self._stamps.clear()
            self._stamps[namespace, key] = known
