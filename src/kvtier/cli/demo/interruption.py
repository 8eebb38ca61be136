"""Ctrl-C between two engine steps, never in the middle of one."""

from __future__ import annotations

import signal
from types import FrameType, TracebackType
from typing import Any

__all__ = ["Interrupted", "Interruption"]

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Interrupted(Exception):
    """The user wants the demo to end."""

    def __init__(self, signal_number: int) -> None:
        super().__init__(signal.Signals(signal_number).name)
        self.exit_code = 128 + signal_number


class Interruption:
    """Inside of it, a signal is noted, and `check` raises. So whatever is being set up or shut down
    at that moment is so to its end, and leaves nothing behind. Main thread."""

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
        """Raise `Interrupted` if a signal has come."""
        if self._noted is not None:
            raise Interrupted(self._noted)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._noted = number
