"""A thread that does what it is given, in order."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from queue import SimpleQueue

from kvtier.cpu.prompt_turns import prompt_turns

__all__ = ["Lane"]

logger = logging.getLogger(__name__)


class Lane:
    """One thread that does what it is given, in order."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._queue: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._thread: threading.Thread | None = None

    def put(self, work: Callable[[], None]) -> None:
        """Add to what is to be done. Raises `RuntimeError`, adding nothing, without a thread."""
        if self._thread is None:
            # A daemon: an engine that ends without shutting down is not kept from ending.
            self._thread = threading.Thread(target=self._work, name=self._name, daemon=True)
            try:
                self._thread.start()
            except RuntimeError:
                self._thread = None
                raise
        self._queue.put(work)

    def flush(self) -> None:
        """Return when all is done that was put here before."""
        if self._thread is not None:
            done = threading.Event()
            self._queue.put(done.set)
            done.wait()

    def close(self) -> None:
        """Return when all is done and the thread has ended. Idempotent."""
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
                # Others wait for what comes after it.
                logger.exception("%s: a job ended in an error that it did not report", self._name)
            del work  # or its caches would live until the next one
