"""Sizes of a model's KV cache, and what tiers hold of it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from kvtier.replay.plan import ModelError, TierPlan, host_sizes, read_model
from kvtier.replay.settings import TierSettings

LLAMA_3_8B: dict[str, Any] = {
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "hidden_size": 4096,
    "torch_dtype": "bfloat16",
    "sliding_window": None,
}
DEEPSEEK_V3: dict[str, Any] = {
    "num_hidden_layers": 61,
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "hidden_size": 7168,
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "torch_dtype": "bfloat16",
}


def written(tmp_path: Path, config: object) -> str:
    path = tmp_path / "config.json"
    path.write_text(config if isinstance(config, str) else json.dumps(config))
    return str(path)


@pytest.mark.parametrize(
    ("config", "kv_dtype", "num_bytes"),
    [
        (LLAMA_3_8B, None, 128 << 10),
        (LLAMA_3_8B, "fp8", 64 << 10),
        (LLAMA_3_8B | {"num_key_value_heads": None}, None, 512 << 10),
        (LLAMA_3_8B | {"head_dim": 64}, None, 64 << 10),
        ({"text_config": LLAMA_3_8B, "hidden_size": 1}, None, 128 << 10),
        (DEEPSEEK_V3, None, 61 * 576 * 2),
    ],
)
def test_bytes_per_token(
    tmp_path: Path, config: dict[str, Any], kv_dtype: str | None, num_bytes: int
) -> None:
    model = read_model(written(tmp_path, config), kv_dtype)
    assert model.bytes_per_token == num_bytes
    assert not model.has_windows


@pytest.mark.parametrize(
    "changes",
    [
        {"sliding_window": 4096},
        {"sliding_window": 4096, "use_sliding_window": True},
        {"layer_types": ["full_attention", "sliding_attention"]},
    ],
)
def test_windows_are_noticed(tmp_path: Path, changes: dict[str, Any]) -> None:
    assert read_model(written(tmp_path, LLAMA_3_8B | changes)).has_windows


@pytest.mark.parametrize(
    "changes",
    [
        {"sliding_window": 4096, "use_sliding_window": False},
        {"sliding_window": 4096, "layer_types": ["full_attention"]},
    ],
)
def test_windows_that_are_not_used(tmp_path: Path, changes: dict[str, Any]) -> None:
    assert not read_model(written(tmp_path, LLAMA_3_8B | changes)).has_windows


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ("hello", "not a JSON object"),
        ("[" * 100_000, "not a JSON object"),
        ([1], "not a JSON object"),
        ({}, "num_hidden_layers is missing"),
        (LLAMA_3_8B | {"num_hidden_layers": 0}, "num_hidden_layers is 0"),
        (LLAMA_3_8B | {"num_hidden_layers": True}, "num_hidden_layers is true"),
        (LLAMA_3_8B | {"num_key_value_heads": "8"}, 'num_key_value_heads is "8"'),
        (LLAMA_3_8B | {"hidden_size": None}, "--kv-bytes-per-token"),
        (LLAMA_3_8B | {"torch_dtype": "int3"}, "give --kv-dtype, one of float32"),
        (LLAMA_3_8B | {"torch_dtype": ["int3"]}, "give --kv-dtype, one of float32"),
        (LLAMA_3_8B | {"layer_types": ["linear_attention"]}, "layers other than attention"),
        (LLAMA_3_8B | {"layers_block_type": ["mamba"]}, "layers other than attention"),
        (LLAMA_3_8B | {"layer_types": 3}, "layer_types"),
        (LLAMA_3_8B | {"layer_types": [["full_attention"]]}, "layer_types"),
    ],
)
def test_what_is_no_model_is_refused(tmp_path: Path, config: object, said: str) -> None:
    path = written(tmp_path, config)
    with pytest.raises(ModelError) as refused:
        read_model(path)
    assert str(refused.value).startswith(path)
    assert said in str(refused.value)


def test_a_tier_holds_and_loads_conversations() -> None:
    tier = TierSettings(
        name="disk", num_bytes=10_500, read_bytes_per_s=1000.0, write_bytes_per_s=1.0, latency_s=0.5
    )
    plan = TierPlan.of(tier, 10, 100)
    assert (plan.num_tokens, plan.num_conversations) == (1050, 10)
    assert plan.load_s == pytest.approx(0.5 + 1.0)
    assert plan.break_even_tokens_per_s == pytest.approx(100 / 1.5)


def test_sizes_that_hold_a_block_are_tried() -> None:
    assert list(host_sizes(800, 100)) == [100, 200, 400, 800, 1600, 3200, 6400]
    assert list(host_sizes(100, 100)) == [100, 200, 400, 800]
