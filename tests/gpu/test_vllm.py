"""Stock vLLM on a GPU gives the same answers, bit for bit, wherever a prompt's blocks come from.

They are compared with a hit in the device's own cache: what is computed in one piece and what is
computed after a hit differ in the last bits of bf16 with and without kvtier.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from kvtier.integrations.vllm.tiny_model import GEMMA3_HYBRID, LLAMA
from tests.gpu import places

PATIENCE_S = 240
BLOCKS = 32
"""Of a prompt."""

pytestmark = [
    pytest.mark.skipif(not places.has_cuda(), reason=places.NO_DEVICE),
    pytest.mark.skipif(find_spec("vllm") is None, reason="no vLLM beside this python"),
]


class Probe:
    """A process with an engine."""

    def __init__(self, folder: Path, **order: Any) -> None:
        order = {"door": "connector", "restart": False, "folder": str(folder)} | order
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.gpu.vllm_probe", json.dumps(order)],
            env=os.environ | {"PYTHONHASHSEED": "0"},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def answers(self) -> dict[str, Any]:
        try:
            out, log = self._process.communicate(timeout=PATIENCE_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            out, log = self._process.communicate()
        assert self._process.returncode == 0, log[-4000:]
        answers: dict[str, Any] = json.loads(out)
        return answers


def require_same(answers: dict[str, Any], what: str) -> None:
    for got, expected in zip(answers[what], answers["from the device"], strict=True):
        assert got["tokens"] == expected["tokens"], what
        assert got["logprobs"] == expected["logprobs"], what
        assert got["cached_tokens"] == expected["cached_tokens"] >= 1_024, what


def test_answers_are_the_same_wherever_blocks_come_from(tmp_path: Path) -> None:
    """Both doors, a model with two kinds of attention, chunks of four blocks: at the same time,
    beside vLLM without kvtier."""
    llama = str(LLAMA.write(tmp_path / "llama"))
    hybrid = str(GEMMA3_HYBRID.write(tmp_path / "hybrid"))
    host = {"cpu_bytes_to_use": "1GiB"}
    probes = {
        "connector": Probe(tmp_path / "1", model=llama, kvtier=host),
        "plain": Probe(tmp_path / "2", model=llama, kvtier=host, door="plain"),
        "hybrid": Probe(tmp_path / "3", model=hybrid, kvtier=host),
        "chunks": Probe(tmp_path / "4", model=llama, kvtier=host | {"block_size": 128}),
    }
    without = {
        model: Probe(tmp_path / model, model=path, kvtier=None)
        for model, path in (("llama", llama), ("hybrid", hybrid))
    }
    stock = {model: probe.answers() for model, probe in without.items()}
    for name, probe in probes.items():
        answers = probe.answers()
        for what in ("computed", "from the device"):
            expected = stock["hybrid" if name == "hybrid" else "llama"][what]
            assert [each["tokens"] for each in answers[what]] == [e["tokens"] for e in expected]
            assert [e["logprobs"] for e in answers[what]] == [e["logprobs"] for e in expected]
        require_same(answers, "from the host")
        assert answers["figures"]["cpu_loaded_blocks"] > 0, name
        assert not answers["figures"].get("failed_loads"), name


def test_answers_are_the_same_after_a_restart(tmp_path: Path) -> None:
    llama = str(LLAMA.write(tmp_path / "llama"))
    tier = {"type": "disk", "path": str(tmp_path / "kv.slab"), "max_bytes": "1GiB"}
    kvtier = {"cpu_bytes_to_use": "1GiB", "prefill_tokens_per_s": 0, "secondary_tiers": [tier]}
    Probe(tmp_path / "1", model=llama, kvtier=kvtier).answers()
    answers = Probe(tmp_path / "2", model=llama, kvtier=kvtier, restart=True).answers()
    require_same(answers, "after a restart")
    assert answers["figures"]["cpu_promoted_blocks"] >= 3 * BLOCKS
