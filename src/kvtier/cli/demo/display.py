"""What the demo shows: progress while it runs, and the report as tables."""

from __future__ import annotations

from collections.abc import Iterable
from types import TracebackType
from typing import Protocol

from rich import box
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
from rich.table import Column, Table

from kvtier.cli.demo.report import LengthRow, Moved, PhaseRow, Report
from kvtier.config.sizes import as_size

__all__ = ["Display", "LiveDisplay", "NoDisplay", "print_report"]

_WIDTH_WITH_NOTE = 77
_WIDTH_WITH_BAR = 98
_NOTHING = "-"
_TIER_NAMES = ("first", "second")


class Display(Protocol):
    """Shows the progress of the demo."""

    def begin(self, title: str, total: int) -> None:
        """A phase of `total` prompts begins."""

    def advance(self, first_token_s: float) -> None:
        """A prompt of this phase was served."""


class NoDisplay:
    """Shows nothing."""

    def begin(self, title: str, total: int) -> None:
        pass

    def advance(self, first_token_s: float) -> None:
        pass


class LiveDisplay:
    """A line for each phase on the terminal, removed at the end."""

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
        if self._task is not None:  # the previous phase may have ended early
            done = self._progress.tasks[-1].completed
            self._progress.update(self._task, total=done)
        self._task = self._progress.add_task(title, total=total, note="")

    def advance(self, first_token_s: float) -> None:
        assert self._task is not None
        note = f"first token after {first_token_s * 1e3:.0f} ms"
        self._progress.update(self._task, advance=1, note=note)


def _columns(width: int) -> list[ProgressColumn]:
    """Return the columns that fit into `width` characters. The bar is left out first, then the
    note."""
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


def print_report(report: Report, console: Console) -> None:
    """Print the tables, the remarks and the verdict."""
    if report.phases:
        _print_table(console, "First token", _first_tokens(report.phases))
        _print_table(console, "Where the blocks came from", _places(report.phases))
    if report.lengths:
        _print_table(console, "First token by prompt length", _lengths(report.lengths))
    for row in report.phases:
        for note in row.notes:
            _print_line(console, f"{row.title}: {note}")
    if report.slow_lengths:
        lengths = ", ".join(map(str, report.slow_lengths))
        _print_line(console, f"Warm was not sooner than cold at {lengths} tokens.")
    for problem in report.all_problems:
        _print_line(console, f"WRONG  {problem}", "bold red")
    if not report.identical:
        _print_line(console, "WRONG  tokens or logits differ from those without offloading", "red")
    if report.ok:
        _print_line(
            console,
            "Every token and every logit equals that of a run without offloading, to the last bit.",
            "green",
        )
    _print_line(console, f"{report.seconds:.1f} s")


def _print_line(console: Console, text: str, style: str | None = None) -> None:
    console.print(text, style=style, markup=False, highlight=False, soft_wrap=True)


def _print_table(console: Console, title: str, table: Table) -> None:
    _print_line(console, f"{title}\n", "italic")
    console.print(table)
    console.print()


def _table(*titles: str) -> Table:
    """Return a table without rows. The first column is text, the others are numbers. No cell is
    wrapped or cut off."""
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0))
    for place, title in enumerate(titles):
        table.add_column(title, justify="right" if place else "left", no_wrap=True)
    return table


def _first_tokens(rows: Iterable[PhaseRow]) -> Table:
    table = _table("phase", "prompts", "cold", "warm", "speed-up", "identical")
    for row in rows:
        table.add_row(
            row.title,
            str(row.prompts),
            _ms(row.cold_s),
            _ms(row.first_token_s) if row.is_warm else _NOTHING,
            _factor(row.speed_up),
            _yes(row.identical),
        )
    return table


def _places(rows: Iterable[PhaseRow]) -> Table:
    table = _table("phase", "device cache", "host memory", "tiers")
    for row in rows:
        tiers = [
            f"{name}: {_amount(tier)}"
            for name, tier in zip(_TIER_NAMES, row.tiers, strict=False)
            if tier.blocks
        ]
        table.add_row(
            row.title, _amount(row.device), _amount(row.host), "\n".join(tiers) or _NOTHING
        )
    return table


def _lengths(rows: Iterable[LengthRow]) -> Table:
    table = _table(
        "tokens", "cold", "from host memory", "speed-up", "from disk", "speed-up", "identical"
    )
    table.columns[0].justify = "right"
    for row in rows:
        table.add_row(
            str(row.tokens),
            _ms(row.cold_s),
            _ms(row.host_s),
            _factor(row.host_speed_up),
            _ms(row.tier_s),
            _factor(row.tier_speed_up),
            _yes(row.identical),
        )
    return table


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.0f} ms" if seconds < 100 else f"{seconds:.0f} s"


def _factor(speed_up: float | None) -> str:
    if speed_up is None:
        return _NOTHING
    return f"{speed_up:.1f}x" if speed_up >= 0.995 else f"{speed_up:#.2g}x"


def _amount(moved: Moved) -> str:
    if not moved.blocks:
        return _NOTHING
    return f"{moved.blocks} ({as_size(moved.bytes, digits=2)})"


def _yes(value: bool) -> str:
    return "yes" if value else "NO"
