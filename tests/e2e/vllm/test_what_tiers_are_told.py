"""What a tier inside stock vLLM gets: the hints of requests, and the engine's configuration."""

from __future__ import annotations

from typing import Any

import pytest

from kvtier.testing.vllm.tiny_model import random_prompts
from tests.e2e.vllm.processes import VLLM
from tests.e2e.vllm.scenarios.hints_and_events import NotedEngine
from tests.e2e.vllm.subject import Subject
from tests.e2e.vllm.test_hints_and_events import HintedRemoteEngine
from tests.tiering.noting_tier import NOTING

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.parametrize("subject", ["llama"], indirect=True),
]

TOKENS, BLOCKS = 256, 8
MAX_MODEL_LEN = 512
PROMPTS = random_prompts(2, TOKENS, "told")
HINTS = {"tenant": "blue", "of the tier's own": {"keep": [1, 2.5, None]}, "skip": False}
METHODS = {"on_new_request", "lookup", "submit_store", "submit_load", "on_request_finished"}


class NotedRemoteEngine(HintedRemoteEngine):
    """An engine over a tier that records its calls."""

    scenario = NotedEngine

    def notes(self) -> list[dict[str, Any]]:
        notes: list[dict[str, Any]] = self.process.ask("notes")
        return notes

    def engines(self) -> dict[str, Any]:
        engines: dict[str, Any] = self.process.ask("engines")
        return engines


def start(vllm: VLLM, subject: Subject, **engine_args: Any) -> NotedRemoteEngine:
    # Host memory has room for one prompt: the other is only in the tier.
    options = {
        "cpu_bytes_to_use": (BLOCKS + 1) * subject.slot_bytes(),
        "prefill_tokens_per_s": 0,
        "secondary_tiers": [NOTING],
    }
    return NotedRemoteEngine(vllm, subject.path, options, **engine_args)


def test_a_tier_is_told_the_hints_of_a_request_in_every_call(vllm: VLLM, subject: Subject) -> None:
    with start(vllm, subject) as engine:
        answers = [engine.generate_with(HINTS, prompt) for prompt in (*PROMPTS, PROMPTS[0])]
        calls = engine.notes()
    assert [answer.cached_tokens for answer in answers] == [0, 0, TOKENS]
    assert {call["method"] for call in calls} >= METHODS
    assert [call for call in calls if call["hints"] != HINTS] == []
    contexts = {(call["request"], call["context"]) for call in calls}
    assert len(contexts) == 3, "one for each request"


@pytest.mark.parametrize("plug_in", ["connector", "spec"])
def test_a_tier_finds_vllms_configuration_on_the_schedulers_side_alone(
    vllm: VLLM, subject: Subject, plug_in: str
) -> None:
    with start(vllm, subject, plug_in=plug_in) as engine:
        found = engine.engines()
    # vLLM's own connector does not give it to a spec.
    is_told = plug_in == "connector"
    assert found == {
        "is_vllms": is_told,
        "max_model_len": MAX_MODEL_LEN if is_told else None,
        "of_rank": "None",
    }
