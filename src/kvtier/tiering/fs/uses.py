"""Writes down when blocks were used, where every engine can see it: in the files' time stamps."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence

from kvtier.base import OffloadKey
from kvtier.tiering.fs.below import Below
from kvtier.tiering.fs.names import LONGEST_KEY, block_path

__all__ = ["Uses"]

_WRITE_EVERY_S = 0.5
_SAME_USE_NS = 10 * 10**9
"""A block that was used again so soon is as recent as it was."""
_MAX_WAITING = 1024
_MAX_KNOWN = 16_384
"""Blocks whose time stamps are remembered, and blocks that were found absent."""


class Uses:
    """A thread that notes uses. What comes faster than it can write is forgotten, and with it only
    how recently some blocks were used."""

    def __init__(self, below: Below, on_error: Callable[[OSError], None]) -> None:
        self._below = below
        self._on_error = on_error
        self._waiting: deque[tuple[str, Sequence[OffloadKey], int]] = deque(maxlen=_MAX_WAITING)
        self._stamps: dict[tuple[str, OffloadKey], int] = {}
        """The thread's own: time stamps that it has seen or set. They save a look at the file of a
        block that every other request uses."""
        self._absent: dict[OffloadKey, str] = {}
        """Blocks that were used and had no file, by the namespace looked into. The thread puts them
        in, the scheduler takes them out."""
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="kvtier-fs-uses", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def note(self, namespace: str, keys: Sequence[OffloadKey]) -> None:
        """A request uses these blocks, in prompt order. The scheduler's thread; does not wait."""
        self._waiting.append((namespace, keys, time.time_ns()))

    def take_absent(self, namespace: str, keys: Sequence[OffloadKey]) -> list[OffloadKey]:
        """Those of these blocks whose file was not there when an earlier use was to be noted. Named
        once: the next use looks again. The scheduler's thread; does not wait."""
        absent = self._absent
        found = [key for key in keys if key in absent] if absent else []
        return [key for key in found if absent.pop(key, None) == namespace]

    def stop(self) -> None:
        """Write what there is to write, and end. Waits. Without a start, changes nothing."""
        self._stopped.set()
        if self._thread.ident is not None:
            self._thread.join()

    def _run(self) -> None:
        is_last = False
        while not is_last:
            is_last = self._stopped.wait(_WRITE_EVERY_S)
            while self._waiting:
                self._write(*self._waiting.popleft())

    def _write(self, namespace: str, keys: Sequence[OffloadKey], when_ns: int) -> None:
        for position, key in enumerate(keys):
            if len(key) > LONGEST_KEY:
                continue
            # Of one prompt, the head is the last to leave.
            stamp = when_ns - position
            known = self._stamps.get((namespace, key))
            if known is not None and stamp - known <= _SAME_USE_NS:
                continue
            path = block_path(namespace, key)
            try:
                known = self._below.lstat(path).st_mtime_ns
                if stamp - known > _SAME_USE_NS:
                    self._below.utime(path, stamp)
                    known = stamp
            except FileNotFoundError:
                if len(self._absent) < _MAX_KNOWN:
                    self._absent[key] = namespace
                continue
            except OSError as error:
                self._on_error(error)
                return
            if len(self._stamps) >= _MAX_KNOWN:
                self._stamps.clear()
            self._stamps[namespace, key] = known
