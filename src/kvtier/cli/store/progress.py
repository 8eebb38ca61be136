"""How far verifying has come, on a terminal."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TimeRemainingColumn,
    TransferSpeedColumn,
)

__all__ = ["shown_progress"]


def _nobody_watches(_done: int, _total: int) -> None:
    return


@contextmanager
def shown_progress() -> Iterator[Callable[[int, int], None]]:
    """Tell what this gives how many bytes are done, and of how many. A bar on standard error where
    that is a terminal, and gone at the end; elsewhere nothing."""
    if sys.stderr is None or not sys.stderr.isatty():
        yield _nobody_watches
        return
    columns = (
        BarColumn(bar_width=20),
        DownloadColumn(binary_units=True),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("", total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)
