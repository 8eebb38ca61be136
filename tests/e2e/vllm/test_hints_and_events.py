"""Hints in `kv_transfer_params` take effect, and KV events describe what happens to blocks."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Mapping
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from kvtier.testing.vllm.in_process import BLOCK_TOKENS, Answer
from kvtier.testing.vllm.tiny_model import random_prompts
from tests.e2e.vllm.lasting_tiers import disk_in, figure_of, over, with_common_hashes
from tests.e2e.vllm.processes import VLLM
from tests.e2e.vllm.remote_engine import RemoteEngine
from tests.e2e.vllm.scenarios.hints_and_events import AnnouncingEngine, HintedEngine
from tests.e2e.vllm.subject import Subject
from tests.engine.test_tenants import RULES, credential, key_file

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.parametrize("subject", ["llama"], indirect=True),
]

TOKENS, BLOCKS = 256, 8
PROMPTS = random_prompts(3, TOKENS, "hints and events")
ENGINE: dict[str, Any] = {"device_blocks": 64, "max_model_len": 512}
PATIENCE_S = 60.0


class HintedRemoteEngine(RemoteEngine):
    """An engine whose requests have hints."""

    scenario: type[HintedEngine] = HintedEngine

    def __init__(
        self, vllm: VLLM, model: Path, options: Mapping[str, Any], **engine_args: Any
    ) -> None:
        self.process = vllm.start(self.scenario, str(model), dict(options), **ENGINE, **engine_args)
        self._numbers = count()
        self._hinted = count()

    def generate_with(
        self, hints: Mapping[str, Any], prompt: list[int], max_tokens: int = 4, **further: Any
    ) -> Answer:
        """Run one request with an empty device cache. `further`: see `add_with_hints`."""
        self.reset_device_cache()
        name = f"hinted-{next(self._hinted)}"
        self.process.ask("add_with_hints", name, prompt, max_tokens, dict(hints), **further)
        self.run()
        self.settle()
        return self.answer(name)


def test_a_request_that_is_to_skip_is_neither_stored_nor_loaded(
    vllm: VLLM, subject: Subject
) -> None:
    prompt = PROMPTS[0]
    with HintedRemoteEngine(vllm, subject.path, {"cpu_bytes_to_use": "16MiB"}) as engine:
        answers = [engine.generate_with({"skip": True}, prompt)]
        assert engine.figures().get("cpu_stored_blocks", 0) == 0
        answers.append(engine.generate_with({}, prompt))
        assert engine.figures()["cpu_stored_blocks"] == BLOCKS
        answers.append(engine.generate_with({"skip": True}, prompt))
        answers.append(engine.generate_with({"skip": False}, prompt))
    assert [answer.cached_tokens for answer in answers] == [0, 0, 0, TOKENS]
    subject.alone.check([prompt] * 4, answers)


def test_a_request_says_whether_tiers_get_its_blocks(vllm: VLLM, subject: Subject) -> None:
    private, public, urgent = PROMPTS
    options = {
        "cpu_bytes_to_use": "16MiB",
        "secondary_tiers": [{"type": "example"}, {"type": "example", "write": "on_evict"}],
    }
    stored = [figure_of(f"{place}:example", "stored_blocks") for place in range(2)]
    with HintedRemoteEngine(vllm, subject.path, options) as engine:
        answers, in_tiers = [], []
        for hints, prompt in (
            ({"write": "never"}, private),
            ({}, public),
            ({"write": "through"}, urgent),
        ):
            answers.append(engine.generate_with(hints, prompt))
            in_tiers.append([engine.figures().get(name, 0) for name in stored])
        again = engine.generate_with({"write": "never"}, private)
    assert in_tiers == [[0, 0], [BLOCKS, 0], [2 * BLOCKS, BLOCKS]]
    assert again.cached_tokens == TOKENS, "host memory has them"
    subject.alone.check([private, public, urgent], answers)


def test_a_request_is_stored_as_far_as_it_says(vllm: VLLM, subject: Subject) -> None:
    prompt = PROMPTS[0]
    with HintedRemoteEngine(vllm, subject.path, {"cpu_bytes_to_use": "16MiB"}) as engine:
        cold = engine.generate_with({"max_offload_tokens": 100}, prompt)
        assert engine.figures()["cpu_stored_blocks"] == 100 // BLOCK_TOKENS
        warm = engine.generate_with({"max_offload_tokens": 100}, prompt)
    assert warm.cached_tokens == 100 // BLOCK_TOKENS * BLOCK_TOKENS
    subject.alone.check([prompt], [cold])
    subject.alone.check([prompt], [warm], exact=False)


def test_a_request_is_loaded_from_where_it_says(
    vllm: VLLM, subject: Subject, tmp_path: Path
) -> None:
    # Room for one prompt: after the last one, the others are only on disk.
    options = over(disk_in(tmp_path), subject, slots=BLOCKS + 1)
    with HintedRemoteEngine(with_common_hashes(vllm), subject.path, options) as engine:
        engine.generate(*PROMPTS)
        kept_out = engine.generate_with({"kv_load_tiers": [{"medium": "cpu"}]}, PROMPTS[0])
        misread = engine.generate_with({"kv_load_tiers": [{"medium": "TAPE"}]}, PROMPTS[1])
        assert engine.figures().get('tier_blocks{tier="0:disk",direction="load"}', 0) == 0
        some = [{"medium": "TAPE"}, {"medium": "Storage", "locality": "local"}]
        let_in = engine.generate_with({"kv_load_tiers": some}, PROMPTS[2])
        assert engine.figures()['tier_blocks{tier="0:disk",direction="load"}'] == BLOCKS
    assert [answer.cached_tokens for answer in (kept_out, misread, let_in)] == [0, 0, TOKENS]
    subject.alone.check(PROMPTS, [kept_out, misread, let_in])


@pytest.mark.parametrize("intent", [{"retain_s": 600}, {"drop": True}, None], ids=str)
def test_a_request_of_one_token_says_what_becomes_of_a_session(
    intent: dict[str, Any] | None, vllm: VLLM, subject: Subject
) -> None:
    """Host memory has room for two sessions. The older one is to stay, the younger one is to leave,
    or nothing is said and the older one leaves."""
    older, younger, third = PROMPTS
    options = {
        "cpu_bytes_to_use": 2 * BLOCKS * subject.slot_bytes(),
        "tenants": {},
        "max_retained_share": 0.9,
    }
    with HintedRemoteEngine(vllm, subject.path, options) as engine:
        answers = [engine.generate_with({}, prompt) for prompt in (older, younger)]
        if intent is not None:
            engine.generate_with(intent, older if "retain_s" in intent else younger, max_tokens=1)
            if "retain_s" in intent:
                engine.generate_with({}, younger, max_tokens=1)
        answers.append(engine.generate_with({}, third))
        warm = engine.generate_with({}, older)
    stays = intent is not None
    assert (warm.cached_tokens == TOKENS) is stays
    subject.alone.check(PROMPTS, answers)
    subject.alone.check([older], [warm], exact=False)


class AnnouncingRemoteEngine(HintedRemoteEngine):
    """An engine that publishes KV events."""

    def __init__(self, vllm: VLLM, model: Path, options: Mapping[str, Any]) -> None:
        self.process = vllm.start(AnnouncingEngine, str(model), dict(options), **ENGINE)
        self._numbers, self._hinted = count(), count()
        # Events from before the subscription are lost.
        greetings = iter(random_prompts(100, BLOCK_TOKENS, "are you there?"))
        while not self.process.ask("events"):
            self.generate(next(greetings))
        self._greeted = len(self.process.ask("events"))

    def announced(self, by: str = "where") -> dict[tuple[str, str | None], set[str]]:
        """The blocks in events since the subscription, by kind and place."""
        blocks: dict[tuple[str, str | None], set[str]] = defaultdict(set)
        for event in self.process.ask("events")[self._greeted :]:
            blocks[event["what"], event[by]].add(event["block"])
        return blocks


def test_blocks_are_announced_where_they_come_and_go(
    vllm: VLLM, subject: Subject, tmp_path: Path
) -> None:
    storage = "STORAGE" if vllm.version >= (0, 28) else "FS"
    # The disk has room for two prompts and a little more, host memory for one.
    tier = disk_in(tmp_path) | {"max_bytes": "2500KiB", "enable_kv_events": True}
    options = over(tier, subject, slots=BLOCKS + 1)
    all_blocks = BLOCKS * len(PROMPTS)
    with AnnouncingRemoteEngine(with_common_hashes(vllm), subject.path, options) as engine:
        engine.generate(*PROMPTS)
        figures = engine.figures()
        on_disk = int(figures['disk_resident_blocks{tier="0:disk"}'])
        in_host = int(figures["cpu_resident_blocks"])
        deadline = time.monotonic() + PATIENCE_S
        while True:
            announced = engine.announced()
            ours = announced["BlockStored", "GPU"]
            left_host = announced["BlockRemoved", "CPU"] & ours
            left_disk = announced["BlockRemoved", storage] & ours
            if len(left_disk) >= all_blocks - on_disk or time.monotonic() > deadline:
                break
    assert len(ours) == all_blocks
    assert announced["BlockStored", "CPU"] == announced["BlockStored", storage] == ours
    assert len(left_host) == all_blocks - in_host > 0
    assert len(left_disk) == all_blocks - on_disk > 0


def test_events_of_private_blocks_have_no_tokens_and_no_hash_of_vllm(
    vllm: VLLM, subject: Subject, tmp_path: Path
) -> None:
    options = over(disk_in(tmp_path) | {"enable_kv_events": True}, subject)
    options |= {"tenants": RULES, "tenant_key_file": key_file(tmp_path)}
    with AnnouncingRemoteEngine(with_common_hashes(vllm), subject.path, options) as engine:
        engine.generate_with({"tenant": credential("acme")}, PROMPTS[0])
        deadline = time.monotonic() + PATIENCE_S
        while len(private := engine.announced()["BlockStored", "CPU"]) < BLOCKS:
            assert time.monotonic() < deadline
        assert private.isdisjoint(engine.announced()["BlockStored", "GPU"])
        assert not any(
            event["has_tokens"]
            for event in engine.process.ask("events")
            if event["block"] in private
        )
        engine.generate_with({}, PROMPTS[1])
        while len(engine.announced()["BlockStored", "CPU"]) < 2 * BLOCKS:
            assert time.monotonic() < deadline
        announced = engine.announced()
    shared = announced["BlockStored", "CPU"] - private
    assert shared <= announced["BlockStored", "GPU"], "of others, events have vLLM's hashes"


def test_events_name_the_tier_where_vllm_has_a_word_for_it(vllm: VLLM, subject: Subject) -> None:
    example = {"type": "example", "enable_kv_events": True, "max_pinned_share": 1}
    # Host memory has room for little more than one prompt: blocks leave it, and stay below.
    options = {
        "cpu_bytes_to_use": (BLOCKS + 1) * subject.slot_bytes(),
        "secondary_tiers": [example, example],
        "name_tier_in_events": True,
    }
    with AnnouncingRemoteEngine(vllm, subject.path, options) as engine:
        engine.generate(*PROMPTS)
        deadline = time.monotonic() + PATIENCE_S
        while True:
            ours = engine.announced()["BlockStored", "GPU"]
            owners = engine.announced(by="owner")
            below = owners["BlockStored", "0:example"], owners["BlockStored", "1:example"]
            if vllm.version < (0, 32) or min(map(len, below)) >= BLOCKS * len(PROMPTS):
                break
            assert time.monotonic() < deadline
    if vllm.version < (0, 32):
        assert {owner for (_, owner), blocks in owners.items() if blocks} == {None}
        return
    assert ours == below[0] == below[1]
    left = owners["BlockRemoved", None] & ours
    assert left, "host memory has room for fewer blocks"
    assert left.isdisjoint(owners["BlockRemoved", "0:example"])
