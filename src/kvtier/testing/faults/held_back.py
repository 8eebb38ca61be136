"""Jobs and results of a faulty tier that are kept until later."""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar

__all__ = ["HeldBack"]

T = TypeVar("T")


class HeldBack(Generic[T]):
    """What comes after so many polls and so much time, in the order in which it was put in."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._polls = 0
        self._held: list[tuple[int, float, T]] = []

    def put(self, item: T, polls: int = 0, seconds: float = 0.0) -> None:
        """Hold `item` back. Without polls and seconds it comes with the next `take_due`."""
        self._held.append((self._polls + polls, self._clock() + seconds, item))

    def count_poll(self) -> None:
        """One poll has passed."""
        self._polls += 1

    def take_due(self) -> list[T]:
        """What has waited long enough."""
        if not self._held:
            return []
        now = self._clock()
        due, waiting = [], []
        for held in self._held:
            poll, when, item = held
            if poll <= self._polls and when <= now:
                due.append(item)
            else:
                waiting.append(held)
        self._held = waiting
        return due

    def take_all(self) -> list[T]:
        """Everything, due or not."""
        held, self._held = self._held, []
        return [item for _, _, item in held]
