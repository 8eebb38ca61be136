"""What kvtier refuses while a vLLM engine starts, and how it logs beside vLLM."""

from __future__ import annotations

from typing import Any

import pytest

from tests.e2e.vllm.processes import VLLM
from tests.integrations.vllm import adapter_report

pytestmark = pytest.mark.vllm


@pytest.fixture
def report(vllm: VLLM) -> dict[str, Any]:
    return vllm.once(adapter_report.start_report)


def test_a_rank_that_has_not_signed_in_is_refused(report: dict[str, Any]) -> None:
    found = report["rank_that_has_not_signed_in"]
    assert found["made"] == 1
    assert found["refused"].startswith("parallel.world_size: got 2, of which ranks 1 do not share")
    assert "Run each engine on one host" in found["refused"]
    assert found["left"] == []


def test_the_connector_has_no_use_for_another_spec(report: dict[str, Any]) -> None:
    message = report["spec_of_vllms_own"]
    assert message.startswith("spec_name: got 'CPUOffloadingSpec'")
    assert "Remove spec_name and spec_module_path" in message


def test_only_an_engine_that_may_sleep_waits_for_hand_overs(report: dict[str, Any]) -> None:
    assert report["flushes_as_a_spec"] == {
        "nothing": True,
        "it may": True,
        "it may not": False,
    }


def test_a_typo_is_told_before_weights_are_loaded(report: dict[str, Any]) -> None:
    assert report["good"] == report["good_with_tier"] == "whole"
    assert report["typo"].startswith("eviction_polici: ")
    assert report["typo_in_tier"].startswith('secondary_tiers[0].type: got "exampel"')


def test_an_engine_without_a_server_is_named_before_weights_are_loaded(
    report: dict[str, Any],
) -> None:
    found = report["slab_of_an_orphan"]
    assert found["while_it_lives"].startswith("secondary_tiers[0]: ")
    assert f"end it with `kill {found['pid']}`" in found["while_it_lives"]
    assert found["when_it_is_gone"] == "whole"


def test_kvtier_speaks_with_vllms_voice_unless_it_was_given_another(
    report: dict[str, Any],
) -> None:
    silent = {"vllm's": [], "user's": False, "propagates": True}
    assert report["loggers"] == {
        "untouched": {
            "vllm's": ["WARNING [kvtier/tiering/disk/manager.py] kvtier: 1 of 2"],
            "user's": False,
            "level": "WARNING",
            "propagates": False,
        },
        "with a handler": silent | {"user's": True, "level": "NOTSET"},
        "with a level": silent | {"level": "DEBUG"},
        "vllm without handlers": silent | {"level": "WARNING"},
    }
