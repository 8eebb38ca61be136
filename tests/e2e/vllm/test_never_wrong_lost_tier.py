"""A tier stops answering while requests run: they continue without it, with right answers."""

from __future__ import annotations

import time
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from kvtier.testing.vllm.in_process import Answer
from kvtier.testing.vllm.tiny_model import random_prompts
from tests.e2e.vllm.lasting_tiers import figure_of
from tests.e2e.vllm.processes import VLLM
from tests.e2e.vllm.remote_engine import RemoteEngine
from tests.e2e.vllm.scenarios.failing_tier import FAILING_TIER, EngineOverFailingTier, Trouble
from tests.e2e.vllm.subject import Subject

pytestmark = pytest.mark.vllm

TOKENS, BLOCKS = 256, 8
PROMPTS = random_prompts(6, TOKENS, "never wrong without a tier")
TIER = FAILING_TIER | {
    "lookup_timeout_ms": 50,
    "load_timeout_ms": 200,
    "store_timeout_ms": 200,
    "max_pinned_share": 1,
}
IN_USE, CUT_OFF = 0, 2
PATIENCE_S = 60.0


class EngineOverTier(RemoteEngine):
    """An engine over a tier that can be made to fail."""

    def __init__(self, vllm: VLLM, model: Path, options: dict[str, Any]) -> None:
        self.process = vllm.start(
            EngineOverFailingTier, str(model), options, device_blocks=64, max_model_len=512
        )
        self._numbers = count()

    def get_into(self, trouble: Trouble) -> None:
        self.process.ask("get_into", trouble)

    def recover(self) -> None:
        self.process.ask("recover")

    def tier_figure(self, name: str) -> float:
        return self.figures().get(figure_of("0:FailingTier", name), 0)

    def generate_until(self, is_over: Callable[[], bool]) -> list[Answer]:
        """Run all prompts repeatedly, with an empty device cache."""
        answers: list[Answer] = []
        deadline = time.monotonic() + PATIENCE_S
        while not is_over():
            assert time.monotonic() < deadline, self.figures()
            self.reset_device_cache()
            answers += self.generate(*PROMPTS)
        return answers


@pytest.mark.parametrize("trouble", ["answers nothing", "moves nothing", "blocks its callers"])
@pytest.mark.parametrize(
    # Host memory has room for four of the six prompts. They return in the order in which they came,
    # so that each has been evicted by then.
    ("subject", "slots"),
    [("llama", 4 * 8), ("hybrid", 4 * (8 + 2 * 4))],
    indirect=["subject"],
)
def test_requests_go_on_without_a_tier_and_with_it_once_it_is_back(
    vllm: VLLM, subject: Subject, slots: int, trouble: Trouble
) -> None:
    options = {
        "cpu_bytes_to_use": slots * subject.slot_bytes(),
        "prefill_tokens_per_s": 0,
        "secondary_tiers": [TIER],
    }
    with EngineOverTier(vllm, subject.path, options) as engine:
        before = engine.generate(*PROMPTS)
        engine.reset_device_cache()
        before += engine.generate(*PROMPTS)
        loaded = engine.tier_figure("loaded_blocks")
        engine.get_into(trouble)
        during = engine.generate_until(lambda: engine.tier_figure("breaker_state") == CUT_OFF)
        during += engine.generate(*PROMPTS)
        noticed = {
            name: engine.tier_figure(name)
            for name in ("late_lookups", "late_loads", "blocking_calls")
        }
        engine.recover()
        after = engine.generate_until(lambda: engine.tier_figure("breaker_state") == IN_USE)
        loaded_meanwhile = engine.tier_figure("loaded_blocks")
        engine.reset_device_cache()
        after += engine.generate(*PROMPTS)
        assert engine.tier_figure("loaded_blocks") >= loaded_meanwhile + BLOCKS
    assert [answer.cached_tokens for answer in before[len(PROMPTS) :]] == [TOKENS] * len(PROMPTS)
    assert loaded >= BLOCKS
    reason = {
        "answers nothing": "late_lookups",
        "moves nothing": "late_loads",
        "blocks its callers": "blocking_calls",
    }[trouble]
    assert noticed[reason] > 0
    prompts = PROMPTS * (len(before + during + after) // len(PROMPTS))
    # How much of a prompt host memory has at that moment depends on timing.
    subject.alone.check(prompts, before + during + after, exact=False)


@pytest.mark.parametrize("subject", ["llama"], indirect=True)
def test_an_engine_ends_over_a_tier_that_does_not_answer(vllm: VLLM, subject: Subject) -> None:
    options = {
        "cpu_bytes_to_use": 32 * subject.slot_bytes(),
        "secondary_tiers": [TIER],
        "shutdown_timeout_ms": 200,
    }
    with EngineOverTier(vllm, subject.path, options) as engine:
        engine.generate(*PROMPTS)
        engine.get_into("answers nothing")
        answers = engine.generate(*PROMPTS)
        engine.add("under way", PROMPTS[0])
        engine.step()
    subject.alone.check(PROMPTS, answers, exact=False)
