"""A busy engine in virtual time: loading and computing add up.

Compared with an engine that never loads and one that always does. The device, host memory and the
prompts are sized so that only a part fits into each.
"""

from __future__ import annotations

import math
import random
from statistics import mean
from typing import Any

import pytest

from kvtier.tiering.health import TierSettings
from tests.tiering.virtual_engine import (
    BLOCK_BYTES,
    Answered,
    VirtualEngine,
    hit_share,
    mean_ttft,
    prompts,
    zipf_prompts,
)

NEVER, ALWAYS, DECIDES = "never", "always", "decides"
DEADLINE = TierSettings().lookup_timeout_s + TierSettings().load_timeout_s


def engine_that(loads: str, bytes_per_s: float, **sizes: Any) -> VirtualEngine:
    if loads == NEVER:
        return VirtualEngine(None, **sizes)
    rate = 0.0 if loads == ALWAYS else None
    return VirtualEngine(bytes_per_s, prefill_tokens_per_s=rate, **sizes)


# --- conversations -----------------------------------------------------------------------------

SHAPES = {
    # A model of 8B parameters computes 37,000 tokens a second on the GPU that this follows, and one
    # of 32B 9,600, whose tokens take twice the bytes: so its tokens are half as many a block.
    "8B": {
        "tokens_per_s": 37_000,
        "step_s": 0.0067,
        "host_blocks": 1536,
        "device_blocks": 1024,
    },
    "32B": {
        "tokens_per_s": 19_200,
        "step_s": 0.020,
        "host_blocks": 1024,
        "device_blocks": 1024,
    },
}


def conversations(loads: str, shape: str, bytes_per_s: float) -> float:
    engine = engine_that(loads, bytes_per_s, budget=16384, **SHAPES[shape])
    return engine.converse(36, 6, 4)


@pytest.mark.parametrize(
    ("shape", "bytes_per_s", "most"),
    [
        ("8B", 0.4e9, 1.03),
        ("8B", 1.25e9, 1.0),
        ("8B", 2.9e9, 0.80),
        ("8B", 6e9, 0.60),
        ("32B", 2.9e9, 0.65),
    ],
)
def test_conversations_take_less_time_than_with_either_alone(
    shape: str, bytes_per_s: float, most: float
) -> None:
    """At 2.9 GB/s, loading one prompt takes longer than computing it, and always loading takes 0.85
    of the time of never loading: the bars hold only if both go on at once."""
    never = conversations(NEVER, shape, bytes_per_s)
    always = conversations(ALWAYS, shape, bytes_per_s)
    decides = conversations(DECIDES, shape, bytes_per_s)
    assert decides <= most * never
    assert decides <= 1.10 * min(never, always)


# --- random rates ------------------------------------------------------------------------------


def outcome(loads: str, seed: int, busy: float, num_answered: int) -> list[Answered]:
    """`busy`: the most work, as a multiple of what the device could compute without any cache,
    which has about a third of it."""
    rng = random.Random(seed)
    tokens_per_s = math.exp(rng.uniform(math.log(3e3), math.log(4e4)))
    bytes_per_s = math.exp(rng.uniform(math.log(0.2e9), math.log(8e9)))
    num_blocks = rng.choice((25, 50, 100))
    engine = engine_that(loads, bytes_per_s, tokens_per_s=tokens_per_s)
    per_s = rng.uniform(0.3, busy) * tokens_per_s / (num_blocks * 64)
    arrivals = zipf_prompts(300, per_s, num_blocks=num_blocks, seed=seed)
    engine.serve(arrivals, num_answered=num_answered)
    return sorted(engine.answered, key=lambda request: request.arrives)[100:]


def seconds_for(answered: list[Answered]) -> float:
    return max(request.first_token for request in answered) - answered[0].arrives


@pytest.mark.parametrize(
    ("busy", "num_answered", "seeds"),
    [(4.0, 20, range(24)), (1.0, 600, range(100, 113))],
    ids=["busy", "decoding"],
)
def test_deciding_is_on_average_no_worse_than_the_better_of_never_and_always(
    busy: float, num_answered: int, seeds: range
) -> None:
    """Over random speeds of the device and of the tier, and random load."""
    ttft, span = [], []
    for seed in seeds:
        never, always, decides = (
            outcome(loads, seed, busy, num_answered) for loads in (NEVER, ALWAYS, DECIDES)
        )
        ttft.append(mean_ttft(decides) / min(mean_ttft(never), mean_ttft(always)))
        span.append(seconds_for(decides) / min(seconds_for(never), seconds_for(always)))
        # A step of more than two seconds counts as two, so a wait may have two such steps.
        longest_step = 8192 / 3e3
        assert max(request.waited_for_tiers for request in decides) <= 2 * longest_step + DEADLINE
    assert mean(ttft) <= 1.10
    assert mean(span) <= 1.10


# --- what may go wrong -------------------------------------------------------------------------


def test_a_tier_whose_speed_changes_by_ten_within_a_minute() -> None:
    """Ten seconds at 5 GB/s, ten at 0.5."""

    def bytes_per_s(t: float) -> float:
        return 5e9 if t % 20 < 10 else 0.5e9

    engine, alone = VirtualEngine(bytes_per_s), VirtualEngine(None)
    for each in (engine, alone):
        each.serve(zipf_prompts(400, per_s=2.0))
    assert mean_ttft(engine.answered[100:]) <= 1.05 * mean_ttft(alone.answered[100:])
    assert max(request.waited_for_tiers for request in engine.answered) <= DEADLINE + 1.0


def test_neither_long_nor_short_prompts_starve() -> None:
    """Every fourth prompt is ten times as long. The slowest of each kind is answered about as soon
    as without a tier, where the engine is overloaded."""
    rng = random.Random(3)
    known = prompts(30, 100)

    def coming() -> list[tuple[float, list[Any]]]:
        return [
            (n / 4, [*rng.choice(known)[: 100 if n % 4 == 0 else 10], *prompts(n + 40, 1)[-1]])
            for n in range(400)
        ]

    arrivals = coming()
    slowest: dict[tuple[str, bool], float] = {}
    for loads in (NEVER, DECIDES):
        engine = engine_that(loads, 1.5e9, tokens_per_s=8_000)
        engine.serve(arrivals)
        for is_long in (False, True):
            kind = [r for r in engine.answered if (len(r.prompt) > 50) == is_long]
            slowest[loads, is_long] = max(r.ttft for r in kind[20:])
    for is_long in (False, True):
        assert slowest[DECIDES, is_long] <= 1.1 * slowest[NEVER, is_long]


def test_an_overloaded_engine_keeps_the_device_and_the_tier_busy() -> None:
    """A tier that is as fast as the device. Had the decisions swung from one side to the other, one
    of them would have idled."""
    engine = VirtualEngine(10_000 * BLOCK_BYTES / 64, host_blocks=300, device_blocks=100)
    arrivals = zipf_prompts(600, per_s=3.5, num_known=200)
    engine.serve(arrivals)
    alone = VirtualEngine(None, host_blocks=300, device_blocks=100)
    alone.serve(arrivals)
    assert seconds_for(engine.answered) <= 0.75 * seconds_for(alone.answered)
    assert 0.3 < hit_share(engine.answered[200:]) < 0.9


def test_what_is_brought_up_ahead_is_not_evicted_before_it_is_used() -> None:
    """Host memory holds six prompts, and every second request is new and stores its blocks."""
    engine = VirtualEngine(3e9, host_blocks=600, device_blocks=150, tokens_per_s=20_000)
    new = prompts(400, 100)[100:]
    engine.serve(
        (when, new[n] if n % 2 else known)
        for n, (when, known) in enumerate(zipf_prompts(300, per_s=3.0))
    )
    (tier,) = engine.tiers
    assert tier.num_loaded > 2_000
    assert tier.num_loaded_again <= 0.02 * tier.num_loaded
    assert len(tier.unused) <= 0.05 * tier.num_loaded


def test_a_device_without_room_for_more_does_not_waste_what_was_brought_up() -> None:
    """The device has room for two prompts, and answers are long. So a lookup that finds no room
    ends the step, and requests behind it do not see for seconds that their blocks have come."""
    sizes: dict[str, Any] = {
        "tokens_per_s": 20_000,
        "device_blocks": 150,
        "pool_blocks": 210,
        "step_s": 0.02,
    }
    engine, alone = VirtualEngine(3e9, **sizes), VirtualEngine(None, **sizes)
    for each in (engine, alone):
        each.serve(zipf_prompts(120, per_s=0.5), num_answered=200)
    (tier,) = engine.tiers
    assert tier.num_loaded > 1_000
    assert tier.num_loaded_again <= 0.02 * tier.num_loaded
    assert engine.clock.now <= alone.clock.now
    assert mean_ttft(engine.answered) <= mean_ttft(alone.answered)


def test_a_prompt_too_long_to_be_loaded_in_time_is_loaded_in_part() -> None:
    """Loading all of it takes 3.4 s and computing it 8.5, but no load may take more than 2 s."""
    (prompt,) = prompts(1, 400)
    engine = VirtualEngine(1e9, tokens_per_s=3_000, kept=prompt, device_blocks=600)
    warm_up = [(n / 2, each) for n, each in enumerate(prompts(9, 10)[1:])]
    engine.serve([*warm_up, (20.0, prompt)])
    asked = engine.answered[-1]
    assert 150 <= asked.num_hits <= 200
    assert asked.ttft <= 0.8 * 400 * 64 / 3_000
    assert asked.waited_for_tiers <= DEADLINE
    counters = engine.manager.get_stats().counters
    (left,) = (count for name, count in counters.items() if 'reason="late"' in name)
    assert left == 399 - asked.num_hits


# --- stores ------------------------------------------------------------------------------------


def test_stores_keep_a_tier_busy_while_steps_are_long() -> None:
    """Half a second of computing a step, in which nothing new can be submitted."""
    engine = VirtualEngine(
        3e9, tokens_per_s=37_000, budget=16384, host_blocks=1536, device_blocks=1024
    )
    engine.serve([(0.0, prompt) for prompt in prompts(36, 94)])
    seconds = engine.clock.now - engine.start
    assert len(engine.tiers[0].kept) * BLOCK_BYTES >= 0.7 * 3e9 * seconds
