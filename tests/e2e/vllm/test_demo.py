"""`python -m kvtier.integrations.vllm.demo` shows what it promises."""

from __future__ import annotations

import pytest

from tests.e2e.vllm.processes import VLLM
from tests.e2e.vllm.scenarios import demo_run

pytestmark = pytest.mark.vllm


def test_the_demo(vllm: VLLM) -> None:
    shown = vllm.run(demo_run.as_a_user_runs_it, "--requests", "2", "--prompt-tokens", "2048")
    assert shown["exit_code"] == 0
    assert shown["tokens_identical"]
    assert shown["logprobs_identical"]
    assert shown["host_tokens"] == 2 * 2048
    # On any machine: computing 2,048 tokens takes ten times as long as copying their blocks.
    assert shown["seconds_warm"] < shown["seconds_cold"]
