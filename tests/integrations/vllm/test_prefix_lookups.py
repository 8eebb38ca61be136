"""A manager that is told of all keys of a prompt says the same as one that is asked one by one."""

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
