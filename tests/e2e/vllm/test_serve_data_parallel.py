"""One server with two replicas of the model: each has memory and a slab file of its own."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest

from kvtier.testing.vllm.in_process import BLOCK_TOKENS
from kvtier.testing.vllm.tiny_model import LLAMA
from tests.e2e.vllm.lasting_tiers import disk_in
from tests.e2e.vllm.openai_server import Server, random_words
from tests.e2e.vllm.process_tree import regions_below
from tests.e2e.vllm.processes import VLLM
from tests.e2e.vllm.test_serve import ENDED_BY_ITSELF, has_stored

pytestmark = pytest.mark.vllm

BLOCKS = 16
TOKENS = BLOCKS * BLOCK_TOKENS
SLOTS = 20
"""Blocks of each replica's host memory: one and a quarter prompts."""
PROMPT, OTHER = (random_words(TOKENS + 8, f"replicas {number}") for number in range(2))


def test_each_replica_has_a_region_and_a_slab_file_of_its_own(
    vllm: VLLM, llama: Path, tmp_path: Path
) -> None:
    options = {
        "cpu_bytes_to_use": SLOTS * LLAMA.bytes_per_block(BLOCK_TOKENS),
        "prefill_tokens_per_s": 0,
        "secondary_tiers": [disk_in(tmp_path)],
    }
    with Server(
        vllm, llama, options, "--data-parallel-size", "2", "--api-server-count", "1"
    ) as server:
        server.wait_until_up()
        regions = regions_below(server.process.pid)
        assert len(regions) == 2
        assert not any(regions.values())
        slabs = [tmp_path / f"kv-dp{replica}.slab" for replica in (0, 1)]
        assert set(tmp_path.iterdir()) == set(slabs)

        answers = []
        for replica, slab in enumerate(slabs):
            for number, prompt in enumerate((PROMPT, OTHER), 1):
                answers.append(server.complete(prompt, replica=replica))
                # Until then, the first prompt's blocks are pinned and leave the second no room.
                server.wait_until(partial(has_stored, slab, number * BLOCKS))
        assert [answer.cached_tokens for answer in answers] == [0] * 4
        server.post("/reset_prefix_cache")
        again = [
            server.complete(prompt, replica=replica)
            for replica in (0, 1)
            for prompt in (OTHER, PROMPT)
        ]
        assert [answer.cached_tokens for answer in again] == [TOKENS] * 4
        # More than a single replica could have loaded.
        assert (
            server.figure('tier_blocks{tier="0:disk",direction="load"}')
            >= 2 * (2 * BLOCKS - SLOTS)
            > BLOCKS
        )
        assert all(answer.is_as(answers[1]) for answer in (again[0], again[2], answers[3]))
        assert all(answer.is_as(answers[0]) for answer in (again[1], again[3], answers[2]))
        stop = server.stop()
    assert stop.end.exit_code in ENDED_BY_ITSELF
    assert stop.end.orphans == []
    assert not any(region.exists() for region in regions)
