"""Ctrl-C, where something must be brought to an end first."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

__all__ = ["noted_interrupts"]


@contextmanager
def noted_interrupts() -> Iterator[Callable[[], bool]]:
    """Whether Ctrl-C was pressed, to be asked between two steps. Pressed once more, it interrupts
    whatever is going on. Main thread."""
    is_pressed = threading.Event()

    def note_it(_number: int, _frame: FrameType | None) -> None:
        is_pressed.set()
        signal.signal(signal.SIGINT, signal.default_int_handler)

    before = signal.getsignal(signal.SIGINT)
    if before is not signal.default_int_handler:  # it is ignored, or someone else's
        yield is_pressed.is_set
        return
    signal.signal(signal.SIGINT, note_it)
    try:
        yield is_pressed.is_set
    finally:
        signal.signal(signal.SIGINT, before)
