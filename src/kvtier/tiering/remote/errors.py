"""Failures of a server, counted and logged."""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from enum import StrEnum

from kvtier.config.errors import printable
from kvtier.tiering.base import TierRefused

__all__ = [
    "FailureKind",
    "NotAllowed",
    "ServerErrors",
    "ServerFailure",
    "TierHasEnded",
    "trying_at_start",
]

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


class TierHasEnded(ServerFailure):
    """A call came after the tier was closed: nothing has failed."""

    def __init__(self) -> None:
        super().__init__(FailureKind.UNREACHABLE, "the tier has ended")


class NotAllowed(ServerFailure):
    """The server refuses the user, or this use of it, and will not change its mind."""

    def __init__(self, reason: str, remedy: str) -> None:
        super().__init__(FailureKind.REFUSED, reason)
        self.remedy = remedy


@contextmanager
def trying_at_start(where: str) -> Iterator[None]:
    """Around the first calls of a server. A server that cannot be reached now is tried again later;
    one that refuses never gets better by itself. `where`: the tier's URL without secrets."""
    try:
        yield
    except NotAllowed as refusal:
        raise TierRefused(f"{where}: {printable(str(refusal))}. {refusal.remedy}") from None
    except ServerFailure as failure:
        logger.warning(
            "%s: %s. The engine starts without this tier and tries the server again",
            where,
            printable(str(failure)),
        )


class ServerErrors:
    """Counts the failures of one tier's servers, and logs each kind at most once a minute. Any
    thread."""

    def __init__(self, where: str) -> None:
        """`where`: the tier's URL without secrets, for log lines."""
        self.where = where
        self._lock = threading.Lock()
        self._counts: Counter[FailureKind] = Counter()
        self._log_at: dict[FailureKind | None, float] = {}

    def note(self, failure: ServerFailure) -> None:
        """Count a failure, and log it unless one of its kind was logged within a minute. The end of
        the tier is none."""
        if isinstance(failure, TierHasEnded):
            return
        with self._lock:
            self._counts[failure.kind] += 1
        if self._is_new(failure.kind):
            logger.warning(
                "%s: %s. Meanwhile, the engine computes blocks that it cannot load, and the server "
                "is tried again. Logged at most once a minute",
                self.where,
                printable(str(failure)),
            )

    def note_unexpected(self, error: Exception) -> None:
        """Count an error that nobody has foreseen as an answer that is none, and log it with its
        traceback, at most once a minute."""
        with self._lock:
            self._counts[FailureKind.GARBAGE] += 1
        if self._is_new(None):
            logger.error(
                "%s: an unexpected error. The blocks that it concerns are computed. Logged at most "
                "once a minute",
                self.where,
                exc_info=error,
            )

    def _is_new(self, kind: FailureKind | None) -> bool:
        """False if one of this kind was logged within a minute. `None`: an unexpected error."""
        now = time.monotonic()
        with self._lock:
            is_new = now >= self._log_at.get(kind, now)
            if is_new:
                self._log_at[kind] = now + _LOG_AGAIN_S
        return is_new

    def take(self) -> Counter[FailureKind]:
        """The failures since the last call, by kind."""
        with self._lock:
            taken, self._counts = self._counts, Counter()
        return taken
