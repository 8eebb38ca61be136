"""How fast an engine computes, estimated from its model and GPU, and what that says of a tier."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from kvtier.cli.checks.finding import Status
from kvtier.cli.doctor.canary import TierSpeed, TriedTier
from kvtier.cli.doctor.payoff import Payoff, estimated_engine
from kvtier.replay.plan import read_model
from kvtier.replay.settings import EngineSettings

H200_FLOPS = 132 * 1.98e9 * 4096
LLAMA_8B = {
    "torch_dtype": "bfloat16",
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "intermediate_size": 14336,
}
MEASURED_S = {2048: 0.050, 8192: 0.212, 32_768: 1.222}
"""On an H200 with vLLM 0.26 (docs/benchmarks.md)."""


def shape_of(directory: Path, **changes: Any) -> Any:
    path = directory / "config.json"
    path.write_text(json.dumps(LLAMA_8B | changes))
    return read_model(str(path))


def test_an_estimate_is_near_what_was_measured(tmp_path: Path) -> None:
    engine = estimated_engine(shape_of(tmp_path), H200_FLOPS)
    assert engine is not None
    for num_tokens, seconds in MEASURED_S.items():
        assert engine.prefill_s(0, num_tokens) == pytest.approx(seconds, rel=0.2)


def test_experts_that_are_not_used_cost_nothing(tmp_path: Path) -> None:
    dense = shape_of(tmp_path, intermediate_size=2 * 1024)
    sparse = shape_of(tmp_path, num_experts_per_tok=2, moe_intermediate_size=1024, num_experts=64)
    assert sparse.num_weights == dense.num_weights


@pytest.mark.parametrize(
    "changes", [{"intermediate_size": None}, {"intermediate_size": "big"}, {"kv_lora_rank": 512}]
)
def test_without_an_estimate(changes: dict[str, Any], tmp_path: Path) -> None:
    changes = {"qk_rope_head_dim": 64, **changes}
    assert estimated_engine(shape_of(tmp_path, **changes), H200_FLOPS) is None


@pytest.mark.parametrize(
    ("rate", "speed_from", "status"),
    [
        (5e9, "given", Status.OK),
        (2.5e9, "given", Status.WARNING),  # leaves the GPU to others
        (1e8, "given", Status.PROBLEM),
        (1e8, "estimated", Status.WARNING),
    ],
)
def test_what_is_too_slow(rate: float, speed_from: str, status: Status) -> None:
    engine = EngineSettings(prefill_tokens_per_s=26_000)  # 3.4 GB of KV cache per second
    payoff = Payoff(128 << 10, False, engine, speed_from)
    found = payoff.finding(TriedTier("here", "disk", speed=TierSpeed(rate, rate, 0.0)))
    assert found is not None
    assert (found.status, bool(found.remedy)) == (status, status is not Status.OK)
