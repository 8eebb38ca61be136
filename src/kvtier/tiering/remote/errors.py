"""Failures of a server, counted and logged."""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from enum import StrEnum

from kvtier.config.errors import printable

__all__ = ["FailureKind", "ServerErrors", "ServerFailure"]

logger = logging.getLogger(__name__)

_LOG_AGAIN_S = 60.0


class FailureKind(StrEnum):
    """What went wrong. The values end the names of counters."""

    UNREACHABLE = "unreachable"
    """There is no connection, or it broke."""
    SILENT = "silent"
    """The server did not answer in time."""
    REFUSED = "refused"
    """The server answered that it will not do that."""
    FULL = "full"
    """The server has no room."""
    GARBAGE = "garbage"
    """The answer was not one."""


class ServerFailure(Exception):
    """The server cannot be used now. The message says why, without secrets."""

    def __init__(self, kind: FailureKind, reason: str) -> None:
        super().__init__(reason)
        self.kind = kind


class ServerErrors:
    """Counts the failures of one tier's servers, and logs each kind at most once a minute. Any
    thread."""

    def __init__(self, where: str) -> None:
        """`where`: the tier's URL without secrets, for log lines."""
        self.where = where
        self._lock = threading.Lock()
        self._counts: Counter[FailureKind] = Counter()
        self._log_at: dict[FailureKind, float] = {}

    def note(self, failure: ServerFailure) -> None:
        """Count a failure, and log it unless one of its kind was logged within a minute."""
        now = time.monotonic()
        with self._lock:
            self._counts[failure.kind] += 1
            is_new = now >= self._log_at.get(failure.kind, now)
            if is_new:
                self._log_at[failure.kind] = now + _LOG_AGAIN_S
        if is_new:
            logger.warning(
                "%s: %s. Meanwhile, the engine computes blocks that it cannot load, and the server "
                "is tried again. Logged at most once a minute",
                self.where,
                printable(str(failure)),
            )

    def take(self) -> Counter[FailureKind]:
        """The failures since the last call, by kind."""
        with self._lock:
            taken, self._counts = self._counts, Counter()
        return taken
