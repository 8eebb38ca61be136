"""Write policies over a real disk: after clean ends and after kills."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from kvtier.config.options import WritePolicyName
from tests.tiering.disk.chat_engine import NUM_BLOCKS, NUM_CHATS, NUM_ROWS, NUM_TURNS, prompt
from tests.tiering.disk.engine import configured_engine

_WHOLE = [prompt(chat, NUM_TURNS - 1) for chat in range(NUM_CHATS)]


def hits_of_each_chat(path: Path, write: WritePolicyName) -> list[int]:
    """The blocks of each chat that a new engine finds. Compares every byte that it loads."""
    with configured_engine(path, num_rows=NUM_ROWS, num_blocks=NUM_BLOCKS, write=write) as engine:
        return [engine.serve(blocks) for blocks in _WHOLE]


@pytest.mark.parametrize("write", list(WritePolicyName))
def test_chats_survive_kills(write: WritePolicyName, tmp_path: Path) -> None:
    path = tmp_path / "kv.slab"
    command = [sys.executable, "-m", "tests.tiering.disk.chat_engine", str(path), write]
    for num_served in (70, 3, 90):
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            try:
                assert process.stdout is not None
                for _ in range(num_served):
                    assert process.stdout.readline() == "served\n"
            finally:
                process.kill()
    num_hits = sum(hits_of_each_chat(path, write))  # compares every byte
    # "adaptive" writes what is cheaper to load than to compute, by times that it has measured. On a
    # busy machine that may be nothing.
    assert num_hits > 0 or write is WritePolicyName.ADAPTIVE


@pytest.mark.parametrize("write", [WritePolicyName.ON_EVICT, WritePolicyName.ADAPTIVE])
def test_a_restarted_engine_is_warm(write: WritePolicyName, tmp_path: Path) -> None:
    path = tmp_path / "kv.slab"
    warm = _WHOLE[:4]
    with configured_engine(path, num_rows=NUM_ROWS, num_blocks=NUM_BLOCKS, write=write) as engine:
        for blocks in warm:
            engine.serve(blocks)
        assert 'kvtier_tier_blocks{tier="0:disk",direction="store"}' not in engine.figures()
    assert hits_of_each_chat(path, write)[:4] == [len(blocks) for blocks in warm]


def test_chats_larger_than_host_memory_are_found_again_on_disk(tmp_path: Path) -> None:
    path = tmp_path / "kv.slab"
    with configured_engine(
        path, num_rows=NUM_ROWS, num_blocks=NUM_BLOCKS, write="on_evict"
    ) as engine:
        for _ in range(3):
            for blocks in _WHOLE:
                engine.serve(blocks)
                engine.settle()
        figures = engine.figures()
        assert figures['kvtier_tier_blocks{tier="0:disk",direction="load"}'] > 0
        num_blocks = sum(map(len, _WHOLE))
        assert figures['kvtier_tier_blocks{tier="0:disk",direction="store"}'] <= num_blocks
