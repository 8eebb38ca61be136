"""Answers prepared for all keys of a prompt equal the answers to single lookups."""

from __future__ import annotations

from typing import Any

import pytest

from tests.e2e.vllm.processes import VLLM
from tests.integrations.vllm import adapter_report

pytestmark = pytest.mark.vllm


@pytest.fixture
def report(vllm: VLLM) -> dict[str, Any]:
    return vllm.once(adapter_report.prefix_report)


def test_vllm_is_told_what_there_is(report: dict[str, Any]) -> None:
    assert report["announced"] == {
        "all above": [3],
        "head above": [2],
        "nothing": [0],
        "given up": [0],
        "below": [None, 2],
    }


def test_it_is_told_the_same_without_an_announcement(report: dict[str, Any]) -> None:
    assert report["one_by_one"] == report["announced"]


def test_a_release_with_another_loop_is_left_as_it_is(report: dict[str, Any]) -> None:
    found = report["without_the_loop"]
    assert found["changed"] == []
    [line] = found["said"]
    assert line.startswith("this vLLM has no _maximal_prefix_lookup: blocks are looked up one by")
