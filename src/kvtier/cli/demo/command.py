"""`kvtier demo`, from checked settings to an exit code."""

from __future__ import annotations

import io
import json
import signal
import sys
import time
from contextlib import ExitStack, suppress

from rich.console import Console

from kvtier.cli import output
from kvtier.cli.demo.display import Display, LiveDisplay, NoDisplay
from kvtier.cli.demo.interruption import Interrupted, Interruption
from kvtier.cli.demo.operator_log import OperatorLog
from kvtier.cli.demo.phases import Demo
from kvtier.cli.demo.report import Report
from kvtier.cli.demo.server import RequestStuck
from kvtier.cli.demo.settings import DemoSettings
from kvtier.cli.demo.tables import print_report
from kvtier.cpu.host_memory import NotEnoughMemory
from kvtier.tiering.factory import TierStartError

__all__ = ["run_demo"]

_WIDTH = 80
"""Of tables. On a narrower terminal lines wrap: nothing is left out."""
_OUTLOOK = "kvtier demo: at work; the default sizes take about half a minute of processor time."


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
    except TierStartError as refusal:
        print(
            f"kvtier demo: {refusal}\nThe file is put where TMPDIR says: name a directory with "
            "more room, or give fewer --requests, or fewer --tokens.",
            file=sys.stderr,
        )
        return 2
    text = json.dumps(report.as_json(), indent=2) + "\n" if as_json else _as_tables(report)
    try:
        output.write(text)
        output.finish()
    except output.NobodyReads:
        return 128 + signal.SIGPIPE
    except output.CannotWrite as error:
        print(f"kvtier demo: {error}", file=sys.stderr)
        return 2
    return 0 if report.ok else 1


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
