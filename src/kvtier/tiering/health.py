"""What keeps a tier from hurting: its deadlines, and the breaker that cuts it off.

Nothing here is up to the tier. The orchestrator judges every tier by the same rules, from what the
tier reports and from what it fails to report.
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
    """How many of the last outcomes count."""
    min_failures: int = 5
    """So many of them must be failures,"""
    max_failure_rate: float = 0.5
    """and they must be at least this share."""
    max_timeouts_in_a_row: int = 3
    """Or: so many deadlines missed one after the other."""
    first_pause_s: float = 1.0
    """How long the first pause is. It doubles with every probe that fails,"""
    longest_pause_s: float = 60.0
    """up to this."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TierSettings:
    """How the orchestrator treats one tier."""

    lookup_timeout_s: float = 0.25
    """A tier that does not know for longer whether it has a block is a miss, for that request."""
    load_timeout_s: float = 2.0
    """A promotion that takes longer is a miss for those who wait for it."""
    store_timeout_s: float = 10.0
    """A store that takes longer counts as a failure; three in a row cut its stores off."""
    max_pinned_share: float = 0.25
    """The share of the primary tier's slots that stores to this tier may pin."""
    write_policy: WritePolicyName = WritePolicyName.THROUGH
    """When blocks go to this tier."""
    enable_kv_events: bool = False
    breaker: BreakerSettings = field(default_factory=BreakerSettings)


class BreakerState(Enum):
    """Whether a tier is asked at all. The values are those of the gauge."""

    CLOSED = 0
    """It is."""
    HALF_OPEN = 1
    """One probe is under way, or allowed."""
    OPEN = 2
    """It is not, until the pause is over."""


_CLOSED, _OPEN = BreakerState.CLOSED, BreakerState.OPEN


class CircuitBreaker:
    """Cuts off what keeps failing, and tries again after a while. Scheduler thread only.

    While it is half-open, one user at a time may try: `lets` says whether, and the outcome of the
    job it then submits (`probe`) decides.
    """

    def __init__(
        self, settings: BreakerSettings, tell: Callable[[int, str], None] = lambda *_: None
    ) -> None:
        """`tell` hears, with a log level, when it is cut off and when it is in use again."""
        self._settings = settings
        self._tell = tell
        self._outcomes: deque[bool] = deque(maxlen=settings.window)
        self._timeouts_in_a_row = 0
        self._pause = settings.first_pause_s
        self._opened_at = 0.0
        self.state = _CLOSED
        self.probe: int | None = None
        """The job that decides, while half-open."""
        self.prober: object = None
        """Who may ask and submit it."""
        self.num_openings = 0

    @property
    def is_closed(self) -> bool:
        """Whether nothing is held back."""
        return self.state is _CLOSED

    def is_pausing(self, now: float) -> bool:
        """Whether nobody may use the tier now, and for some time to come."""
        return self.state is _OPEN and now - self._opened_at < self._pause

    def lets(self, user: object, now: float) -> bool:
        """Whether `user` may use the tier now."""
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
        """A job was sent. If half-open, it is the probe."""
        if self.state is BreakerState.HALF_OPEN:
            self.probe = job_id

    def step_ended(self) -> None:
        """A prober that has found nothing to try makes room for another one."""
        self.let_go(self.prober)

    def let_go(self, user: object) -> None:
        """`user` does not want to try any more."""
        if self.prober is user and self.probe is None:
            self.prober = None

    def succeeded(self, job_id: int) -> None:
        """A job has ended well, in time."""
        self._timeouts_in_a_row = 0
        if self.state is _CLOSED:
            self._outcomes.append(True)
        elif job_id == self.probe:
            self.state = _CLOSED
            self._outcomes.clear()
            self._pause = self._settings.first_pause_s
            self.probe = self.prober = None
            self._tell(logging.INFO, "in use again")

    def failed(self, now: float, job_id: int | None = None, is_timeout: bool = False) -> None:
        """Something went wrong: a job (named), or a call."""
        if self.state is _OPEN:
            if job_id is None and not self.is_pausing(now):
                self._pause_longer(now)  # a call, before anyone was let through
            return
        if self.state is BreakerState.HALF_OPEN:
            # Jobs from before it was cut off say nothing about the probe.
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
            self.trip(now, f"{num_failures} of the last {len(self._outcomes)} outcomes were bad")

    def _pause_longer(self, now: float) -> None:
        self._pause = min(self._pause * 2, self._settings.longest_pause_s)
        self.trip(now, "the probe failed")

    def trip(self, now: float, reason: str) -> None:
        """Cut it off at once: it has broken the contract, or failed too often."""
        if self.state is _CLOSED:
            self._tell(logging.WARNING, f"cut off: {reason}. Tried again in {self._pause:g} s")
        self.state = _OPEN
        self._opened_at = now
        self._outcomes.clear()
        self._timeouts_in_a_row = 0
        self.probe = self.prober = None
        self.num_openings += 1
