"""The engine with a connector that is late and unreliable."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtier.engine import Engine, EngineConfig, FinishReason, ModelConfig, RequestResult
from tests.engine.models import FULL, HYBRID, random_tokens
from tests.engine.oracle import assert_same
from tests.engine.stand_in import Behaviour, StandIn

CASES = {
    "full": (FULL, EngineConfig(block_tokens=(8,), num_blocks=(24,), token_budget=40)),
    "hybrid": (
        HYBRID,
        EngineConfig(block_tokens=(8, 4), num_blocks=(24, 40), token_budget=40),
    ),
    "ranks": (
        HYBRID,
        EngineConfig(block_tokens=(4, 8), num_blocks=(48, 20), token_budget=40, world_size=2),
    ),
}


def start(case: str, behaviour: Behaviour | None = None) -> tuple[Engine, StandIn, ModelConfig]:
    model, engine_config = CASES[case]
    stand_in = StandIn(model, engine_config, behaviour or Behaviour())
    return Engine(model, engine_config, stand_in.connector), stand_in, model


def run_until(engine: Engine, condition: Callable[[], bool]) -> list[RequestResult]:
    results: list[RequestResult] = []
    for _ in range(1000):
        if condition():
            return results
        results += engine.step()
    raise AssertionError("that never happened")


@pytest.mark.parametrize("case", CASES)
def test_a_prompt_comes_back_after_the_device_has_forgotten_it(case: str) -> None:
    engine, _, model = start(case)
    prompt = random_tokens(1, 100)
    [cold] = engine.generate([prompt], 6, keep_logits=True)
    assert engine.drain()
    engine.drop_device_cache()
    [warm] = engine.generate([prompt], 6, keep_logits=True)
    assert (cold.num_loaded_tokens, cold.num_computed_tokens) == (0, 105)
    assert (warm.num_device_tokens, warm.num_loaded_tokens) == (0, 96)
    assert warm.num_computed_tokens == 4 + 5
    assert_same(cold, model, prompt)
    assert_same(warm, model, prompt)


def test_the_connector_is_told_what_each_run_of_the_model_computes() -> None:
    engine, stand_in, _ = start("full")
    prompt = random_tokens(1, 100)
    engine.generate([prompt], 3)
    assert stand_in.computed == [(0, 40), (40, 40), (80, 20), (100, 1), (101, 1)]
    assert engine.drain()
    engine.drop_device_cache()
    stand_in.computed.clear()
    engine.generate([prompt], 2)
    assert stand_in.computed == [(96, 4), (100, 1)]


@pytest.mark.parametrize("case", CASES)
def test_what_is_loaded_adds_to_what_the_device_has(case: str) -> None:
    engine, _, model = start(case)
    prompt = random_tokens(1, 100)
    engine.generate([prompt], 1)
    assert engine.drain()
    engine.drop_device_cache()
    engine.generate([prompt[:44]], 1)
    [both] = engine.generate([prompt], 6, keep_logits=True)
    assert (both.num_device_tokens, both.num_loaded_tokens) == (40, 56)
    assert_same(both, model, prompt)


def test_even_one_token_is_worth_keeping_its_prompt() -> None:
    engine, stand_in, _ = start("full")
    engine.generate([random_tokens(1, 40)], 1)
    assert engine.drain()
    assert len(stand_in.shelf) == 5


def test_blocks_that_left_the_window_in_the_same_step_are_offered_too() -> None:
    engine, stand_in, _ = start("hybrid")
    engine.generate([random_tokens(1, 120)], 1)
    assert engine.drain()
    assert len([key for key in stand_in.shelf if key[0] == 1]) == 120 // 4


def test_others_run_while_one_waits_for_a_lookup_or_a_load() -> None:
    engine, stand_in, model = start("full", Behaviour(max_delay=0))
    prompt = random_tokens(1, 60)
    engine.generate([prompt], 1)
    assert engine.drain()
    engine.drop_device_cache()
    late = engine.add_request(prompt, 4, keep_logits=True)
    other = random_tokens(2, 30)
    soon = engine.add_request(other, 4, keep_logits=True)
    stand_in.asks_left[late] = 6
    results = run_until(engine, lambda: not engine.has_requests)
    assert [result.request_id for result in results] == [soon, late]
    assert results[1].num_loaded_tokens == 56
    assert_same(results[0], model, other)
    assert_same(results[1], model, prompt)


@pytest.mark.parametrize("case", CASES)
def test_a_failed_load_is_computed(case: str) -> None:
    engine, stand_in, model = start(case, Behaviour(failing=1.0, max_delay=2))
    prompt = random_tokens(1, 100)
    engine.generate([prompt], 1)
    assert engine.drain()
    engine.drop_device_cache()
    [result] = engine.generate([prompt], 6, keep_logits=True)
    assert stand_in.num_failed_loads == 1
    assert result.num_loaded_tokens < 96
    assert result.num_loaded_tokens + result.num_computed_tokens == 105
    assert_same(result, model, prompt)


def test_the_blocks_of_an_aborted_load_are_kept_until_it_ends() -> None:
    engine, stand_in, model = start("full")
    prompt = random_tokens(1, 100)
    engine.generate([prompt], 1)
    assert engine.drain()
    engine.drop_device_cache()
    stand_in.behaviour.holds = True
    loading = engine.add_request(prompt, 4)
    engine.step()
    result = engine.abort(loading)
    assert result is not None
    assert result.finish_reason is FinishReason.ABORTED
    assert engine.blocks.num_unused_blocks == (24 - 12,)
    with pytest.raises(ValueError, match="or a load for it, has not ended"):
        engine.add_request(prompt, 4, request_id=loading)
    other = random_tokens(2, 90)
    [beside] = engine.generate([other], 3, keep_logits=True)
    assert_same(beside, model, other)
    assert engine.blocks.num_unused_blocks == (24 - 12,)
    stand_in.behaviour.holds = False
    assert engine.drain()
    assert engine.blocks.num_unused_blocks == (24,)


def test_blocks_are_not_written_while_a_store_reads_them() -> None:
    """A connector that learns of reused blocks in time can copy them before that."""
    engine, stand_in, model = start("hybrid")
    stand_in.behaviour.holds = True
    prompt = random_tokens(1, 100)
    engine.generate([prompt], 1)
    engine.step()
    assert not stand_in.shelf
    engine.generate([random_tokens(2, 150)], 1)
    stand_in.behaviour.holds = False
    assert engine.drain()
    [warm] = engine.generate([prompt], 4, keep_logits=True)
    assert warm.num_loaded_tokens > 0
    assert_same(warm, model, prompt)


def test_a_reset_in_the_middle_of_everything() -> None:
    engine, stand_in, model = start("hybrid")
    prompt = random_tokens(1, 100)
    engine.generate([prompt], 1)
    assert engine.drain()
    engine.drop_device_cache()
    running = engine.add_request(random_tokens(2, 30), 9, keep_logits=True)
    engine.step()
    stand_in.behaviour.holds = True
    loading = engine.add_request(prompt, 4, keep_logits=True)
    engine.step()
    engine.load_weights(seed=1)
    engine.step()
    stand_in.behaviour.holds = False
    results = {r.request_id: r for r in run_until(engine, lambda: not engine.has_requests)}
    assert_same(results[loading], replace(model, seed=1), prompt)
    assert results[loading].num_loaded_tokens == 0
    assert results[running].num_preemptions == 1
    assert sorted(stand_in.preempted) == sorted([running, loading])
    engine.drop_device_cache()
    [again] = engine.generate([prompt], 4, keep_logits=True)
    assert again.num_loaded_tokens == 96
    assert_same(again, replace(model, seed=1), prompt)


def test_shutdown_goes_to_both_halves_once() -> None:
    engine, stand_in, _ = start("ranks")
    engine.shutdown()
    assert stand_in.is_shut_down
    stand_in.is_shut_down = False
    engine.shutdown()
    assert not stand_in.is_shut_down


def test_every_rank_has_a_worker() -> None:
    model, engine_config = CASES["ranks"]
    stand_in = StandIn(model, replace(engine_config, world_size=1))
    with pytest.raises(ValueError, match=r"1 worker\(s\), but world_size=2"):
        Engine(model, engine_config, stand_in.connector)


ARRIVALS = st.lists(
    st.tuples(
        st.integers(0, 1),  # whose beginning it has
        st.integers(1, 80),  # tokens of that beginning
        st.integers(0, 2),  # which end
        st.integers(1, 10),  # tokens to generate
        st.integers(0, 8),  # steps until the next one comes
        st.sampled_from(["", "", "", "abort", "drop", "reset"]),
    ),
    min_size=3,
    max_size=10,
)


@given(
    st.sampled_from(sorted(CASES)),
    st.integers(0, 4),
    st.sampled_from([0.0, 0.4]),
    st.integers(1, 64),
    st.integers(2, 5),
    ARRIVALS,
    st.integers(0, 2**16),
)
@settings(max_examples=40)
def test_any_workload_gets_the_bits_of_lonely_requests(
    case: str,
    max_delay: int,
    failing: float,
    budget: int,
    max_running: int,
    arrivals: list[tuple[int, int, int, int, int, str]],
    seed: int,
) -> None:
    model, engine_config = CASES[case]
    full_blocks = 96 // engine_config.block_tokens[0] + 2
    tight = replace(
        engine_config,
        num_blocks=(full_blocks, 60)[: len(engine_config.num_blocks)],
        token_budget=budget,
        max_running=max_running,
    )
    stand_in = StandIn(model, tight, Behaviour(max_delay, failing, seed))
    engine = Engine(model, tight, stand_in.connector)
    prompts: dict[str, list[int]] = {}
    results: list[RequestResult] = []
    for base, length, end, max_tokens, steps, then in arrivals:
        prompt = random_tokens(base, length) + random_tokens(10 + end, 3)
        request_id = engine.add_request(prompt, max_tokens, keep_logits=True)
        prompts[request_id] = prompt
        results += [result for _ in range(steps) for result in engine.step()]
        if then == "abort":
            aborted = engine.abort(request_id)
            results += [aborted] if aborted is not None else []
        elif then == "drop":
            engine.drop_device_cache()
        elif then == "reset":
            engine.reset_cache()
    results += run_until(engine, lambda: not engine.has_requests)
    assert sorted(result.request_id for result in results) == sorted(prompts)
    for result in results:
        assert_same(result, model, prompts[result.request_id])
    assert engine.drain()
    assert engine.blocks.num_unused_blocks == tight.num_blocks
    assert not stand_in.alive
