"""Requests are aborted, and everything is reset, while requests run and copies are under way."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from kvtier.integrations.vllm.comparison import random_prompts
from kvtier.integrations.vllm.in_process import Answer
from tests.e2e.vllm.processes import VLLM
from tests.e2e.vllm.scenarios.faulty_transfers import WITH_FAULTS
from tests.e2e.vllm.scenarios.mid_flight import MAX_TOKENS, MidFlight
from tests.e2e.vllm.subject import Subject

pytestmark = pytest.mark.vllm

TOKENS = 192
LONG = random_prompts(5, TOKENS, "never wrong in mid-flight")
PROMPTS = [*LONG, LONG[0][:128] + LONG[1], LONG[0][:128] + LONG[2]]
"""Two of them begin like another one."""
TIER = {
    "type": "example",
    "simulate_async": True,
    "latency_ms": 2,
    "load_timeout_ms": 60_000,
    "store_timeout_ms": 60_000,
    "max_pinned_share": 1,
}
STORIES, EVENTS = 8, 120


@pytest.mark.parametrize(
    ("subject", "device_blocks", "slots"),
    [("llama", 40, 30), ("hybrid", 96, 60)],
    indirect=["subject"],
)
def test_whatever_happens_in_mid_flight_answers_are_right(
    vllm: VLLM, subject: Subject, device_blocks: int, slots: int
) -> None:
    options = WITH_FAULTS | {
        "cpu_bytes_to_use": slots * subject.slot_bytes(),
        "prefill_tokens_per_s": 0,
        "secondary_tiers": [TIER],
    }
    engine_args: dict[str, Any] = {"device_blocks": device_blocks, "max_model_len": 512}
    happened: Counter[str] = Counter()
    answers: list[tuple[int, Answer]] = []
    with vllm.start(MidFlight, str(subject.path), options, **engine_args) as process:
        for seed in range(STORIES):
            told = process.ask("live", seed, EVENTS, PROMPTS)
            happened.update(told["happened"])
            answers += [(number, Answer(**answer)) for number, answer in told["answers"]]
        figures = process.ask("figures")
        assert process.ask("close") == []
    subject.alone.check(
        [PROMPTS[number] for number, _ in answers],
        [answer for _, answer in answers],
        max_tokens=MAX_TOKENS,
        exact=False,
    )
    for what in ("aborted while loading", "aborted while storing", "reset while storing"):
        assert happened[what] > 0, happened
    assert figures["cpu_loaded_blocks"] > 0
    assert figures["tier_0_example_loaded_blocks"] > 0
    assert figures["cpu_pinned_blocks"] == figures["cpu_writing_blocks"] == 0
