"""A model with windows only: blocks before a window are nowhere, also when a load fails."""

from __future__ import annotations

from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest

from kvtier.testing.vllm.in_process import Answer
from kvtier.testing.vllm.tiny_model import GEMMA3_HYBRID, random_prompts
from tests.e2e.vllm.faulty_engine import FaultyRemoteEngine
from tests.e2e.vllm.processes import VLLM
from tests.e2e.vllm.reference import Reference

pytestmark = pytest.mark.vllm

WINDOWS_ONLY = replace(
    GEMMA3_HYBRID,
    config=GEMMA3_HYBRID.config | {"layer_types": ["sliding_attention"] * 6},
    cache_tensors=6,
)
PROMPTS = random_prompts(3, 256, "windows only")


def test_a_failed_load_is_computed_from_the_start(vllm: VLLM, tmp_path: Path) -> None:
    """vLLM would compute from the first lost block on, without the blocks before it."""
    if vllm.version < (0, 32):
        pytest.skip("before 0.32, vLLM cannot be told of it, and the engine stops with the reason")
    model = WINDOWS_ONLY.write(tmp_path / "model")
    answers: dict[str, list[Answer]] = {}
    with closing(Reference(vllm, model)) as alone:
        with FaultyRemoteEngine(vllm, model, {"cpu_bytes_to_use": "32MiB"}) as engine:
            for name in ("cold", "warm", "failed"):
                engine.set_faults(failing_loads=1_000 if name == "failed" else 0)
                answers[name] = engine.generate(*PROMPTS)
                engine.reset_device_cache()
            assert engine.figures()["failed_loads"] == len(PROMPTS)
        for prompt, *answered in zip(PROMPTS, *answers.values(), strict=True):
            computed, from_device = alone.answers(prompt)
            cold, warm, failed = answered
            assert [answer.tokens for answer in answered] == [computed.tokens] * 3
            assert cold.logprobs == failed.logprobs == computed.logprobs
            assert warm.logprobs == from_device.logprobs
            assert (cold.cached_tokens, failed.cached_tokens) == (0, 0)
            assert warm.cached_tokens == from_device.cached_tokens > 0
