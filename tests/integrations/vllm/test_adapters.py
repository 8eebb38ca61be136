"""The adapters between vLLM and kvtier, without an engine: mapping, refusals, and cost."""

from __future__ import annotations

from typing import Any

import pytest

from tests.e2e.vllm.processes import VLLM
from tests.integrations.vllm import adapter_report

pytestmark = pytest.mark.vllm


@pytest.fixture
def report(vllm: VLLM) -> dict[str, Any]:
    # Without it, some releases have random block hashes, which a disk tier refuses.
    return vllm.but(environment={"PYTHONHASHSEED": "0"}).once(adapter_report.report)


def test_the_adapter_costs_well_under_a_microsecond(report: dict[str, Any]) -> None:
    assert report["cost"]["adapter_ns"] < 1000


def test_the_adapter_speaks_vllms_language(report: dict[str, Any]) -> None:
    mapped = report["mapped"]
    assert mapped["answers_are_vllms"]
    assert mapped["answers"] == ["MISS", "HIT_PENDING", "HIT"]
    assert mapped["output_is_vllms"]
    assert mapped["policy"]
    assert mapped["load_slots"] == mapped["store_slots"][::-1]
    (event,) = mapped["events"]
    assert event == ["vllm.v1.kv_offload.base", mapped["medium_of_host_memory"], False, 2]
    assert mapped["load_source"] in {"host", None}
    assert mapped["prompt_order"] in {True, None}
    assert mapped["undeclared_figures"] == []


def test_a_failed_store_is_reported_done_and_never_served(report: dict[str, Any]) -> None:
    failed = report["failed_store"]
    assert failed["reported"] == [True, True]
    assert failed["lookups"] == ["MISS", "HIT"]
    assert failed["failed_stores"] == 1


def test_a_failed_load_is_tried_again(report: dict[str, Any]) -> None:
    load = report["load_that_fails_twice"]
    assert load["raised"] is None
    assert load["reported"] == [1]
    assert load["attempts"] == 3


def test_a_load_that_fails_for_good_stops_an_engine_that_cannot_be_told(
    report: dict[str, Any],
) -> None:
    load = report["load_that_fails_for_good"]
    assert load["reported"] == []
    assert load["attempts"] == 3
    assert "a load of 1 device blocks from host memory failed 3 times" in load["raised"]
    assert "Use KVTierConnector" in load["raised"]


def test_a_tier_that_does_not_exist_is_refused(report: dict[str, Any]) -> None:
    message = report["refused"]
    assert message.startswith('secondary_tiers[0].type: got "exampel"')
    assert message.endswith('Did you mean "example"?')


def test_a_disk_tier_wants_to_know_the_weights(report: dict[str, Any]) -> None:
    message = report["disk_without_namespace"]
    assert message.startswith("cache_namespace: got nothing")
    assert "Set cache_namespace to your own name for these weights" in message


def test_ranks_that_do_not_share_the_schedulers_memory_are_refused(
    report: dict[str, Any],
) -> None:
    message = report["scheduler_without_ranks"]
    assert message.startswith("parallel.world_size: got 1, of which ranks 0 do not share")
    assert "Run each engine on one host" in message


def test_replicas_given_one_path_have_a_file_each(report: dict[str, Any]) -> None:
    # vLLM configures each replica of a dense model as the only one.
    for files in report["files_of_replicas"].values():
        assert files == ["kv-dp0.slab", "kv-dp1.slab"]
    assert report["file_of_an_only_engine"] == ["kv.slab"]


def test_an_unknown_vllm_is_warned_about_once(report: dict[str, Any]) -> None:
    (line,) = report["version_warnings"]
    assert "this is 0.1.2" in line
