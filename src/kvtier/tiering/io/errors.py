"""Reads and writes that have failed: counted by kind, and said once for each."""

from __future__ import annotations

import errno
import logging
import os
import threading
from collections import Counter
from collections.abc import Callable

from kvtier.config.redaction import printable

__all__ = ["ErrorLog", "error_counter", "error_counters"]

logger = logging.getLogger(__name__)

_NAMED_ERRORS = (
    "EIO",
    "ENOSPC",
    "EDQUOT",
    "EROFS",
    "EMFILE",
    "EACCES",
    "ENODATA",
    "ENOENT",
    "ESTALE",
    "ETIMEDOUT",
)
_OTHER = "other"


def error_counter(prefix: str, kind: str) -> str:
    """The counter of errors of this kind, by the name of the error number. `prefix`: that of the
    tier's figures, like "kvtier_disk"."""
    return f"{prefix}_errors_{(kind if kind in _NAMED_ERRORS else _OTHER).lower()}"


def error_counters(prefix: str) -> dict[str, str]:
    """All of these counters, and what they count."""
    tier = prefix.removeprefix("kvtier_")
    return {
        error_counter(prefix, kind): f"Reads and writes of the {tier} tier that failed with {kind}."
        for kind in (*_NAMED_ERRORS, _OTHER)
    }


class ErrorLog:
    """The errors of one tier. Any thread."""

    def __init__(self, where: object, remedy_for: Callable[[int], str]) -> None:
        """`where`: the path, for log lines. `remedy_for`: what to do about an error number."""
        self._where = where
        self._remedy_for = remedy_for
        self._lock = threading.Lock()
        self._errors: Counter[str] = Counter()
        self._told: set[int] = set()

    def note(self, error: int, is_write: bool, path: str | None = None) -> None:
        """A read or write has failed with this error number. `path`: of a file or directory, where
        that is known."""
        kind = errno.errorcode.get(error, str(error))
        with self._lock:
            self._errors[kind] += 1
            is_first = error not in self._told
            self._told.add(error)
        if is_first:
            logger.warning(
                "%s: a %s has failed: %s (%s): %s. Until then such blocks are computed, and the "
                "tier is tried again. This is said once for each kind of error",
                printable(str(path or self._where)),
                "write" if is_write else "read",
                os.strerror(error),
                kind,
                self._remedy_for(error),
            )

    def take(self) -> Counter[str]:
        """How many have failed since the last call, by the name of the error."""
        with self._lock:
            taken, self._errors = self._errors, Counter()
        return taken
