"""The deadlines of a tier, and the circuit breaker that cuts it off.

The orchestrator applies the same rules to every tier, whatever its code does.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum

from kvtier.config.options import WritePolicyName

__all__ = ["BreakerSettings", "BreakerState", "CircuitBreaker", "TierSettings"]


@dataclass(frozen=True, slots=True, kw_only=True)
class BreakerSettings:
    """When a tier is cut off, and for how long."""

    window: int = 20
    """The number of recent outcomes that count."""
    min_failures: int = 5
    """Failures needed to open the breaker."""
    max_failure_rate: float = 0.5
    """The breaker opens only if at least this share of the recent outcomes are failures, too."""
    max_timeouts_in_a_row: int = 3
    """Missed deadlines in a row that open the breaker, whatever the share of failures."""
    first_pause_s: float = 1.0
    """Seconds until the first probe: the job that shows whether the tier works again. Each failed
    probe doubles the pause."""
    longest_pause_s: float = 60.0
    """The longest pause."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TierSettings:
    """How the orchestrator treats one tier."""

    lookup_timeout_s: float = 0.25
    """If the tier needs longer to say whether it has a block, the request treats that as a miss."""
    load_timeout_s: float = 2.0
    """If a promotion takes longer, it is a miss for the requests that wait for it."""
    store_timeout_s: float = 10.0
    """If a store takes longer, and no other store has ended in that time, it is late and counts as
    a failure. Three missed deadlines in a row cut the tier's stores off."""
    max_pinned_share: float = 0.25
    """Share of the primary tier's slots that stores to this tier may pin; at least 32 slots."""
    write_policy: WritePolicyName = WritePolicyName.THROUGH
    """Which blocks go to this tier, and when."""
    write_budget: int | None = None
    """Bytes that may be written to this tier in a day, on average. None: no limit."""
    enable_kv_events: bool | None = None
    """Whether the engine gets the tier's events. None: if it gets any, and the tier's storage is on
    this machine. Storage that several engines share would be announced by each of them."""
    breaker: BreakerSettings = field(default_factory=BreakerSettings)


class BreakerState(Enum):
    """The state of a breaker. The values are those of the metric `breaker_state`."""

    CLOSED = 0
    """The tier is used."""
    HALF_OPEN = 1
    """One probe is allowed or under way."""
    OPEN = 2
    """The tier is not used until the pause is over."""


_CLOSED, _OPEN = BreakerState.CLOSED, BreakerState.OPEN


class CircuitBreaker:
    """Cuts off a tier that keeps failing, and tries it again after a pause. Scheduler thread only.

    While the breaker is half-open, `lets` allows the tier to one user at a time: a request, or all
    stores together. The outcome of the probe, the job that this user submits, decides whether the
    breaker closes.
    """

    def __init__(
        self, settings: BreakerSettings, log: Callable[[int, str], None] = lambda *_: None
    ) -> None:
        """`log` is called with a log level and a text when the breaker opens or closes."""
        self._settings = settings
        self._log = log
        self._outcomes: deque[bool] = deque(maxlen=settings.window)
        self._timeouts_in_a_row = 0
        self._pause = settings.first_pause_s
        self._opened_at = 0.0
        self.state = _CLOSED
        self.probe: int | None = None
        """While half-open: the job id of the probe."""
        self.prober: object = None
        """While half-open: the user that may submit the probe."""
        self.num_openings = 0

    @property
    def is_closed(self) -> bool:
        """True if every user may use the tier."""
        return self.state is _CLOSED

    def is_pausing(self, now: float) -> bool:
        """True if the breaker is open and its pause is not over."""
        return self.state is _OPEN and now - self._opened_at < self._pause

    def lets(self, user: object, now: float) -> bool:
        """True if `user` may use the tier now. After the pause, the first user that asks may."""
        if self.state is _CLOSED:
            return True
        if self.state is _OPEN:
            if self.is_pausing(now):
                return False
            self.state = BreakerState.HALF_OPEN
            self.probe = self.prober = None
        if self.probe is not None:
            return False
        if self.prober is None:
            self.prober = user
        return self.prober is user

    def submitted(self, job_id: int) -> None:
        """A job was submitted. While half-open, it is the probe."""
        if self.state is BreakerState.HALF_OPEN:
            self.probe = job_id

    def step_ended(self) -> None:
        """If the prober has submitted nothing in this step, another user may become the prober."""
        self.let_go(self.prober)

    def let_go(self, user: object) -> None:
        """`user` does not need the tier any more."""
        if self.prober is user and self.probe is None:
            self.prober = None

    def succeeded(self, job_id: int) -> None:
        """A job has ended well and in time."""
        self._timeouts_in_a_row = 0
        if self.state is _CLOSED:
            self._outcomes.append(True)
        elif job_id == self.probe:
            self.state = _CLOSED
            self._outcomes.clear()
            self._pause = self._settings.first_pause_s
            self.probe = self.prober = None
            self._log(logging.INFO, "in use again")

    def failed(self, now: float, job_id: int | None = None, is_timeout: bool = False) -> None:
        """A job has failed; or a call, if `job_id` is None."""
        if self.state is _OPEN:
            if job_id is None and not self.is_pausing(now):
                self._pause_longer(now)  # the pause is over, but a call failed before any probe
            return
        if self.state is BreakerState.HALF_OPEN:
            # Only the probe counts, not jobs that were submitted before the breaker opened.
            if job_id is None or job_id == self.probe:
                self._pause_longer(now)
            return
        self._outcomes.append(False)
        self._timeouts_in_a_row = self._timeouts_in_a_row + 1 if is_timeout else 0
        num_failures = self._outcomes.count(False)
        if self._timeouts_in_a_row >= self._settings.max_timeouts_in_a_row:
            self.trip(now, f"{self._timeouts_in_a_row} deadlines in a row were missed")
        elif (
            num_failures >= self._settings.min_failures
            and num_failures >= self._settings.max_failure_rate * len(self._outcomes)
        ):
            self.trip(
                now, f"{num_failures} of the last {len(self._outcomes)} outcomes were failures"
            )

    def _pause_longer(self, now: float) -> None:
        self._pause = min(self._pause * 2, self._settings.longest_pause_s)
        self.trip(now, "the probe failed")

    def trip(self, now: float, reason: str) -> None:
        """Open the breaker at once."""
        if self.state is _CLOSED:
            self._log(logging.WARNING, f"cut off: {reason}. Tried again in {self._pause:g} s")
        self.state = _OPEN
        self._opened_at = now
        self._outcomes.clear()
        self._timeouts_in_a_row = 0
        self.probe = self.prober = None
        self.num_openings += 1
