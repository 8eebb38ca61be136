"""A thousand jobs under way at once, of both directions and of every path."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from kvtier.base import TransferResult
from kvtier.cpu.cuda import page_kernel
from kvtier.cpu.cuda.copies import CopyPath
from tests.gpu.cache_layout import plain_layout
from tests.gpu.checked_worker import open_checked_worker, poll
from tests.gpu.jobs import Job, load, store
from tests.gpu.places import CPUPlace, Place

NUM_JOBS = 1000
LAYOUT = plain_layout(4096, 4096, num_blocks=32)
STORED_BLOCKS, LOADED_BLOCKS = range(16), range(16, 32)
STORED_SLOTS, LOADED_SLOTS = range(12), range(12, 24)
"""No store reads what a load writes, or the other way round, because the directions have no order.
Within a direction the last job for a slot or a block counts."""


def some_job(rng: random.Random) -> Job | None:
    """None: a job that cannot be right."""
    if rng.random() < 0.05:
        return None
    count = rng.randint(1, 8)
    if rng.random() < 0.5:
        return store(rng.choices(STORED_BLOCKS, k=count), rng.sample(STORED_SLOTS, count))
    return load(rng.choices(LOADED_SLOTS, k=count), rng.sample(LOADED_BLOCKS, count))


@pytest.mark.parametrize("most_entries", [page_kernel.MOST_ENTRIES, 2])
def test_a_thousand_jobs_are_done_in_order_and_reported_once(
    place: Place, most_entries: int, shm: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(page_kernel, "MOST_ENTRIES", most_entries)
    place.use(*CopyPath)
    if isinstance(place, CPUPlace):
        place.copies.is_held = True
    rng = random.Random(7)
    jobs = [some_job(rng) for _ in range(NUM_JOBS)]
    with open_checked_worker(place, LAYOUT, shm, num_slots=24) as rig:
        rig.do(store(LOADED_BLOCKS[:12], LOADED_SLOTS))
        place.delay()
        results: list[TransferResult] = []
        for job_id, job in enumerate(jobs):
            submitted = job or load([99], [0])
            assert submitted.submit(rig.worker, job_id)
            if isinstance(place, CPUPlace) and rng.random() < 0.5:
                copied = rng.random() < 0.5
                if place.copies.num_under_way(is_store=copied):
                    place.copies.copy_next(is_store=copied)
            if job_id > NUM_JOBS // 2 and rng.random() < 0.05:
                results += rig.worker.get_finished()
        rig.worker.wait(range(NUM_JOBS // 2))
        if isinstance(place, CPUPlace):
            rig.worker.wait(range(NUM_JOBS))
        results += poll(rig.worker, NUM_JOBS - len(results))
        assert rig.worker.get_finished() == []
        assert sorted(result.job_id for result in results) == list(range(NUM_JOBS))
        for result in results:
            done = jobs[result.job_id]
            assert result.success == (done is not None)
            assert result.transfer_size == (done.size(LAYOUT) if done else 0)
        rig.apply(*(job for job in jobs if job))
        rig.check()
        rig.do(store(LOADED_BLOCKS, range(16)), first_id=NUM_JOBS)
        rig.check()
