"""A worker cannot drop a job: the engine waits for it, and then reuses its memory.

This happens when a request is aborted while its blocks are being copied. The next user of the
memory finds no trace of the job, then or later.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from kvtier.base import TransferResult
from kvtier.cpu.cuda.copies import CopyPath
from kvtier.cpu.cuda.driver import CudaError
from kvtier.cpu.gpu_worker import GPUOffloadingWorker
from kvtier.cpu.host_worker import HostOffloadingWorker
from tests.gpu.cache_layout import plain_layout
from tests.gpu.checked_worker import RANK, CheckedWorker, finish, open_checked_worker, require_equal
from tests.gpu.jobs import Job, load, store
from tests.gpu.places import CPUPlace, Place, finish_everything, put_off_threads, refuse_device_call

NUM_JOBS, BLOCKS_PER_JOB = 8, 3
"""Jobs of each direction. Each has blocks and slots of its own."""
NUM_BLOCKS = NUM_SLOTS = 2 * NUM_JOBS * BLOCKS_PER_JOB
LAYOUT = plain_layout(4096, 512, num_blocks=NUM_BLOCKS)
REUSED_BLOCK, REUSED_SLOT = 0x44, 0x33
"""The bytes that the next users write."""


@pytest.fixture
def slow_place(any_place: Place, monkeypatch: pytest.MonkeyPatch) -> Place:
    slow_down(any_place, monkeypatch)
    return any_place


def slow_down(place: Place, patch: pytest.MonkeyPatch) -> None:
    """Delay every job of job threads, so that jobs queue up."""
    place.use(*CopyPath)
    if isinstance(place, CPUPlace):
        place.copies.is_held = True
    put_off_threads(patch, 0.002)


def make_jobs(chance: random.Random) -> list[Job]:
    """Stores and loads in turn, of scattered blocks and slots."""
    blocks, slots = (chance.sample(range(NUM_BLOCKS), NUM_BLOCKS) for _ in range(2))
    parts = [slice(start, start + BLOCKS_PER_JOB) for start in range(0, NUM_BLOCKS, BLOCKS_PER_JOB)]
    return [
        load(slots[part], blocks[part]) if number % 2 else store(blocks[part], slots[part])
        for number, part in enumerate(parts)
    ]


def submit(rig: CheckedWorker, jobs: Sequence[Job]) -> None:
    """Submit each job after some compute, so that there is always one that has not begun."""
    for job_id, job in enumerate(jobs):
        rig.place.delay()
        assert job.submit(rig.worker, job_id)


def pages_of(job: Job) -> list[tuple[int, int]]:
    """The tensor and block of every page on the device."""
    (part,) = job.parts
    return [(tensor, block) for block in part.blocks for tensor in range(len(LAYOUT.tensors))]


def reuse(rig: CheckedWorker, job: Job) -> None:
    """Write all memory of a job at once, on an idle stream, and the expected bytes."""
    (part,) = job.parts
    cell = slice(RANK * LAYOUT.cell_bytes, (RANK + 1) * LAYOUT.cell_bytes)
    for rows in (rig.rows, rig.expected_rows):
        rows[part.slots, cell] = REUSED_SLOT
    with rig.place.other_stream():
        for tensor, block in pages_of(job):
            rig.page(tensor, block).fill_(REUSED_BLOCK)
            LAYOUT.page(rig.expected_memory, tensor, block)[:] = REUSED_BLOCK
        finish_current_stream(rig.place)


def finish_current_stream(place: Place) -> None:
    if place.device != "cpu":
        torch.cuda.current_stream().synchronize()


def require_done(rig: CheckedWorker, job: Job) -> None:
    """Check that the job has written all its bytes by now."""
    (part,) = job.parts
    require_equal(rig.rows[part.slots], rig.expected_rows[part.slots], "slots of the job")
    with rig.place.other_stream():
        for tensor, block in pages_of(job):
            expected = LAYOUT.page(rig.expected_memory, tensor, block)
            require_equal(rig.page(tensor, block).cpu().numpy(), expected, f"block {block}")


def abort(rig: CheckedWorker, job_id: int, job: Job) -> None:
    """Wait for the job, as an engine does."""
    rig.worker.wait([job_id])
    rig.apply(job)
    require_done(rig, job)
    reuse(rig, job)


def abort_some(rig: CheckedWorker, jobs: Sequence[Job], aborted: Sequence[int]) -> None:
    """Check that nothing of them is written later, and that the other jobs are right."""
    submit(rig, jobs)
    reported: list[TransferResult] = []
    for job_id in aborted:
        abort(rig, job_id, jobs[job_id])
        reported += rig.worker.get_finished()
    rig.worker.wait(range(len(jobs)))
    reported += rig.worker.get_finished()
    rig.apply(*(job for job_id, job in enumerate(jobs) if job_id not in aborted))
    finish_everything(rig.place)
    rig.check()
    require_reported(reported, jobs)
    assert rig.worker.get_finished() == []


def require_reported(results: Sequence[TransferResult], jobs: Sequence[Job]) -> None:
    assert sorted(result.job_id for result in results) == list(range(len(jobs)))
    assert all(result.success for result in results)
    assert all(result.transfer_size == jobs[result.job_id].size(LAYOUT) for result in results)


ABORTED = {
    "the first": [0, 1],
    "the middle": [2 * (NUM_JOBS // 2), 2 * (NUM_JOBS // 2) + 1],
    "the last": [2 * NUM_JOBS - 1, 2 * NUM_JOBS - 2],
    "here and there": [3, 8, 6, 1, 13, 10],
    "all, backwards": list(range(2 * NUM_JOBS))[::-1],
}


@pytest.mark.parametrize("which", ABORTED)
def test_nothing_of_an_aborted_job_goes_on(which: str, slow_place: Place, shm: Path) -> None:
    with open_checked_worker(slow_place, LAYOUT, shm, num_slots=NUM_SLOTS) as rig:
        abort_some(rig, make_jobs(random.Random(which)), ABORTED[which])


def test_nothing_goes_on_in_memory_that_cannot_be_pinned(
    device_place: Place, shm: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow_down(device_place, monkeypatch)
    refuse_device_call(monkeypatch, "register_host", CudaError("injected"))
    with open_checked_worker(device_place, LAYOUT, shm, num_slots=NUM_SLOTS) as rig:
        abort_some(rig, make_jobs(random.Random(0)), ABORTED["here and there"])


def test_nothing_of_an_aborted_job_that_fails_goes_on(
    device_place: Place, shm: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first half may be under way when the driver refuses the second."""
    slow_down(device_place, monkeypatch)
    device_place.use(CopyPath.STAGED, CopyPath.ENGINES_TWICE)
    jobs = make_jobs(random.Random(4))
    with open_checked_worker(device_place, LAYOUT, shm, num_slots=NUM_SLOTS) as rig:
        with monkeypatch.context() as patch:
            refuse_device_call(patch, "copy_batch", CudaError("injected"), after=NUM_JOBS)
            submit(rig, jobs)
            for job_id, job in enumerate(jobs):
                rig.worker.wait([job_id])
                reuse(rig, job)
        finish_everything(device_place)
        rig.check()
        results = finish(rig.worker, range(len(jobs)))
        assert {result.success for result in results} == {True, False}


def test_the_memory_of_aborted_jobs_is_good_for_others(slow_place: Place, shm: Path) -> None:
    """Also for jobs of the other direction, while jobs before and after the aborted ones are under
    way."""
    jobs = make_jobs(random.Random(1))
    with open_checked_worker(slow_place, LAYOUT, shm, num_slots=NUM_SLOTS) as rig:
        submit(rig, jobs)
        aborted = [4, 7]
        for job_id in aborted:
            abort(rig, job_id, jobs[job_id])
        (stored,), (loaded,) = jobs[4].parts, jobs[7].parts
        later = [load(stored.slots, stored.blocks), store(loaded.blocks, loaded.slots)]
        for job_id, job in enumerate(later, len(jobs)):
            assert job.submit(rig.worker, job_id)
        rig.worker.wait(range(len(jobs) + len(later)))
        rig.apply(*(job for job_id, job in enumerate(jobs) if job_id not in aborted), *later)
        rig.check()
        require_reported(rig.worker.get_finished(), jobs + later)
        assert rig.worker.get_finished() == []


@pytest.mark.parametrize("which", ["nobody", "the middle"])
def test_nothing_goes_on_after_the_end(which: str, slow_place: Place, shm: Path) -> None:
    """For all jobs that are under way when the worker is shut down."""
    jobs = make_jobs(random.Random(2))
    aborted = ABORTED.get(which, [])
    with open_checked_worker(slow_place, LAYOUT, shm, num_slots=NUM_SLOTS) as rig:
        submit(rig, jobs)
        for job_id in aborted:
            abort(rig, job_id, jobs[job_id])
        rig.worker.shutdown()
        rest = [job for job_id, job in enumerate(jobs) if job_id not in aborted]
        rig.apply(*rest)
        for job in rest:
            require_done(rig, job)
            reuse(rig, job)
        finish_everything(slow_place)
        rig.check()
        require_reported(rig.worker.get_finished(), jobs)
        assert rig.worker.get_finished() == []


# ---------------------------------------------------------------------------------------------
# These tests can fail
# ---------------------------------------------------------------------------------------------


def test_a_worker_that_does_not_wait_is_found_out(
    slow_place: Place, shm: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with open_checked_worker(slow_place, LAYOUT, shm, num_slots=NUM_SLOTS) as rig:
        with monkeypatch.context() as patch:
            for worker in (HostOffloadingWorker, GPUOffloadingWorker):
                patch.setattr(worker, "wait", lambda *_: None)
            with pytest.raises(AssertionError, match="bytes differ"):
                abort_some(rig, make_jobs(random.Random(3)), ABORTED["the middle"])
        rig.worker.wait(range(2 * NUM_JOBS))
