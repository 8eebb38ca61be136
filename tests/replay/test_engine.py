"""The engine in virtual time: exact times where they can be computed, and hits that agree with
counting."""

from __future__ import annotations

import logging
import random
from collections.abc import Iterable
from dataclasses import replace
from itertools import islice

import pytest

from kvtier.config.options import WritePolicyName
from kvtier.replay.engine import Counting, TimedEngine
from kvtier.replay.figures import Figures, Timing
from kvtier.replay.settings import EngineSettings, ReplaySettings, SettingError
from kvtier.replay.trace import Request
from tests.replay.oracle import BLOCK_TOKENS, settings_for, some_requests
from tests.trace_replay import key_of

STEP_S, RATE = 0.01, 10_000.0
ENGINE = EngineSettings(
    prefill_tokens_per_s=RATE, decode_step_s=STEP_S, step_tokens=2048, most_running=4
)


def settings(host_blocks: int, *tier_blocks: int, host_speed: float = 1e9) -> ReplaySettings:
    chosen = settings_for(host_blocks, *tier_blocks, is_timed=True, engine=ENGINE)
    host = replace(chosen.host, read_bytes_per_s=host_speed, write_bytes_per_s=host_speed)
    return replace(chosen, host=host)


def served(requests: Iterable[Request], chosen: ReplaySettings) -> tuple[Figures, Timing]:
    engine = TimedEngine(chosen, BLOCK_TOKENS)
    for _ in engine.serve(requests):
        pass
    figures = engine.end()
    assert figures.timing is not None
    return figures, figures.timing


def counted(requests: Iterable[Request], chosen: ReplaySettings) -> Figures:
    counting = Counting(replace(chosen, is_timed=False), BLOCK_TOKENS)
    for _ in counting.serve(requests):
        pass
    return counting.end()


def prompt(*blocks: int, at: float = 0.0, more: int = 0, output: int = 1) -> Request:
    tokens = len(blocks) * BLOCK_TOKENS + more
    return Request(at, tokens, output, [key_of(block) for block in blocks])


def test_a_prompt_on_an_idle_engine_takes_its_steps_and_its_tokens() -> None:
    # 5220 tokens are computed in chunks of 2048, so in three steps.
    _, timing = served([prompt(*range(10), at=7.0, more=100)], settings(100))
    assert timing.first_token_s == [pytest.approx(3 * STEP_S + 5220 / RATE)]
    assert timing.seconds == pytest.approx(timing.first_token_s[0])
    assert timing.busy_s == pytest.approx(timing.seconds)


def test_each_further_token_takes_a_step() -> None:
    _, timing = served([prompt(1, output=11)], settings(100))
    assert timing.seconds == pytest.approx(timing.first_token_s[0] + 10 * STEP_S)
    assert timing.output_tokens == 11


def test_what_is_in_host_memory_is_copied_and_not_computed() -> None:
    # One byte per token: 4 blocks take 2048 / 4096 s.
    requests = [prompt(1, 2, 3, 4, more=8), prompt(1, 2, 3, 4, at=100.0, more=8)]
    figures, timing = served(requests, settings(100, host_speed=4096.0))
    assert figures.hit_blocks == figures.places[0].read_blocks == 4
    assert timing.first_token_s[1] == pytest.approx(0.5 + STEP_S + 8 / RATE)
    assert figures.saved_tokens == 4 * BLOCK_TOKENS


def test_at_least_one_token_is_computed() -> None:
    requests = [prompt(1, 2), prompt(1, 2, at=100.0)]
    _, timing = served(requests, settings(100))
    assert timing.first_token_s[1] == pytest.approx(STEP_S + 1 / RATE, rel=1e-3)


def test_what_is_on_the_device_is_neither_loaded_nor_computed() -> None:
    requests = [prompt(1, 2, 3, 4, more=8), prompt(1, 2, 5, at=100.0), prompt(1, 2, 5, 6, at=200.0)]
    chosen = replace(settings(100, host_speed=4096.0), gpu_bytes=4 * BLOCK_TOKENS)
    figures, timing = served(requests, chosen)
    assert timing.first_token_s[1] == pytest.approx(STEP_S + BLOCK_TOKENS / RATE)
    assert figures.gpu is not None
    assert (figures.gpu.hit_blocks, figures.gpu.evicted_blocks) == (5, 2)
    assert figures.places[0].read_blocks == 0
    assert figures.saved_tokens == 5 * BLOCK_TOKENS


def test_tiers_are_asked_for_what_comes_after_the_blocks_on_the_device() -> None:
    # 1 and 2 stay on the device, 3 and 4 leave it: their 1024 bytes take 0.25 s to load.
    chosen = replace(settings(100, 100, host_speed=4096.0), gpu_bytes=4 * BLOCK_TOKENS)
    requests = [prompt(1, 2, 3, 4), prompt(1, 2, 8, 9, at=50.0), prompt(1, 2, 3, 4, 5, at=100.0)]
    figures, timing = served(requests, chosen)
    assert figures.gpu is not None
    assert (figures.gpu.hit_blocks, figures.places[0].read_blocks) == (4, 2)
    assert timing.first_token_s[2] == pytest.approx(0.25 + STEP_S + BLOCK_TOKENS / RATE)


def test_blocks_on_the_device_that_have_left_host_memory_are_stored_again() -> None:
    chosen = replace(settings(10), gpu_bytes=100 * BLOCK_TOKENS)
    prompts = [range(4), range(10, 14), range(20, 24), range(4)]
    requests = [prompt(*blocks, at=50.0 * n) for n, blocks in enumerate(prompts)]
    for figures in (served(requests, chosen)[0], counted(requests, chosen)):
        assert figures.gpu is not None
        assert figures.gpu.hit_blocks == 4
        assert figures.places[0].written_blocks == 12 + 2


@pytest.mark.parametrize("tier_blocks", [(), (100, 300)])
def test_a_device_that_holds_everything_leaves_no_hits_to_tiers(
    tier_blocks: tuple[int, ...],
) -> None:
    requests = some_requests(9, 200, longest=8)
    chosen = replace(settings(60, *tier_blocks), gpu_bytes=10_000 * BLOCK_TOKENS)
    every_hit = counted(requests, settings(10_000)).hit_blocks
    for figures in (served(requests, chosen)[0], counted(requests, chosen)):
        assert figures.gpu is not None
        assert [place.hit_blocks for place in figures.places] == [0] * (1 + len(tier_blocks))
        assert figures.gpu.evicted_blocks == 0
    assert counted(requests, chosen).hit_blocks == every_hit


# --- the cost of a prompt ----------------------------------------------------------------------


@pytest.mark.parametrize("times", [[(5000, 0.8)], [(4096, 0.3), (40_000, 9.0)]])
def test_prompts_take_the_times_that_were_measured(times: list[tuple[int, float]]) -> None:
    chosen = replace(settings(100), engine=ENGINE.fitted_to(times))
    requests = [Request(100.0 * n, num_tokens, 1, []) for n, (num_tokens, _) in enumerate(times)]
    _, timing = served(requests, chosen)
    assert timing.first_token_s == [pytest.approx(seconds) for _, seconds in times]


def test_the_last_tokens_of_a_long_prompt_cost_more_than_the_first() -> None:
    chosen = replace(settings(100), engine=ENGINE.fitted_to([(2048, 0.1), (20_480, 5.0)]))
    blocks = range(39)
    requests = [prompt(*blocks), prompt(*blocks, 99, at=100.0), prompt(100, at=200.0)]
    _, timing = served(requests, chosen)
    _, at_end, at_start = timing.first_token_s
    assert at_end - STEP_S > 5 * (at_start - STEP_S)


@pytest.mark.parametrize(
    ("times", "remedy"),
    [
        ([(4096, 0.02)], "--decode-step"),
        ([(4096, 1.0), (4096, 2.0)], "differ"),
        ([(4096, 1.0), (40_960, 2.0)], "or give one prompt"),
        ([(4096, 0.03), (8192, 9.0)], "or give one prompt"),
    ],
)
def test_times_that_no_engine_has_are_refused(times: list[tuple[int, float]], remedy: str) -> None:
    with pytest.raises(SettingError, match=remedy):
        ENGINE.fitted_to(times)


def test_a_prompt_waits_for_those_before_it() -> None:
    requests = [prompt(*range(n * 10, n * 10 + 4)) for n in range(3)]
    _, timing = served(requests, settings(100))
    one = STEP_S + 2048 / RATE
    assert timing.first_token_s == [pytest.approx(n * one) for n in (1, 2, 3)]


def test_only_so_many_requests_run_at_the_same_time() -> None:
    requests = [prompt(n, output=1000) for n in range(5)]
    _, timing = served(requests, settings(100))
    assert max(timing.first_token_s[:4]) < 1.0
    assert timing.first_token_s[4] > 999 * STEP_S


def test_a_second_request_waits_for_the_copy_to_host_memory() -> None:
    requests = [prompt(1, 2), prompt(1, 2, at=5.0)]
    figures, timing = served(requests, settings(100, host_speed=64.0))  # 1024 bytes take 16 s
    assert figures.hit_blocks == 2
    # The copy begins with the step, and the way back takes as long.
    assert timing.first_token_s[1] == pytest.approx(2 * 16 - 5 + STEP_S, abs=0.01)


@pytest.mark.parametrize("tier_blocks", [(), (200,), (100, 300)])
def test_with_quick_tiers_and_pauses_the_hits_are_those_of_counting(
    tier_blocks: tuple[int, ...],
) -> None:
    requests = [
        request._replace(arrives_s=100.0 * n)
        for n, request in enumerate(some_requests(3, 200, longest=8))
    ]
    chosen = settings(60, *tier_blocks)
    expected = counted(requests, chosen)
    figures, _ = served(requests, chosen)
    if not tier_blocks:
        assert figures.hit_blocks == expected.hit_blocks
        assert figures.places[0].evicted_blocks == expected.places[0].evicted_blocks
    # With tiers, the manager computes some prompts at first, to learn what loading saves.
    assert figures.hit_blocks == pytest.approx(expected.hit_blocks, rel=0.1)
    assert figures.places[0].hit_blocks <= figures.hit_blocks


def test_a_tier_too_slow_to_be_worth_it_is_declined() -> None:
    requests = some_requests(4, 300, longest=8)
    chosen = settings(40, 400)
    slow = replace(chosen.tiers[0], read_bytes_per_s=600.0)  # a block: 0.85 s; computed: 0.05 s
    quick, _ = served(requests, chosen)
    figures, timing = served(requests, replace(chosen, tiers=(slow,)))
    tier = figures.places[1]
    assert tier.declined_blocks > tier.read_blocks
    assert quick.places[1].hit_blocks > 2 * tier.hit_blocks
    assert len(timing.first_token_s) == 300


def test_a_busy_engine_answers_everything_and_adds_up() -> None:
    requests = some_requests(5, 500, longest=12)
    figures, timing = served(requests, replace(settings(50, 60, 400), speed_up=20.0))
    assert figures.num_requests == len(timing.first_token_s) == 500
    assert timing.prompt_tokens == figures.prompt_tokens
    assert timing.output_tokens == sum(request.output_tokens for request in requests)
    assert min(timing.first_token_s) > 0
    assert 0 < timing.busy_s <= timing.seconds * (1 + 1e-9)
    host, *tiers = figures.places
    assert host.read_blocks == figures.hit_blocks
    assert host.promoted_blocks == sum(tier.read_blocks for tier in tiers)
    assert sum(tier.hit_blocks for tier in tiers) > 0
    for tier in tiers:
        assert tier.written_blocks - tier.evicted_blocks <= tier.capacity_blocks


def test_twice_as_fast_is_twice_the_load() -> None:
    requests = some_requests(6, 100, longest=8)
    _, slow = served(requests, settings(50))
    _, fast = served(requests, replace(settings(50), speed_up=2.0))
    assert fast.seconds < slow.seconds
    assert sum(fast.first_token_s) >= sum(slow.first_token_s)


def test_a_replay_that_is_ended_early_has_figures() -> None:
    engine = TimedEngine(settings(50, 100), BLOCK_TOKENS)
    for _ in islice(engine.serve(some_requests(7, 300, longest=8)), 50):
        pass
    figures = engine.end()
    assert 0 < figures.num_requests < 300
    assert figures.document()["timing"]["virtual_seconds"] > 0


def test_nothing_that_depends_on_time_differs_between_two_runs() -> None:
    requests = some_requests(8, 300, longest=8)
    chosen = replace(settings(40, 80), speed_up=5.0)
    first, _ = served(requests, chosen)
    second, _ = served(requests, chosen)
    assert first.document() == second.document()


def test_a_request_without_tokens_is_answered() -> None:
    _, timing = served([Request(0.0, 0, 0, []), prompt(1)], settings(10))
    assert len(timing.first_token_s) == 2


@pytest.mark.parametrize("seed", range(12))
def test_tiny_and_slow_tiers_keep_nobody_waiting_for_ever(
    seed: int, caplog: pytest.LogCaptureFixture
) -> None:
    """Prompts may be larger than host memory, and tiers so slow that they are cut off."""
    caplog.set_level(logging.CRITICAL)
    rng = random.Random(seed)
    requests = some_requests(seed, 60, longest=rng.choice([5, 12, 30]))
    sizes = [rng.choice([1, 2, 3, 5, 8, 40]) for _ in range(rng.randint(1, 3))]
    chosen = settings(*sizes, host_speed=rng.choice([200.0, 5e3, 1e9]))
    tiers = [
        replace(
            tier,
            policy=rng.choice(["lru", "arc"]),
            read_bytes_per_s=rng.choice([100.0, 2e3, 1e6]),
            write_bytes_per_s=rng.choice([10.0, 2e3, 1e6]),
            latency_s=rng.choice([0.0, 0.1, 3.0]),
            write_policy=rng.choice(list(WritePolicyName)),
        )
        for tier in chosen.tiers
    ]
    gpu_bytes = rng.choice([None, 1, 5, 40])
    if gpu_bytes is not None:
        chosen = replace(chosen, gpu_bytes=gpu_bytes * BLOCK_TOKENS)
    figures, timing = served(requests, replace(chosen, tiers=tuple(tiers), speed_up=5.0))
    assert figures.num_requests == len(timing.first_token_s) == 60
    num_loaded = sum(place.hit_blocks for place in figures.places)
    assert figures.places[0].read_blocks == num_loaded
    expected = counted(requests, replace(chosen, tiers=tuple(tiers)))
    assert expected.num_requests == 60
    assert all(place.hit_blocks >= 0 for place in [*expected.places, *figures.places])
