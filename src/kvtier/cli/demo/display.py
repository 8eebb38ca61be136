"""What is shown while the demo runs."""

from __future__ import annotations

from types import TracebackType
from typing import Protocol

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    SpinnerColumn,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
)
from rich.table import Column

__all__ = ["Display", "LiveDisplay", "NoDisplay"]


_WIDTH_WITH_NOTE = 77
_WIDTH_WITH_BAR = 98


class Display(Protocol):
    """Hears what the demo does."""

    def begin(self, title: str, total: int) -> None:
        """A phase of so many prompts begins."""

    def advance(self, first_token_s: float) -> None:
        """A prompt of this phase was served."""


class NoDisplay:
    """For those who are not watching."""

    def begin(self, title: str, total: int) -> None:
        pass

    def advance(self, first_token_s: float) -> None:
        pass


class LiveDisplay:
    """A line for each phase, on the terminal; gone when the demo has ended."""

    def __init__(self, console: Console) -> None:
        self._progress = Progress(*_columns(console.width), console=console, transient=True)
        self._task: TaskID | None = None

    def __enter__(self) -> LiveDisplay:
        self._progress.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._progress.stop()

    def begin(self, title: str, total: int) -> None:
        if self._task is not None:  # the one before has ended, even if it was expected to be longer
            done = self._progress.tasks[-1].completed
            self._progress.update(self._task, total=done)
        self._task = self._progress.add_task(title, total=total, note="")

    def advance(self, first_token_s: float) -> None:
        assert self._task is not None
        note = f"first token after {first_token_s * 1e3:.0f} ms"
        self._progress.update(self._task, advance=1, note=note)


def _columns(width: int) -> list[ProgressColumn]:
    """As many as there is room for: the bar goes first; the count and the time always stay."""
    columns: list[ProgressColumn] = [
        SpinnerColumn(finished_text="+"),
        TextColumn("{task.description}"),
    ]
    if width >= _WIDTH_WITH_BAR:
        columns.append(BarColumn(bar_width=20))
    columns.append(MofNCompleteColumn(table_column=Column(no_wrap=True, min_width=5)))
    if width >= _WIDTH_WITH_NOTE:
        columns.append(TextColumn("{task.fields[note]}"))
    columns.append(TimeElapsedColumn(table_column=Column(no_wrap=True, min_width=7)))
    return columns
