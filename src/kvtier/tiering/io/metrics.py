"""Metric definitions of a tier, and its I/O errors: counted by kind, logged once for each kind."""

from __future__ import annotations

import errno
import logging
import os
import threading
from collections import Counter
from collections.abc import Callable, Mapping

from kvtier.base import MetricDefinition, MetricKind
from kvtier.config.errors import printable

__all__ = ["ErrorLog", "definitions", "error_counter", "error_counters"]

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


def definitions(
    gauges: Mapping[str, str], counters: Mapping[str, str]
) -> dict[str, MetricDefinition]:
    """The result of `build_metric_definitions`, from metric names and their help texts."""
    return {
        **{name: MetricDefinition(MetricKind.GAUGE, text) for name, text in gauges.items()},
        **{name: MetricDefinition(MetricKind.COUNTER, text) for name, text in counters.items()},
    }


def error_counter(prefix: str, kind: str) -> str:
    """Name of the counter for one kind of error.

    `prefix`: that of the tier's metrics, such as "kvtier_disk". `kind`: such as "EIO"; kinds
    without a counter of their own share one.
    """
    return f"{prefix}_errors_{(kind if kind in _NAMED_ERRORS else _OTHER).lower()}"


def error_counters(prefix: str) -> dict[str, str]:
    """Name and help text of every error counter of a tier."""
    tier = prefix.removeprefix("kvtier_")
    return {
        error_counter(prefix, kind): f"Reads and writes of the {tier} tier that failed with {kind}."
        for kind in (*_NAMED_ERRORS, _OTHER)
    }


class ErrorLog:
    """The I/O errors of one tier. Any thread."""

    def __init__(self, where: object, remedy_for: Callable[[int], str]) -> None:
        """`where`: the tier's path, for log lines. `remedy_for`: advice for an error number."""
        self._where = where
        self._remedy_for = remedy_for
        self._lock = threading.Lock()
        self._errors: Counter[str] = Counter()
        self._logged: set[int] = set()

    def note(self, error: int, is_write: bool, path: str | None = None) -> None:
        """Count a failed read or write, and log the first of its kind. `path`: the file or
        directory, where it is known."""
        kind = errno.errorcode.get(error, str(error))
        with self._lock:
            self._errors[kind] += 1
            is_first = error not in self._logged
            self._logged.add(error)
        if is_first:
            logger.warning(
                "%s: a %s has failed: %s (%s): %s. Meanwhile, the engine computes blocks that it "
                "cannot load, and the tier is retried. Each kind of error is logged once",
                printable(str(path or self._where)),
                "write" if is_write else "read",
                os.strerror(error),
                kind,
                self._remedy_for(error),
            )

    def take(self) -> Counter[str]:
        """Number of errors since the last call, by name."""
        with self._lock:
            taken, self._errors = self._errors, Counter()
        return taken
