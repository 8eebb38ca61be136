"""A smoke test with vLLM 0.28: as a connector and as a spec, with host memory and disk.

`make test-vllm VLLM=0.28.0` runs all other tests with that release.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from kvtier.testing.vllm.in_process import Answer, PlugIn
from kvtier.testing.vllm.tiny_model import LLAMA, random_prompts
from tests.e2e.vllm.lasting_tiers import disk_in, over, with_common_hashes
from tests.e2e.vllm.processes import VLLM, ScenarioFailedError
from tests.e2e.vllm.reference import Reference
from tests.e2e.vllm.remote_engine import RemoteEngine
from tests.e2e.vllm.subject import Subject

pytestmark = pytest.mark.vllm

TOKENS = 256
PROMPTS = random_prompts(2, TOKENS, "smoke")
ENGINE = {"device_blocks": 128, "max_model_len": 512}


@pytest.fixture(scope="module")
def llama_in_0_28(vllm_0_28: VLLM, llama: Path) -> Iterator[Subject]:
    with closing(Reference(vllm_0_28, llama, **ENGINE)) as alone:
        yield Subject(LLAMA, llama, alone)


def test_it_is_that_release(vllm_0_28: VLLM) -> None:
    assert vllm_0_28.version == (0, 28)


@pytest.mark.parametrize("plug_in", ["connector", "spec"])
def test_a_restarted_engine_has_all_from_disk(
    vllm_0_28: VLLM, llama_in_0_28: Subject, tmp_path: Path, plug_in: PlugIn
) -> None:
    # As a spec, kvtier does not know the weights.
    options = over(disk_in(tmp_path), llama_in_0_28) | {"cache_namespace": "smoke"}

    def live() -> tuple[list[Answer], dict[str, float]]:
        with RemoteEngine(
            with_common_hashes(vllm_0_28), llama_in_0_28.path, options, plug_in=plug_in, **ENGINE
        ) as engine:
            return engine.generate(*PROMPTS), engine.figures()

    (first, _), (second, figures) = live(), live()
    assert [answer.cached_tokens for answer in first] == [0, 0]
    assert [answer.cached_tokens for answer in second] == [TOKENS, TOKENS]
    assert figures['tier_blocks{tier="0:disk",direction="load"}'] == 2 * TOKENS // 32
    llama_in_0_28.alone.check(PROMPTS, first)
    llama_in_0_28.alone.check(PROMPTS, second)


def test_a_hybrid_model_has_all_from_host_memory(vllm_0_28: VLLM, hybrid: Path) -> None:
    with closing(Reference(vllm_0_28, hybrid, **ENGINE)) as alone:
        with RemoteEngine(vllm_0_28, hybrid, {"cpu_bytes_to_use": "32MiB"}, **ENGINE) as engine:
            cold = engine.generate(*PROMPTS)
            engine.reset_device_cache()
            warm = engine.generate(*PROMPTS)
            figures = engine.figures()
        assert [answer.cached_tokens for answer in warm] == [TOKENS, TOKENS]
        assert figures["cpu_loaded_blocks"] > 0
        alone.check(PROMPTS, cold)
        alone.check(PROMPTS, warm)


def test_random_block_hashes_and_a_disk_are_refused(
    vllm_0_28: VLLM, llama_in_0_28: Subject, tmp_path: Path
) -> None:
    options = over(disk_in(tmp_path), llama_in_0_28)
    with pytest.raises(ScenarioFailedError, match="Set PYTHONHASHSEED to the same number"):
        RemoteEngine(vllm_0_28, llama_in_0_28.path, options, **ENGINE)
    assert list(tmp_path.iterdir()) == []
