"""Two ranks, each in a process of its own, with one region of host memory and one disk."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from kvtier.testing.vllm.in_process import BLOCK_TOKENS
from kvtier.testing.vllm.tiny_model import random_prompts
from tests.e2e.vllm.lasting_tiers import disk_in, over, with_common_hashes
from tests.e2e.vllm.processes import VLLM
from tests.e2e.vllm.reference import Reference
from tests.e2e.vllm.remote_engine import RemoteEngine
from tests.e2e.vllm.subject import Subject

pytestmark = pytest.mark.vllm

TOKENS = 256
BLOCKS = TOKENS // BLOCK_TOKENS
PROMPTS = random_prompts(3, TOKENS, "two ranks")
TWO_RANKS: dict[str, Any] = {
    "tensor_parallel_size": 2,
    "distributed_executor_backend": "mp",
    "device_blocks": 64,
    "max_model_len": 512,
}


@pytest.mark.parametrize("subject", ["llama"], indirect=True)
def test_both_ranks_have_their_part_from_host_memory_and_from_disk(
    vllm: VLLM, subject: Subject, tmp_path: Path
) -> None:
    # Independent of the number of cores of this machine.
    vllm = with_common_hashes(vllm).but(environment={"VLLM_CPU_OMP_THREADS_BIND": "nobind"})
    options = over(disk_in(tmp_path), subject, slots=BLOCKS * 3 // 2)
    with RemoteEngine(vllm, subject.path, options, **TWO_RANKS) as engine:
        cold = engine.generate(*PROMPTS)
        engine.reset_device_cache()
        from_host = engine.generate(PROMPTS[2])
        assert engine.figures().get('tier_blocks{tier="0:disk",direction="load"}', 0) == 0
        engine.reset_device_cache()
        from_disk = engine.generate(*PROMPTS[:2])
        figures = engine.figures()
    assert [answer.cached_tokens for answer in cold] == [0] * 3
    assert [answer.cached_tokens for answer in from_host + from_disk] == [TOKENS] * 3
    assert figures["cpu_loaded_blocks"] == 3 * BLOCKS
    assert figures['tier_blocks{tier="0:disk",direction="load"}'] > BLOCKS
    with closing(Reference(vllm, subject.path, **TWO_RANKS)) as alone:
        alone.check(PROMPTS, cold)
        alone.check(PROMPTS, [*from_disk, *from_host])
