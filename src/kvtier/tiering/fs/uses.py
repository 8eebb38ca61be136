"""Writes down when blocks were used, where every engine can see it: in the files' time stamps."""

from __future__ import annotations

import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from math import inf

from kvtier.base import OffloadKey
from kvtier.tiering.fs.below import Below
from kvtier.tiering.fs.names import LONGEST_KEY, block_path

__all__ = ["Uses"]

_WRITE_EVERY_S = 0.5
_SAME_USE_NS = 10 * 10**9
"""A block that was used again so soon is as recent as it was."""
_MAX_WAITING = 65_536
"""Blocks whose uses wait to be noted. More: the oldest uses are forgotten."""
_MAX_KNOWN = 16_384
"""Blocks whose time stamps are remembered, and blocks that were found absent."""
_LONGEST_END_S = 0.5
"""How long uses are still written once the end has come."""


class Uses:
    """A thread that notes uses. What comes faster than it can write is forgotten, and with it only
    how recently some blocks were used."""

    def __init__(
        self,
        below: Below,
        on_error: Callable[[OSError], None],
        is_coming: Callable[[OffloadKey], bool],
    ) -> None:
        """Both are called on the thread. `is_coming`: whether a block is being written. It is as
        recent as can be, and not there yet."""
        self._below = below
        self._on_error = on_error
        self._is_coming = is_coming
        self._lock = threading.Lock()
        """Held for `_waiting` and `_absent`, never during I/O."""
        self._waiting: deque[tuple[str, Sequence[OffloadKey], int]] = deque()
        self._num_waiting = 0
        """Blocks in there."""
        self._absent: OrderedDict[OffloadKey, str] = OrderedDict()
        """Blocks that were used and had no file, by the namespace looked into; the latest come
        last."""
        self._stamps: dict[tuple[str, OffloadKey], int] = {}
        """The thread's own: time stamps that it has seen or set. They save a look at the file of a
        block that every other request uses."""
        self._stopped = threading.Event()
        self._deadline = inf
        """When the thread stops writing, by the monotonic clock."""
        self._thread = threading.Thread(target=self._run, name="kvtier-fs-uses", daemon=True)

    def start(self) -> None:
        self._thread.start()

    # --- the scheduler's side: none of these waits for a file ----------------------------------

    def note(self, namespace: str, keys: Sequence[OffloadKey]) -> None:
        """A request uses these blocks, in prompt order."""
        keys = keys[:_MAX_WAITING]
        with self._lock:
            self._waiting.append((namespace, keys, time.time_ns()))
            self._num_waiting += len(keys)
            while self._num_waiting > _MAX_WAITING:
                self._num_waiting -= len(self._waiting.popleft()[1])

    def take_absent(self, namespace: str, keys: Sequence[OffloadKey]) -> list[OffloadKey]:
        """Those of these blocks whose file was not there when an earlier use was to be noted. Named
        once: the next use looks again."""
        absent = self._absent
        if not absent:
            return []
        with self._lock:
            found = [key for key in keys if key in absent]
            return [key for key in found if absent.pop(key) == namespace]

    def note_present(self, keys: Sequence[OffloadKey]) -> None:
        """These blocks are there now."""
        absent = self._absent
        if absent:
            with self._lock:
                for key in keys:
                    absent.pop(key, None)

    def forget_absent(self) -> None:
        """Another namespace is used from now on."""
        with self._lock:
            self._absent.clear()

    def stop(self) -> None:
        """Write what there is to write, for a moment, and end; the rest is forgotten. Waits, if
        need be for one file. Without a start, changes nothing."""
        self._deadline = time.monotonic() + _LONGEST_END_S
        self._stopped.set()
        if self._thread.ident is not None:
            self._thread.join()

    # --- on the thread -------------------------------------------------------------------------

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
            # Of one prompt, the head is the last to leave.
            stamp = when_ns - position
            known = self._stamps.get((namespace, key))
            if known is not None and stamp - known <= _SAME_USE_NS:
                continue
            if time.monotonic() > self._deadline:
                return
            path = block_path(namespace, key)
            try:
                known = self._below.lstat(path).st_mtime_ns
                if stamp - known > _SAME_USE_NS:
                    self._below.utime(path, stamp)
                    known = stamp
            except FileNotFoundError:
                self._note_absent(namespace, key)
                continue
            except OSError as error:
                self._on_error(error)
                return
            if len(self._stamps) >= _MAX_KNOWN:
                self._stamps.clear()
            self._stamps[namespace, key] = known

    def _note_absent(self, namespace: str, key: OffloadKey) -> None:
        with self._lock:
            self._absent[key] = namespace
            self._absent.move_to_end(key)
            if len(self._absent) > _MAX_KNOWN:
                self._absent.popitem(last=False)
