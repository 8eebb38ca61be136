"""A command in a real terminal of any size, and what is on the screen."""

from __future__ import annotations

import fcntl
import os
import pty
import select
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Callable
from types import TracebackType
from typing import Self

import pyte

from tests.test_architecture import REPO, SRC
from tests.tiering.patience import PATIENCE_S

__all__ = ["Terminal"]


class Terminal:
    """A context manager that ends the command."""

    def __init__(self, *arguments: str, columns: int = 80, rows: int = 24, **env: str) -> None:
        """Run `kvtier` with these arguments."""
        self._own, theirs = pty.openpty()
        self.screen = pyte.Screen(columns, rows)
        self._stream = pyte.ByteStream(self.screen)
        self.written = b""
        self._set_size(columns, rows)
        self.modes = termios.tcgetattr(theirs)
        self._theirs = theirs
        kept = {name: value for name, value in os.environ.items() if name not in _SETS_SIZE}
        self.process = subprocess.Popen(
            # The shell opens the terminal, and thereby makes it the one whose keys send signals.
            [
                *("sh", "-c", 'exec "$@" <>"$0" >&0 2>&0', os.ttyname(theirs)),
                *(sys.executable, "-m", "kvtier", *arguments),
            ],
            cwd=REPO,
            env=kept | {"PYTHONPATH": str(SRC), "TERM": "xterm-256color"} | env,
            start_new_session=True,
        )

    def _set_size(self, columns: int, rows: int) -> None:
        fcntl.ioctl(self._own, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))

    def resize(self, columns: int, rows: int) -> None:
        self.screen.resize(rows, columns)
        self._set_size(columns, rows)

    def press(self, keys: bytes) -> None:
        os.write(self._own, keys)

    def read(self, patience_s: float = 0.1) -> None:
        ready, _, _ = select.select([self._own], [], [], patience_s)
        if ready:
            part = os.read(self._own, 1 << 16)
            self.written += part
            self._stream.feed(part)

    @property
    def lines(self) -> list[str]:
        return [line.rstrip() for line in self.screen.display]

    @property
    def text(self) -> str:
        return "\n".join(self.lines)

    def wait_for(self, is_so: Callable[[], bool]) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while not is_so():
            assert time.monotonic() < deadline, self.text
            self.read()

    def wait_for_text(self, *texts: str) -> None:
        self.wait_for(lambda: all(text in self.text for text in texts))

    def ended(self) -> int:
        """The exit code, once it has ended and everything is read."""
        self.wait_for(lambda: self.process.poll() is not None)
        while select.select([self._own], [], [], 0.05)[0]:
            self.read()
        return self.process.returncode

    def is_restored(self) -> bool:
        """True if the terminal is as before: its modes, its cursor, its first screen."""
        entered, left = (self.written.rfind(code) for code in (b"\x1b[?1049h", b"\x1b[?1049l"))
        hidden, shown = (self.written.rfind(code) for code in (b"\x1b[?25l", b"\x1b[?25h"))
        modes = termios.tcgetattr(self._theirs)
        return 0 <= entered < left and 0 <= hidden < shown and modes == self.modes

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self._own)
        os.close(self._theirs)


_SETS_SIZE = frozenset({"COLUMNS", "LINES", "NO_COLOR", "FORCE_COLOR"})
