"""The sources of blocks that vLLM gets from the manager, and which blocks count as used."""

from __future__ import annotations

from typing import Any

import pytest

from tests.e2e.vllm.processes import VLLM
from tests.integrations.vllm import adapter_report

pytestmark = pytest.mark.vllm


@pytest.fixture
def report(vllm: VLLM) -> dict[str, Any]:
    if vllm.version < (0, 32):
        pytest.skip("this vLLM reports itself what is used, and does not ask where from")
    return vllm.once(adapter_report.manager_report)


def test_vllm_is_told_where_blocks_come_from(report: dict[str, Any]) -> None:
    assert report["local_disk"] == ["DISK", "DISK", "HOST"]
    assert report["remote_disk"] == ["EXTERNAL_UNSPECIFIED", "EXTERNAL_UNSPECIFIED", "HOST"]
    # vLLM accepts only its own names, and has none for a directory that engines share.
    assert report["fs"] == ["EXTERNAL_UNSPECIFIED", "EXTERNAL_UNSPECIFIED", "HOST"]
    assert report["local_fs"] == ["DISK", "DISK", "HOST"]
    assert report["memory"] == ["HOST", "HOST", "HOST"]


@pytest.mark.parametrize("on_device", ["none", "half", "half, of one that is decoding", "all"])
def test_the_head_of_a_prompt_outlives_its_tail(report: dict[str, Any], on_device: str) -> None:
    """Independent of how much of the prompt vLLM has found on the device."""
    assert report["left_first"][on_device] == ["unused1", "unused0", "used3", "used2", "used1"]
