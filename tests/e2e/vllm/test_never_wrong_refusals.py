"""Setups that could give wrong answers, or never find a block, are refused with a remedy."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kvtier.testing.vllm.in_process import PlugIn
from tests.e2e.vllm.lasting_tiers import LASTING, over, with_common_hashes
from tests.e2e.vllm.processes import VLLM
from tests.e2e.vllm.scenarios.refusals import FROM_ANOTHER_HOST, can_be_elsewhere, refusal
from tests.e2e.vllm.subject import Subject

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.parametrize("subject", ["llama"], indirect=True),
]

ENGINE: dict[str, Any] = {"device_blocks": 32, "max_model_len": 128}
PLUG_INS = pytest.mark.parametrize("plug_in", ["connector", "spec"])


@pytest.mark.parametrize("tier", ["disk", "fs"])
@pytest.mark.parametrize(
    ("unknown", "reason"),
    [({"load_format": "dummy"}, "load_format is dummy"), ({"enable_lora": True}, "LoRA")],
    ids=["dummy weights", "lora"],
)
def test_weights_that_nobody_knows_are_not_kept_unless_the_user_names_them(
    vllm: VLLM,
    subject: Subject,
    tmp_path: Path,
    tier: str,
    unknown: dict[str, Any],
    reason: str,
) -> None:
    options = over(LASTING[tier](tmp_path), subject)
    vllm = with_common_hashes(vllm)
    outcome = vllm.run(refusal, str(subject.path), options, **ENGINE, **unknown)
    assert outcome["when"] == "at start"
    assert reason in outcome["why"]
    assert "cache_namespace" in outcome["why"]
    assert outcome["left"] == []
    assert list(tmp_path.iterdir()) == []
    named = options | {"cache_namespace": "these"}
    outcome = vllm.run(refusal, str(subject.path), named, **ENGINE, **unknown)
    assert outcome == {"when": "never", "why": "", "left": []}


def test_the_plain_door_does_not_know_any_weights(
    vllm: VLLM, subject: Subject, tmp_path: Path
) -> None:
    options = over(LASTING["disk"](tmp_path), subject)
    vllm = with_common_hashes(vllm)
    outcome = vllm.run(refusal, str(subject.path), options, plug_in="spec", **ENGINE)
    assert outcome["when"] == "at start"
    assert "cache_namespace" in outcome["why"]
    assert "KVTierConnector" in outcome["why"]
    assert outcome["left"] == []
    assert list(tmp_path.iterdir()) == []


@PLUG_INS
@pytest.mark.parametrize("tier", ["disk", "fs"])
def test_blocks_that_no_later_process_would_find_are_not_kept(
    vllm: VLLM, subject: Subject, tmp_path: Path, tier: str, plug_in: PlugIn
) -> None:
    options = over(LASTING[tier](tmp_path), subject) | {"cache_namespace": "these"}
    # Later releases draw a random root only for hashes that are not cryptographic.
    random_root = {"prefix_caching_hash_algo": "xxhash"} if vllm.version >= (0, 32) else {}
    outcome = vllm.run(
        refusal, str(subject.path), options, plug_in=plug_in, **ENGINE, **random_root
    )
    # A spec does not know the hash algorithm.
    is_told_late = plug_in == "spec" and vllm.version >= (0, 32)
    assert outcome["when"] == ("at the first request" if is_told_late else "at start")
    assert "PYTHONHASHSEED=0" in outcome["why"]
    assert tier in outcome["why"]
    assert ("--prefix-caching-hash-algo sha256_cbor" in outcome["why"]) is (vllm.version >= (0, 32))
    assert outcome["left"] == []
    if not is_told_late:
        assert list(tmp_path.iterdir()) == []
    seeded = vllm.but(environment={"PYTHONHASHSEED": "0"})
    outcome = seeded.run(
        refusal, str(subject.path), options, plug_in=plug_in, **ENGINE, **random_root
    )
    assert outcome == {"when": "never", "why": "", "left": []}


@PLUG_INS
def test_a_rank_that_does_not_share_memory_is_refused(
    vllm: VLLM, subject: Subject, tmp_path: Path, plug_in: PlugIn
) -> None:
    if not vllm.run(can_be_elsewhere):
        pytest.skip("this process may not have a /dev/shm of its own: it takes CAP_SYS_ADMIN")
    options = FROM_ANOTHER_HOST | over(LASTING["disk"](tmp_path), subject)
    options |= {"cache_namespace": "these"}
    vllm = with_common_hashes(vllm)
    outcome = vllm.run(refusal, str(subject.path), options, plug_in=plug_in, **ENGINE)
    assert outcome["when"] == "at start"
    assert "ranks 0 do not share the memory of the scheduler's host" in outcome["why"]
    assert "--ipc=host" in outcome["why"]
    assert list(tmp_path.iterdir()) == []
    # The scheduler cannot reach the memory of the rank; it is freed with the rank's process, which
    # is checked when this test ends.
    assert [name for name in outcome["left"] if not name.endswith(".region")] == []
