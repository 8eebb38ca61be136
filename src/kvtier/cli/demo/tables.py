"""The report as people read it."""

from __future__ import annotations

from collections.abc import Iterable

from rich import box
from rich.console import Console
from rich.table import Table

from kvtier.cli.demo.report import LengthRow, Moved, PhaseRow, Report

__all__ = ["print_report"]

_NOTHING = "-"


def print_report(report: Report, console: Console) -> None:
    """Tables, remarks, and the verdict."""
    if report.phases:
        console.print(_phases(report.phases))
    if report.lengths:
        console.print(_lengths(report.lengths))
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
            "Every token and every logit is that of a run without offloading, to the last bit.",
            "green",
        )
    _print_line(console, f"{report.seconds:.1f} s")


def _print_line(console: Console, text: str, style: str | None = None) -> None:
    console.print(text, style=style, markup=False, highlight=False, soft_wrap=True)


def _phases(rows: Iterable[PhaseRow]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, title="Served from where", title_justify="left")
    table.add_column("phase")
    for title in ("prompts", "first token\ncold", "first token\nwarm", "speed-up"):
        table.add_column(title, justify="right", no_wrap=True)
    for title in ("device cache", "host memory", "tiers"):
        table.add_column(f"{title}\nblocks", justify="right")
    table.add_column("tokens\nidentical")
    for row in rows:
        table.add_row(
            row.title,
            str(row.prompts),
            _ms(row.cold_s),
            _ms(row.first_token_s) if row.is_warm else _NOTHING,
            _factor(row.speed_up),
            _amount(row.device),
            _amount(row.host),
            "\n".join(_amount(tier) for tier in row.tiers if tier.blocks) or _NOTHING,
            _yes(row.identical),
        )
    return table


def _lengths(rows: Iterable[LengthRow]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, title="First token by prompt length", title_justify="left")
    for title in ("tokens", "cold", "from host memory", "speed-up", "from a tier", "speed-up"):
        table.add_column(title, justify="right", no_wrap=True)
    table.add_column("tokens identical")
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
    return f"{seconds * 1e3:.0f} ms"


def _factor(speed_up: float | None) -> str:
    return _NOTHING if speed_up is None else f"{speed_up:.1f}x"


def _amount(moved: Moved) -> str:
    return f"{moved.blocks} ({moved.bytes / 2**20:.1f} MiB)" if moved.blocks else _NOTHING


def _yes(value: bool) -> str:
    return "yes" if value else "NO"
