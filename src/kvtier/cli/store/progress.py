"""How far it has come, and how long it will take."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)

from kvtier.cli.output import note
from kvtier.cli.store.amounts import as_age, as_size

__all__ = ["shown_count", "shown_progress"]

_LONG_S = 60.0


@contextmanager
def shown_progress(max_rate: int | None) -> Iterator[Callable[[int, int], None]]:
    """Tell what this gives how many bytes are done, and of how many. A bar on standard error where
    that is a terminal, and gone at the end; elsewhere nothing. One line before that if `max_rate`,
    in bytes per second, makes it long."""

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
def shown_count() -> Iterator[Callable[[int, int], None]]:
    """The same for how many blocks are done."""
    with _bar(MofNCompleteColumn()) as show:
        yield show


@contextmanager
def _bar(*columns: ProgressColumn) -> Iterator[Callable[[int, int], None]]:
    if sys.stderr is None or not sys.stderr.isatty():
        yield lambda _done, _total: None
        return
    console = Console(stderr=True)
    all_columns = (BarColumn(bar_width=20), *columns, TimeRemainingColumn())
    with Progress(*all_columns, console=console, transient=True) as bar:
        task = bar.add_task("", total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)
