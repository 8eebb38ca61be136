"""Tenants in stock vLLM: who finds whose blocks, whatever names the tenant."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kvtier.testing.vllm.tiny_model import LLAMA, random_prompts
from tests.e2e.vllm.lasting_tiers import fs_in, over, with_common_hashes
from tests.e2e.vllm.processes import VLLM
from tests.e2e.vllm.scenarios.watched_keys import KeyWatchedEngine
from tests.e2e.vllm.subject import Subject
from tests.e2e.vllm.test_hints_and_events import HintedRemoteEngine
from tests.engine.test_tenants import RULES, credential, key_file

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.parametrize("subject", ["llama", "hybrid"], indirect=True),
]

TOKENS = 256
PROMPT, OTHER = random_prompts(2, TOKENS, "tenants")


def test_a_private_tenants_blocks_are_its_own_also_after_a_restart(
    vllm: VLLM, subject: Subject, tmp_path: Path
) -> None:
    options = over(fs_in(tmp_path), subject)
    options |= {"tenants": RULES, "tenant_key_file": key_file(tmp_path)}
    acme, beta = {"tenant": credential("acme")}, {"tenant": credential("beta")}
    vllm = with_common_hashes(vllm)
    with HintedRemoteEngine(vllm, subject.path, options) as engine:
        cold = [
            engine.generate_with(hints, PROMPT) for hints in (acme, beta, {}, {"tenant": "acme"})
        ]
        warm = [engine.generate_with(hints, PROMPT) for hints in (acme, beta, {"tenant": "chat"})]
        # The salt changes vLLM's hashes, and the credential in it names the tenant.
        salted = [
            engine.generate_with({}, PROMPT, salt=salt)
            for salt in (acme["tenant"], acme["tenant"], "acme", beta["tenant"])
        ]
    assert [answer.cached_tokens > 0 for answer in cold] == [False] * 4
    assert [answer.cached_tokens > 0 for answer in warm] == [True] * 3
    assert [answer.cached_tokens > 0 for answer in salted] == [False, True, False, False]
    with HintedRemoteEngine(vllm, subject.path, options) as engine:
        restarted = [engine.generate_with(hints, PROMPT) for hints in (acme, {"tenant": "acme"})]
    assert [answer.cached_tokens > 0 for answer in restarted] == [True, False]
    subject.alone.check([PROMPT] * 4, cold)
    subject.alone.check([PROMPT] * 5, warm + restarted, exact=False)


class KeyWatchedRemoteEngine(HintedRemoteEngine):
    """An engine that notes which keys the manager gets."""

    scenario = KeyWatchedEngine

    def add_private(self, prompt: list[int], max_tokens: int = 4) -> None:
        name, hints = f"private-{next(self._hinted)}", {"tenant": credential("acme")}
        self.process.ask("add_with_hints", name, prompt, max_tokens, hints)

    def run_private(self) -> set[str]:
        """Run the added requests. Returns the manager's methods that were called with their keys,
        none of which is vLLM's."""
        self.run()
        self.settle()
        given, passed_on = self.process.ask("seen")
        assert given
        for keys in passed_on.values():
            assert set(keys).isdisjoint(given)
        return {name for name, keys in passed_on.items() if keys}


def test_no_key_of_vllm_reaches_the_manager_for_a_private_tenant(
    vllm: VLLM, subject: Subject, tmp_path: Path
) -> None:
    """Whatever vLLM does with a prompt: queue it, look it up, load, store, use and end it."""
    options = over(fs_in(tmp_path), subject)
    options |= {"tenants": RULES, "tenant_key_file": key_file(tmp_path)}
    vllm = with_common_hashes(vllm)
    calls = set()
    with KeyWatchedRemoteEngine(vllm, subject.path, options) as engine:
        for prompt in (PROMPT, PROMPT[: TOKENS // 2], PROMPT):
            engine.add_private(prompt)
            calls |= engine.run_private()
            # Then half of the prompt is on the device, and all of it in host memory.
            if prompt is PROMPT:
                engine.reset_device_cache()
        engine.generate_with({}, PROMPT)
        given, passed_on = engine.process.ask("seen")
        assert set(passed_on["prepare_store"]) <= set(given), "of others, the manager gets vLLM's"
    with KeyWatchedRemoteEngine(vllm, subject.path, options, max_requests=1) as engine:
        engine.add_private(OTHER, 20)
        engine.step(3)
        engine.add_private(PROMPT)  # it is on fs, and waits in the queue
        calls |= engine.run_private()
    expected = {"lookup", "prepare_load", "complete_load", "prepare_store", "complete_store"}
    assert calls >= expected | {"touch", "note_prompt"}
    if subject.tiny is LLAMA:  # kvtier looks ahead only for models of one group
        assert "on_request_queued" in calls


def test_an_orchestrator_sends_hints_in_an_envelope(
    vllm: VLLM, subject: Subject, tmp_path: Path
) -> None:
    if vllm.version < (0, 31):
        pytest.skip("this vLLM has no kv_hints")
    options: dict[str, Any] = {"cpu_bytes_to_use": "16MiB"}
    options |= {"tenants": RULES, "tenant_key_file": key_file(tmp_path)}
    with HintedRemoteEngine(vllm, subject.path, options) as engine:
        orders = {"tenant": credential("acme")}
        cold = engine.generate_with({}, PROMPT, orders=orders)
        others = [
            engine.generate_with({}, PROMPT),
            engine.generate_with({"tenant": "chat"}, PROMPT),
        ]
        warm = engine.generate_with({"tenant": "chat"}, PROMPT, orders=orders)
        skipped = engine.generate_with({}, PROMPT, orders={"skip": True})
    cached = [answer.cached_tokens > 0 for answer in (cold, *others, warm, skipped)]
    assert cached == [False, False, True, True, False]
