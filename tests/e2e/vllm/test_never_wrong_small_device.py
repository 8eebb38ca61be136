"""The device has too few blocks for all requests: blocks are evicted, requests are preempted, and
blocks from host memory are right."""

from __future__ import annotations

import pytest

from kvtier.testing.vllm.in_process import BLOCK_TOKENS
from kvtier.testing.vllm.tiny_model import random_prompts
from tests.e2e.vllm.processes import VLLM
from tests.e2e.vllm.remote_engine import RemoteEngine
from tests.e2e.vllm.subject import Subject

pytestmark = pytest.mark.vllm

TOKENS = 256
PROMPTS = random_prompts(6, TOKENS, "never wrong on a small device")
HOST = {"cpu_bytes_to_use": "64MiB"}


@pytest.mark.parametrize("subject", ["llama", "hybrid"], indirect=True)
def test_what_has_left_the_device_comes_back_from_host_memory(vllm: VLLM, subject: Subject) -> None:
    with RemoteEngine(
        vllm, subject.path, HOST, device_blocks=33, max_model_len=TOKENS + 64
    ) as engine:
        cold = engine.generate(*PROMPTS)
        warm = engine.generate(*PROMPTS)
        figures = engine.figures()
    assert [answer.cached_tokens for answer in cold] == [0] * len(PROMPTS)
    assert [answer.cached_tokens for answer in warm] == [TOKENS] * len(PROMPTS)
    assert figures["cpu_loaded_blocks"] >= len(PROMPTS) * TOKENS // BLOCK_TOKENS
    subject.alone.check(PROMPTS, cold)
    subject.alone.check(PROMPTS, warm)


@pytest.mark.parametrize(
    ("subject", "device_blocks"), [("llama", 40), ("hybrid", 64)], indirect=["subject"]
)
def test_a_preempted_request_goes_on_from_host_memory(
    vllm: VLLM, subject: Subject, device_blocks: int
) -> None:
    prompts = PROMPTS[:4]
    with RemoteEngine(
        vllm, subject.path, HOST, device_blocks=device_blocks, max_model_len=448
    ) as engine:
        answers = engine.generate_together(*prompts, max_tokens=128)
        figures = engine.figures()
        metrics = {metric["name"]: metric["value"] for metric in engine.metrics()}
    assert metrics["vllm:num_preemptions"] > 0
    # Blocks that were not reused meanwhile are still on the device.
    assert figures["cpu_loaded_blocks"] > 0
    subject.alone.check(prompts, answers, max_tokens=128, exact=False)


@pytest.mark.parametrize("blocks_per_chunk", [1, 4])
@pytest.mark.parametrize("subject", ["llama", "hybrid"], indirect=True)
def test_requests_with_a_common_prefix_load_it_at_the_same_time(
    vllm: VLLM, subject: Subject, blocks_per_chunk: int
) -> None:
    prefix, *tails = (prompt[:TOKENS] for prompt in PROMPTS)
    prompts = [prefix + tail[: 8 + BLOCK_TOKENS * place] for place, tail in enumerate(tails)]
    options = HOST | {"blocks_per_chunk": blocks_per_chunk}
    with RemoteEngine(vllm, subject.path, options, device_blocks=160, max_model_len=512) as engine:
        cold = engine.generate_together(*prompts)
        engine.reset_device_cache()
        warm = engine.generate_together(*prompts)
        figures = engine.figures()
    assert all(answer.cached_tokens >= TOKENS for answer in warm)
    assert figures["cpu_loaded_blocks"] >= TOKENS // BLOCK_TOKENS // blocks_per_chunk
    subject.alone.check(prompts, cold, exact=False)
    subject.alone.check(prompts, warm, exact=False)
