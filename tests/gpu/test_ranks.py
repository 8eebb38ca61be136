"""Two processes are two ranks of one region, and neither touches the other's cells."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest

from kvtier.cpu.shared_offload_region import SharedOffloadRegion
from tests.gpu.checked_worker import POISON, require_equal, row_bytes
from tests.gpu.jobs import load, store
from tests.gpu.places import NO_DEVICE, has_cuda
from tests.gpu.rank_process import (
    BLOCKS_PER_CHUNK,
    LAYOUT,
    NUM_BLOCKS,
    NUM_SLOTS,
    WORLD_SIZE,
    RankProcess,
)

ROUNDS = 5


@pytest.mark.parametrize("place_name", ["cpu", "cuda"])
def test_ranks_keep_to_their_cells(place_name: str, shm: Path, tmp_path: Path) -> None:
    if place_name == "cuda" and not has_cuda():
        pytest.skip(NO_DEVICE)
    row = row_bytes(LAYOUT, WORLD_SIZE)
    region = SharedOffloadRegion(
        "ranks", NUM_SLOTS, None, row, LAYOUT.cell_bytes, directory=str(shm)
    )
    rows = np.asarray(region.create_kv_memoryview())
    rows[:] = POISON
    expected_rows = rows.copy()
    expected_memory = [LAYOUT.new_memory(rank) for rank in range(WORLD_SIZE)]
    ranks = [RankProcess(place_name, shm, rank) for rank in range(WORLD_SIZE)]
    try:
        assert [process.receive() for process in ranks] == ["ready"] * WORLD_SIZE
        rng = random.Random(5)
        for is_store in [True, False] * ROUNDS:
            for rank, process in enumerate(ranks):  # side by side
                process.send("do", jobs=(jobs := some_jobs(is_store, rng)))
                for _, blocks, slots in jobs:
                    job = store(blocks, slots) if is_store else load(slots, blocks)
                    job.apply(LAYOUT, rank, expected_rows, expected_memory[rank])
            for process in ranks:
                assert all(process.receive())
            require_equal(rows, expected_rows, "the region")
        for rank, process in enumerate(ranks):
            path = tmp_path / f"{rank}.npz"
            process.send("save", path=str(path))
            process.receive()
            with np.load(path) as saved:
                for name, expected in zip(saved.files, expected_memory[rank], strict=True):
                    require_equal(saved[name], expected, f"{name} of rank {rank}")
    finally:
        statuses = [process.end() for process in ranks]
        del rows
        region.cleanup()
    assert statuses == [0] * WORLD_SIZE


def some_jobs(is_store: bool, rng: random.Random) -> list[tuple[bool, list[int], list[int]]]:
    """Several jobs of a direction: the last one for a slot or a block counts."""
    jobs = []
    for _ in range(20):
        slots = rng.sample(range(NUM_SLOTS), rng.randint(1, NUM_SLOTS))
        blocks = rng.sample(range(NUM_BLOCKS), len(slots) * BLOCKS_PER_CHUNK)
        jobs.append((is_store, blocks, slots))
    return jobs
