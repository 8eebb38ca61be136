"""`python -m kvtier.testing.vllm.demo` runs and shows identical tokens and logprobs."""

from __future__ import annotations

import json

import pytest

from tests.e2e.vllm.processes import VLLM
from tests.e2e.vllm.scenarios import demo_run

pytestmark = pytest.mark.vllm


def test_the_demo(vllm: VLLM) -> None:
    options = ("--json", "--requests", "2", "--prompt-tokens", "2048")
    with vllm.start(demo_run.exit_code_of, *options) as process:
        assert process.answer() == 0
        (line,) = process.stdout.splitlines()
    shown = json.loads(line)
    assert shown["tokens_identical"]
    assert shown["logprobs_identical"]
    assert shown["host_tokens"] == 2 * 2048
    # On any machine, computing 2,048 tokens takes longer than copying their blocks.
    assert shown["seconds_warm"] < shown["seconds_cold"]
