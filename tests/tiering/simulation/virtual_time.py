"""Virtual time, and the events in it."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from itertools import count


class VirtualTime:
    """A clock for the manager, and the events of everything that is not the scheduler thread.

    Events occur in order while time advances. Between two calls of `advance`, only the scheduler
    thread runs.
    """

    def __init__(self) -> None:
        self.now = 0.0
        self._agenda: list[tuple[float, int, Callable[[], None]]] = []
        self._tie_breaker = count()

    def __call__(self) -> float:
        return self.now

    def at(self, when: float, action: Callable[[], None]) -> None:
        """Schedule an event."""
        heapq.heappush(self._agenda, (max(when, self.now), next(self._tie_breaker), action))

    def advance(self, seconds: float) -> None:
        """Let time pass."""
        end = self.now + seconds
        while self._agenda and self._agenda[0][0] <= end:
            self.now, _, action = heapq.heappop(self._agenda)
            action()
        self.now = end
