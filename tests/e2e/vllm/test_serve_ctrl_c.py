"""Ctrl-C right after an answer, with the flags that `kvtier vllm-config` prints."""

from __future__ import annotations

import os
import shlex
import signal
from pathlib import Path

import pytest

from kvtier.cli import main
from tests.e2e.vllm.openai_server import Server
from tests.e2e.vllm.processes import VLLM
from tests.e2e.vllm.test_serve import BLOCKS_OF_PROMPT, PROMPTS, disk, has_stored, options

pytestmark = pytest.mark.vllm


def test_the_blocks_of_the_last_answer_are_on_disk(
    vllm: VLLM, llama: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    slab = tmp_path / "kv.slab"
    assert main(["vllm-config", "--no-check", "--cpu", "1GiB", "--disk", f"{slab}:64MiB"]) == 0
    *flags, _, _ = shlex.split(capsys.readouterr().out)
    assert flags
    with Server(vllm, llama, options(disk(slab)), *flags) as server:
        server.wait_until_up()
        server.complete(PROMPTS[0], max_tokens=8)
        # A terminal sends the signal to every process that it started.
        os.killpg(server.process.pid, signal.SIGINT)
        server.process.wait()
    assert has_stored(slab, BLOCKS_OF_PROMPT)
