"""The breaker compared with a simple model."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kvtier.tiering.health import BreakerSettings, BreakerState, CircuitBreaker

SETTINGS = BreakerSettings(
    window=6,
    min_failures=3,
    max_failure_rate=0.5,
    max_timeouts_in_a_row=2,
    first_pause_s=1.0,
    longest_pause_s=5.0,
)


def breaker_with(*outcomes: bool) -> CircuitBreaker:
    breaker = CircuitBreaker(SETTINGS)
    for job_id, is_good in enumerate(outcomes):
        if is_good:
            breaker.succeeded(job_id)
        else:
            breaker.failed(0.0, job_id)
    return breaker


def test_single_failures_are_forgiven() -> None:
    assert breaker_with(True, False, True, False, True, True).is_closed


def test_a_failure_rate_opens_it() -> None:
    assert not breaker_with(True, False, True, False, True, False).is_closed
    assert not breaker_with(False, False, False).is_closed


def test_old_failures_do_not_count() -> None:
    assert breaker_with(False, False, *[True] * 6, False).is_closed


def test_timeouts_in_a_row_open_it() -> None:
    breaker = CircuitBreaker(SETTINGS)
    breaker.failed(0.0, 1, is_timeout=True)
    breaker.succeeded(2)
    breaker.failed(0.0, 3, is_timeout=True)
    assert breaker.is_closed
    breaker.failed(0.0, 4, is_timeout=True)
    assert breaker.state is BreakerState.OPEN


def test_one_prober_at_a_time() -> None:
    breaker = CircuitBreaker(SETTINGS)
    breaker.trip(10.0, "a test")
    assert not breaker.lets("a", 10.9)
    assert breaker.lets("a", 11.0)
    assert not breaker.lets("b", 11.0)
    assert breaker.lets("a", 11.0)
    breaker.step_ended()
    assert breaker.lets("b", 11.1)
    breaker.submitted(7)
    breaker.step_ended()
    assert not breaker.lets("b", 11.2)
    assert not breaker.lets("a", 11.2)


def test_jobs_from_before_decide_nothing() -> None:
    breaker = CircuitBreaker(SETTINGS)
    breaker.trip(0.0, "a test")
    breaker.lets("a", 1.0)
    breaker.submitted(7)
    breaker.succeeded(3)
    breaker.failed(1.0, 4)
    assert breaker.state is BreakerState.HALF_OPEN
    breaker.succeeded(7)
    assert breaker.is_closed


@given(st.lists(st.booleans(), max_size=12))
def test_pauses_double_up_to_the_longest_and_start_again_after_a_success(
    outcomes: list[bool],
) -> None:
    breaker = CircuitBreaker(SETTINGS)
    now, pause = 0.0, 1.0
    breaker.trip(now, "a test")
    for job_id, is_good in enumerate(outcomes):
        assert not breaker.lets("a", now + pause - 0.01)
        now += pause
        assert breaker.lets("a", now)
        breaker.submitted(job_id)
        if is_good:
            breaker.succeeded(job_id)
            assert breaker.is_closed
            breaker.trip(now, "a test")
            pause = 1.0
        else:
            breaker.failed(now, job_id)
            pause = min(pause * 2, 5.0)
        assert breaker.state is BreakerState.OPEN


@given(
    st.lists(
        st.tuples(st.sampled_from(["good", "bad", "late", "call", "trip", "ask"]), st.floats(0, 3)),
        max_size=60,
    )
)
def test_a_closed_breaker_lets_everyone_and_an_open_one_nobody(
    events: list[tuple[str, float]],
) -> None:
    breaker = CircuitBreaker(SETTINGS)
    now = 0.0
    for job_id, (event, seconds) in enumerate(events):
        now += seconds
        if event == "ask":
            lets = breaker.lets("a", now)
            assert lets or not breaker.is_closed
            if lets:
                breaker.submitted(job_id)
                assert breaker.is_closed or not breaker.lets("b", now)
        elif event == "good":
            breaker.succeeded(breaker.probe if breaker.probe is not None else job_id)
        elif event == "trip":
            breaker.trip(now, "a test")
            assert not breaker.lets("a", now)
        else:
            breaker.failed(now, None if event == "call" else job_id, is_timeout=event == "late")
        if breaker.is_pausing(now):
            assert not breaker.lets("a", now)
