"""`kvtier explain` asks `vllm serve`, with the ids that its clients get."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest

from kvtier.observe.client import ask
from kvtier.testing.vllm.in_process import BLOCK_TOKENS
from kvtier.testing.vllm.tiny_model import LLAMA
from tests.e2e.vllm.lasting_tiers import PATIENT
from tests.e2e.vllm.openai_server import Completion, Server, random_words
from tests.e2e.vllm.processes import VLLM

pytestmark = pytest.mark.vllm

NUM_BLOCKS = 4
PROMPTS = [random_words(NUM_BLOCKS * BLOCK_TOKENS + 8, f"explained {n}") for n in range(14)]


def _has_stored(server: Server, num_blocks: int) -> bool:
    return server.figure('tier_blocks{tier="0:example",direction="store"}') == num_blocks


def test_a_declined_load_in_vllm(vllm: VLLM, llama: Path, tmp_path: Path) -> None:
    path = tmp_path / "status.sock"
    options = {
        "cpu_bytes_to_use": (NUM_BLOCKS + 1) * LLAMA.bytes_per_block(BLOCK_TOKENS),
        "prefill_tokens_per_s": 1e9,  # faster than any tier
        "secondary_tiers": [{"type": "example", "simulate_async": True} | PATIENT],
        "status_socket": str(path),
    }

    def explain(completion: Completion) -> dict[str, Any]:
        (found,) = ask(path, "explain", request=completion.request_id)["requests"]
        explained: dict[str, Any] = found
        return explained

    with Server(vllm, llama, options) as server:
        server.wait_until_up()
        answers = []
        for number, prompt in enumerate(PROMPTS, start=1):
            answers.append(server.complete(prompt))
            server.wait_until(partial(_has_stored, server, number * NUM_BLOCKS))
        new = explain(answers[0])
        assert [reason["reason"] for reason in new["why"]] == ["first_block_new"]
        assert new["id"].startswith(answers[0].request_id)
        # A prompt on the device, and one that goes on in another way.
        again = explain(server.complete(PROMPTS[-1]))
        assert again["tokens"]["device"] == NUM_BLOCKS * BLOCK_TOKENS
        assert [reason["reason"] for reason in again["why"]] == ["all_found"]
        half = PROMPTS[-1][: 2 * BLOCK_TOKENS + 5] + PROMPTS[0]
        (differs,) = explain(server.complete(half))["why"]
        assert differs["reason"] == "differs"
        assert f"from token {2 * BLOCK_TOKENS} on" in differs["text"]
        # The first loads show what loading costs.
        server.post("/reset_prefix_cache")
        explained = [explain(server.complete(prompt)) for prompt in PROMPTS]
    for each in explained:
        tokens = each["tokens"]
        assert tokens["prompt"] == NUM_BLOCKS * BLOCK_TOKENS + 8
        loaded = sum(tokens["loaded"].values())
        assert tokens["device"] + loaded + tokens["computed"] == tokens["prompt"]
    assert explained[0]["tokens"]["loaded"] == {"0:example": NUM_BLOCKS * BLOCK_TOKENS}
    (reason,) = explained[-1]["why"]
    assert reason["reason"] == "declined_slower"
    assert reason["numbers"]["load_s"] > reason["numbers"]["compute_s"]
    assert "Loading was estimated at" in reason["text"]
    assert explained[-1]["tokens"]["loaded"] == {}
