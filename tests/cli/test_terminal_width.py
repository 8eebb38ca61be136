"""The demo's output on narrow terminals."""

from __future__ import annotations

import io
import re
import sys

import pytest
from rich.cells import cell_len
from rich.console import Console
from rich.text import Text

from kvtier.cli.demo import command
from kvtier.cli.demo.display import LiveDisplay
from kvtier.cli.demo.report import LengthRow, Moved, PhaseRow, Report
from kvtier.cli.demo.settings import DemoSettings

TITLES = [
    "cold",
    "from the device cache",
    "one of two tiers killed",
    "hybrid: from host memory",
]


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def widest_report() -> Report:
    """A report whose numbers are as long as the demo's limits and a slow machine can make them."""
    settings = DemoSettings(tokens=1016, requests=64, lengths=(8184,), seed=0)
    most = Moved("somewhere", 8192, 128 << 20)
    return Report(
        settings,
        phases=[
            PhaseRow(
                name=title,
                title=title,
                prompts=138,
                cold_s=99.9,
                first_token_s=99.8 if title != TITLES[2] else 4321.0,
                is_warm=title != "cold",
                device=most,
                host=most,
                tiers=[most, most],
                identical=True,
            )
            for title in TITLES
        ],
        lengths=[LengthRow(tokens=8184, cold_s=99.9, host_s=0.011, tier_s=99.8, identical=True)],
    )


@pytest.mark.parametrize("width", [60, 80, 200])
def test_every_title_and_figure_is_whole(width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setattr(sys, "stdout", Terminal())
    shown = Text.from_ansi(command._as_tables(widest_report())).plain
    tables = shown[: shown.index("Every token")]
    assert "\u2026" not in shown
    for title in TITLES:
        assert sum(line.startswith(f"{title} ") for line in tables.splitlines()) == 2
    assert tables.count("yes") == len(TITLES) + 1
    assert tables.count("first: 8192 (128 MiB)") == len(TITLES)
    assert tables.count("second: 8192 (128 MiB)") == len(TITLES)
    assert tables.count(" 8192 (128 MiB)") == 4 * len(TITLES)
    assert "0.023x" in tables
    assert "9081.8x" in tables
    for head in ("prompts", "cold", "warm", "speed-up", "identical", "device cache", "tiers"):
        assert head in tables
    assert max(map(cell_len, tables.splitlines())) <= 80


@pytest.mark.parametrize("width", [60, 80, 120])
def test_progress_keeps_the_count_and_the_time(width: int) -> None:
    terminal = Terminal()
    console = Console(file=terminal, width=width, force_terminal=True, color_system="standard")
    with LiveDisplay(console) as display:
        display.begin("all lengths, without offloading", 64)
        display.advance(12.345)
    shown = re.sub(r"\x1b\[[0-9;]*m", "", terminal.getvalue())
    assert "all lengths, without offloading" in shown
    assert " 1/64 " in shown
    assert "0:00:0" in shown
    assert "\u2026" not in shown
    assert ("first token after 12345 ms" in shown) == (width >= 80)
    assert ("\u2501" in shown) == (width >= 120)
