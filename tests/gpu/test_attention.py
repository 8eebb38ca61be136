"""Attention runs over some blocks of a cache while others are stored and loaded.

Neither disturbs the other: attention computes what it computes alone, and every loaded block is
right as soon as it is reported.
"""

from __future__ import annotations

import random
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from kvtier.cpu.cuda.copies import CopyPath
from kvtier.cpu.cuda.streams import StreamCopies
from kvtier.cpu.gpu_worker import GPUOffloadingWorker
from tests.gpu.cache_layout import CacheLayout, PagedTensor
from tests.gpu.checked_worker import open_checked_worker
from tests.gpu.jobs import Job, load, store
from tests.gpu.places import CudaPlace, Place

HEADS, BLOCK_TOKENS, HEAD_SIZE = 8, 16, 64
PAGE = HEADS * BLOCK_TOKENS * HEAD_SIZE * 2
READ_BLOCKS, STORED_BLOCKS, LOADED_BLOCKS = range(32), range(32, 64), range(64, 96)
NUM_BLOCKS, NUM_SLOTS = 96, 64
STORED_SLOTS, LOADED_SLOTS = range(32), range(32, 64)
LAYOUT = CacheLayout(
    NUM_BLOCKS,
    (2 * PAGE * NUM_BLOCKS,),
    tuple(PagedTensor(0, offset, 2 * PAGE, PAGE, "bfloat16") for offset in (0, PAGE)),
    ({0: PAGE, 1: PAGE},),
)
MOST_UNDER_WAY = 32


class Attention:
    """Attention over all blocks that it reads, gathered anew each time, as in a decoding step."""

    def __init__(self, place: Place, allocation: Any) -> None:
        self._cache = allocation.view(torch.bfloat16).view(
            NUM_BLOCKS, 2, HEADS, BLOCK_TOKENS, HEAD_SIZE
        )
        # Random bytes are no numbers to compute with.
        generator = torch.Generator().manual_seed(3)
        values = torch.randn(self._cache.shape, generator=generator).to(torch.bfloat16)
        self._cache.copy_(values)
        self._query = (
            values[:4, 0].transpose(0, 1).reshape(1, HEADS, -1, HEAD_SIZE).to(place.device)
        )
        self._blocks = torch.tensor(READ_BLOCKS[::-1], device=place.device)
        self._step()
        self._reference = self._step()
        self._num_wrong = torch.zeros((), dtype=torch.int64, device=place.device)
        for _ in range(3):
            self.step()
        place.finish_compute()
        assert self.num_wrong == 0, "attention alone is not repeatable here"

    def _step(self) -> Any:
        gathered = self._cache[self._blocks].permute(1, 2, 0, 3, 4)
        keys, values = gathered.reshape(2, 1, HEADS, -1, HEAD_SIZE)
        return torch.nn.functional.scaled_dot_product_attention(self._query, keys, values)

    def step(self) -> None:
        self._num_wrong += (self._step() != self._reference).any()

    def require_right(self, blocks: list[int], expected: Any) -> None:
        """Make the device compare blocks that were just loaded."""
        self._num_wrong += (self._cache[blocks] != expected).any()

    @property
    def num_wrong(self) -> int:
        return int(self._num_wrong.item())


def test_attention_and_copies_do_not_disturb_each_other(place: Place, shm: Path) -> None:
    duration_s, least_steps = (5.0, 100) if isinstance(place, CudaPlace) else (0.0, 6)
    place.use(*CopyPath)
    rng = random.Random(11)
    with open_checked_worker(place, LAYOUT, shm, num_slots=NUM_SLOTS) as rig:
        attention = Attention(place, rig.memory[0])
        rig.expected_memory[0][:] = place.download(rig.memory[0])
        rig.do(store(STORED_BLOCKS, LOADED_SLOTS))
        # The slots to load from stay as they are: slot i holds the first stored block + i.
        loadable = attention._cache[list(STORED_BLOCKS)].clone()
        under_way: dict[int, Job] = {}
        busy_blocks: set[int] = set()
        done, next_id, num_steps = 0, 1, 0
        deadline = time.monotonic() + duration_s
        while under_way or num_steps < least_steps or time.monotonic() < deadline:
            place.compute(attention.step)
            num_steps += 1
            if num_steps % 16 == 0:
                place.finish_compute()  # or it would run ahead of the device without end
            is_ending = num_steps >= least_steps and time.monotonic() >= deadline
            while len(under_way) < MOST_UNDER_WAY and not is_ending:
                job = some_job(rng, busy_blocks)
                if not job.is_store:
                    busy_blocks.update(job.parts[0].blocks)
                under_way[next_id] = job
                assert job.submit(rig.worker, next_id)
                next_id += 1
            for result in rig.worker.get_finished():
                assert result.success
                job = under_way.pop(result.job_id)
                rig.apply(job)
                done += 1
                if not job.is_store:
                    blocks, slots = job.parts[0].blocks, job.parts[0].slots
                    expected = loadable[np.array(slots) - LOADED_SLOTS[0]]
                    place.compute(
                        lambda b=blocks, e=expected: attention.require_right(b, e)  # type: ignore[misc]
                    )
                    busy_blocks.difference_update(blocks)
        place.finish_compute()
        assert attention.num_wrong == 0
        rig.check()
        assert done >= MOST_UNDER_WAY
        assert isinstance(rig.worker, GPUOffloadingWorker)
        if isinstance(copies := rig.worker.copies, StreamCopies):
            assert set(copies.taken) == set(CopyPath)


def some_job(rng: random.Random, busy_blocks: set[int]) -> Job:
    """Choose a load of blocks that no other load writes; if there are none, a store."""
    free = sorted(set(LOADED_BLOCKS) - busy_blocks)
    count = rng.randint(1, 8)
    if len(free) >= count and rng.random() < 0.5:
        return load(rng.sample(LOADED_SLOTS, count), rng.sample(free, count))
    return store(rng.sample(STORED_BLOCKS, count), rng.sample(STORED_SLOTS, count))
