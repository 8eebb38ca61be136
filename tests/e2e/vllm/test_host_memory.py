"""Stock vLLM with kvtier: blocks from host memory change no answer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest

from kvtier.testing.vllm.in_process import BLOCK_TOKENS, Answer, PlugIn
from kvtier.testing.vllm.tiny_model import random_prompts
from tests.e2e.vllm.processes import VLLM
from tests.e2e.vllm.remote_engine import RemoteEngine
from tests.e2e.vllm.subject import Subject

pytestmark = pytest.mark.vllm

PROMPT_TOKENS = 1024
PROMPT_BLOCKS = PROMPT_TOKENS // BLOCK_TOKENS
# Long enough that with 1 and with 4 blocks per chunk the prompts are the same.
PROMPTS = random_prompts(4, PROMPT_TOKENS, "end to end", blocks_per_chunk=4)


@dataclass(frozen=True, slots=True)
class Life:
    """The answers to each prompt, computed, and again after a reset of the device cache."""

    cold: list[Answer]
    warm: list[Answer]
    figures: dict[str, float]
    metrics: list[dict[str, Any]]

    @property
    def host_tokens(self) -> list[int]:
        """Tokens of every prompt that came from host memory, the only cache that had any."""
        return [answer.cached_tokens for answer in self.warm]


def live(
    vllm: VLLM,
    subject: Subject,
    prompts: Sequence[Sequence[int]],
    *,
    blocks_per_chunk: int = 1,
    slots: int = 512,
    plug_in: PlugIn = "connector",
    **options: Any,
) -> Life:
    """`slots`: the number of blocks that host memory has room for."""
    options |= {
        "cpu_bytes_to_use": slots * subject.slot_bytes(blocks_per_chunk),
        "blocks_per_chunk": blocks_per_chunk,
    }
    with RemoteEngine(
        vllm,
        subject.path,
        options,
        plug_in=plug_in,
        device_blocks=512,
        max_model_len=2 * PROMPT_TOKENS,
    ) as engine:
        cold = engine.generate(*prompts)
        assert not any(answer.cached_tokens for answer in cold)
        engine.reset_device_cache()
        warm = engine.generate(*prompts)
        return Life(cold, warm, engine.figures(), engine.metrics())


@pytest.mark.parametrize("plug_in", ["connector", "spec"])
@pytest.mark.parametrize("blocks_per_chunk", [1, 4])
@pytest.mark.parametrize("subject", ["llama", "hybrid"], indirect=True)
def test_everything_comes_back_and_nothing_changes(
    vllm: VLLM, subject: Subject, blocks_per_chunk: int, plug_in: PlugIn
) -> None:
    life = live(vllm, subject, PROMPTS, blocks_per_chunk=blocks_per_chunk, plug_in=plug_in)
    assert life.host_tokens == [PROMPT_TOKENS] * len(PROMPTS)
    assert life.figures["cpu_loaded_blocks"] >= len(PROMPTS) * PROMPT_BLOCKS // blocks_per_chunk
    subject.alone.check(PROMPTS, life.cold)
    subject.alone.check(PROMPTS, life.warm)


@pytest.mark.parametrize("subject", ["llama"], indirect=True)
def test_host_memory_too_small_for_everything(vllm: VLLM, subject: Subject) -> None:
    # The last two are in host memory; the first comes again and evicts two that follow.
    again = [PROMPTS[index] for index in (3, 2, 1, 0)]
    options = {"cpu_bytes_to_use": 2 * PROMPT_BLOCKS * subject.slot_bytes()}
    with RemoteEngine(
        vllm, subject.path, options, device_blocks=512, max_model_len=2 * PROMPT_TOKENS
    ) as engine:
        cold = engine.generate(*PROMPTS)
        engine.reset_device_cache()
        warm = engine.generate(*again)
        figures = engine.figures()
    assert [answer.cached_tokens for answer in warm] == [PROMPT_TOKENS, PROMPT_TOKENS, 0, 0]
    assert figures["cpu_evicted_blocks"] == 4 * PROMPT_BLOCKS
    assert figures["cpu_loaded_blocks"] == 2 * PROMPT_BLOCKS
    subject.alone.check(PROMPTS, cold)
    subject.alone.check(again, warm)


@pytest.mark.parametrize("subject", ["llama"], indirect=True)
def test_one_wrong_bit_would_be_noticed(vllm: VLLM, subject: Subject) -> None:
    life = live(
        vllm,
        subject,
        PROMPTS[:2],
        plug_in="spec",
        spec_name="CorruptingSpec",
        spec_module_path="tests.e2e.vllm.corrupting_spec",
    )
    assert life.host_tokens == [PROMPT_TOKENS] * 2
    subject.alone.check(PROMPTS[:2], life.cold)
    for prompt, answer in zip(PROMPTS[:2], life.warm, strict=True):
        with pytest.raises(AssertionError, match="from a cache: got"):
            subject.alone.check([prompt], [answer])


@pytest.mark.parametrize("plug_in", ["connector", "spec"])
@pytest.mark.parametrize("subject", ["llama"], indirect=True)
def test_counters_are_there_before_they_count(
    vllm: VLLM, subject: Subject, plug_in: PlugIn
) -> None:
    options = {"cpu_bytes_to_use": "16MiB", "secondary_tiers": [{"type": "example"}]}
    counters = (
        "cpu_loaded_blocks",
        'tier_blocks{tier="0:example",direction="load"}',
        'tier_blocks{tier="0:example",direction="store"}',
    )
    with RemoteEngine(vllm, subject.path, options, plug_in=plug_in, max_model_len=512) as engine:
        at_start = engine.figures()
        engine.generate(PROMPTS[0][:BLOCK_TOKENS])
        after_one_block = engine.figures()
    if plug_in == "connector":  # otherwise they are there with the first step
        assert {name: at_start[name] for name in counters} == dict.fromkeys(counters, 0)
    assert [after_one_block[name] for name in counters] == [0, 0, 1]


@pytest.mark.parametrize("subject", ["llama"], indirect=True)
def test_vllm_shows_kvtiers_figures(vllm: VLLM, subject: Subject) -> None:
    life = live(vllm, subject, PROMPTS[:1])
    assert life.figures["cpu_stored_blocks"] == PROMPT_BLOCKS
    assert life.figures["cpu_loaded_blocks"] == PROMPT_BLOCKS
    assert life.figures["cpu_resident_blocks"] == PROMPT_BLOCKS
    assert life.figures["cpu_pinned_blocks"] == 0
    if vllm.version < (0, 32):
        return
    by_source = {
        metric["labels"]["source"]: metric["value"]
        for metric in life.metrics
        if metric["name"] == "vllm:prompt_tokens_cached_by_source"
    }
    assert by_source["host"] == PROMPT_TOKENS
    assert by_source["external_unspecified"] == 0
