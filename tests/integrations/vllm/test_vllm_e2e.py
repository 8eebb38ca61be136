"""Stock vLLM with kvtier plugged in: what comes back from host memory changes no answer.

vLLM lives in an environment of its own. One process of that environment does all the work, see
`child`; the tests read its report.
"""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.vllm

REPO = Path(__file__).resolve().parents[3]
PROMPT_TOKENS = 4 * 1032
WHOLE_BLOCKS = 4 * 1024


@pytest.fixture(scope="module")
def report(vllm_python: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What the process found out; its temporary files must all be gone."""
    folder = tmp_path_factory.mktemp("vllm")
    process = subprocess.run(
        [vllm_python, "-m", "tests.integrations.vllm.child"],
        cwd=REPO,
        env=os.environ | {"PYTHONPATH": str(REPO / "src"), "TMPDIR": str(folder)},
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )
    assert process.returncode == 0, process.stderr[-4000:]
    assert list(folder.iterdir()) == []
    report: dict[str, Any] = json.loads(process.stdout)
    return report


@pytest.mark.parametrize("scenario", ["chunks", "hybrid", "hybrid_chunks"])
def test_everything_comes_back_and_nothing_changes(report: dict[str, Any], scenario: str) -> None:
    part = report[scenario]
    assert part["tokens_identical"]
    assert part["logprobs_identical"]
    assert part["prompt_tokens"] == PROMPT_TOKENS
    assert part["host_tokens"] == WHOLE_BLOCKS
    assert part["prompts_from_host"] == 4


def test_a_tier_too_small_for_everything(report: dict[str, Any]) -> None:
    part = report["small_tier"]
    assert part["tokens_identical"]
    assert part["logprobs_identical"]
    assert part["evictions"] > 0
    assert part["prompts_from_host"] == 2
    assert part["host_tokens"] == WHOLE_BLOCKS // 2


@pytest.mark.parametrize(("scenario", "blocks"), [("tier_below", 128), ("hybrid_tier_below", 160)])
def test_what_host_memory_has_no_room_for_comes_back_from_a_tier(
    report: dict[str, Any], scenario: str, blocks: int
) -> None:
    part = report[scenario]
    assert part["tokens_identical"]
    assert part["logprobs_identical"]
    assert part["prompts_from_host"] == 4
    assert part["host_tokens"] == WHOLE_BLOCKS
    figures = part["figures"]
    # Room for two prompts, which return in the order in which they came: none is there still.
    assert figures["cpu_slots"] == blocks // 2
    assert figures["tier_0_example_stored_blocks"] == blocks
    assert figures["tier_0_example_loaded_blocks"] == blocks
    assert figures["tier_0_example_pinned_blocks"] == 0
    assert figures["tier_0_example_breaker_state"] == 0
    assert figures["example_resident_blocks"] == blocks


@pytest.mark.parametrize("scenario", ["tier_below", "hybrid_tier_below"])
def test_vllm_shuts_the_tiers_down(report: dict[str, Any], scenario: str) -> None:
    assert report[scenario]["threads_left"] == []
    assert report[scenario]["memory_left"] == []


def test_one_wrong_bit_would_be_noticed(report: dict[str, Any]) -> None:
    part = report["one_wrong_bit"]
    assert part["host_tokens"] == WHOLE_BLOCKS
    assert not part["logprobs_identical"]
    assert not part["good"]


def test_the_demo(report: dict[str, Any]) -> None:
    part = report["demo"]
    assert part["exit_code"] == 0
    assert part["tokens_identical"]
    assert part["logprobs_identical"]
    assert part["host_tokens"] == 2 * 2048
    # On any machine: computing 2,048 tokens takes ten times as long as copying their blocks.
    assert part["seconds_warm"] < part["seconds_cold"]


def test_vllm_shows_kvtiers_figures(report: dict[str, Any]) -> None:
    part = report["metrics"]
    assert part["by_name"]["vllm:kvtier_cpu_stored_blocks"] == 1024 // 32
    assert part["by_name"]["vllm:kvtier_cpu_loaded_blocks"] == 1024 // 32
    assert part["by_name"]["vllm:kvtier_cpu_resident_blocks"] == 1024 // 32
    assert part["by_name"]["vllm:kvtier_cpu_pinned_blocks"] == 0
    assert part["by_source"]["host"] == 1024
    assert part["by_source"]["external_unspecified"] == 0


def test_the_adapter_costs_well_under_a_microsecond(report: dict[str, Any]) -> None:
    assert report["adapters"]["cost"]["adapter_ns"] < 1000


def test_the_adapter_speaks_vllms_language(report: dict[str, Any]) -> None:
    mapped = report["adapters"]["mapped"]
    assert mapped["answers_are_vllms"]
    assert mapped["answers"] == ["MISS", "HIT_PENDING", "HIT"]
    assert mapped["output_is_vllms"]
    assert mapped["policy"] == "CHUNK_LEVEL"
    assert mapped["load_slots"] == mapped["store_slots"][::-1]
    assert mapped["events"] == [["vllm.v1.kv_offload.base", "CPU", False, 2]]
    assert mapped["load_source"] == "host"
    assert mapped["prompt_order"]
    assert mapped["undeclared_figures"] == []


def test_a_failed_transfer_stops_the_engine(report: dict[str, Any]) -> None:
    failed = report["adapters"]["failed"]
    assert "store to host memory failed" in failed["store"]
    assert "load from host memory failed" in failed["load"]


def test_a_tier_that_does_not_exist_is_refused(report: dict[str, Any]) -> None:
    message = report["adapters"]["refused"]
    assert message.startswith('secondary_tiers[0].type: got "exampel"')
    assert message.endswith('Did you mean "example"?')


def test_a_disk_tier_wants_to_know_the_weights(report: dict[str, Any]) -> None:
    message = report["adapters"]["disk_without_namespace"]
    assert message.startswith("cache_namespace: got nothing")
    assert "Set cache_namespace to your own word for these weights" in message


def test_replicas_given_one_path_have_a_file_each(report: dict[str, Any]) -> None:
    # vLLM tells replicas of a dense model that they are the only one.
    for files in report["adapters"]["files_of_replicas"].values():
        assert files == ["kv-dp0.slab", "kv-dp1.slab"]
    assert report["adapters"]["file_of_an_only_engine"] == ["kv.slab"]


def test_an_unknown_vllm_is_warned_about_once(report: dict[str, Any]) -> None:
    (line,) = report["adapters"]["version_warnings"]
    assert "tested with vLLM 0.1, this is 0.32" in line
