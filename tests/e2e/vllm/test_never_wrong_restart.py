"""A restarted vLLM loads from disk and from a shared directory what the one before computed,
however that one ended, with right answers. The weights are identified without the user's help."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from kvtier.testing.vllm.tiny_model import random_prompts
from tests.e2e.vllm.lasting_tiers import LASTING, figure_of, over, with_common_hashes
from tests.e2e.vllm.processes import VLLM
from tests.e2e.vllm.remote_engine import RemoteEngine
from tests.e2e.vllm.subject import Subject

pytestmark = pytest.mark.vllm

TOKENS, BLOCKS = 256, 8
PROMPTS = random_prompts(3, TOKENS, "never wrong after a restart")
ENGINE = {"device_blocks": 64, "max_model_len": 512}


@pytest.mark.parametrize("tier", ["disk", "fs"])
@pytest.mark.parametrize("subject", ["llama", "hybrid"], indirect=True)
def test_everything_comes_back_after_a_restart(
    vllm: VLLM, subject: Subject, tmp_path: Path, tier: str
) -> None:
    options = over(LASTING[tier](tmp_path), subject)
    vllm = with_common_hashes(vllm)
    with RemoteEngine(vllm, subject.path, options, **ENGINE) as engine:
        first = engine.generate(*PROMPTS)
    with RemoteEngine(vllm, subject.path, options, **ENGINE) as engine:
        second = engine.generate(*PROMPTS)
        figures = engine.figures()
    assert [answer.cached_tokens for answer in first] == [0] * len(PROMPTS)
    assert [answer.cached_tokens for answer in second] == [TOKENS] * len(PROMPTS)
    assert figures[figure_of(f"0:{tier}", "loaded_blocks")] >= len(PROMPTS) * BLOCKS
    assert figures.get(figure_of(f"0:{tier}", "stored_blocks"), 0) == 0
    subject.alone.check(PROMPTS, first)
    subject.alone.check(PROMPTS, second)


@pytest.mark.parametrize("tier", ["disk", "fs"])
@pytest.mark.parametrize("subject", ["llama"], indirect=True)
def test_an_engine_that_was_killed_leaves_nothing_wrong_behind(
    vllm: VLLM, subject: Subject, tmp_path: Path, tier: str
) -> None:
    *stored, under_way = PROMPTS
    options = over(LASTING[tier](tmp_path), subject)
    vllm = with_common_hashes(vllm)
    with RemoteEngine(vllm, subject.path, options, **ENGINE) as engine:
        engine.generate(*stored)
        engine.add("under way", under_way)
        engine.step(2)
        engine.kill()
    with RemoteEngine(vllm, subject.path, options, **ENGINE) as engine:
        answers = engine.generate(*stored)
        figures = engine.figures()
        torn = engine.generate(under_way)
    assert [answer.cached_tokens for answer in answers] == [TOKENS] * len(stored)
    assert figures[figure_of(f"0:{tier}", "loaded_blocks")] == len(stored) * BLOCKS
    subject.alone.check(stored, answers)
    subject.alone.check([under_way], torn, exact=False)


@pytest.fixture
def two_engines(
    vllm: VLLM, subject: Subject, tmp_path: Path
) -> Iterator[tuple[RemoteEngine, RemoteEngine]]:
    """Several engines at the same time, with one directory."""
    options = over(LASTING["fs"](tmp_path), subject)
    vllm = with_common_hashes(vllm)
    with (
        RemoteEngine(vllm, subject.path, options, **ENGINE) as one,
        RemoteEngine(vllm, subject.path, options, **ENGINE) as other,
    ):
        yield one, other


@pytest.mark.parametrize("subject", ["llama", "hybrid"], indirect=True)
def test_two_engines_with_one_directory_find_each_others_blocks(
    subject: Subject, two_engines: tuple[RemoteEngine, RemoteEngine]
) -> None:
    one, other = two_engines
    ours, theirs, _ = PROMPTS
    answers = one.generate(ours) + other.generate(ours, theirs) + one.generate(theirs)
    prompts = [ours, ours, theirs, theirs]
    assert [answer.cached_tokens for answer in answers] == [0, TOKENS, 0, TOKENS]
    for engine in (one, other):
        figures = engine.figures()
        assert figures['tier_blocks{tier="0:fs",direction="load"}'] >= BLOCKS
        assert figures['tier_blocks{tier="0:fs",direction="store"}'] >= BLOCKS
    subject.alone.check(prompts, answers)
