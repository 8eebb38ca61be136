"""Switches at run time, in stock vLLM: what an operator stops, and the halves of a trial."""

from __future__ import annotations

import pytest

from kvtier.observe.client import ask, find_engine
from kvtier.testing.vllm.tiny_model import random_prompts
from tests.e2e.vllm.lasting_tiers import figure_of
from tests.e2e.vllm.processes import VLLM
from tests.e2e.vllm.remote_engine import RemoteEngine
from tests.e2e.vllm.subject import Subject

pytestmark = [pytest.mark.vllm, pytest.mark.parametrize("subject", ["llama"], indirect=True)]

OPTIONS = {
    "cpu_bytes_to_use": "16MiB",
    "prefill_tokens_per_s": 0,
    "secondary_tiers": [{"type": "example", "max_pinned_share": 1}],
}
FIRST, SECOND = random_prompts(2, 128, "switches")


def test_an_operator_stops_and_resumes_kvtier(vllm: VLLM, subject: Subject) -> None:
    with RemoteEngine(vllm, subject.path, OPTIONS, device_blocks=64, max_model_len=512) as engine:
        socket = find_engine(str(engine.process.pid))

        def cached(prompt: list[int]) -> int:
            engine.reset_device_cache()
            (answer,) = engine.generate(prompt)
            return answer.cached_tokens

        ask(socket, "switch", stores=False)
        assert [cached(FIRST), cached(FIRST)] == [0, 0]
        ask(socket, "switch", tiers=["host"], stores=True)
        assert cached(FIRST) == 0
        assert cached(FIRST) > 0
        figures = engine.figures()
        assert figures[figure_of("0:example", "switched_off_blocks")] == 128 // 32
        assert figures.get(figure_of("0:example", "stored_blocks"), 0) == 0
        ask(socket, "switch", loads=False)
        assert cached(FIRST) == 0
        ask(socket, "switch", loads=True, stores=True, share=0)
        assert [cached(SECOND), cached(SECOND), cached(FIRST)] == [0, 0, 0]
        ask(socket, "switch", share=100)
        assert cached(FIRST) > 0
        figures = engine.figures()
        assert figures['requests{half="with"}'] == 6
        assert figures['requests{half="without"}'] == 3
