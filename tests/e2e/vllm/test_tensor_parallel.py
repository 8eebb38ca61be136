"""Two ranks, each in a process of its own, with one region of host memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kvtier.integrations.vllm.comparison import random_prompts
from kvtier.integrations.vllm.in_process import BLOCK_TOKENS
from tests.e2e.vllm.lasting_tiers import disk_in, over, with_common_hashes
from tests.e2e.vllm.processes import VLLM
from tests.e2e.vllm.reference import Reference
from tests.e2e.vllm.remote_engine import RemoteEngine
from tests.e2e.vllm.subject import Subject

pytestmark = pytest.mark.vllm

TOKENS = 256
PROMPTS = random_prompts(3, TOKENS, "two ranks")
TWO_RANKS: dict[str, Any] = {
    "tensor_parallel_size": 2,
    "distributed_executor_backend": "mp",
    "device_blocks": 64,
    "max_model_len": 512,
}


@pytest.fixture
def two_ranks(vllm: VLLM) -> VLLM:
    """The processes of the ranks are forks, too."""
    environment = {"VLLM_WORKER_MULTIPROC_METHOD": "fork", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    return with_common_hashes(vllm).but(environment=environment)


@pytest.mark.parametrize("subject", ["llama"], indirect=True)
def test_two_ranks_have_all_from_host_memory_and_then_from_disk(
    two_ranks: VLLM, subject: Subject, tmp_path: Path
) -> None:
    alone = Reference(two_ranks, subject.path, **TWO_RANKS)
    options = over(disk_in(tmp_path), subject)

    with RemoteEngine(two_ranks, subject.path, options, **TWO_RANKS) as engine:
        cold = engine.generate(*PROMPTS)
        engine.reset_device_cache()
        warm = engine.generate(*PROMPTS)
        first = engine.figures()
    with RemoteEngine(two_ranks, subject.path, options, **TWO_RANKS) as engine:
        restarted = engine.generate(*PROMPTS)
        second = engine.figures()

    assert [answer.cached_tokens for answer in cold] == [0] * 3
    assert [answer.cached_tokens for answer in warm] == [TOKENS] * 3
    assert [answer.cached_tokens for answer in restarted] == [TOKENS] * 3
    assert first["cpu_loaded_blocks"] == 3 * TOKENS // BLOCK_TOKENS
    assert second["tier_0_disk_loaded_blocks"] == 3 * TOKENS // BLOCK_TOKENS
    for answers in (cold, warm, restarted):
        alone.check(PROMPTS, answers)
    alone.close()
