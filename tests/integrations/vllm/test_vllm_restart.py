"""Stock vLLM with a disk tier: a restarted process is warm, and answers the same."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.vllm

REPO = Path(__file__).resolve().parents[3]
PROMPTS, BLOCKS, TOKENS = 3, 3 * 16, 3 * 512


def live(python: Path, folder: Path, *options: str) -> dict[str, Any]:
    """One process, from its start to its end."""
    process = subprocess.run(
        [python, "-m", "tests.integrations.vllm.life", folder, *options],
        cwd=REPO,
        env=os.environ | {"PYTHONPATH": str(REPO / "src"), "TMPDIR": str(folder)},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert process.returncode == 0, process.stderr[-4000:]
    report: dict[str, Any] = json.loads(process.stdout)
    return report


@pytest.fixture(scope="module")
def lives(
    vllm_python: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[dict[str, Any], dict[str, Any]]:
    """What two processes, one after the other, found out. They leave the slab and the model."""
    folder = tmp_path_factory.mktemp("vllm-restart")
    first, second = live(vllm_python, folder, "plain"), live(vllm_python, folder)
    assert sorted(path.name for path in folder.iterdir()) == ["kv.slab", "model"]
    return first, second


def values(answers: list[dict[str, Any]], key: str) -> list[Any]:
    return [answer[key] for answer in answers]


def test_the_first_process_computes_and_stores(
    lives: tuple[dict[str, Any], dict[str, Any]],
) -> None:
    first, _ = lives
    assert values(first["answers"], "cached_tokens") == [0] * PROMPTS
    assert first["figures"].get("tier_0_disk_loaded_blocks", 0) == 0
    assert first["figures"]["tier_0_disk_stored_blocks"] == BLOCKS
    assert first["figures"]["disk_resident_blocks"] == BLOCKS


def test_the_second_process_has_all_of_it_from_the_disk(
    lives: tuple[dict[str, Any], dict[str, Any]],
) -> None:
    _, second = lives
    assert sum(values(second["answers"], "cached_tokens")) == TOKENS
    assert second["figures"]["tier_0_disk_loaded_blocks"] == BLOCKS
    assert second["figures"]["cpu_promoted_blocks"] == BLOCKS
    assert second["figures"].get("tier_0_disk_stored_blocks", 0) == 0
    assert second["figures"]["disk_resident_blocks"] == BLOCKS
    assert second["figures"].get("disk_forgotten_blocks", 0) == 0


def test_tokens_and_logprobs_are_those_of_vllm_alone(
    lives: tuple[dict[str, Any], dict[str, Any]],
) -> None:
    first, second = lives
    cold, device = first["plain"]["cold"], first["plain"]["device"]
    assert values(second["answers"], "tokens") == values(first["answers"], "tokens")
    assert values(first["answers"], "tokens") == values(cold, "tokens")
    # To the last bit, where as many tokens were computed.
    assert values(second["answers"], "cached_tokens") == values(device, "cached_tokens")
    assert values(second["answers"], "logprobs") == values(device, "logprobs")
    assert values(first["answers"], "logprobs") == values(cold, "logprobs")
