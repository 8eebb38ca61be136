"""The engine with the real connector, from its configuration to tokens."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kvtier.config import AttentionKind
from kvtier.config.options import WritePolicyName
from kvtier.connector import OffloadingConnectorScheduler
from kvtier.engine import Engine, EngineConfig, ModelConfig
from kvtier.engine.cache import KVCache
from kvtier.engine.offloading import make_connector, offloading_config
from tests.engine.models import FULL, HYBRID, random_tokens
from tests.engine.oracle import assert_same

CPU_ONLY = {"spec_name": "CPUOffloadingSpec", "cpu_bytes_to_use": "4MiB"}
TIERED = {
    "cpu_bytes_to_use": "4MiB",
    "secondary_tiers": [{"type": "example", "simulate_async": True, "load_timeout_ms": 60_000}],
}
CASES: dict[str, tuple[ModelConfig, EngineConfig]] = {
    "full": (FULL, EngineConfig(block_tokens=(8,), num_blocks=(24,), token_budget=40)),
    "hybrid": (
        HYBRID,
        EngineConfig(block_tokens=(8, 4), num_blocks=(24, 40), token_budget=40),
    ),
    "ranks": (
        HYBRID,
        EngineConfig(block_tokens=(8, 8), num_blocks=(24, 20), token_budget=40, world_size=2),
    ),
}


@contextmanager
def offloading_engine(
    model: ModelConfig, engine: EngineConfig, extra_config: dict[str, Any]
) -> Iterator[Engine]:
    config = offloading_config(model, engine, extra_config, f"test-{uuid.uuid4().hex}")
    started = Engine(model, engine, make_connector(config))
    try:
        yield started
    finally:
        started.shutdown()


def test_the_engine_describes_itself() -> None:
    model, engine = CASES["hybrid"]
    config = offloading_config(model, engine, CPU_ONLY, "e")
    full, windowed = config.groups
    assert (full.kind, full.tokens_per_block) == (AttentionKind.FULL, 8)
    assert (windowed.kind, windowed.window_tokens) == (AttentionKind.SLIDING_WINDOW, 24)
    assert windowed.layer_names == ("layers.0", "layers.1", "layers.2")
    assert config.cache.tokens_per_hash == 4
    tensors = KVCache(model, engine).canonical(0).tensors
    assert config.worker_kv_bytes_per_block == sum(t.page_size_bytes for t in tensors)


def test_other_weights_have_another_fingerprint() -> None:
    model, engine = CASES["full"]
    prints = {
        offloading_config(changed, engine, CPU_ONLY, "e").fingerprint()
        for changed in (model, replace(model, seed=1), replace(model, rope_base=500.0))
    }
    assert len(prints) == 3
    again = offloading_config(model, engine, CPU_ONLY, "another").fingerprint()
    assert again in prints


@pytest.mark.parametrize("blocks_per_chunk", [1, 2, 3])
@pytest.mark.parametrize("extra", [CPU_ONLY, TIERED], ids=["cpu", "tiered"])
@pytest.mark.parametrize("case", CASES)
def test_a_prompt_comes_back_after_the_device_has_forgotten_it(
    case: str, extra: dict[str, Any], blocks_per_chunk: int
) -> None:
    model, engine_config = CASES[case]
    prompt = random_tokens(1, 100)
    extra = extra | {"blocks_per_chunk": blocks_per_chunk}
    with offloading_engine(model, engine_config, extra) as engine:
        [cold] = engine.generate([prompt], 6, keep_logits=True)
        assert engine.drain()
        engine.drop_device_cache()
        [warm] = engine.generate([prompt], 6, keep_logits=True)
    assert_same(cold, model, prompt)
    assert_same(warm, model, prompt)
    alignment = max(engine_config.block_tokens) * blocks_per_chunk
    assert warm.num_loaded_tokens == 99 // alignment * alignment


@pytest.mark.parametrize("write", list(WritePolicyName))
@pytest.mark.parametrize("eviction", ["lru", "arc", "density"])
def test_no_policy_changes_an_answer(eviction: str, write: WritePolicyName, tmp_path: Path) -> None:
    """Host memory has room for two of the four prompts. The last round is in a restarted engine."""
    model, engine_config = CASES["full"]
    prompts = [random_tokens(seed, 100) for seed in range(4)]
    row_bytes = offloading_config(model, engine_config, TIERED, "e").row_bytes
    tier = {"type": "disk", "path": str(tmp_path / "kv.slab"), "max_bytes": "4MiB"}
    patience = {"load_timeout_ms": 60_000, "store_timeout_ms": 60_000}
    extra = {
        "cpu_bytes_to_use": 26 * row_bytes,
        "eviction_policy": eviction,
        "prefill_tokens_per_s": 0,
        "secondary_tiers": [tier | patience | {"write": write, "eviction_policy": eviction}],
    }
    num_loaded = []
    for num_rounds in (3, 1):
        with offloading_engine(model, engine_config, extra) as engine:
            for _ in range(num_rounds):
                for prompt in prompts:
                    [answer] = engine.generate([prompt], 4, keep_logits=True)
                    assert engine.drain()
                    engine.drop_device_cache()
                    assert_same(answer, model, prompt)
                    num_loaded.append(answer.num_loaded_tokens)
    assert num_loaded[:4] == [0] * 4
    assert max(num_loaded[4:12]) == 96
    assert max(num_loaded[12:]) == 96, "the restarted engine is not warm"


def test_the_guard_hears_what_prefill_costs_without_a_single_store() -> None:
    model, engine_config = CASES["full"]
    engine_config = replace(engine_config, token_budget=128)
    config = offloading_config(model, engine_config, TIERED, f"test-{uuid.uuid4().hex}")
    connector = make_connector(config)
    assert isinstance(connector.scheduler, OffloadingConnectorScheduler)
    engine = Engine(model, engine_config, connector)
    try:
        for seed in range(16):
            engine.generate([random_tokens(seed, 100)], 2, kv_transfer_params={"skip": True})
        stats = connector.scheduler.get_stats()
    finally:
        engine.shutdown()
    assert stats is not None
    assert not stats.counters.get("kvtier_cpu_stored_blocks")
    assert stats.gauges["kvtier_tiering_prefill_tokens_per_s"] > 0


@pytest.mark.parametrize("case", CASES)
def test_many_requests_on_a_small_device(case: str) -> None:
    model, engine_config = CASES[case]
    tight = replace(engine_config, num_blocks=(14, *engine_config.num_blocks[1:]))
    prompts = [[*random_tokens(seed % 2, 30 + 7 * seed), seed] for seed in range(8)]
    with offloading_engine(model, tight, TIERED) as engine:
        cold = engine.generate(prompts, 10, keep_logits=True)
        engine.drop_device_cache()
        warm = engine.generate(prompts, 10, keep_logits=True)
        for prompt, *results in zip(prompts, cold, warm, strict=True):
            for result in results:
                assert_same(result, model, prompt)
        assert sum(result.num_loaded_tokens for result in warm) > 0
        assert engine.drain()
        assert engine.blocks.num_unused_blocks == tight.num_blocks


@pytest.mark.parametrize("case", CASES)
def test_other_weights_find_nothing_of_the_old_ones(case: str) -> None:
    model, engine_config = CASES[case]
    prompt = random_tokens(1, 90)
    with offloading_engine(model, engine_config, TIERED) as engine:
        engine.generate([prompt], 4)
        engine.load_weights(seed=1)
        [after] = engine.generate([prompt], 4, keep_logits=True)
        assert engine.drain()
        engine.drop_device_cache()
        [warm] = engine.generate([prompt], 4, keep_logits=True)
    assert after.num_loaded_tokens == 0
    assert warm.num_loaded_tokens == 88
    for result in (after, warm):
        assert_same(result, replace(model, seed=1), prompt)


def test_an_engine_that_cannot_start_leaves_nothing_behind() -> None:
    """`tests/conftest.py` checks that nothing is left behind."""
    model, engine_config = CASES["full"]
    config = offloading_config(model, engine_config, TIERED, f"test-{uuid.uuid4().hex}")
    larger = replace(engine_config, block_tokens=(16,))
    with pytest.raises(ValueError, match="cpu_page_size"):
        Engine(model, larger, make_connector(config))
