"""`kvtier demo`, from checked settings to an exit code."""

from __future__ import annotations

import json
import sys
import time
from contextlib import ExitStack

from rich.console import Console

from kvtier.cli.demo.display import Display, LiveDisplay, NoDisplay
from kvtier.cli.demo.interruption import Interrupted, Interruption
from kvtier.cli.demo.operator_log import OperatorLog
from kvtier.cli.demo.phases import Demo
from kvtier.cli.demo.report import Report
from kvtier.cli.demo.server import RequestStuck
from kvtier.cli.demo.settings import DemoSettings
from kvtier.cli.demo.tables import print_report
from kvtier.cpu.host_memory import NotEnoughMemory

__all__ = ["run_demo"]

_PLAIN_WIDTH = 140
"""Of tables that are not shown on a terminal."""


def run_demo(settings: DemoSettings, *, as_json: bool) -> int:
    """Run, print, and return the exit code. Standard output gets the result and nothing else."""
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
    if as_json:
        print(json.dumps(report.as_json(), indent=2))
    else:
        is_terminal = sys.stdout.isatty()
        print_report(report, Console(width=None if is_terminal else _PLAIN_WIDTH))
    return 0 if report.ok else 1


def _run(report: Report, as_json: bool, interruption: Interruption) -> None:
    started = time.monotonic()
    with ExitStack() as stack:
        log = stack.enter_context(OperatorLog())
        display: Display = NoDisplay()
        if sys.stderr.isatty() and not as_json:
            display = stack.enter_context(LiveDisplay(Console(stderr=True)))
        try:
            Demo(report, display, log, interruption.check).run()
        except RequestStuck as stuck:
            report.problems.append(str(stuck))
    report.seconds = time.monotonic() - started
