"""Reads and writes that have failed: counted by kind, and said once for each."""

from __future__ import annotations

import errno
import logging
import os
import threading
from collections import Counter

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

_REMEDIES = {
    "EIO": "look at the disk (dmesg)",
    "ENOSPC": "make room on its file system",
    "EDQUOT": "make room, or raise the quota of the engine's user",
    "EROFS": "see why its file system is read-only (dmesg), mount it for writing, and restart the "
    "engine",
    "EMFILE": "let this process have more files open (ulimit -n)",
    "EACCES": "let the engine's user read and write there",
    "ENODATA": "something has cut a file off: see what does, and restart the engine",
    "ENOENT": "see what removes files there",
    "ESTALE": "see whether the server of its file system is up",
    "ETIMEDOUT": "see whether the server of its file system is up",
}


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

    def __init__(self, where: object) -> None:
        """`where`: the path, for log lines."""
        self._where = where
        self._lock = threading.Lock()
        self._errors: Counter[str] = Counter()
        self._told: set[int] = set()

    def note(self, error: int, is_write: bool) -> None:
        """A read or write has failed with this error number."""
        kind = errno.errorcode.get(error, str(error))
        with self._lock:
            self._errors[kind] += 1
            is_first = error not in self._told
            self._told.add(error)
        if is_first:
            logger.warning(
                "%s: a %s has failed: %s (%s): %s. Until then such blocks are computed, and the "
                "tier is tried again. This is said once for each kind of error",
                self._where,
                "write" if is_write else "read",
                os.strerror(error),
                kind,
                _REMEDIES.get(kind, "mend that, or give another path"),
            )

    def take(self) -> Counter[str]:
        """How many have failed since the last call, by the name of the error."""
        with self._lock:
            taken, self._errors = self._errors, Counter()
        return taken
