"""Hits and times to first token with a tier that is slow, was slow, or is not used, in virtual time
over the real orchestrator."""

from __future__ import annotations

import pytest

from tests.tiering.virtual_engine import (
    VirtualEngine,
    hit_share,
    mean_ttft,
    prompts,
    zipf_prompts,
)

QUICK = 3e9


@pytest.mark.parametrize(("slow", "length"), [(50e6, 30), (200e6, 100), (1e9, 30)])
def test_a_tier_that_was_slow_for_a_while_is_used_again_soon(slow: float, length: int) -> None:
    """Hits come back within a minute of its return."""
    engine = VirtualEngine(lambda t: slow if 100 < t < 100 + length else QUICK)
    end = 100 + length
    engine.serve(zipf_prompts(end + 120, per_s=1.0))
    assert hit_share(engine.between(end + 60, end + 120)) > 0.9


@pytest.mark.parametrize("slow", [50e6, 600e6])
def test_a_tier_that_has_become_slow_is_not_waited_for_any_more(slow: float) -> None:
    """Some slots belong to the tier until it reports; a minute later it has."""
    engine, alone = VirtualEngine(lambda t: slow if t > 100 else QUICK), VirtualEngine(None)
    for each in (engine, alone):
        each.serve(zipf_prompts(280, per_s=1.0))
    slowed, usual = engine.between(160, 280), alone.between(160, 280)
    assert mean_ttft(slowed) < 1.1 * mean_ttft(usual)


def test_short_stalls_do_not_cost_a_tier_its_use() -> None:
    engine = VirtualEngine(lambda t: 30e6 if t > 60 and t % 10 < 0.5 else QUICK)
    engine.serve(zipf_prompts(300, per_s=1.0))
    assert hit_share(engine.between(100, 300)) > 0.85


@pytest.mark.parametrize(("bytes_per_s", "per_s"), [(50e6, 1.8), (200e6, 1.0)])
def test_a_tier_that_nobody_loads_from_costs_no_hits(bytes_per_s: float, per_s: float) -> None:
    """Slots that its stores pin are missing in host memory."""
    engine, alone = VirtualEngine(bytes_per_s), VirtualEngine(None)
    for each in (engine, alone):
        each.serve(zipf_prompts(600, per_s=per_s))
    used, usual = engine.answered[150:], alone.answered[150:]
    assert hit_share(used) > hit_share(usual) - 0.01
    assert mean_ttft(used) < 1.05 * mean_ttft(usual)


def test_a_tier_that_is_loaded_from_loses_no_stores() -> None:
    engine = VirtualEngine(1.5e9)
    engine.serve(zipf_prompts(300, per_s=1.0))
    assert hit_share(engine.between(200, 300)) > 0.6
    computed = {key for request in engine.answered[:-10] for key in request.prompt}
    assert computed <= engine.tiers[0].kept.keys()


def test_a_burst_for_a_tier_that_nobody_has_loaded_from_yet_is_stored() -> None:
    """All blocks fit into host memory, so stores have time."""
    engine = VirtualEngine(500e6)
    burst = prompts(5, 100)
    engine.serve([(0.0, prompt) for prompt in burst])
    while not all(key in engine.tiers[0].kept for prompt in burst for key in prompt):
        assert engine.clock.now < engine.start + 60
        engine.step()


def storm(engine: VirtualEngine, after_s: float = 0.0) -> float:
    """Sixteen requests at once whose prompts the tier has; their mean time to first token."""
    engine.serve([(after_s, [*prompt, *tail]) for prompt, tail in zip(WARM, TAILS, strict=True)])
    return mean_ttft(engine.answered)


*WARM, _ = prompts(17, 100)
TAILS = [[prompt[-1]] for prompt in prompts(33, 2)[17:]]
KEPT = [key for prompt in WARM for key in prompt]


@pytest.mark.parametrize("bytes_per_s", [50e6, 500e6, QUICK])
def test_after_a_restart_an_engine_goes_by_what_was_learnt_before(bytes_per_s: float) -> None:
    """Requests arrive at the start."""
    before = VirtualEngine(bytes_per_s)
    before.serve(zipf_prompts(60, per_s=1.0))
    before.manager.shutdown()
    assert before.tiers[0].note is not None
    after = storm(VirtualEngine(bytes_per_s, kept=KEPT, note=before.tiers[0].note))
    alone = storm(VirtualEngine(None))
    assert after < (0.9 if bytes_per_s == QUICK else 1.03) * alone


@pytest.mark.parametrize("bytes_per_s", [50e6, 500e6, QUICK])
def test_a_warm_tier_is_measured_before_the_first_request(bytes_per_s: float) -> None:
    """Nothing was kept of what was learnt. The first request comes some seconds after the start."""
    after = storm(VirtualEngine(bytes_per_s, kept=KEPT), after_s=5.0)
    alone = storm(VirtualEngine(None), after_s=5.0)
    assert after < (0.9 if bytes_per_s == QUICK else 1.03) * alone


@pytest.mark.parametrize("names_keys", [True, False])
@pytest.mark.parametrize("bytes_per_s", [50e6, 500e6, QUICK])
def test_requests_hardly_wait_for_a_tier_that_is_just_being_measured(
    bytes_per_s: float, names_keys: bool
) -> None:
    """At the start, or, if it cannot name any blocks then, with the first that a request wants."""
    after = storm(VirtualEngine(bytes_per_s, kept=KEPT, names_keys=names_keys))
    alone = storm(VirtualEngine(None))
    assert after < 0.9 * alone if bytes_per_s == QUICK else after < alone + 0.3
