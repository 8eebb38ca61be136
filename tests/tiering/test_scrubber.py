"""The rate limit of a scrub."""

from __future__ import annotations

import pytest

from kvtier.tiering import scrubber
from kvtier.tiering.scrubber import RateLimit


class VirtualTime:
    def __init__(self) -> None:
        self.now = 100.0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


def test_pauses_are_not_made_up_for(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = VirtualTime()
    monkeypatch.setattr(scrubber, "time", clock)
    limit = RateLimit(1000)
    for _ in range(10):
        limit.wait_for(500)
    assert clock.now == pytest.approx(105.0)
    clock.now += 60
    for _ in range(10):
        limit.wait_for(500)
    assert clock.now == pytest.approx(170.0)
