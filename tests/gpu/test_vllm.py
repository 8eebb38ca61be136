"""Stock vLLM on a GPU gives the same answers, bit for bit, wherever a prompt's blocks come from.

They are compared with a hit in the device's own cache: a prompt that is computed in one piece and
one that is computed after a hit differ in the last bits of bf16, with and without kvtier. So do
requests that are computed together with others; for these, the bytes that the model reads are
compared.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from kvtier.testing.vllm.tiny_model import GEMMA3_HYBRID, LLAMA
from tests.gpu import places
from tests.gpu.vllm_probe import FAMILY_TOKENS, PROMPT_TOKENS

PATIENCE_S = 240
BLOCKS = 32
"""Tokens of a prompt."""
AT_ONCE = 6
"""Engines at the same time. Nearly all of their time goes into starting."""

GRAPHS = {
    "enforce_eager": False,
    # Not compiled: that takes a C compiler, and changes nothing about how graphs are launched.
    "compilation_config": {
        "mode": 0,
        "cudagraph_mode": "FULL_DECODE_ONLY",
        "cudagraph_capture_sizes": [1, 2, 4, 8],
    },
}
CHUNKED = {"max_num_batched_tokens": 256}
ASYNCHRONOUS, SYNCHRONOUS = {"async_scheduling": True}, {"async_scheduling": False}

pytestmark = [
    pytest.mark.skipif(not places.has_cuda(), reason=places.NO_DEVICE),
    pytest.mark.skipif(find_spec("vllm") is None, reason="no vLLM beside this python"),
]

Answers = dict[str, Any]


def probe(folder: Path, **order: Any) -> Answers:
    """The answers of an engine in a process of its own."""
    order = {
        "plug_in": "connector",
        "restart": False,
        "sleep": False,
        "crowd": False,
        "engine": {},
        "folder": str(folder),
    } | order
    done = subprocess.run(
        [sys.executable, "-m", "tests.gpu.vllm_probe", json.dumps(order)],
        env=os.environ | {"PYTHONHASHSEED": "0"},
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    answers: Answers = json.loads(done.stdout)
    return answers


@pytest.fixture(scope="module")
def answers_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Answers]:
    """Runs all engines, several at the same time, and keeps their answers."""
    folder = tmp_path_factory.mktemp("vllm")
    llama = str(LLAMA.write(folder / "llama"))
    hybrid = str(GEMMA3_HYBRID.write(folder / "hybrid"))
    host = {"cpu_bytes_to_use": "1GiB"}
    tier = {"type": "disk", "path": str(folder / "kv.slab"), "max_bytes": "1GiB"}
    disk = host | {
        "prefill_tokens_per_s": 0,
        "secondary_tiers": [tier],
        "reset_scope": "primary",  # vLLM resets when it sleeps
    }
    orders: dict[str, dict[str, Any]] = {
        "sleep": {"kvtier": disk, "sleep": True},
        "llama without kvtier": {"kvtier": None},
        "hybrid without kvtier": {"kvtier": None, "model": hybrid},
        "connector": {"engine": ASYNCHRONOUS},
        "spec": {"plug_in": "spec"},
        "hybrid": {"model": hybrid},
        "large chunks": {"kvtier": host | {"block_size": 128}},
        "synchronous": {"engine": SYNCHRONOUS | CHUNKED},
        "graphs": {"engine": ASYNCHRONOUS | GRAPHS},
        "crowd": {"crowd": True, "engine": ASYNCHRONOUS | CHUNKED},
        "crowd with graphs": {"crowd": True, "engine": SYNCHRONOUS | CHUNKED | GRAPHS},
    }
    running: dict[str, Future[Answers]] = {}

    def run(name: str, order: dict[str, Any]) -> Answers:
        return probe(folder / f"of {name}", **({"model": llama, "kvtier": host} | order))

    def run_again() -> Answers:
        running["sleep"].result()
        return run("restart", {"kvtier": disk, "restart": True})

    began = time.perf_counter()
    with ThreadPoolExecutor(AT_ONCE) as pool:
        running |= {name: pool.submit(run, name, order) for name, order in orders.items()}
        running["restart"] = pool.submit(run_again)
    print(f"{len(running)} engines in {time.perf_counter() - began:.0f} s")
    return lambda name: running[name].result()


def require_same(answers: Answers, what: str) -> None:
    for got, expected in zip(answers[what], answers["from the device"], strict=True):
        assert got["tokens"] == expected["tokens"], what
        assert got["logprobs"] == expected["logprobs"], what
        assert got["cached_tokens"] == expected["cached_tokens"] >= PROMPT_TOKENS, what


def require_loaded(answers: Answers) -> None:
    assert answers["figures"]["cpu_loaded_blocks"] > 0
    assert not answers["figures"].get("failed_loads")


@pytest.mark.parametrize("name", ["connector", "spec", "hybrid", "large chunks"])
def test_answers_are_the_same_wherever_blocks_come_from(
    name: str, answers_of: Callable[[str], Answers]
) -> None:
    """As a connector and as a spec, with two kinds of attention, with chunks of four blocks: the
    answers are those without kvtier."""
    answers = answers_of(name)
    stock = answers_of("hybrid without kvtier" if name == "hybrid" else "llama without kvtier")
    for what in ("computed", "from the device"):
        assert [each["tokens"] for each in answers[what]] == [e["tokens"] for e in stock[what]]
        assert [e["logprobs"] for e in answers[what]] == [e["logprobs"] for e in stock[what]]
    require_same(answers, "from the host")
    require_loaded(answers)


def test_answers_are_the_same_in_asynchronous_steps(
    answers_of: Callable[[str], Answers],
) -> None:
    answers = answers_of("connector")
    require_same(answers, "from the host")
    assert answers["mode"]["asynchronous"]


def test_answers_are_the_same_with_graphs(answers_of: Callable[[str], Answers]) -> None:
    answers = answers_of("graphs")
    require_same(answers, "from the host")
    require_loaded(answers)
    assert answers["mode"]["graph replays"] > 0


def test_answers_are_the_same_in_synchronous_steps_and_prompts_in_pieces(
    answers_of: Callable[[str], Answers],
) -> None:
    answers = answers_of("synchronous")
    require_same(answers, "from the host")
    require_loaded(answers)
    assert not answers["mode"]["asynchronous"]
    assert answers["mode"]["tokens per step"] < PROMPT_TOKENS


@pytest.mark.parametrize("name", ["crowd", "crowd with graphs"])
def test_a_crowd_reads_what_was_computed(name: str, answers_of: Callable[[str], Answers]) -> None:
    """Nothing is computed twice, so every byte that is read was computed once. It can differ only
    if it was lost, or came too late, or was overwritten."""
    answers = answers_of(name)
    assert set(answers["cached"]["known"]) == {PROMPT_TOKENS}
    assert set(answers["cached"]["new"]) == {FAMILY_TOKENS}
    watch = answers["watch"]
    assert watch["compared"] > 10_000
    assert watch["wrong"] == 0
    assert watch["busy steps"] > 0
    assert answers["figures"]["cpu_loaded_blocks"] > 10 * BLOCKS
    require_loaded(answers)
    has_graphs = name == "crowd with graphs"
    assert (answers["mode"]["graph replays"] > 0) == has_graphs
    assert answers["mode"]["asynchronous"] == (not has_graphs)


def test_answers_are_the_same_after_a_sleep(answers_of: Callable[[str], Answers]) -> None:
    """Another process used the device's memory meanwhile. The engine was idle before: vLLM does not
    sleep while blocks are being stored."""
    answers = answers_of("sleep")
    require_same(answers, "from the host")
    require_same(answers, "after a sleep")
    require_loaded(answers)
    assert answers["figures"]["cpu_promoted_blocks"] >= 3 * BLOCKS


def test_answers_are_the_same_after_a_restart(answers_of: Callable[[str], Answers]) -> None:
    answers = answers_of("restart")
    require_same(answers, "after a restart")
    assert answers["figures"]["cpu_promoted_blocks"] >= 3 * BLOCKS
