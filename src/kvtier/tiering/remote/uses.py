"""A thread that tells a server which blocks are used, so that it keeps them."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import TypeAlias

from kvtier.base import OffloadKey
from kvtier.tiering.io.lookups import AbsentBlocks
from kvtier.tiering.remote.errors import ServerErrors, ServerFailure
from kvtier.tiering.remote.lane import Pause

__all__ = ["Touch", "UseReports"]

_REPORT_EVERY_S = 0.5
_MAX_WAITING = 65_536
"""Blocks whose uses wait to be reported; beyond that, the oldest uses are dropped."""
_AT_ONCE = 1024

Touch: TypeAlias = Callable[[str, Sequence[OffloadKey]], Sequence[OffloadKey]]
"""Reports uses of blocks of a namespace. Returns the blocks that are not there. May raise
`ServerFailure`."""


class UseReports:
    """Passes uses to the server every half second. If they come faster than it takes them, the
    oldest are dropped."""

    def __init__(
        self, name: str, touch: Touch, errors: ServerErrors, is_coming: Callable[[OffloadKey], bool]
    ) -> None:
        """`is_coming`: True while this engine stores the block. Called on the thread."""
        self._touch = touch
        self._errors = errors
        self._is_coming = is_coming
        self.absent = AbsentBlocks()
        """Used blocks that the server did not have."""
        self._waiting: deque[tuple[str, Sequence[OffloadKey]]] = deque()
        self._num_waiting = 0
        self._lock = threading.Lock()
        """Protects what waits. Never held while the server is called."""
        self._pause = Pause()
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        self._thread.start()

    def note(self, namespace: str, keys: Sequence[OffloadKey]) -> None:
        """Record that a request uses these blocks. Scheduler thread."""
        keys = keys[:_MAX_WAITING]
        with self._lock:
            self._waiting.append((namespace, keys))
            self._num_waiting += len(keys)
            while self._num_waiting > _MAX_WAITING:
                self._num_waiting -= len(self._waiting.popleft()[1])

    def stop(self) -> None:
        """Drop what waits, and end the thread. Does nothing before `start`."""
        self._stopped.set()
        if self._thread.ident is not None:
            self._thread.join()

    def _run(self) -> None:
        while not self._stopped.wait(_REPORT_EVERY_S):
            while self._waiting and not self._stopped.is_set():
                with self._lock:
                    namespace, keys = self._waiting.popleft()
                    self._num_waiting -= len(keys)
                if self._pause.is_over:
                    self._report(namespace, keys)

    def _report(self, namespace: str, keys: Sequence[OffloadKey]) -> None:
        try:
            for start in range(0, len(keys), _AT_ONCE):
                some = [key for key in keys[start : start + _AT_ONCE] if not self._is_coming(key)]
                self.absent.add(namespace, self._touch(namespace, some))
            self._pause.forget()
        except ServerFailure as failure:
            if not self._stopped.is_set():
                self._pause.begin()
                self._errors.note(failure)
        except Exception as error:
            self._pause.begin()
            self._errors.note_unexpected(error)
