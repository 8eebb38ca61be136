"""Metric definitions of a tier, a log of its I/O errors, which counts them by kind, and a log of
unexpected errors."""

from __future__ import annotations

import errno
import logging
import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from traceback import walk_tb

from kvtier.base import MetricDefinition, MetricKind
from kvtier.config.errors import printable

__all__ = ["ErrorLog", "UnexpectedErrors", "definitions", "error_counter", "error_counters"]

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
_LOG_AGAIN_S = 60.0


def definitions(
    gauges: Mapping[str, str], counters: Mapping[str, str]
) -> dict[str, MetricDefinition]:
    """What a tier returns from `build_metric_definitions`. `gauges`, `counters`: help texts by
    metric name."""
    return {
        **{name: MetricDefinition(MetricKind.GAUGE, text) for name, text in gauges.items()},
        **{name: MetricDefinition(MetricKind.COUNTER, text) for name, text in counters.items()},
    }


def error_counter(prefix: str, kind: str) -> str:
    """Name of the counter for one kind of error.

    `prefix`: prefix of the tier's metrics, such as "kvtier_disk". `kind`: name of the error, such
    as "EIO". Kinds without a counter of their own share one.
    """
    return f"{prefix}_errors_{(kind if kind in _NAMED_ERRORS else _OTHER).lower()}"


def error_counters(prefix: str) -> dict[str, str]:
    """Help text of every error counter of a tier, by name."""
    tier = prefix.removeprefix("kvtier_")
    return {
        error_counter(prefix, kind): f"Reads and writes of the {tier} tier that failed with {kind}."
        for kind in (*_NAMED_ERRORS, _OTHER)
    }


class ErrorLog:
    """Counts the I/O errors of one tier, and logs the first of each kind. Any thread."""

    def __init__(self, where: object, remedy_for: Callable[[int], str]) -> None:
        """`where`: the tier's path, for log lines. `remedy_for`: returns what an operator can do
        about an error number."""
        self._where = where
        self._remedy_for = remedy_for
        self._lock = threading.Lock()
        self._errors: Counter[str] = Counter()
        self._logged: set[int] = set()

    def note(self, error: int, is_write: bool, path: str | None = None) -> None:
        """Count a failed read or write, and log it if it is the first of its kind. `path`: the file
        or directory; None: the log line names the tier's path."""
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
        """Number of errors since the last call, by kind, such as "EIO"."""
        with self._lock:
            taken, self._errors = self._errors, Counter()
        return taken


class UnexpectedErrors:
    """Logs the unexpected errors of one thread, each with its traceback and at most once a minute.
    A thread that goes on after an error may meet the same one many times a second."""

    def __init__(self, where: object, consequence: str) -> None:
        """`where`: the tier's path. `consequence`: what the error means for the tier."""
        self._where = where
        self._consequence = consequence
        self._log_at: dict[tuple[type[Exception], str, int], float] = {}
        """Monotonic time from which an error is logged again, by its type and by the file and line
        that raised it. Not by its text, because each occurrence may have another text."""

    def log(self, error: Exception) -> None:
        """Called while `error` is handled."""
        *_, (frame, line) = walk_tb(error.__traceback__)
        kind = type(error), frame.f_code.co_filename, line
        now = time.monotonic()
        if now >= self._log_at.get(kind, now):
            self._log_at[kind] = now + _LOG_AGAIN_S
            logger.exception(  # noqa: LOG004 - the caller handles `error`
                "%s: unexpected error: %s. Logged at most once a minute; please report it",
                printable(str(self._where)),
                self._consequence,
            )
