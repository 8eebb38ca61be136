"""The weights change between two runs, or within one: no block that was computed with other weights
is served, from host memory or from a tier."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import closing
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from kvtier.testing.vllm.in_process import PlugIn
from kvtier.testing.vllm.tiny_model import LLAMA, random_prompts
from tests.e2e.vllm.lasting_tiers import LASTING, figure_of, over, with_common_hashes
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
    """The answers of vLLM with these weights, without kvtier."""
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
        plug_in: PlugIn = "connector",
    ) -> None:
        self.process = with_common_hashes(vllm).start(
            kind, str(model), options, plug_in=plug_in, device_blocks=64, max_model_len=512
        )
        self._numbers = count()

    def update_weights(self, way: Way, path: Path) -> None:
        self.process.ask("update_weights", way, str(path))

    def update_weights_under_a_request(self, path: Path) -> None:
        self.process.ask("update_weights_under_a_request", str(path))


def replace_by(model: Path, weights: Path) -> Path:
    """Replace the weights in a model's folder."""
    shutil.rmtree(model, ignore_errors=True)
    shutil.copytree(weights, model)
    return model


def cached(engine: RemoteEngine, reference: Reference) -> list[int]:
    """Run the prompts and check the answers. Returns the cached tokens of each."""
    answers = engine.generate(*PROMPTS)
    reference.check(PROMPTS, answers)
    return [answer.cached_tokens for answer in answers]


NOTHING, EVERYTHING = [0] * len(PROMPTS), [TOKENS] * len(PROMPTS)


@pytest.mark.parametrize("plug_in", ["connector", "spec"])
@pytest.mark.parametrize("tier", ["disk", "fs"])
@pytest.mark.parametrize("subject", ["llama"], indirect=True)
def test_other_weights_in_the_same_place_find_nothing(
    vllm: VLLM,
    subject: Subject,
    other: Path,
    other_alone: Reference,
    tmp_path: Path,
    tier: str,
    plug_in: PlugIn,
) -> None:
    options = over(LASTING[tier](tmp_path), subject)
    # As a spec, kvtier does not know the weights: the user has to name them.
    first = options | ({"cache_namespace": "first"} if plug_in == "spec" else {})
    second = options | ({"cache_namespace": "second"} if plug_in == "spec" else {})
    model = replace_by(tmp_path / "model", subject.path)
    with ChangingEngine(vllm, model, first, plug_in=plug_in) as engine:
        assert cached(engine, subject.alone) == NOTHING
    replace_by(model, other)
    with ChangingEngine(vllm, model, second, plug_in=plug_in) as engine:
        assert cached(engine, other_alone) == NOTHING
        assert engine.figures().get(figure_of(f"0:{tier}", "loaded_blocks"), 0) == 0
    with ChangingEngine(vllm, model, second, plug_in=plug_in) as engine:
        assert cached(engine, other_alone) == EVERYTHING
        assert engine.figures()[figure_of(f"0:{tier}", "loaded_blocks")] > 0


@pytest.mark.parametrize("plug_in", ["connector", "spec"])
@pytest.mark.parametrize("subject", ["llama"], indirect=True)
def test_one_namespace_for_all_weights_would_be_noticed(
    vllm: VLLM,
    subject: Subject,
    other: Path,
    other_alone: Reference,
    tmp_path: Path,
    plug_in: PlugIn,
) -> None:
    options = over(LASTING["fs"](tmp_path), subject)
    options |= {"cache_namespace": "any"} if plug_in == "spec" else {}
    model = replace_by(tmp_path / "model", subject.path)
    with ChangingEngine(vllm, model, options, EngineThatIgnoresItsWeights, plug_in) as engine:
        engine.generate(*PROMPTS)
    replace_by(model, other)
    with ChangingEngine(vllm, model, options, EngineThatIgnoresItsWeights, plug_in) as engine:
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
        # It began with the old weights, and its blocks are on their way to host memory.
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
        # All of its blocks that are kept now were computed with the new weights.
        engine.reset_device_cache()
        other_alone.check([begun], engine.generate(begun), exact=False)
    with ChangingEngine(vllm, other, options) as engine:
        cached(engine, other_alone)
    with ChangingEngine(vllm, subject.path, options) as engine:
        cached(engine, subject.alone)
        # This reset begins another namespace than the last one did.
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
