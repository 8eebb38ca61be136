"""Requests are aborted, and everything is reset, while requests run and copies are under way."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from kvtier.testing.vllm.in_process import Answer
from kvtier.testing.vllm.tiny_model import random_prompts
from tests.e2e.vllm.faulty_engine import FaultyRemoteEngine
from tests.e2e.vllm.processes import VLLM
from tests.e2e.vllm.scenarios.faulty_transfers import WITH_FAULTS
from tests.e2e.vllm.scenarios.mid_flight import MAX_TOKENS, MidFlight
from tests.e2e.vllm.subject import Subject

pytestmark = pytest.mark.vllm

TOKENS = 192
LONG = random_prompts(5, TOKENS, "never wrong in mid-flight")
PROMPTS = [*LONG, LONG[0][:128] + LONG[1], LONG[0][:128] + LONG[2]]
"""Two of them share a prefix with another one."""
HOST = {"cpu_bytes_to_use": "32MiB"}
TIER = {
    "type": "example",
    "simulate_async": True,
    "latency_ms": 2,
    "load_timeout_ms": 60_000,
    "store_timeout_ms": 60_000,
    "max_pinned_share": 1,
}
STORIES, EVENTS = 6, 100


@pytest.mark.parametrize("subject", ["llama", "hybrid"], indirect=True)
def test_a_request_is_aborted_while_it_loads(vllm: VLLM, subject: Subject) -> None:
    prompt, others = LONG[0], LONG[1:4]
    with FaultyRemoteEngine(vllm, subject.path, HOST) as engine:
        engine.generate(prompt)
        engine.reset_device_cache()
        engine.set_faults(are_held=True)
        engine.add("aborted", prompt)
        engine.step(3)
        assert engine.under_way() == ["load"]
        engine.abort("aborted")
        # They share blocks with it.
        for place, other in enumerate(others):
            engine.add(f"other {place}", other)
        engine.run()
        engine.set_faults(are_held=False)
        engine.settle()
        engine.reset_device_cache()
        (again,) = engine.generate(prompt)
        answers = [engine.answer(f"other {place}") for place in range(len(others))]
        figures = engine.figures()
    subject.alone.check(others, answers, exact=False)
    assert again.cached_tokens == TOKENS
    subject.alone.check([prompt], [again])
    assert figures["cpu_pinned_blocks"] == 0


@pytest.mark.parametrize("subject", ["llama", "hybrid"], indirect=True)
def test_a_request_ends_while_it_is_stored_and_others_take_its_blocks(
    vllm: VLLM, subject: Subject
) -> None:
    with FaultyRemoteEngine(
        vllm, subject.path, HOST, device_blocks=40, max_model_len=256
    ) as engine:
        engine.set_faults(are_held=True)
        engine.add("first", LONG[0])
        engine.run()
        assert "store" in engine.under_way()
        for place, prompt in enumerate(LONG[1:]):
            engine.add(f"other {place}", prompt)
        engine.run()
        engine.set_faults(are_held=False)
        engine.settle()
        engine.reset_device_cache()
        answers = engine.generate(*LONG)
        figures = engine.figures()
    assert [answer.cached_tokens for answer in answers] == [TOKENS] * len(LONG)
    assert figures["cpu_loaded_blocks"] >= len(LONG) * TOKENS // 32
    subject.alone.check(LONG, answers)


@pytest.mark.parametrize("subject", ["llama", "hybrid"], indirect=True)
def test_everything_is_reset_while_a_request_runs_and_is_stored(
    vllm: VLLM, subject: Subject
) -> None:
    kept, running, *_ = LONG
    with FaultyRemoteEngine(vllm, subject.path, HOST) as engine:
        engine.generate(kept)
        engine.set_faults(are_held=True)
        engine.add("running", running)
        engine.step(3)
        assert engine.under_way() == ["store"]
        # Also twice without a step in between.
        assert engine.reset_all(running=True)
        assert engine.reset_all(running=True)
        engine.set_faults(are_held=False)
        engine.run()
        engine.settle()
        answers = [engine.answer("running"), *engine.generate(kept)]
        assert engine.figures().get("cpu_loaded_blocks", 0) == 0
        engine.reset_device_cache()
        later = engine.generate(kept, running)
        figures = engine.figures()
    assert answers[1].cached_tokens == 0
    subject.alone.check([running, kept], answers, exact=False)
    assert [answer.cached_tokens for answer in later] == [TOKENS] * 2
    subject.alone.check([kept, running], later)
    assert figures["cpu_quarantined_slots"] == figures["cpu_pinned_blocks"] == 0


@pytest.mark.parametrize(
    ("subject", "device_blocks", "slots"),
    [("llama", 32, 40), ("hybrid", 64, 80)],
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
    engine_args: dict[str, Any] = {"device_blocks": device_blocks, "max_model_len": 352}
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
    assert len(answers) > 0 < happened["aborts"]
    assert happened["resets"] > 0
    assert figures["cpu_loaded_blocks"] > 0
    assert figures['tier_blocks{tier="0:example",direction="load"}'] > 0
    assert figures["cpu_pinned_blocks"] == figures["cpu_writing_blocks"] == 0
