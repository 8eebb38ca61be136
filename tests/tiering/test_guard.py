"""What the guard learns."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtier.tiering.guard import PrefillRate, TransferEstimate


def test_a_configured_rate_is_taken_as_it_is() -> None:
    rate = PrefillRate(5000.0)
    rate.note_computed(10)
    rate.step_ended(1.0)
    assert rate.tokens_per_s == 5000.0


def test_a_rate_of_zero_is_never_known() -> None:
    rate = PrefillRate(0)
    for second in range(100):
        rate.note_computed(10)
        rate.step_ended(second)
    assert rate.tokens_per_s is None


def test_idle_steps_and_pauses_do_not_lower_the_rate() -> None:
    rate = PrefillRate(None)
    now = 0.0
    for step in range(200):
        now += 0.1 if step % 50 else 30.0
        if step % 3 == 0:
            rate.note_computed(512)
        rate.step_ended(now)
    assert rate.tokens_per_s == pytest.approx(5120)


@pytest.mark.parametrize("shift", [0, 1, 2])
def test_a_burst_between_short_steps_is_not_taken_for_the_rate(shift: int) -> None:
    """A prefill of 0.4 s among decoding steps of 0.01 s, offered before, in or after its step."""
    rate = PrefillRate(None)
    now = 0.0
    for step in range(300):
        now += 0.4 if step % 10 == 5 else 0.01
        if step % 10 == 4 + shift:
            rate.note_computed(8192)
        rate.step_ended(now)
    assert rate.tokens_per_s == pytest.approx(20480)


def test_a_clock_that_stands_still_teaches_nothing() -> None:
    rate = PrefillRate(None)
    for _ in range(100):
        rate.note_computed(512)
        rate.step_ended(1.0)
    assert rate.tokens_per_s is None


@given(
    latency=st.floats(0, 0.1),
    per_block=st.floats(1e-5, 0.01),
    sizes=st.lists(st.integers(1, 500), min_size=8, max_size=80),
    asked=st.integers(1, 500),
)
def test_a_tier_that_keeps_its_pace_is_predicted(
    latency: float, per_block: float, sizes: list[int], asked: int
) -> None:
    estimate = TransferEstimate()
    for size in sizes:
        estimate.note(size, latency + per_block * size)
    predicted = estimate.predict(asked)
    assert predicted is not None
    if max(sizes) - min(sizes) >= 50:
        assert predicted == pytest.approx(latency + per_block * asked, rel=0.01, abs=1e-4)
    assert predicted >= 0


def test_nothing_is_predicted_from_little() -> None:
    estimate = TransferEstimate()
    for _ in range(7):
        estimate.note(4, 0.1)
    assert estimate.predict(4) is None


def test_a_change_of_pace_is_followed() -> None:
    estimate = TransferEstimate()
    for seconds in [0.001] * 50 + [0.1] * 50:
        estimate.note(10, seconds)
    predicted = estimate.predict(10)
    assert predicted is not None
    assert predicted > 0.08
