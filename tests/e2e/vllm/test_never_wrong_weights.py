"""The weights change, between two runs and within one: nothing that was computed with others is
served, from host memory or from a tier."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import closing
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from kvtier.integrations.vllm.comparison import random_prompts
from kvtier.integrations.vllm.in_process import Door
from kvtier.integrations.vllm.tiny_model import LLAMA
from tests.e2e.vllm.lasting_tiers import LASTING, over, with_common_hashes
from tests.e2e.vllm.processes import VLLM
from tests.e2e.vllm.reference import Reference
from tests.e2e.vllm.remote_engine import RemoteEngine
from tests.e2e.vllm.scenarios.engine import Engine
from tests.e2e.vllm.scenarios.other_weights import (
    EngineThatIgnoresItsWeights,
    EngineThatIgnoresResets,
    EngineWithOtherWeights,
    Way,
)
from tests.e2e.vllm.subject import Subject

pytestmark = pytest.mark.vllm

TOKENS = 256
PROMPTS = random_prompts(2, TOKENS, "never wrong with other weights")


@pytest.fixture(scope="module")
def other(models: Path) -> Path:
    """A model of the same architecture as `llama`, with other weights."""
    return LLAMA.write(models / "llama-other", seed=1)


@pytest.fixture(scope="module")
def other_alone(vllm: VLLM, other: Path) -> Iterator[Reference]:
    """What vLLM makes of prompts with these weights, without kvtier."""
    with closing(Reference(vllm, other)) as reference:
        yield reference


class ChangingEngine(RemoteEngine):
    """An engine whose weights can be replaced."""

    def __init__(
        self,
        vllm: VLLM,
        model: Path,
        options: dict[str, Any],
        kind: type[Engine] = EngineWithOtherWeights,
        door: Door = "connector",
    ) -> None:
        self.process = with_common_hashes(vllm).start(
            kind, str(model), options, door=door, device_blocks=64, max_model_len=512
        )
        self._numbers = count()

    def update_weights(self, way: Way, path: Path) -> None:
        self.process.ask("update_weights", way, str(path))

    def update_weights_under_a_request(self, path: Path) -> None:
        self.process.ask("update_weights_under_a_request", str(path))


def replace_by(model: Path, weights: Path) -> Path:
    """Put other weights where a model is."""
    shutil.rmtree(model, ignore_errors=True)
    shutil.copytree(weights, model)
    return model


def cached(engine: RemoteEngine, reference: Reference) -> list[int]:
    """Run the prompts, see that the answers are right; how much of each was in some cache."""
    answers = engine.generate(*PROMPTS)
    reference.check(PROMPTS, answers)
    return [answer.cached_tokens for answer in answers]


NOTHING, EVERYTHING = [0] * len(PROMPTS), [TOKENS] * len(PROMPTS)


@pytest.mark.parametrize("door", ["connector", "plain"])
@pytest.mark.parametrize("tier", ["disk", "fs"])
@pytest.mark.parametrize("subject", ["llama"], indirect=True)
def test_other_weights_in_the_same_place_find_nothing(
    vllm: VLLM,
    subject: Subject,
    other: Path,
    other_alone: Reference,
    tmp_path: Path,
    tier: str,
    door: Door,
) -> None:
    options = over(LASTING[tier](tmp_path), subject)
    # Through the plain door, nobody but the user can say which weights these are.
    first = options | ({"cache_namespace": "first"} if door == "plain" else {})
    second = options | ({"cache_namespace": "second"} if door == "plain" else {})
    model = replace_by(tmp_path / "model", subject.path)
    with ChangingEngine(vllm, model, first, door=door) as engine:
        assert cached(engine, subject.alone) == NOTHING
    replace_by(model, other)
    with ChangingEngine(vllm, model, second, door=door) as engine:
        assert cached(engine, other_alone) == NOTHING
        assert engine.figures().get(f"tier_0_{tier}_loaded_blocks", 0) == 0
    with ChangingEngine(vllm, model, second, door=door) as engine:
        assert cached(engine, other_alone) == EVERYTHING
        assert engine.figures()[f"tier_0_{tier}_loaded_blocks"] > 0


@pytest.mark.parametrize("door", ["connector", "plain"])
@pytest.mark.parametrize("subject", ["llama"], indirect=True)
def test_one_namespace_for_all_weights_would_be_noticed(
    vllm: VLLM,
    subject: Subject,
    other: Path,
    other_alone: Reference,
    tmp_path: Path,
    door: Door,
) -> None:
    options = over(LASTING["fs"](tmp_path), subject)
    options |= {"cache_namespace": "any"} if door == "plain" else {}
    model = replace_by(tmp_path / "model", subject.path)
    with ChangingEngine(vllm, model, options, EngineThatIgnoresItsWeights, door) as engine:
        engine.generate(*PROMPTS)
    replace_by(model, other)
    with ChangingEngine(vllm, model, options, EngineThatIgnoresItsWeights, door) as engine:
        answers = engine.generate(*PROMPTS)
    assert [answer.cached_tokens for answer in answers] == EVERYTHING
    for prompt, answer in zip(PROMPTS, answers, strict=True):
        with pytest.raises(AssertionError, match="without kvtier"):
            other_alone.check([prompt], [answer], exact=False)


@pytest.mark.parametrize(
    ("way", "tier"),
    [
        ("sleep", "disk"),
        ("pause and abort", "fs"),
        ("pause and keep", "disk"),
        ("reset", "fs"),
    ],
)
@pytest.mark.parametrize("subject", ["llama"], indirect=True)
def test_weights_that_change_in_mid_run_find_nothing_from_before(
    vllm: VLLM,
    subject: Subject,
    other: Path,
    other_alone: Reference,
    tmp_path: Path,
    way: Way,
    tier: str,
) -> None:
    options = over(LASTING[tier](tmp_path), subject)
    with ChangingEngine(vllm, subject.path, options) as engine:
        assert cached(engine, subject.alone) == NOTHING
        engine.reset_device_cache()
        assert cached(engine, subject.alone) == EVERYTHING
        loaded = engine.figures()["cpu_loaded_blocks"]
        # Begun with the old weights, and its blocks are on their way to host memory.
        begun = random_prompts(1, TOKENS, way)[0]
        engine.add("begun", begun, max_tokens=16)
        engine.step(3)
        engine.update_weights(way, other)
        engine.step(20)
        engine.abort("begun")
        engine.settle()
        assert cached(engine, other_alone) == NOTHING
        assert engine.figures()["cpu_loaded_blocks"] == loaded
        engine.reset_device_cache()
        assert cached(engine, other_alone) == EVERYTHING
        # Whatever is kept of it now was computed with the new weights.
        engine.reset_device_cache()
        other_alone.check([begun], engine.generate(begun), exact=False)
    with ChangingEngine(vllm, other, options) as engine:
        cached(engine, other_alone)
    with ChangingEngine(vllm, subject.path, options) as engine:
        cached(engine, subject.alone)
        # The namespace that follows is not the one that followed the last time.
        assert engine.reset_all()
        assert cached(engine, subject.alone) == NOTHING


@pytest.mark.parametrize("subject", ["llama"], indirect=True)
def test_what_a_request_computed_before_a_reset_is_not_kept_after_it(
    vllm: VLLM, subject: Subject, other: Path, other_alone: Reference, tmp_path: Path
) -> None:
    options = over(LASTING["disk"](tmp_path), subject)
    with ChangingEngine(vllm, subject.path, options) as engine:
        engine.add("begun", PROMPTS[0], max_tokens=16)
        engine.step(3)
        engine.update_weights_under_a_request(other)
        engine.run()
        engine.settle()
        assert engine.figures()["cpu_stale_blocks"] > 0
        engine.reset_device_cache()
        assert cached(engine, other_alone) == NOTHING


@pytest.mark.parametrize("subject", ["llama"], indirect=True)
def test_a_reset_without_effect_would_be_noticed(
    vllm: VLLM, subject: Subject, other: Path, other_alone: Reference, tmp_path: Path
) -> None:
    options = over(LASTING["disk"](tmp_path), subject)
    with ChangingEngine(vllm, subject.path, options, EngineThatIgnoresResets) as engine:
        engine.generate(*PROMPTS)
        engine.update_weights("sleep", other)
        answers = engine.generate(*PROMPTS)
        engine.kill()
    assert [answer.cached_tokens for answer in answers] == EVERYTHING
    for prompt, answer in zip(PROMPTS, answers, strict=True):
        with pytest.raises(AssertionError, match="without kvtier"):
            other_alone.check([prompt], [answer], exact=False)
