"""What `KVTierConnector` passes on to kvtier, and that it keeps nothing of ended requests."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from kvtier.testing.vllm.in_process import PlugIn
from kvtier.testing.vllm.tiny_model import random_prompts
from tests.e2e.vllm.faulty_engine import FaultyRemoteEngine
from tests.e2e.vllm.processes import VLLM
from tests.e2e.vllm.scenarios.changed_objects import changed
from tests.e2e.vllm.scenarios.faulty_transfers import WITH_FAULTS
from tests.e2e.vllm.subject import Subject
from tests.integrations.vllm.counting_tier import COUNTING
from tests.integrations.vllm.watched_engine import WatchedEngine

pytestmark = pytest.mark.vllm

TOKENS, BLOCKS = 256, 8
PROMPTS = random_prompts(5, TOKENS, "what the connector tells and keeps")
PROMPT_TOKENS = len(PROMPTS[0])
HOST: dict[str, Any] = {"cpu_bytes_to_use": "32MiB"}
ALL = 1_000_000


class WatchedRemoteEngine(FaultyRemoteEngine):
    """The test's side of an engine with the connector."""

    def __init__(
        self, vllm: VLLM, model: Path, kvtier: Mapping[str, Any], **engine_args: Any
    ) -> None:
        engine_args = {"device_blocks": 64, "max_model_len": 512} | engine_args
        self.process = vllm.start(
            WatchedEngine, str(model), WITH_FAULTS | dict(kvtier), **engine_args
        )
        self._numbers = count()

    def step_until(self, kind: str) -> None:
        """Step until a held copy of this kind is under way."""
        for _ in range(100):
            self.step()
            if kind in self.under_way():
                return
        pytest.fail(f"no {kind} has begun")


@pytest.mark.parametrize("subject", ["llama", "hybrid"], indirect=True)
def test_nothing_is_kept_of_requests_that_are_over(vllm: VLLM, subject: Subject) -> None:
    fails_loads = vllm.version >= (0, 32) or subject.path.name == "llama"
    with WatchedRemoteEngine(vllm, subject.path, HOST, device_blocks=128) as engine:
        known, fresh = PROMPTS[:-1], PROMPTS[-1]
        engine.generate(*known)
        engine.reset_device_cache()
        engine.generate_together(*known)  # loaded
        engine.reset_device_cache()
        if fails_loads:
            engine.set_faults(failing_loads=ALL)
            engine.generate(PROMPTS[0])
            engine.set_faults(failing_loads=0)
            assert engine.figures()["failed_loads"] == 1
            engine.reset_device_cache()
        # One is aborted while it is loading, one before it has begun.
        engine.set_faults(are_held=True)
        engine.add("loading", PROMPTS[1])
        engine.step_until("load")
        engine.add("waiting", PROMPTS[2])
        assert engine.process.ask("kept")["connector: loads"] == 1
        engine.abort("loading", "waiting")
        engine.set_faults(are_held=False)
        engine.settle()
        engine.add("running", fresh, 8)
        engine.step(2)
        engine.reset_all(running=True)
        engine.run()
        engine.settle()
        assert engine.process.ask("kept") == {}


@pytest.mark.parametrize("subject", ["llama"], indirect=True)
def test_everything_may_be_reset_again_before_the_next_step(vllm: VLLM, subject: Subject) -> None:
    prompt = PROMPTS[0]
    with WatchedRemoteEngine(vllm, subject.path, HOST) as engine:
        engine.set_faults(are_held=True)
        engine.add("first", prompt, 8)
        engine.step_until("store")
        engine.run()
        assert engine.reset_all()
        assert engine.reset_all()
        engine.set_faults(are_held=False)
        engine.settle()
        assert engine.process.ask("kept") == {}
        answers = engine.generate(prompt)
        engine.reset_device_cache()
        answers += engine.generate(prompt)
    assert [answer.cached_tokens for answer in answers] == [0, TOKENS]
    subject.alone.check([prompt, prompt], answers)


@pytest.mark.parametrize("subject", ["llama"], indirect=True)
def test_kvtier_hears_what_only_a_connector_knows(vllm: VLLM, subject: Subject) -> None:
    step = 128
    options = HOST | {"secondary_tiers": [COUNTING]}
    with WatchedRemoteEngine(
        vllm, subject.path, options, device_blocks=128, max_num_batched_tokens=step
    ) as engine:
        engine.add("first", PROMPTS[0])
        engine.add("second", PROMPTS[1][: step // 2])
        assert engine.process.ask("expected_prompts") == [PROMPT_TOKENS, step // 2]
        engine.run()
        engine.settle()
        cold = random_prompts(4, TOKENS, "to learn from")
        engine.generate(*cold)
        prefills = engine.process.ask("prefills")
        # With full attention, no lookup follows a miss.
        assert engine.process.ask("lookups_behind_a_miss", 5) == 1
        assert engine.figures()["tiering_prefill_tokens_per_s"] > 0
    whole = [[step, step / 2, True], [step, step * 3 / 2, True]]
    # The rest of the first prompt, and all of the second, in one step.
    rest, second = PROMPT_TOKENS - TOKENS, step // 2
    mean = (rest * (TOKENS + rest / 2) + second * second / 2) / (rest + second)
    assert prefills == [*whole, [rest + second, mean, True], *(whole * len(cold))]


@pytest.mark.parametrize("plug_in", ["connector", "spec"])
def test_what_is_changed_in_a_running_engine(vllm: VLLM, llama: Path, plug_in: PlugIn) -> None:
    """Exactly the changes that docs/vllm.md lists."""
    replaced = ["_maximal_prefix_lookup"] if plug_in == "connector" else []
    assert vllm.run(changed, str(llama), plug_in) == {"methods": replaced, "elsewhere": []}
