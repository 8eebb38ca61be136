"""Runs `kvtier demo` with checked settings, prints the result, and returns the exit code."""

from __future__ import annotations

import io
import json
import signal
import sys
import time
from contextlib import ExitStack, suppress
from types import FrameType, TracebackType
from typing import Any

from rich.console import Console

from kvtier.cli import output
from kvtier.cli.demo.display import Display, LiveDisplay, NoDisplay, print_report
from kvtier.cli.demo.phases import Demo
from kvtier.cli.demo.report import OperatorLog, Report
from kvtier.cli.demo.server import RequestStuck
from kvtier.cli.demo.settings import DemoSettings
from kvtier.cpu.host_memory import NotEnoughMemory
from kvtier.tiering.factory import TierStartError

__all__ = ["Interrupted", "Interruption", "run_demo"]

_WIDTH = 80
"""Least width of the tables. On a narrower terminal lines wrap, and nothing is left out."""
_OUTLOOK = "kvtier demo: running; the default sizes take about half a minute of processor time."
_SIGNALS = (signal.SIGINT, signal.SIGTERM)


def run_demo(settings: DemoSettings, *, as_json: bool) -> int:
    """Run the demo, print the result, and return the exit code. Standard output gets only the
    result."""
    report = Report(settings)
    try:
        with Interruption() as interruption:
            _run(report, as_json, interruption)
    except Interrupted as end:
        print(f"kvtier demo: ended by {end}; nothing is left behind.", file=sys.stderr)
        return end.exit_code
    except NotEnoughMemory as lack:
        print(f"kvtier demo: {lack}\nOr give fewer --requests, or fewer --tokens.", file=sys.stderr)
        return 2
    except TierStartError as refusal:
        print(
            f"kvtier demo: {refusal}\nThe demo's file is in the directory that TMPDIR names: "
            "choose one with more room, or give fewer --requests, or fewer --tokens.",
            file=sys.stderr,
        )
        return 2
    text = json.dumps(report.as_json(), indent=2) + "\n" if as_json else _as_tables(report)

    def print_report() -> int:
        output.write(text)
        output.finish()
        return 0 if report.ok else 1

    return output.run_to_exit_code("demo", print_report)


def _as_tables(report: Report) -> str:
    terminal = Console()
    is_terminal = sys.stdout is not None and sys.stdout.isatty()
    width = max(_WIDTH, terminal.width) if is_terminal else _WIDTH
    text = io.StringIO()
    print_report(report, Console(file=text, width=width, force_terminal=is_terminal))
    return "".join(f"{line.rstrip()}\n" for line in text.getvalue().splitlines())


def _run(report: Report, as_json: bool, interruption: Interruption) -> None:
    started = time.monotonic()
    with ExitStack() as stack:
        log = stack.enter_context(OperatorLog())
        display: Display = NoDisplay()
        if as_json or sys.stderr is None:
            pass
        elif sys.stderr.isatty():
            display = stack.enter_context(LiveDisplay(Console(stderr=True)))
        else:
            with suppress(OSError):
                print(_OUTLOOK, file=sys.stderr, flush=True)
        try:
            Demo(report, display, log, interruption.check).run()
        except RequestStuck as stuck:
            report.problems.append(str(stuck))
    report.seconds = time.monotonic() - started


class Interrupted(Exception):
    """A signal asked the demo to end."""

    def __init__(self, signal_number: int) -> None:
        super().__init__(signal.Signals(signal_number).name)
        self.exit_code = 128 + signal_number


class Interruption:
    """Records SIGINT and SIGTERM. The demo calls `check` between steps of the engine, and `check`
    raises `Interrupted`. So setup and shutdown are never cut short. Used on the main thread
    only."""

    def __init__(self) -> None:
        self._noted: int | None = None
        self._former: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Interruption:
        for number in _SIGNALS:
            self._former[number] = signal.signal(number, self._note)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        for number, handler in self._former.items():
            signal.signal(number, handler)

    def check(self) -> None:
        """Raise `Interrupted` if a signal has arrived."""
        if self._noted is not None:
            raise Interrupted(self._noted)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._noted = number
