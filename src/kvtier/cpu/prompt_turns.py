"""How soon a thread that moves blocks gets its turn with the interpreter."""

from __future__ import annotations

import sys
import threading
from types import TracebackType

__all__ = ["prompt_turns"]

_INTERVAL_S = 0.0001


class _PromptTurns:
    """Within, whoever wants the interpreter has it after a tenth of a millisecond at most.

    Python's own interval is 50 times as long. A thread that moves large blocks has some
    microseconds to do between two waits for a disk or a device, and would wait for its turn a
    hundred times as long beside an engine that computes; the engine loses no more than those
    microseconds. Not for threads that have much to do. For the whole process; what was set before
    is set again when the last one leaves. Any thread.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._num_within = 0
        self._interval_before: float | None = None
        """None: it is not ours."""

    def __enter__(self) -> None:
        with self._lock:
            if self._num_within == 0:
                before = sys.getswitchinterval()
                if before > _INTERVAL_S:
                    self._interval_before = before
                    sys.setswitchinterval(_INTERVAL_S)
            self._num_within += 1

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        with self._lock:
            self._num_within -= 1
            if self._num_within or self._interval_before is None:
                return
            # Unless somebody else has changed it meanwhile.
            if abs(sys.getswitchinterval() - _INTERVAL_S) < _INTERVAL_S / 50:
                sys.setswitchinterval(self._interval_before)
            self._interval_before = None


prompt_turns = _PromptTurns()
"""The one of this process."""
