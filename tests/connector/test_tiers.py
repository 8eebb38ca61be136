"""What a tier learns about requests, from the engine through the connector."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from kvtier.connector import OffloadingConnectorScheduler
from kvtier.engine import Engine, EngineConfig, make_connector, offloading_config
from kvtier.tiering.manager import TieringOffloadingManager
from tests.engine.models import FULL, random_tokens
from tests.engine.oracle import assert_same
from tests.tiering.noting_tier import NOTING, NotingTier

BLOCK_TOKENS, TOKENS = 8, 96
BLOCKS = TOKENS // BLOCK_TOKENS
ENGINE = EngineConfig(block_tokens=(BLOCK_TOKENS,), num_blocks=(32,), token_budget=40)
PROMPTS = [random_tokens(seed, TOKENS + 1) for seed in range(2)]


@contextmanager
def started(host_blocks: int, **tier: Any) -> Iterator[tuple[Engine, NotingTier]]:
    """An engine with this much host memory, and a tier below that records its calls."""
    extra = {
        "cpu_bytes_to_use": "1MiB",
        "prefill_tokens_per_s": 0,
        "secondary_tiers": [NOTING | tier],
    }
    engine_id = f"test-{uuid.uuid4().hex}"
    row_bytes = offloading_config(FULL, ENGINE, extra, engine_id).row_bytes
    extra["cpu_bytes_to_use"] = host_blocks * row_bytes
    connector = make_connector(offloading_config(FULL, ENGINE, extra, engine_id))
    engine = Engine(FULL, ENGINE, connector)
    try:
        assert isinstance(connector.scheduler, OffloadingConnectorScheduler)
        assert isinstance(connector.scheduler.manager, TieringOffloadingManager)
        (noting,) = connector.scheduler.manager.secondary_tiers
        assert isinstance(noting, NotingTier)
        yield engine, noting
    finally:
        engine.shutdown()


def serve(engine: Engine, prompt: list[int], hints: dict[str, Any] | None = None) -> int:
    """Serve a prompt that is not on the device. Returns how many tokens were loaded."""
    engine.drop_device_cache()
    [result] = engine.generate([prompt], 2, keep_logits=True, kv_transfer_params=hints)
    assert engine.drain()
    assert_same(result, FULL, prompt)
    return result.num_loaded_tokens


def test_a_tier_is_told_the_hints_of_a_request_in_every_call() -> None:
    hints = {"tenant": "blue", "of the tier's own": {"keep": [1, 2.5, None]}, "skip": False}
    # Host memory has room for one prompt: the other is only in the tier.
    with started(BLOCKS + 1) as (engine, tier):
        loaded = [serve(engine, prompt, hints) for prompt in (*PROMPTS, PROMPTS[0])]
        calls = tier.calls
    assert loaded == [0, 0, TOKENS]
    assert {call["method"] for call in calls} >= {
        "on_new_request",
        "lookup",
        "submit_store",
        "submit_load",
        "on_request_finished",
    }
    assert [call for call in calls if call["hints"] != hints] == []
    contexts = {(call["request"], call["context"]) for call in calls}
    assert len(contexts) == 3, "one for each request"


def test_hints_of_one_request_are_not_those_of_another() -> None:
    with started(4 * BLOCKS) as (engine, tier):
        for number, prompt in enumerate(PROMPTS):
            serve(engine, prompt, {"number": number})
        serve(engine, PROMPTS[0])
        told = {call["request"]: call["hints"] for call in tier.calls}
    assert list(told.values()) == [{"number": 0}, {"number": 1}, None]


@pytest.mark.parametrize("whole_requests", [False, True])
def test_a_tier_that_wants_whole_requests_is_offered_what_was_loaded(
    whole_requests: bool,
) -> None:
    with started(4 * BLOCKS, whole_requests=whole_requests) as (engine, tier):
        assert serve(engine, PROMPTS[0]) == 0
        num_jobs = len(tier.stored)
        first = [key for _, keys in tier.stored for key in keys]
        assert serve(engine, PROMPTS[0]) == TOKENS, "from host memory"
        again = [key for _, keys in tier.stored[num_jobs:] for key in keys]
    assert len(first) == BLOCKS
    assert again == (first if whole_requests else [])
