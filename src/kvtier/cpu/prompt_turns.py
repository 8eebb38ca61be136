"""How soon a thread that moves blocks gets its turn with the interpreter."""

from __future__ import annotations

import sys
import threading
from types import TracebackType

__all__ = ["prompt_turns"]

_INTERVAL_S = 0.0001


class _PromptTurns:
    """Within, whoever wants the interpreter has it after a tenth of a millisecond at most.

    Python's own interval is fifty times as long. A thread that moves large blocks has some
    microseconds to do between two waits for a disk or a device, and would wait for its turn a
    hundred times as long beside an engine that computes; the engine loses no more than those
    microseconds. Not for threads that have much to do. For the whole process; what was set before
    is set again when the last one leaves. Any thread.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._num_within = 0
        self._interval_before = _INTERVAL_S

    def __enter__(self) -> None:
        with self._lock:
            if self._num_within == 0:
                self._interval_before = sys.getswitchinterval()
                if self._interval_before > _INTERVAL_S:
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
            # Unless somebody else has changed it meanwhile.
            is_ours = abs(sys.getswitchinterval() - _INTERVAL_S) < _INTERVAL_S / 100
            if self._num_within == 0 and is_ours:
                sys.setswitchinterval(self._interval_before)


prompt_turns = _PromptTurns()
"""The one of this process."""
