"""A thread that runs jobs in order, and that gets the GIL quickly beside a busy engine."""

from __future__ import annotations

import logging
import sys
import threading
from collections.abc import Callable
from queue import SimpleQueue
from types import TracebackType

__all__ = ["JobThread", "prompt_turns"]

logger = logging.getLogger(__name__)

_INTERVAL_S = 0.0001


class _PromptTurns:
    """A context in which a thread waits about 0.1 ms for the GIL, instead of Python's 5 ms.

    A thread that moves large blocks needs the GIL for microseconds between two waits for a disk or
    a device. Beside a busy engine it would otherwise wait milliseconds for the GIL each time. The
    engine loses only the microseconds. Threads that compute must not use this.

    The switch interval applies to the whole process. It is restored when the last thread leaves the
    context. Any thread may enter.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._num_within = 0
        self._interval_before: float | None = None
        """The interval to restore; None if it was not changed here."""

    def __enter__(self) -> None:
        with self._lock:
            if self._num_within == 0:
                before = sys.getswitchinterval()
                if before > _INTERVAL_S:
                    self._interval_before = before
                    sys.setswitchinterval(_INTERVAL_S)
            self._num_within += 1

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        with self._lock:
            self._num_within -= 1
            if self._num_within or self._interval_before is None:
                return
            # Do not restore the interval if other code has changed it meanwhile.
            if abs(sys.getswitchinterval() - _INTERVAL_S) < _INTERVAL_S / 50:
                sys.setswitchinterval(self._interval_before)
            self._interval_before = None


prompt_turns = _PromptTurns()
"""The instance for this process."""


class JobThread:
    """One thread that runs jobs in order. It starts with the first job.

    Call `put`, `flush` and `close` from one thread.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._queue: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._thread: threading.Thread | None = None

    def put(self, work: Callable[[], None]) -> None:
        """Add a job. Raises `RuntimeError`, and adds nothing, if the thread cannot be started."""
        if self._thread is None:
            # A daemon, so that a process can end without calling `close`.
            self._thread = threading.Thread(target=self._work, name=self._name, daemon=True)
            try:
                self._thread.start()
            except RuntimeError:
                self._thread = None
                raise
        self._queue.put(work)

    def flush(self) -> None:
        """Return when all jobs added before this call have ended."""
        if self._thread is not None:
            done = threading.Event()
            self._queue.put(done.set)
            done.wait()

    def close(self) -> None:
        """Wait for all jobs, then end the thread. Idempotent."""
        if self._thread is not None:
            self._queue.put(None)
            self._thread.join()
            self._thread = None

    def _work(self) -> None:
        while (work := self._queue.get()) is not None:
            try:
                with prompt_turns:
                    work()
            except BaseException:
                # The thread continues, because callers wait for later jobs.
                logger.exception(
                    "Thread %s: a job ended with an error that it should have handled. Later jobs "
                    "still run",
                    self._name,
                )
            del work  # otherwise the caches that it refers to would be kept until the next job
