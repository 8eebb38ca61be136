"""What `kvtier store` prints besides its result: questions, progress, warnings, refusals."""

from __future__ import annotations

import errno
import logging
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.markup import escape
from rich.progress import (
    BarColumn,
    DownloadColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    TaskProgressColumn,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)

from kvtier.cli.output import note
from kvtier.config.errors import printable
from kvtier.config.sizes import as_size
from kvtier.tiering import inspection
from kvtier.tiering.inspection import WHAT_TO_GIVE, InspectionRefused, as_age, local_path

__all__ = [
    "explain_os_error",
    "Steps",
    "is_confirmed",
    "require_terminal",
    "shown_count",
    "shown_progress",
    "shown_share",
    "shown_steps",
    "warnings_as_notes",
]

_LONG_S = 60.0


# --- questions ---------------------------------------------------------------------------------


def require_terminal(remedy: str) -> None:
    """Raise `InspectionRefused` if standard input is not a terminal: then no user can answer.
    `remedy`: which options to add."""
    if sys.stdin is None or not sys.stdin.isatty():
        raise InspectionRefused(f"there is no terminal to ask whether you are sure: add {remedy}")


def is_confirmed(question: str) -> bool:
    """Ask on standard error. True if the answer is yes."""
    note(f"{question} [y/N]")
    return sys.stdin.readline().strip().lower() in ("y", "yes")


# --- progress ----------------------------------------------------------------------------------


@contextmanager
def shown_progress(max_rate: int | None) -> Iterator[inspection.Progress]:
    """Yield a function to call with the bytes done and the total. Shows a bar on standard error, if
    that is a terminal, and removes it at the end. Prints an estimate of the time first, if reading
    at `max_rate` bytes per second takes more than a minute."""

    def say_how_long(done: int, total: int) -> None:
        if max_rate is not None and not done and total / max_rate > _LONG_S:
            note(
                f"kvtier store: {as_size(total)} to read, at most {as_size(max_rate)} per s: that "
                f"takes about {as_age(total / max_rate)}"
            )

    with _bar(DownloadColumn(binary_units=True), TransferSpeedColumn()) as show:

        def say_and_show(done: int, total: int) -> None:
            say_how_long(done, total)
            show(done, total)

        yield say_and_show


@contextmanager
def shown_count() -> Iterator[inspection.Progress]:
    """Yield a function to call with the blocks done and the total. Shows a bar like that of
    `shown_progress`."""
    with _bar(MofNCompleteColumn()) as show:
        yield show


@contextmanager
def shown_share() -> Iterator[inspection.Progress]:
    """Yield a function to call with what is done and the total, in any unit. Shows a bar like that
    of `shown_progress`, in percent."""
    with _bar(TaskProgressColumn()) as show:
        yield show


class Steps:
    """Names the steps of a command while they run, on standard error if that is a terminal."""

    def __init__(self, bar: Progress | None) -> None:
        self.total = 0
        """How many steps there are, as soon as that is known."""
        self._bar = bar
        self._task = None if bar is None else bar.add_task("", total=None)
        self.num_begun = 0

    def begin(self, name: str) -> None:
        """A step begins; the one before has ended."""
        if self._bar is not None and self._task is not None:
            self._bar.update(
                self._task,
                description=escape(printable(name)),
                completed=self.num_begun,
                total=max(self.total, self.num_begun + 1),
            )
        self.num_begun += 1


@contextmanager
def shown_steps() -> Iterator[Steps]:
    """Yield an object to call before each step. What it shows is removed at the end."""
    if sys.stderr is None or not sys.stderr.isatty():
        yield Steps(None)
        return
    columns = (BarColumn(bar_width=20), MofNCompleteColumn(), TextColumn("{task.description}"))
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        yield Steps(bar)


@contextmanager
def _bar(*columns: ProgressColumn) -> Iterator[inspection.Progress]:
    if sys.stderr is None or not sys.stderr.isatty():
        yield lambda _done, _total: None
        return
    console = Console(stderr=True)
    all_columns = (BarColumn(bar_width=20), *columns, TimeRemainingColumn())
    with Progress(*all_columns, console=console, transient=True) as bar:
        task = bar.add_task("", total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


# --- warnings and errors -----------------------------------------------------------------------


class _Notes(logging.Handler):
    def __init__(self, command: str, most: int | None) -> None:
        super().__init__(logging.WARNING)
        self._command = command
        self._most = most
        self.num_left_out = 0
        self._num_noted = 0

    def emit(self, record: logging.LogRecord) -> None:
        if self._num_noted == self._most:
            self.num_left_out += 1
            return
        self._num_noted += 1
        note(f"{self._command}: {record.getMessage()}")


@contextmanager
def warnings_as_notes(command: str = "kvtier store", most: int | None = None) -> Iterator[None]:
    """While this context is open, print kvtier's warnings in the form of the command's own
    messages. `most`: how many; None: all. At the end, the others are counted."""
    handler = _Notes(command, most)
    logger = logging.getLogger("kvtier")
    logger.addHandler(handler)
    try:
        yield
    finally:
        logger.removeHandler(handler)
        if handler.num_left_out:
            note(f"{command}: {handler.num_left_out:,} more warnings like these")


def explain_os_error(location: str, error: OSError) -> str:
    """Explain an error of the operating system at `location`, with the remedy."""
    location = str(local_path(location) or location)
    if error.errno == errno.ENOENT:
        return f"there is no {location}: {WHAT_TO_GIVE}"
    if error.errno in (errno.EACCES, errno.EPERM):
        return f"no permission for {location}: run this as {_owner(location)}, or as root"
    if error.errno == errno.ENXIO:
        return f"{location} is not a regular file: give the path of a slab file"
    return f"{location}: {error.strerror or error}"


def _owner(location: str) -> str:
    try:
        return f"the user it belongs to (uid {os.stat(location).st_uid})"
    except OSError:
        return "the user the engine runs as"
