"""Requests through the engine, without a connector."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtier.engine import Engine, EngineConfig, FinishReason, ModelConfig
from tests.engine.dense import dense_logits
from tests.engine.models import FULL, HYBRID, random_tokens
from tests.engine.oracle import assert_same, expected

SMALL_ENGINE = EngineConfig(block_tokens=(8,), num_blocks=(24,), token_budget=40)
HYBRID_ENGINE = EngineConfig(block_tokens=(8, 4), num_blocks=(24, 40), token_budget=40)
CASES = {"full": (FULL, SMALL_ENGINE), "hybrid": (HYBRID, HYBRID_ENGINE)}


@pytest.mark.parametrize("case", CASES)
def test_tokens_are_those_of_the_dense_model(case: str) -> None:
    model, engine_config = CASES[case]
    prompt = random_tokens(0, 50)
    [result] = Engine(model, engine_config).generate([prompt], 12, keep_logits=True)
    assert result.logits is not None
    everything = prompt + result.token_ids
    dense = dense_logits(model, everything)[len(prompt) - 1 : -1]
    np.testing.assert_allclose(np.stack(result.logits), dense, rtol=0, atol=2e-4)
    assert result.token_ids == dense.argmax(axis=1).tolist()


@pytest.mark.parametrize("case", CASES)
def test_requests_together_get_what_they_get_alone(case: str) -> None:
    model, engine_config = CASES[case]
    prompts = [random_tokens(seed, 11 * seed + 3) for seed in range(6)]
    results = Engine(model, engine_config).generate(prompts, 10, keep_logits=True)
    for prompt, result in zip(prompts, results, strict=True):
        assert_same(result, model, prompt)


def test_the_device_cache_serves_prefixes() -> None:
    engine = Engine(FULL, SMALL_ENGINE)
    prompt = random_tokens(1, 60)
    engine.generate([prompt], 2)
    other = prompt[:37] + random_tokens(2, 20)
    [again, shared] = engine.generate([prompt, other], 4, keep_logits=True)
    assert again.num_device_tokens == 56
    assert again.num_computed_tokens == 4 + 3
    assert shared.num_device_tokens == 32
    assert_same(again, FULL, prompt)
    assert_same(shared, FULL, other)


def test_at_least_one_token_is_computed() -> None:
    engine = Engine(FULL, SMALL_ENGINE)
    prompt = random_tokens(1, 64)
    engine.generate([prompt], 1)
    [again] = engine.generate([prompt], 1, keep_logits=True)
    assert again.num_device_tokens == 56
    assert_same(again, FULL, prompt)


def test_generated_tokens_are_cached_too() -> None:
    engine = Engine(FULL, SMALL_ENGINE)
    prompt = random_tokens(1, 20)
    [first] = engine.generate([prompt], 21)
    second_turn = prompt + first.token_ids + [5, 6, 7]
    [second] = engine.generate([second_turn], 3, keep_logits=True)
    assert second.num_device_tokens == 40
    assert_same(second, FULL, second_turn)


def test_a_window_is_enough_of_a_prefix() -> None:
    """The blocks of the windowed group that lie behind the window may be gone."""
    engine = Engine(HYBRID, HYBRID_ENGINE)
    prompt = random_tokens(1, 120)
    engine.generate([prompt], 1)
    # Takes the blocks of the windowed group that were given back first.
    engine.generate([random_tokens(2, 60)], 1)
    [again] = engine.generate([prompt], 4, keep_logits=True)
    assert again.num_device_tokens == 112
    assert_same(again, HYBRID, prompt)


@pytest.mark.parametrize(("num_taken", "num_shared"), [(60, 20), (68, 44)])
def test_a_prefix_whose_window_is_gone_is_none(num_taken: int, num_shared: int) -> None:
    engine = Engine(HYBRID, HYBRID_ENGINE)
    prompt = random_tokens(1, 120)
    engine.generate([prompt], 1)
    engine.generate([random_tokens(2, num_taken)], 1)
    # Blocks of its window have been given back and reused since: all of them, or the first ones.
    shorter = prompt[:num_shared] + random_tokens(3, 20)
    [result] = engine.generate([shorter], 4, keep_logits=True)
    assert result.num_device_tokens == 0
    assert_same(result, HYBRID, shorter)


def test_a_window_takes_few_blocks() -> None:
    long = replace(HYBRID_ENGINE, num_blocks=(60, 28))
    engine = Engine(HYBRID, long)
    prompt = random_tokens(1, 400)
    [result] = engine.generate([prompt], 5, keep_logits=True)
    assert_same(result, HYBRID, prompt)
    assert engine.blocks.num_unused_blocks == (60, 28)


def test_dropping_the_device_cache_forgets_prefixes_only() -> None:
    engine = Engine(FULL, SMALL_ENGINE)
    prompt = random_tokens(1, 60)
    engine.add_request(prompt, 10, keep_logits=True)
    for _ in range(5):
        engine.step()
    engine.drop_device_cache()
    [result] = [result for _ in range(20) for result in engine.step()]
    assert_same(result, FULL, prompt)
    engine.drop_device_cache()
    [again] = engine.generate([prompt], 2, keep_logits=True)
    assert again.num_device_tokens == 0
    assert_same(again, FULL, prompt)


@pytest.mark.parametrize("case", CASES)
def test_preempted_requests_get_the_same_tokens(case: str) -> None:
    model, engine_config = CASES[case]
    tight = replace(engine_config, num_blocks=(13, *engine_config.num_blocks[1:]))
    prompts = [random_tokens(seed, 30) for seed in range(4)]
    engine = Engine(model, tight)
    results = engine.generate(prompts, 60, keep_logits=True)
    assert sum(result.num_preemptions for result in results) > 0
    assert results[0].num_preemptions == 0
    for prompt, result in zip(prompts, results, strict=True):
        assert_same(result, model, prompt)
    assert engine.blocks.num_unused_blocks == tight.num_blocks


def test_a_long_prompt_does_not_hold_up_those_that_decode() -> None:
    engine = Engine(FULL, replace(SMALL_ENGINE, token_budget=16))
    short = engine.add_request(random_tokens(0, 10), 8)
    engine.step()
    long = engine.add_request(random_tokens(1, 120), 1)
    ended = [result.request_id for _ in range(12) for result in engine.step()]
    assert ended == [short, long]


def test_abort() -> None:
    engine = Engine(FULL, replace(SMALL_ENGINE, max_running=1))
    running = engine.add_request(random_tokens(0, 10), 20)
    waiting = engine.add_request(random_tokens(1, 10), 20)
    last = engine.add_request(random_tokens(2, 10), 3, keep_logits=True)
    for _ in range(4):
        engine.step()
    first_result, second_result = engine.abort(running), engine.abort(waiting)
    assert first_result is not None
    assert first_result.finish_reason is FinishReason.ABORTED
    assert first_result.token_ids == list(expected(FULL, tuple(random_tokens(0, 10))).token_ids[:4])
    assert second_result is not None
    assert second_result.token_ids == []
    assert second_result.time_to_first_token_s is None
    assert engine.abort(running) is None
    [result] = [result for _ in range(3) for result in engine.step()]
    assert result.request_id == last
    assert_same(result, FULL, random_tokens(2, 10))
    assert not engine.has_requests
    assert engine.blocks.num_unused_blocks == (24,)


def test_eos_ends_a_request() -> None:
    prompt = random_tokens(0, 10)
    tokens = expected(FULL, tuple(prompt)).token_ids
    [result] = Engine(FULL, SMALL_ENGINE).generate([prompt], 40, eos=tokens[5])
    assert result.finish_reason is FinishReason.EOS
    assert result.token_ids == tokens[: tokens.index(tokens[5]) + 1]


def test_other_weights_start_all_requests_again() -> None:
    engine = Engine(FULL, SMALL_ENGINE)
    prompt = random_tokens(0, 30)
    engine.add_request(prompt, 6, keep_logits=True)
    for _ in range(3):
        engine.step()
    engine.load_weights(seed=1)
    [result] = [result for _ in range(6) for result in engine.step()]
    before, after = result.token_ids[:3], result.token_ids[3:]
    assert before == list(expected(FULL, tuple(prompt)).token_ids[:3])
    changed = replace(FULL, seed=1)
    assert after == list(expected(changed, tuple(prompt + before)).token_ids[:3])
    [again] = engine.generate([prompt], 4, keep_logits=True)
    assert_same(again, changed, prompt)


def test_text_is_a_prompt() -> None:
    engine = Engine(FULL, SMALL_ENGINE)
    [by_text, by_ids] = engine.generate(["né", [256, 110, 195, 169]], 5)
    assert by_text.num_prompt_tokens == 4
    assert by_text.token_ids == by_ids.token_ids


@given(
    st.sampled_from(sorted(CASES)),
    st.integers(1, 64),
    st.integers(1, 5),
    st.lists(
        st.tuples(st.integers(0, 2), st.integers(1, 70), st.integers(1, 12), st.integers(0, 6)),
        min_size=1,
        max_size=8,
    ),
)
@settings(max_examples=40)
def test_any_workload_gets_the_bits_of_lonely_requests(
    case: str, budget: int, max_running: int, arrivals: list[tuple[int, int, int, int]]
) -> None:
    model, engine_config = CASES[case]
    tight = replace(
        engine_config,
        num_blocks=(12, 60)[: len(engine_config.num_blocks)],
        token_budget=budget,
        max_running=max_running,
    )
    engine = Engine(model, tight)
    prompts, results = {}, []
    for base, length, max_tokens, steps in arrivals:
        prompt = random_tokens(base, length)
        prompts[engine.add_request(prompt, max_tokens, keep_logits=True)] = prompt
        results += [result for _ in range(steps) for result in engine.step()]
    while engine.has_requests:
        results += engine.step()
    assert len(results) == len(arrivals)
    for result in results:
        assert_same(result, model, prompts[result.request_id])
    assert engine.blocks.num_unused_blocks == tight.num_blocks


@pytest.mark.parametrize(
    ("prompt", "max_tokens", "complaint"),
    [
        ([], 1, "a prompt of 0 tokens"),
        ([258], 1, "from 0 to 257"),
        ([1], 0, "max_tokens=0"),
        ([1] * 190, 3, r"num_blocks=\(24,\)"),
    ],
)
def test_requests_that_cannot_be_are_refused(
    prompt: list[int], max_tokens: int, complaint: str
) -> None:
    with pytest.raises(ValueError, match=complaint):
        Engine(FULL, SMALL_ENGINE).add_request(prompt, max_tokens)


def test_an_id_belongs_to_one_request() -> None:
    engine = Engine(FULL, SMALL_ENGINE)
    engine.add_request([1], 1, request_id="a")
    with pytest.raises(ValueError, match="request_id='a'"):
        engine.add_request([1], 1, request_id="a")
    engine.drain()
    assert engine.add_request([1], 1, request_id="a") == "a"


def test_the_demo_model_fits_its_engine() -> None:
    prompt = random_tokens(0, 200)
    chunked = Engine(ModelConfig(), EngineConfig(token_budget=37))
    whole = Engine(ModelConfig(), EngineConfig())
    [a] = chunked.generate([prompt], 4, keep_logits=True)
    [b] = whole.generate([prompt], 4, keep_logits=True)
    assert a.logits is not None
    assert b.logits is not None
    assert np.stack(a.logits).tobytes() == np.stack(b.logits).tobytes()
