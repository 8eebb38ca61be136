"""Stock vLLM with more requests than it runs at once: tiers bring up what queued ones will need."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from kvtier.testing.vllm.tiny_model import random_prompts
from tests.e2e.vllm.processes import VLLM
from tests.e2e.vllm.remote_engine import RemoteEngine
from tests.e2e.vllm.subject import Subject

pytestmark = pytest.mark.vllm

PROMPT_BLOCKS = 32
FIRST, SECOND, THIRD, RUNNING, *OTHERS = random_prompts(8, 32 * PROMPT_BLOCKS, "queued")
TIER = {
    "type": "example",
    "simulate_async": True,
    "latency_ms": 5,
    "load_timeout_ms": 60_000,
    "store_timeout_ms": 60_000,
}
LOADED = 'tier_blocks{tier="0:example",direction="load"}'


@contextmanager
def busy_engine(vllm: VLLM, subject: Subject, **engine_args: Any) -> Iterator[RemoteEngine]:
    """An engine that runs one request at a time and is answering one with many tokens. Three
    prompts are only in the tier."""
    options = {
        "cpu_bytes_to_use": 5 * PROMPT_BLOCKS * subject.slot_bytes(),
        "prefill_tokens_per_s": 0,
        "secondary_tiers": [TIER],
    }
    sizes = {"device_blocks": 512, "max_model_len": 2048, "max_requests": 1}
    with RemoteEngine(vllm, subject.path, options, **(sizes | engine_args)) as engine:
        engine.generate(FIRST, SECOND, THIRD, *OTHERS, *OTHERS[:1])
        engine.reset_device_cache()
        engine.add("running", RUNNING, 400)
        engine.step(5)
        yield engine


def step_until_loaded(engine: RemoteEngine, num_blocks: int) -> None:
    """The running request goes on meanwhile."""
    while engine.figures().get(LOADED, 0) < num_blocks:
        engine.step(5)
        assert len(engine.answer("running").tokens) < 400, "not brought up before its turn"


@pytest.mark.parametrize("subject", ["llama"], indirect=True)
def test_blocks_come_up_before_vllm_asks_for_them(vllm: VLLM, subject: Subject) -> None:
    with busy_engine(vllm, subject) as engine:
        engine.add("first", FIRST, 4)
        engine.add("second", SECOND, 4)
        step_until_loaded(engine, PROMPT_BLOCKS)
        engine.run()
        answers = [engine.answer(name) for name in ("first", "second")]
        figures = engine.figures()
    subject.alone.check([FIRST, SECOND], answers)
    assert [answer.cached_tokens for answer in answers] == [1024] * 2
    assert figures[LOADED] == 2 * PROMPT_BLOCKS
    assert figures["tiering_leased_blocks"] == 0


@pytest.mark.parametrize("subject", ["llama"], indirect=True)
def test_what_the_device_has_is_not_read(vllm: VLLM, subject: Subject) -> None:
    """The running request has the first half of the queued one on the device."""
    half = 16 * PROMPT_BLOCKS
    shared = [*RUNNING[:half], *FIRST[:half]]
    with busy_engine(vllm, subject) as engine:
        engine.add("shares", shared, 4)
        engine.add("first", FIRST, 4)
        step_until_loaded(engine, PROMPT_BLOCKS)
        engine.run()
        assert engine.figures()[LOADED] == PROMPT_BLOCKS
        assert engine.answer("shares").cached_tokens == half


@pytest.mark.parametrize("subject", ["llama"], indirect=True)
def test_an_aborted_request_gives_back_what_was_brought_up(vllm: VLLM, subject: Subject) -> None:
    with busy_engine(vllm, subject) as engine:
        engine.add("first", FIRST, 4)
        step_until_loaded(engine, PROMPT_BLOCKS)
        assert engine.figures()["tiering_leased_blocks"] == PROMPT_BLOCKS
        engine.abort("first")
        engine.run()
        assert engine.figures()["tiering_leased_blocks"] == 0
