"""What the guard learns about the costs of loading and computing."""

from __future__ import annotations

from collections.abc import Callable
from itertools import cycle
from random import Random

import pytest
from hypothesis import assume, example, given
from hypothesis import strategies as st

from kvtier.tiering.cost import PrefillRate, TransferEstimate
from kvtier.tiering.guard import Exploration, Trials


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


def test_who_is_learnt_from_stores_is_not_told() -> None:
    rate = PrefillRate(None)
    for number in range(20):
        rate.note_computed(100)
        rate.step_ended(float(number))
    assert rate.is_known
    assert not rate.has_reports
    rate.note_prefill(100, 50, 0.1)
    assert rate.has_reports


def test_a_clock_that_stands_still_teaches_nothing() -> None:
    rate = PrefillRate(None)
    for _ in range(100):
        rate.note_computed(512)
        rate.step_ended(1.0)
    assert rate.tokens_per_s is None


# --- told by the engine -------------------------------------------------------------------------

AT_START, PER_POSITION = 23e-6, 1e-9
"""About what a token costs on an H200, for a model of 8 billion parameters."""


def true_cost(position: float) -> float:
    return AT_START + PER_POSITION * position


def exactly(seconds: float) -> float:
    return seconds


def compute(
    rate: PrefillRate,
    num_tokens: int,
    chunk: int,
    cost: Callable[[float], float] = true_cost,
    measure: Callable[[float], float] = exactly,
) -> bool:
    """Compute a prompt in steps of one chunk each. Returns True if its cost is known afterwards."""
    for start in range(0, num_tokens, chunk):
        n = min(chunk, num_tokens - start)
        position = start + n / 2
        rate.note_prefill(n, position, measure(n * cost(position)))
    return rate.is_known


def per_token(rate: PrefillRate, position: float) -> float:
    assert rate.is_known
    return rate.seconds_for(1, position)


@given(
    at_start=st.floats(1e-7, 1e-2),
    per_position=st.floats(0, 1e-6),
    chunk=st.integers(64, 8192),
    num_chunks=st.integers(1, 20),
    asked=st.floats(0, 1),
)
def test_what_a_token_costs_at_its_position_is_found_out(
    at_start: float, per_position: float, chunk: int, num_chunks: int, asked: float
) -> None:
    rate = PrefillRate(None)
    for _ in range(8):
        compute(rate, num_chunks * chunk, chunk, lambda p: at_start + per_position * p)
    first, last = chunk / 2, (num_chunks - 0.5) * chunk
    position = first + asked * (last - first)
    assert per_token(rate, position) == pytest.approx(at_start + per_position * position)


@given(seed=st.integers(0, 2**32))
def test_noise_moves_it_little(seed: int) -> None:
    random = Random(seed)
    rate = PrefillRate(None)
    for length in [*random.choices((2048, 8192, 32768), k=12), 32768]:
        compute(rate, length, 2048, measure=lambda s: s * random.uniform(0.95, 1.05))
    for position in (0, 1024, 8192, 16384, 30000):
        assert per_token(rate, position) == pytest.approx(true_cost(position), rel=0.1)


@given(
    data=st.lists(
        st.tuples(
            st.integers(1, 10**5),
            st.sampled_from([0.0, 0.5, 1.0, 700.0, 900.0, 3000.0, 1e5, 1e9 - 1]),
            st.floats(1e-9, 1e5),
        ),
        min_size=32,
        max_size=200,
    ),
    asked=st.floats(0, 1e9),
)
def test_whatever_it_is_told_it_makes_sense_of_it(
    data: list[tuple[int, float, float]], asked: float
) -> None:
    """No cost is negative, none is below what was measured anywhere, and none falls."""
    rate = PrefillRate(None)
    for sample in data:
        rate.note_prefill(*sample)
    assume(rate.is_known)
    costs = [seconds / tokens for tokens, _, seconds in data]
    assert 0 <= per_token(rate, 0) <= per_token(rate, asked)
    assert per_token(rate, 1e9) <= max(costs) * 1.001
    assert per_token(rate, 1e9) >= min(costs) * 0.999


@given(
    others=st.lists(st.integers(256, 2048), min_size=7, max_size=15),
    tokens=st.integers(1, 2048),
    factor=st.floats(1, 1e6),
    place=st.integers(0, 15),
)
def test_one_slow_step_is_no_cost(
    others: list[int], tokens: int, factor: float, place: int
) -> None:
    """A compilation, say: however slow, however heavy, and whenever it comes."""
    rate = PrefillRate(None)
    seconds = [(n, n * 1e-4) for n in others]
    seconds.insert(place, (tokens, tokens * 1e-4 * factor))
    for n, took in seconds:
        rate.note_prefill(n, 1500, took)
    rate.note_prefill(2048, 1500, 2048 * 1e-4)  # now it is known which of them are small
    for _ in range(8):
        rate.note_prefill(2048, 1500, 2048 * 1e-4)
    assert per_token(rate, 1500) == pytest.approx(1e-4)


def test_a_long_prompt_that_was_slow_from_end_to_end_does_little_harm() -> None:
    """It may be the only step of its length."""
    rate = PrefillRate(None)
    for _ in range(10):
        compute(rate, 4096, 2048)
    compute(rate, 32768, 2048, measure=lambda s: s * 50)
    for _ in range(10):
        compute(rate, 4096, 2048)
    assert per_token(rate, 2000) < 2 * true_cost(2000)
    assert per_token(rate, 30000) < 6 * true_cost(30000)
    compute(rate, 32768, 2048)
    for position in (2000, 30000):
        assert per_token(rate, position) == pytest.approx(true_cost(position), rel=0.01)


def test_prompts_that_always_begin_slowly_do_not_make_their_start_dear() -> None:
    rate = PrefillRate(None)
    for _ in range(16):
        compute(rate, 2048, 2048, measure=lambda s: s * 9)
        for start in range(2048, 32768, 2048):
            rate.note_prefill(2048, start + 1024, 2048 * true_cost(start + 1024))
    for position in (1024, 16384, 30000):
        assert per_token(rate, position) == pytest.approx(true_cost(position), rel=0.1)


@given(factors=st.lists(st.floats(1, 1e4), min_size=1, max_size=7), every=st.integers(2, 5))
@example(factors=[1.125], every=2)
def test_steps_that_are_slow_for_other_reasons_do_not_count(
    factors: list[float], every: int
) -> None:
    """Up to every second step, at any position."""
    rate = PrefillRate(None)
    slow = cycle(factors)
    for number in range(16):
        for start in range(0, 32768, 2048):
            position = start + 1024
            is_slow = (number + start // 2048) % every == 0
            seconds = 2048 * true_cost(position) * (next(slow) if is_slow else 1)
            rate.note_prefill(2048, position, seconds)
        assert rate.is_known
    for position in (1024, 16384, 30000):
        assert per_token(rate, position) == pytest.approx(true_cost(position), rel=0.02)


@given(place=st.integers(0, 3), factor=st.floats(1e-6, 1))
def test_one_step_that_was_too_quick_does_no_harm(place: int, factor: float) -> None:
    rate = PrefillRate(None)
    for number in range(4):
        rate.note_prefill(2048, 1024, 0.05)
        rate.note_prefill(2048, 3072, 0.05 * (factor if number == place else 1))
    for position in (1024, 3072):
        assert rate.seconds_for(2048, position) == pytest.approx(0.05)


def test_a_few_steps_deep_in_a_prompt_do_not_count_yet() -> None:
    rate = PrefillRate(None)
    for _ in range(8):
        compute(rate, 4096, 2048)
    for position in (9000, 11000, 13000):
        rate.note_prefill(2048, position, 2048 * 5e-5)
    for _ in range(8):
        compute(rate, 4096, 2048)
    assert per_token(rate, 13000) == per_token(rate, 3072) == pytest.approx(true_cost(3072))


def test_every_length_is_known_after_a_few_prompts() -> None:
    """A prompt that is expensive to compute is loaded, and its cost is not measured any more."""
    rate = PrefillRate(None)
    chunk = 8192
    for num_tokens in (2048, 32768, 32768, 8191, 8191, 2047, 2047, 32767):
        compute(rate, num_tokens, chunk)
        if rate.is_known:
            for position in (1024, 4096, 16384):
                cost = per_token(rate, position)
                assert cost == pytest.approx(true_cost(position), rel=0.12)
                assert cost < 1.01 * true_cost(position)
    for position in (1024, 4096, 16384, 28672):
        assert per_token(rate, position) == pytest.approx(true_cost(position), rel=0.05)


def test_the_first_step_near_the_start_counts_at_once() -> None:
    rate = PrefillRate(None)
    for _ in range(8):
        rate.note_prefill(8192, 28672, 8192 * true_cost(28672))
    before = per_token(rate, 1024)
    assert before < true_cost(28672)
    rate.note_prefill(2048, 1024, 2048 * true_cost(1024))
    assert per_token(rate, 1024) == pytest.approx(true_cost(1024))
    assert per_token(rate, 28672) == pytest.approx(true_cost(28672))


@given(factor=st.floats(1e-6, 1e6), shallow=st.floats(0, 4095))
def test_one_step_near_the_start_lowers_nothing_behind_it(factor: float, shallow: float) -> None:
    """Nor does it raise the cost."""
    rate = PrefillRate(None)
    for _ in range(8):
        compute(rate, 32768, 8192)
    rate.note_prefill(2048, shallow, 2048 * true_cost(shallow) * factor)
    for _ in range(8):
        rate.note_prefill(8192, 20480, 8192 * true_cost(20480))
    assert per_token(rate, 28672) == pytest.approx(true_cost(28672), rel=0.15)
    assert per_token(rate, shallow) <= true_cost(4096) * 1.01


@pytest.mark.parametrize("position", [0, 1, 500, 4096])
def test_before_the_one_position_that_is_known_a_token_may_cost_less(position: float) -> None:
    """Otherwise prompts would never be computed there, and their cost never be known."""
    rate = PrefillRate(None)
    for _ in range(8):
        rate.note_prefill(2048, 4096, 2048 * 1e-4)
    assert per_token(rate, position) == pytest.approx(1e-4 * (0.5 + 0.5 * position / 4096))
    assert per_token(rate, 10**6) == pytest.approx(1e-4)


@pytest.mark.parametrize("factor", [1.0, 10.0, 1000.0])
def test_one_slow_step_near_the_start_does_not_make_it_dear(factor: float) -> None:
    """A compilation, say, of the first prompt of its length."""
    rate = PrefillRate(None)
    for _ in range(8):
        rate.note_prefill(8192, 28672, 8192 * true_cost(28672))
    rate.note_prefill(2048, 1024, 2048 * true_cost(1024) * factor)
    assert per_token(rate, 1024) < 0.55 * true_cost(28672)


@given(noise=st.lists(st.floats(0.9, 1.1), min_size=16, max_size=16))
def test_positions_close_to_each_other_say_nothing_of_the_start(noise: list[float]) -> None:
    """Though they may be in two octaves."""
    rate = PrefillRate(None)
    for number, factor in enumerate(noise):
        length = 16450 if number % 2 else 16300
        rate.note_prefill(length, length / 2, length * true_cost(length / 2) * factor)
    here = true_cost(8200)
    assert per_token(rate, 8200) == pytest.approx(here, rel=0.11)
    assert 0.4 * here < per_token(rate, 512) < 0.62 * here


def test_what_is_remembered_of_the_start_is_not_mixed_up_with_the_end() -> None:
    """Even if its weight is small by now."""
    rate = PrefillRate(None)
    rate.note_prefill(1024, 512, 1024 * true_cost(512))
    for number in range(9_990):
        rate.note_prefill(8192, 98304, 8192 * true_cost(98304))
        if number % 1000 == 999:
            assert per_token(rate, 1024) <= 1.01 * true_cost(98304) / 2
    assert per_token(rate, 98304) == pytest.approx(true_cost(98304))


def test_what_is_recent_counts_more() -> None:
    """The engine is three times as quick now, as steps at the start of prompts show."""
    rate = PrefillRate(None)
    for _ in range(16):
        compute(rate, 32768, 8192)
    for _ in range(4000):
        compute(rate, 8192, 8192, measure=lambda s: s / 3)
    assert per_token(rate, 4096) == pytest.approx(true_cost(4096) / 3, rel=0.02)


@pytest.mark.parametrize(
    ("num_tokens", "position", "is_measured"),
    [
        (2048, 1024, True),
        (2048, 600, True),
        (2048, 3000, True),
        (2048, 300, False),
        (2048, 5000, False),
        (16384, 1024, True),
        (16392, 1024, True),
    ],
)
def test_it_is_known_what_was_measured(num_tokens: int, position: float, is_measured: bool) -> None:
    rate = PrefillRate(None)
    for number in range(2):
        assert not rate.is_measured(num_tokens, position)
        rate.note_prefill(1024, 1500, 0.05)
        rate.note_prefill(2048, 1500 + 10 * number, 0.05)
        rate.note_prefill(127, 5000, 0.01)  # mostly overhead
        rate.note_prefill(127, 300, 0.01)
    assert rate.is_measured(num_tokens, position) == is_measured


def test_small_steps_measure_small_loads_only() -> None:
    rate = PrefillRate(None)
    for _ in range(4):
        rate.note_prefill(100, 1500, 0.01)
    assert rate.is_measured(800, 1500)
    assert not rate.is_measured(801, 1500)


def test_a_step_of_a_thousand_tokens_measures_any_load() -> None:
    rate = PrefillRate(None)
    for _ in range(4):
        rate.note_prefill(1023, 1500, 0.05)
        rate.note_prefill(1024, 9000, 0.05)
    assert not rate.is_measured(10**6, 1500)
    assert rate.is_measured(10**6, 9000)


def test_within_one_octave_the_cost_is_taken_to_be_level() -> None:
    rate = PrefillRate(None)
    for _ in range(8):
        for position in (1030, 2000):
            rate.note_prefill(1024, position, 1024 * 1e-4)
    for position in (1030, 2000, 10**6):
        assert per_token(rate, position) == pytest.approx(1e-4)


# --- trials -------------------------------------------------------------------------------------


def loads_until_trial(load_s: float, compute_s: float, is_measured: bool, most: int) -> int:
    trials = Trials()
    for number in range(most):
        if trials.are_due(load_s, compute_s, is_measured=is_measured):
            return number
        trials.note_load(load_s)
    return most


@pytest.mark.parametrize(
    ("ratio", "is_measured", "num_loads"),
    [
        (1, False, 32),
        (2, False, 32),
        (3, False, 64),
        (11, False, 320),
        (1, True, 256),
        (3, True, 512),
    ],
)
@pytest.mark.parametrize("load_s", [0.0625, 2.0])
def test_one_of_many_is_computed(
    load_s: float, ratio: float, is_measured: bool, num_loads: int
) -> None:
    assert loads_until_trial(load_s, ratio * load_s, is_measured, 1000) == num_loads


def test_what_is_loaded_soon_is_never_computed() -> None:
    assert loads_until_trial(0.0499, 0.05, False, 1000) == 1000


@given(
    loads=st.lists(
        st.tuples(st.floats(0.001, 10), st.floats(1, 100), st.booleans()), min_size=1, max_size=300
    )
)
def test_trials_cost_little_of_what_loads_take(loads: list[tuple[float, float, bool]]) -> None:
    trials = Trials()
    loaded = lost = 0.0
    for load_s, ratio, is_measured in loads:
        if trials.are_due(load_s, ratio * load_s, is_measured=is_measured):
            lost += (ratio - 1) * load_s
            trials.note_trial()
        else:
            loaded += load_s
            trials.note_load(load_s)
    assert lost <= loaded / 32 * 1.000001


def test_what_is_known_is_not_lost_when_steps_become_much_larger() -> None:
    rate = PrefillRate(None)
    for _ in range(8):
        rate.note_prefill(64, 32, 64 * 1e-4)
    assert per_token(rate, 32) == pytest.approx(1e-4)
    for octave in range(8):  # of each of them, too little to go by
        rate.note_prefill(4096, 2048 << octave, 0.1)
    assert per_token(rate, 32) == pytest.approx(1e-4)


def test_a_few_tokens_beside_much_decoding_say_nothing() -> None:
    rate = PrefillRate(None)
    for _ in range(8):
        compute(rate, 8192, 2048)
    for _ in range(500):
        rate.note_prefill(64, 32, 0.02)
    assert per_token(rate, 1024) == pytest.approx(true_cost(1024))


def test_small_steps_before_a_large_one_are_forgotten() -> None:
    rate = PrefillRate(None)
    for _ in range(20):
        rate.note_prefill(16, 8, 0.02)
    assert per_token(rate, 8) == pytest.approx(0.02 / 16)
    for _ in range(8):
        compute(rate, 8192, 2048)
    for position in (0, 8, 4096):
        assert per_token(rate, position) == pytest.approx(true_cost(position))


def test_an_engine_that_takes_small_steps_only_is_learnt_from_them() -> None:
    rate = PrefillRate(None)
    for _ in range(8):
        compute(rate, 8192, 2048)
    for _ in range(13_000):
        rate.note_prefill(64, 32, 64 * 1e-3)
    assert per_token(rate, 32) == pytest.approx(1e-3)


def test_what_is_deeper_than_anything_seen_is_not_taken_to_cost_more() -> None:
    rate = PrefillRate(None)
    for _ in range(8):
        compute(rate, 8192, 2048)
    assert per_token(rate, 10**6) == per_token(rate, 7168) == pytest.approx(true_cost(7168))


def test_deep_steps_are_not_crowded_out_by_shallow_ones() -> None:
    rate = PrefillRate(None)
    for _ in range(4):
        compute(rate, 32768, 2048)
    for _ in range(1000):
        compute(rate, 2048, 2048)
    assert per_token(rate, 30000) == pytest.approx(true_cost(30000))


def test_deep_steps_of_long_ago_are_forgotten() -> None:
    rate = PrefillRate(None)
    for _ in range(4):
        compute(rate, 32768, 2048)
    for _ in range(11_000):
        compute(rate, 2048, 2048, cost=lambda _: 1e-6)
    assert per_token(rate, 30000) == pytest.approx(1e-6)


def test_another_pace_of_the_engine_is_followed() -> None:
    rate = PrefillRate(None)
    for factor in (1.0, 3.0, 0.5):
        for _ in range(16):
            compute(rate, 8192, 2048, measure=factor.__mul__)
        for position in (1024, 7000):
            assert per_token(rate, position) == pytest.approx(factor * true_cost(position))


def test_from_little_nothing_is_known() -> None:
    rate = PrefillRate(None)
    for _ in range(7):
        rate.note_prefill(2048, 1024, 0.05)
        assert not rate.is_known
    assert rate.tokens_per_s is None
    rate.note_prefill(2048, 1024, 0.05)
    assert rate.tokens_per_s == pytest.approx(40960)


@pytest.mark.parametrize(
    ("num_tokens", "position", "seconds"),
    [
        (0, 0.0, 1.0),
        (-5, 10.0, 1.0),
        (5, -1.0, 1.0),
        (5, float("inf"), 1.0),
        (5, float("nan"), 1.0),
        (5, 10.0, 0.0),
        (5, 10.0, -1.0),
        (5, 10.0, float("inf")),
        (5, 10.0, float("nan")),
    ],
)
def test_what_cannot_be_says_nothing(num_tokens: int, position: float, seconds: float) -> None:
    rate = PrefillRate(None)
    for _ in range(100):
        rate.note_prefill(num_tokens, position, seconds)
    assert not rate.is_known
    assert rate.learns_from_stores


@pytest.mark.parametrize("configured", [0.0, 5000.0])
def test_what_is_configured_wins_over_what_is_told(configured: float) -> None:
    rate = PrefillRate(configured)
    for _ in range(20):
        compute(rate, 32768, 2048)
    assert rate.tokens_per_s == (configured or None)
    assert rate.is_known == bool(configured)
    if configured:
        assert rate.seconds_for(1000, 20_000) == pytest.approx(0.2)


def test_once_told_it_does_not_go_by_stores() -> None:
    rate = PrefillRate(None)
    rate.note_prefill(2048, 1024, 0.05)
    for second in range(100):
        rate.note_computed(10)
        rate.step_ended(second)
    assert not rate.is_known
    for _ in range(7):
        rate.note_prefill(2048, 1024, 0.05)
    assert rate.tokens_per_s == pytest.approx(40960)


def test_what_stores_have_taught_counts_until_the_engine_has_told_enough() -> None:
    rate = PrefillRate(None)
    for second in range(100):
        rate.note_computed(10)
        rate.step_ended(second)
    assert rate.tokens_per_s == pytest.approx(10)
    for _ in range(7):
        rate.note_prefill(2048, 1024, 0.05)
    assert rate.seconds_for(100, 1024) == pytest.approx(10)
    rate.note_prefill(2048, 1024, 0.05)
    assert rate.seconds_for(2048, 1024) == pytest.approx(0.05)


def test_the_rate_that_is_shown_is_that_at_the_position_of_the_last_step() -> None:
    rate = PrefillRate(None)
    for _ in range(8):
        compute(rate, 32768, 2048)
    assert rate.tokens_per_s == pytest.approx(1 / true_cost(31744))
    compute(rate, 2048, 2048)
    assert rate.tokens_per_s == pytest.approx(1 / true_cost(1024))


# --- how long a tier takes ----------------------------------------------------------------------


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


# ---------------------------------------------------------------------------------------------
# How much is explored
# ---------------------------------------------------------------------------------------------


def test_what_is_explored_grows_while_it_takes_little() -> None:
    exploration, nothing_known = Exploration(longest_s=1.0), TransferEstimate()
    sizes = []
    for seconds in (0.3, 0.3, 0.5, 0.6, 0.9):
        sizes.append(exploration.num_blocks(1000, nothing_known))
        exploration.note(sizes[-1], seconds)
    sizes.append(exploration.num_blocks(1000, nothing_known))
    assert sizes == [8, 16, 32, 64, 64, 64]  # twice as many could have taken too long
    assert exploration.num_blocks(20, nothing_known) == 20


@pytest.mark.parametrize("what", ["slow", "loaded again"])
def test_what_is_explored_begins_anew(what: str) -> None:
    exploration, nothing_known = Exploration(longest_s=1.0), TransferEstimate()
    exploration.note(512, 0.1)
    assert exploration.num_blocks(5000, nothing_known) == 1024
    if what == "slow":
        exploration.note(1024, 1.1)
    else:
        exploration.begin_anew()
    assert exploration.num_blocks(5000, nothing_known) == 8


def test_what_is_thought_to_take_little_is_explored_as_a_whole() -> None:
    estimate = TransferEstimate()
    for _ in range(10):
        estimate.note(10, 0.001)
    assert Exploration(longest_s=1.0).num_blocks(1000, estimate) == 1000


def test_what_was_few_does_not_make_it_fewer() -> None:
    exploration, nothing_known = Exploration(longest_s=1.0), TransferEstimate()
    exploration.note(512, 0.1)
    exploration.note(3, 0.1)
    assert exploration.num_blocks(5000, nothing_known) == 1024
