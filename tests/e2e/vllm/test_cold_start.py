"""Stock vLLM that finds nothing in a tier that is not empty: its log says why."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from kvtier.testing.vllm.tiny_model import random_prompts
from kvtier.tiering.inspection import open_inspector
from tests.e2e.vllm.lasting_tiers import LASTING, with_common_hashes
from tests.e2e.vllm.processes import VLLM
from tests.e2e.vllm.remote_engine import RemoteEngine
from tests.tiering.patience import wait_until

pytestmark = pytest.mark.vllm

TOKENS, BLOCKS = 256, 8
PROMPT = random_prompts(1, TOKENS, "cold")[0]


def release(name: str, request: pytest.FixtureRequest) -> VLLM:
    vllm = request.getfixturevalue("vllm" if name == "0.32" else "vllm_0_28")
    assert isinstance(vllm, VLLM)
    return vllm


def engine_with(
    vllm: VLLM, model: Path, tier: Mapping[str, Any], max_model_len: int = 512
) -> RemoteEngine:
    options = {"cpu_bytes_to_use": "16MiB", "secondary_tiers": [dict(tier)]}
    return RemoteEngine(vllm, model, options, device_blocks=64, max_model_len=max_model_len)


def line_of(engine: RemoteEngine) -> str:
    """What an engine says that has found nothing."""

    def said() -> list[str]:
        return [text for _, text in engine.told() if " holds " in text and " blocks of " in text]

    wait_until(lambda: said() != [], "it is said why")
    (line,) = said()
    return line


def place_of(tier: Mapping[str, Any]) -> str:
    return str(tier.get("path") or tier["root_dir"])


@pytest.mark.parametrize(("name", "kind"), [("0.32", "disk"), ("0.28", "fs")])
def test_another_length(
    request: pytest.FixtureRequest, llama: Path, tmp_path: Path, name: str, kind: str
) -> None:
    vllm, tier = with_common_hashes(release(name, request)), LASTING[kind](tmp_path)
    with engine_with(vllm, llama, tier) as engine:
        engine.generate(PROMPT)
    with engine_with(vllm, llama, tier, max_model_len=384) as engine:
        line = line_of(engine)
        (answer,) = engine.generate(PROMPT)
        assert answer.cached_tokens == 0
    assert f"{place_of(tier)} holds {BLOCKS} blocks of another namespace of the model " in line
    assert line.endswith(
        ": this engine can use none of them. It differs in max_model_len: 512, now 384"
    )
    with open_inspector(place_of(tier)) as store:
        store.figures()
        lengths = [each.ingredients["max_model_len"] for each in store.descriptions().values()]
        assert sorted(map(str, lengths)) == ["384", "512"]
        releases = {each.ingredients["vllm"] for each in store.descriptions().values()}
        assert releases == {vllm.zygote.vllm_version.partition("+")[0]}


@pytest.mark.parametrize(("name", "before"), [("0.32", {}), ("0.28", {"PYTHONHASHSEED": "0"})])
def test_another_seed_of_the_hashes(
    request: pytest.FixtureRequest,
    llama: Path,
    tmp_path: Path,
    name: str,
    before: Mapping[str, str],
) -> None:
    vllm, tier = release(name, request), LASTING["disk"](tmp_path)
    with engine_with(vllm.but(environment=before), llama, tier) as engine:
        engine.generate(PROMPT)
    with engine_with(vllm.but(environment={"PYTHONHASHSEED": "1"}), llama, tier) as engine:
        line = line_of(engine)
        (answer,) = engine.generate(PROMPT)
        assert answer.cached_tokens == 0
    assert f"holds {BLOCKS} blocks of this engine's namespace" in line
    assert "the seed in PYTHONHASHSEED). Such blocks are never found: start all engines" in line
