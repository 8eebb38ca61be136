"""`kvtier top`: one picture, or a live view until the user ends it."""

from __future__ import annotations

import io
import json
import os
import select
import signal
import sys
import termios
import threading
import tty
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict
from types import FrameType

from rich.console import Console
from rich.live import Live
from rich.text import Text

from kvtier.cli.output import CannotWrite, finish, note, write
from kvtier.cli.watch.engines import FollowedEngines
from kvtier.cli.watch.overview import Overview, look
from kvtier.cli.watch.screen import Screen
from kvtier.observe.client import NoAnswer

__all__ = ["run_top"]

_LOOK_AGAIN_S = 0.25
"""How soon a new size of the terminal is seen."""


def run_top(engines: FollowedEngines, interval_s: float, *, once: bool, as_json: bool) -> int:
    """Show the engines. Returns the exit code. Raises `EngineNotFound`, `NoAnswer`."""
    engines.find()
    if as_json or once or not _is_terminal():
        overview = look(engines)
        if not overview.engines:
            raise NoAnswer(overview.problem or "no answer")
        if as_json:
            write(json.dumps(asdict(overview), indent=2) + "\n")
        else:
            _print(overview)
        finish()
        return 0
    return _LiveView(engines, interval_s).run()


def _is_terminal() -> bool:
    return sys.stdout is not None and sys.stdout.isatty() and os.environ.get("TERM") != "dumb"


def _print(overview: Overview) -> None:
    terminal, text = Console(), io.StringIO()
    console = Console(file=text, width=terminal.width, force_terminal=terminal.is_terminal)
    console.print(Screen(overview, ascii_only=terminal.options.ascii_only))
    write("".join(f"{line.rstrip()}\n" for line in text.getvalue().splitlines()))


class _LiveView:
    """Draws on this thread. Another one asks the engines, because an answer may take long and the
    keyboard should not wait for it."""

    def __init__(self, engines: FollowedEngines, interval_s: float) -> None:
        self._engines, self._interval_s = engines, interval_s
        self._overview: Overview | None = None
        self._wake, self._end = os.eventfd(0, os.EFD_CLOEXEC), threading.Event()
        self._asking = threading.Thread(target=self._ask, name="kvtier-top", daemon=True)
        self._console = Console()

    def run(self) -> int:
        self._asking.start()
        try:
            with ExitStack() as restored:
                restored.enter_context(_ended_by_signals())
                keyboard = restored.enter_context(_keyboard())
                live = restored.enter_context(
                    Live(console=self._console, screen=True, auto_refresh=False)
                )
                code = self._show(live, keyboard)
        except OSError as error:  # the terminal has gone
            raise CannotWrite(f"the terminal has gone: {error.strerror or error}") from None
        finally:
            self._end.set()
        if code:
            note("kvtier top: the engine has ended")
        return code

    def _ask(self) -> None:
        while not self._end.is_set():
            self._overview = look(self._engines)
            os.eventfd_write(self._wake, 1)
            self._end.wait(self._interval_s)

    def _show(self, live: Live, keyboard: int | None) -> int:
        sources = [self._wake] if keyboard is None else [self._wake, keyboard]
        shown: object = None
        while True:
            overview, size = self._overview, self._console.size
            if overview is None and shown is None:
                shown = size
                live.update(Text("Asking the engine ..."), refresh=True)
            if (overview, size) != shown and overview is not None:
                shown = overview, size
                live.update(Screen(overview, self._notice(overview), size.height), refresh=True)
            ready, _, _ = select.select(sources, [], [], _LOOK_AGAIN_S)
            if self._wake in ready:
                os.eventfd_read(self._wake)
            if keyboard in ready and keyboard is not None:
                typed = os.read(keyboard, 64)
                if not typed or b"q" in typed.lower():
                    return 0
            if overview is not None and overview.state == "gone" and not self._engines.may_return:
                return 1

    def _notice(self, overview: Overview) -> str | None:
        if overview.state in ("gone", "none"):
            return "The engine has ended. Waiting for the next one; q ends."
        if overview.state == "silent":
            return "The engine does not answer: it is stopped, or very busy. q ends."
        return None


@contextmanager
def _keyboard() -> Iterator[int | None]:
    """Yield the descriptor of the keyboard, which gives each key at once and shows none; None:
    there is no keyboard."""
    if sys.stdin is None or not sys.stdin.isatty():
        yield None
        return
    keyboard = sys.stdin.fileno()
    before = termios.tcgetattr(keyboard)
    try:
        tty.setcbreak(keyboard)
        modes = termios.tcgetattr(keyboard)
        modes[6][termios.VSUSP] = b"\0"  # Ctrl-Z would leave the picture in the user's shell
        termios.tcsetattr(keyboard, termios.TCSADRAIN, modes)
        yield keyboard
    finally:
        with suppress(termios.error):
            termios.tcsetattr(keyboard, termios.TCSADRAIN, before)


@contextmanager
def _ended_by_signals() -> Iterator[None]:
    """Leave the context, and so restore the terminal, when the process is to end."""

    def leave(number: int, _frame: FrameType | None) -> None:
        raise SystemExit(128 + number)

    former = {number: signal.signal(number, leave) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in former.items():
            signal.signal(number, handler)
