"""Stock vLLM with a tier below a host memory that is too small for all blocks."""

from __future__ import annotations

import pytest

from kvtier.testing.vllm.tiny_model import random_prompts
from tests.e2e.vllm.processes import VLLM
from tests.e2e.vllm.remote_engine import RemoteEngine
from tests.e2e.vllm.subject import Subject

pytestmark = pytest.mark.vllm

PROMPTS = random_prompts(4, 1024, "end to end", blocks_per_chunk=4)
TIER = {
    "type": "example",
    "simulate_async": True,
    "latency_ms": 5,
    # Independent of the speed of this machine.
    "load_timeout_ms": 60_000,
    "store_timeout_ms": 60_000,
    "max_pinned_share": 1,
}


PROMPT_BLOCKS = 32
WINDOW_BLOCKS = 4


@pytest.mark.parametrize(
    ("subject", "windowed_groups"), [("llama", 0), ("hybrid", 2)], indirect=["subject"]
)
def test_what_host_memory_has_no_room_for_comes_back_from_a_tier(
    vllm: VLLM, subject: Subject, windowed_groups: int
) -> None:
    # Early releases offer every block of a group with a window; all load only the last few.
    offers_all = vllm.version < (0, 32)
    loaded = PROMPT_BLOCKS + windowed_groups * WINDOW_BLOCKS
    stored = (1 + windowed_groups) * PROMPT_BLOCKS if offers_all else loaded
    options = {
        "cpu_bytes_to_use": 2 * stored * subject.slot_bytes(),
        "prefill_tokens_per_s": 0,
        "secondary_tiers": [TIER],
    }
    with RemoteEngine(vllm, subject.path, options, device_blocks=512, max_model_len=2048) as engine:
        cold = engine.generate(*PROMPTS)
        engine.reset_device_cache()
        warm = engine.generate(*PROMPTS)
        figures = engine.figures()
    subject.alone.check(PROMPTS, cold)
    subject.alone.check(PROMPTS, warm)
    assert [answer.cached_tokens for answer in warm] == [1024] * 4
    # Room for two prompts; they return in the order in which they came, so each was evicted.
    assert figures["cpu_slots"] == 2 * stored
    assert figures['tier_blocks{tier="0:example",direction="store"}'] == 4 * stored
    if stored == loaded:
        assert figures['tier_blocks{tier="0:example",direction="load"}'] == 4 * loaded
    else:  # blocks that are not loaded again have made room in host memory for others
        assert 0 < figures['tier_blocks{tier="0:example",direction="load"}'] <= 4 * loaded
    assert figures['tier_pinned_blocks{tier="0:example"}'] == 0
    assert figures['tier_breaker_state{tier="0:example",direction="load"}'] == 0
    assert figures['example_resident_blocks{tier="0:example"}'] == 4 * stored


@pytest.mark.parametrize("subject", ["llama"], indirect=True)
def test_vllm_rests_though_a_tier_takes_its_time_for_stores(vllm: VLLM, subject: Subject) -> None:
    tier = TIER | {"latency_ms": 3_600_000, "store_timeout_ms": 3_600_000}
    options = {
        "cpu_bytes_to_use": 256 * subject.slot_bytes(),
        "secondary_tiers": [tier],
        "shutdown_timeout_ms": 100,
    }
    with RemoteEngine(vllm, subject.path, options, device_blocks=512, max_model_len=2048) as engine:
        engine.add("request", PROMPTS[0])
        engine.run()
        engine.rest()
        figures = engine.figures()
        engine.kill()  # the tier would end in an hour
    assert figures['tier_pinned_blocks{tier="0:example"}'] > 0
    assert figures.get('tier_blocks{tier="0:example",direction="store"}', 0) == 0
