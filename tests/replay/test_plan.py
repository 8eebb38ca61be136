"""Sizes of a model's KV cache, and what tiers hold of it."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import product
from math import inf
from pathlib import Path
from typing import Any

import pytest

from kvtier.replay.plan import (
    ModelError,
    Sizes,
    Sweep,
    Target,
    TierPlan,
    most_hits,
    read_model,
    sizes_around,
)
from kvtier.replay.settings import MOST_BLOCKS, ReplaySettings, TierSettings
from tests.replay.oracle import BLOCK_TOKENS, settings_for, some_requests, write_jsonl
from tests.traces import CHATS

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
    assert list(sizes_around(800, 100)) == [100, 200, 400, 800, 1600, 3200, 6400]
    assert list(sizes_around(100, 100)) == [100, 200, 400, 800]
    assert list(sizes_around(MOST_BLOCKS, 1))[-1] == MOST_BLOCKS


# --- with a trace ------------------------------------------------------------------------------


def sweep_of(tmp_path: Path, seed: int, settings: ReplaySettings) -> Sweep:
    path = write_jsonl(tmp_path / "trace.jsonl", some_requests(seed, 60, longest=8))
    return Sweep(str(path), settings, BLOCK_TOKENS)


def least_memory(sizes: Sizes) -> tuple[float, ...]:
    return sizes


def in_money(sizes: Sizes) -> tuple[float, ...]:
    return (sum(size * price for size, price in zip(sizes, (5, 1, 0.5), strict=False)),)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("cost", [least_memory, in_money])
@pytest.mark.parametrize("tier_blocks", [(), (40,)])
def test_no_combination_that_reaches_the_target_is_cheaper(
    tmp_path: Path, seed: int, cost: Any, tier_blocks: tuple[int, ...]
) -> None:
    policies = ["lru", "arc"]
    sweep = sweep_of(tmp_path, seed, settings_for(16, *tier_blocks))
    # Smaller sizes are skipped where larger ones do not suffice. Here more memory never hits less.
    all_sizes = list(product(*map(sweep.sizes_of, range(1 + len(tier_blocks)))))
    points = [sweep.point(policy, sizes) for policy in policies for sizes in all_sizes]
    hits = sorted({point.figures.hit_percent for point in points})
    for hit_percent in hits[:: max(1, len(hits) // 5)]:
        target = Target(hit_percent=hit_percent)
        found = sweep_of(tmp_path, seed, sweep.settings).cheapest(policies, target, cost)
        reaching = [point for point in points if target.is_met_by(point.figures)]
        assert found is not None
        assert target.is_met_by(found.figures)
        assert cost(found.sizes) == min(cost(point.sizes) for point in reaching)
    assert sweep.cheapest(policies, Target(hit_percent=hits[-1] + 0.1), cost) is None


def test_nothing_cheaper_in_the_tables_reaches_the_target() -> None:
    """In this trace, 1 GiB and 8 GiB hit more than 2 GiB and 8 GiB."""
    settings = ReplaySettings(
        host=tier_of("host", 2 << 30), tiers=(tier_of("disk", 8 << 30),), is_timed=False
    )
    sweep = Sweep(str(CHATS), settings, 512)
    rows = [point for place in range(2) for point in sweep.curve("lru", place)]
    target = Target(hit_percent=58.0)
    found = sweep.cheapest(["lru"], target, in_money)
    assert found is not None
    reaching = [point for point in rows if target.is_met_by(point.figures)]
    assert in_money(found.sizes) <= min(in_money(point.sizes) for point in reaching)


def tier_of(name: str, num_bytes: int) -> TierSettings:
    return TierSettings(name=name, num_bytes=num_bytes, read_bytes_per_s=1, write_bytes_per_s=1)


def test_the_search_replays_few_of_the_combinations(tmp_path: Path) -> None:
    sweep = sweep_of(tmp_path, 1, settings_for(16, 40))
    largest = tuple(sweep.sizes_of(place)[-1] for place in range(2))
    most = sweep.point("lru", largest).figures.hit_percent
    num_replays = 0

    def note_replay() -> None:
        nonlocal num_replays
        num_replays += 1

    sweep = sweep_of(tmp_path, 1, sweep.settings)
    sweep.note_replay = note_replay
    assert sweep.cheapest(["lru"], Target(hit_percent=0.9 * most), in_money) is not None
    assert num_replays <= 14  # of 49


def test_a_target_for_times_is_about_nine_of_ten_requests(tmp_path: Path) -> None:
    sweep = sweep_of(tmp_path, 2, replace(settings_for(16), is_timed=True))
    figures = sweep.point("lru", sweep.sizes).figures
    assert figures.timing is not None
    times = sorted(figures.timing.first_token_s)
    assert times[53] <= figures.timing.p90_s <= times[54]
    assert Target(ttft_s=times[54]).is_met_by(figures)
    assert not Target(ttft_s=times[53] / 2).is_met_by(figures)
    assert not Target(ttft_s=times[54], hit_percent=100).is_met_by(figures)


def test_unlimited_memory_has_the_hits_of_memory_for_everything(tmp_path: Path) -> None:
    sweep = sweep_of(tmp_path, 3, settings_for(10_000))
    assert most_hits(sweep.path, BLOCK_TOKENS) == pytest.approx(
        sweep.point("lru", sweep.sizes).figures.hit_percent, abs=1e-4
    )
    assert most_hits(sweep.path, BLOCK_TOKENS, limit=1) == 0


def test_how_long_a_drive_lasts(tmp_path: Path) -> None:
    sweep = sweep_of(tmp_path, 4, settings_for(16, 40))
    point = sweep.point("lru", sweep.sizes)
    figures = point.figures
    written = figures.places[1].written_blocks * BLOCK_TOKENS
    assert written > 0
    years = point.life_years(1, 1000 * written)
    assert years == pytest.approx(1000 * figures.trace_s / (365.25 * 86_400))
    figures.places[1].written_blocks = 0
    assert point.life_years(1, 1) == inf
    figures.trace_s = 0.0
    assert point.written_per_day(1) is point.life_years(1, 1) is None
