"""The log lines of an engine that starts, and of one that cannot."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import kvtier
from kvtier.testing.vllm.in_process import BLOCK_TOKENS, PlugIn
from tests.e2e.vllm.lasting_tiers import disk_in, fs_in, with_common_hashes
from tests.e2e.vllm.processes import VLLM
from tests.e2e.vllm.remote_engine import RemoteEngine
from tests.e2e.vllm.scenarios.refusals import last_words, lines_before_the_start
from tests.e2e.vllm.subject import Subject

pytestmark = pytest.mark.vllm

LONGEST = 512
ENGINE: dict[str, Any] = {"device_blocks": 64, "max_model_len": LONGEST}


@pytest.mark.parametrize("plug_in", ["connector", "spec"])
@pytest.mark.parametrize("subject", ["llama", "hybrid"], indirect=True)
def test_host_memory_alone_says_what_it_has_room_for(
    vllm: VLLM, subject: Subject, plug_in: PlugIn
) -> None:
    groups = 1 if subject.path.name == "llama" else 3
    blocks = LONGEST // BLOCK_TOKENS * groups - 1  # one too few for the longest prompt
    options = {"cpu_bytes_to_use": blocks * subject.slot_bytes()}
    with RemoteEngine(vllm, subject.path, options, plug_in=plug_in, **ENGINE) as engine:
        told = engine.told()
    tokens = blocks * BLOCK_TOKENS // groups
    [banner] = [text for level, text in told if level == "INFO" and text.startswith("release")]
    assert banner.startswith(f"release {kvtier.__version__} in vLLM {vllm.zygote.vllm_version}")
    assert banner.endswith(f": host memory {blocks} blocks ({tokens} tokens)")
    warnings = [text for level, text in told if level == "WARNING"]
    if plug_in == "connector":  # a spec does not know the longest prompt
        [warning] = warnings
        assert warning.startswith(f"host memory holds {tokens} tokens, and a prompt may have 512")
        assert "Give it more room, or lower --max-model-len" in warning
    else:
        assert warnings == []


@pytest.mark.parametrize("subject", ["llama"], indirect=True)
def test_every_tier_says_what_it_has_room_for(vllm: VLLM, subject: Subject, tmp_path: Path) -> None:
    tiers = [disk_in(tmp_path), fs_in(tmp_path), {"type": "example", "max_blocks": 3}]
    options = {"cpu_bytes_to_use": "64MiB", "secondary_tiers": tiers}
    with RemoteEngine(with_common_hashes(vllm), subject.path, options, **ENGINE) as engine:
        engine.generate(list(range(3, 3 + BLOCK_TOKENS)))
        told, figures = engine.told(), engine.figures()
    [banner] = [text for level, text in told if text.startswith("release")]
    capacity = figures['disk_capacity_blocks{tier="0:disk"}']
    assert f", disk {capacity:.0f} blocks (" in banner
    assert ", fs " in banner
    assert ", example 3 blocks (" in banner
    [warning] = [text for level, text in told if level == "WARNING" and "tokens, and" in text]
    assert warning.startswith("example holds ")


@pytest.mark.parametrize(
    ("key", "size", "remedy"),
    [("cpu_bytes_to_use", "4KiB", "Write "), ("cpu_byte_to_use", "4GiB", "Did you mean ")],
)
@pytest.mark.parametrize("plug_in", ["connector", "spec"])
@pytest.mark.parametrize("subject", ["llama"], indirect=True)
def test_an_engine_that_cannot_start_says_so_in_one_line(
    vllm: VLLM, subject: Subject, plug_in: PlugIn, key: str, size: str, remedy: str
) -> None:
    told = vllm.run(last_words, str(subject.path), {key: size}, plug_in=plug_in, **ENGINE)
    [line] = told["errors"]
    assert line == f"cannot start: {' '.join(told['raised'].split())}"
    assert "\n" not in line
    assert remedy in line


def test_a_key_that_is_refused_early_is_logged_with_the_mark_of_kvtier(vllm: VLLM) -> None:
    [line] = vllm.run(lines_before_the_start, {"cpu_byte_to_use": "4GiB"})
    assert line.startswith("kvtier: cannot start: ")
    assert 'Did you mean "cpu_bytes_to_use"?' in line
