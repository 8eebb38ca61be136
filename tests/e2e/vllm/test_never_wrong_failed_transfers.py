"""A copy between host memory and the device fails: its blocks are never used."""

from __future__ import annotations

import pytest

from kvtier.testing.vllm.in_process import BLOCK_TOKENS, PlugIn
from kvtier.testing.vllm.tiny_model import random_prompts
from tests.e2e.vllm.faulty_engine import FaultyRemoteEngine
from tests.e2e.vllm.processes import VLLM, ScenarioFailedError
from tests.e2e.vllm.subject import Subject

pytestmark = pytest.mark.vllm

TOKENS = 256
PROMPTS = random_prompts(3, TOKENS, "never wrong when a copy fails")
HOST = {"cpu_bytes_to_use": "32MiB"}
TIER = {
    "type": "example",
    "lookup_timeout_ms": 60_000,
    "load_timeout_ms": 60_000,
    "store_timeout_ms": 60_000,
    "max_pinned_share": 1,
}
ALL = 1_000_000
TRIES = 3
"""Attempts before a load has failed for good."""


def can_compute_instead(vllm: VLLM, subject: Subject) -> bool:
    """True if vLLM can compute the blocks of a failed load of this model."""
    return vllm.version >= (0, 32) or subject.path.name == "llama"


@pytest.mark.parametrize("failing", [TRIES, ALL])
@pytest.mark.parametrize("subject", ["llama", "hybrid"], indirect=True)
def test_what_cannot_be_loaded_is_computed(vllm: VLLM, subject: Subject, failing: int) -> None:
    if not can_compute_instead(vllm, subject):
        pytest.skip("this vLLM cannot be told of a failed load where there are several groups")
    with FaultyRemoteEngine(vllm, subject.path, HOST) as engine:
        cold = engine.generate(*PROMPTS)
        engine.reset_device_cache()
        engine.set_faults(failing_loads=failing)
        warm = engine.generate(*PROMPTS)
        figures = engine.figures()
        engine.set_faults(failing_loads=0)
        engine.reset_device_cache()
        healthy = engine.generate(*PROMPTS)
    # With only the first load failing, the others come from host memory.
    lost = 1 if failing == TRIES else len(PROMPTS)
    assert figures["failed_loads"] == lost
    for prompt, answer in zip(PROMPTS[:lost], warm, strict=False):
        computed, _ = subject.alone.answers(prompt)
        assert answer.tokens == computed.tokens
        assert answer.logprobs == computed.logprobs
    subject.alone.check(PROMPTS, cold)
    subject.alone.check(PROMPTS[lost:], warm[lost:])
    subject.alone.check(PROMPTS, healthy)
    assert [answer.cached_tokens for answer in warm[lost:] + healthy] == [TOKENS] * (
        2 * len(PROMPTS) - lost
    )


@pytest.mark.parametrize("subject", ["llama", "hybrid"], indirect=True)
def test_several_at_once_that_cannot_be_loaded_are_computed(vllm: VLLM, subject: Subject) -> None:
    if not can_compute_instead(vllm, subject):
        pytest.skip("this vLLM cannot be told of a failed load where there are several groups")
    prefix, *tails = (prompt[: TOKENS // 2] for prompt in PROMPTS)
    prompts = [prefix + tail for tail in tails] + PROMPTS[1:]
    with FaultyRemoteEngine(vllm, subject.path, HOST, device_blocks=128) as engine:
        engine.generate(*prompts)
        engine.reset_device_cache()
        engine.set_faults(failing_loads=ALL)
        answers = engine.generate_together(*prompts)
        assert engine.figures()["failed_loads"] > 0
    subject.alone.check(prompts, answers, exact=False)


@pytest.mark.parametrize("subject", ["llama"], indirect=True)
@pytest.mark.parametrize("plug_in", ["spec", "connector"])
def test_a_load_that_fails_once_is_tried_again(
    vllm: VLLM, subject: Subject, plug_in: PlugIn
) -> None:
    with FaultyRemoteEngine(vllm, subject.path, HOST, plug_in=plug_in) as engine:
        engine.generate(PROMPTS[0])
        engine.reset_device_cache()
        engine.set_faults(failing_loads=TRIES - 1)
        warm = engine.generate(PROMPTS[0])
        figures = engine.figures()
    assert warm[0].cached_tokens == TOKENS
    assert figures["cpu_loaded_blocks"] == TOKENS // BLOCK_TOKENS
    assert figures.get("failed_loads", 0) == 0
    subject.alone.check(PROMPTS[:1], warm)


@pytest.mark.parametrize(
    ("subject", "plug_in"),
    [("llama", "spec"), ("hybrid", "spec"), ("hybrid", "connector")],
    indirect=["subject"],
)
def test_an_engine_that_cannot_be_told_stops_with_the_reason(
    vllm: VLLM, subject: Subject, plug_in: PlugIn
) -> None:
    if plug_in == "connector" and can_compute_instead(vllm, subject):
        pytest.skip("this vLLM can be told")
    with FaultyRemoteEngine(vllm, subject.path, HOST, plug_in=plug_in) as engine:
        engine.generate(PROMPTS[0])
        engine.reset_device_cache()
        engine.set_faults(failing_loads=ALL)
        with pytest.raises(ScenarioFailedError) as stopped:
            engine.generate(PROMPTS[0])
        engine.kill()
    assert "failed 3 times" in str(stopped.value)
    assert "rather than use wrong bytes" in str(stopped.value)
    remedy = "KVTierConnector" if plug_in == "spec" else "vLLM"
    assert remedy in str(stopped.value)


@pytest.mark.parametrize("plug_in", ["connector", "spec"])
@pytest.mark.parametrize("subject", ["llama", "hybrid"], indirect=True)
def test_what_was_not_stored_is_never_served_and_reaches_no_tier(
    vllm: VLLM, subject: Subject, plug_in: PlugIn
) -> None:
    lost, kept, _ = PROMPTS
    options = HOST | {"prefill_tokens_per_s": 0, "secondary_tiers": [TIER]}
    with FaultyRemoteEngine(vllm, subject.path, options, plug_in=plug_in) as engine:
        engine.set_faults(failing_stores=ALL)
        answers = engine.generate(lost)
        before = engine.figures()
        engine.set_faults(failing_stores=0)
        engine.reset_device_cache()
        answers += engine.generate(kept, lost)
        stored = engine.figures()
        engine.reset_device_cache()
        answers += engine.generate(lost, kept)
        after = engine.figures()
    assert before["cpu_failed_stores"] >= TOKENS // BLOCK_TOKENS
    assert before["cpu_resident_blocks"] == before["cpu_writing_blocks"] == 0
    assert before.get('tier_blocks{tier="0:example",direction="store"}', 0) == 0
    assert before['example_resident_blocks{tier="0:example"}'] == 0
    assert [answer.cached_tokens for answer in answers] == [0, 0, 0, TOKENS, TOKENS]
    # The same blocks, in the same slots, once their stores do not fail.
    assert (
        stored['tier_blocks{tier="0:example",direction="store"}'] == stored["cpu_stored_blocks"] > 0
    )
    assert after["cpu_failed_stores"] == before["cpu_failed_stores"]
    assert 2 * TOKENS // BLOCK_TOKENS <= after["cpu_loaded_blocks"] <= stored["cpu_stored_blocks"]
    subject.alone.check([lost, kept, lost, lost, kept], answers)
