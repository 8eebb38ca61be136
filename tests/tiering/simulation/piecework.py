"""A slow transfer: parts of it are done at random times."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

from tests.tiering.simulation.virtual_time import VirtualTime

_MAX_PORTIONS = 3


class Piecework:
    """Actions carried out in portions at random times until `duration` is over, then `on_done`.

    Calls `may_go_on` before each portion. If that returns False, it stops until `resume` or
    `finish_now`.
    """

    def __init__(
        self,
        time: VirtualTime,
        rng: random.Random,
        actions: Sequence[Callable[[], None]],
        duration: float,
        on_done: Callable[[], None],
        may_go_on: Callable[[], bool] = lambda: True,
    ) -> None:
        self._time = time
        self._actions = list(actions)
        self._on_done = on_done
        self._may_go_on = may_go_on
        self.is_done = False
        self.is_stopped = False
        portions = rng.randint(1, _MAX_PORTIONS)
        breaks = sorted(rng.random() for _ in range(portions - 1))
        self._moments = [time.now + duration * moment for moment in breaks]
        self._moments.append(time.now + duration)
        self._bounds = [round(len(self._actions) * moment) for moment in breaks]
        self._bounds.append(len(self._actions))
        self._num_done = 0
        self._portion = 0
        time.at(self._moments[0], self._go_on)

    def resume(self) -> None:
        """Go on now, if it was stopped."""
        if self.is_stopped and not self.is_done:
            self.is_stopped = False
            self._time.at(self._time.now, self._go_on)

    def finish_now(self) -> None:
        """Do all that is left at once."""
        if self.is_done:
            return
        while self._num_done < len(self._actions):
            self._num_done += 1
            self._actions[self._num_done - 1]()
        self.is_done = True
        self._on_done()

    def _go_on(self) -> None:
        if self.is_done or self.is_stopped:
            return
        if not self._may_go_on():
            self.is_stopped = True
            return
        if self._portion == len(self._moments) - 1:
            self.finish_now()
            return
        while self._num_done < self._bounds[self._portion]:
            self._num_done += 1
            self._actions[self._num_done - 1]()
        self._portion += 1
        self._time.at(self._moments[self._portion], self._go_on)
