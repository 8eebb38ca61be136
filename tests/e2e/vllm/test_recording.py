"""Stock vLLM with `record_trace`: a replay of the file has the hits that vLLM saw."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kvtier.observe.client import ask, find_engine
from kvtier.replay.engine import Counting
from kvtier.replay.settings import ReplaySettings, TierSettings
from kvtier.replay.trace import open_trace
from kvtier.testing.vllm.in_process import BLOCK_TOKENS
from kvtier.testing.vllm.tiny_model import random_prompts
from tests.e2e.vllm.processes import VLLM
from tests.e2e.vllm.remote_engine import RemoteEngine
from tests.e2e.vllm.subject import Subject

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.parametrize("subject", ["llama"], indirect=True),
]


@pytest.mark.parametrize("host_bytes", ["2MiB", "4MiB"])
def test_a_replay_has_the_hits_that_vllm_saw(
    vllm: VLLM, subject: Subject, tmp_path: Path, host_bytes: str
) -> None:
    """Four chats of 3 to 5 blocks take turns; host memory holds all of them, or three."""
    path = tmp_path / "trace.jsonl"
    chats = random_prompts(4, 200, "recording")
    turns = [chat[: 100 + 30 * turn] for turn in range(4) for chat in chats]
    options = {"cpu_bytes_to_use": host_bytes, "record_trace": str(path)}
    answers = []
    with RemoteEngine(vllm, subject.path, options, device_blocks=64, max_model_len=512) as engine:
        for turn in turns:
            engine.reset_device_cache()
            answers += engine.generate(turn)
        curve = ask(find_engine(str(engine.process.pid)), "curve")
        assert curve["block_tokens"] == BLOCK_TOKENS
    header = json.loads(path.read_text().splitlines()[0])
    assert header["block_tokens"] == BLOCK_TOKENS
    with open_trace(str(path)) as trace:
        requests = list(trace.requests())
    assert [request.prompt_tokens for request in requests] == list(map(len, turns))
    assert [request.output_tokens for request in requests] == [4] * len(turns)
    host = TierSettings(
        name="host",
        num_bytes=header["host_bytes"],
        read_bytes_per_s=1e9,
        write_bytes_per_s=1e9,
    )
    per_token = header["kv_bytes_per_token"]
    settings = ReplaySettings(host=host, kv_bytes_per_token=per_token, is_timed=False)
    counting = Counting(settings, BLOCK_TOKENS)
    for _ in counting.serve(requests):
        pass
    seen = sum(answer.cached_tokens for answer in answers) // BLOCK_TOKENS
    assert counting.end().hit_blocks == seen > 10
