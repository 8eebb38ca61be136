"""The device is never given more than its queues hold by a call that keeps the interpreter.

The driver would wait then, and so would every thread: the engine's, and those that have to do with
what the device is waiting for. The simulated driver counts, and complains.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from kvtier.cpu.cuda import page_kernel, page_mover, streams, window
from kvtier.cpu.cuda.copy_paths import Path as CopyPath
from tests.cpu.jobs import Part
from tests.gpu.cache_layout import plain_layout
from tests.gpu.jobs import Job, load, store
from tests.gpu.places import Place
from tests.gpu.rig import Rig, finish, open_rig

NUM_SMALL_JOBS = 600
"""With the fewest entries that a job has, five, they are more than there is room for."""
NUM_PAGES = 2_500
"""Of the large job: more than there is room for, however they are copied."""

DIRECTIONS = pytest.mark.parametrize("is_store", [True, False], ids=["store", "load"])
PATHS = pytest.mark.parametrize("path", CopyPath)


@pytest.fixture(autouse=True)
def _much_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the engine's thread begins it goes on with for as long as it need not wait."""
    for name in ("_AT_ONCE_S", "_MOST_AT_ONCE_S"):
        monkeypatch.setattr(streams, name, 60.0)


@contextmanager
def a_full_device(rig: Rig) -> Iterator[None]:
    """It does nothing of what is submitted within until somebody has to wait for room."""
    with rig.place.held():
        rig.place.delay()
        yield
        rig.place.await_waiter()


@DIRECTIONS
@PATHS
def test_many_small_jobs(path: CopyPath, is_store: bool, device_place: Place, shm: Path) -> None:
    assert 5 * NUM_SMALL_JOBS > window._MOST_ENTRIES * 5 // 4
    device_place.use(path)
    blocks, slots = itertools.cycle(range(20)), itertools.cycle(range(12))
    jobs = [
        store([next(blocks)], [next(slots)]) if is_store else load([next(slots)], [next(blocks)])
        for _ in range(NUM_SMALL_JOBS)
    ]
    with open_rig(device_place, plain_layout(64, num_blocks=20), shm, num_slots=12) as rig:
        rig.do(store(range(12), range(12)))
        with a_full_device(rig):
            for job_id, job in enumerate(jobs):
                assert job.submit(rig.worker, job_id)
        assert all(result.success for result in finish(rig.worker, range(NUM_SMALL_JOBS)))
        rig.apply(*jobs)
        rig.check()


def test_many_jobs_without_pages(device_place: Place, shm: Path) -> None:
    """They copy nothing, but have their marks in the queue."""
    jobs = [Job(is_store=True, parts=[Part(0, 0, [], [])]) for _ in range(NUM_SMALL_JOBS)]
    with open_rig(device_place, plain_layout(64, num_blocks=20), shm, num_slots=12) as rig:
        with a_full_device(rig):
            for job_id, job in enumerate(jobs):
                assert job.submit(rig.worker, job_id)
        assert all(result.success for result in finish(rig.worker, range(NUM_SMALL_JOBS)))
        rig.check()


def large_job(is_store: bool) -> Job:
    blocks = [(7 * i + 3) % NUM_PAGES for i in range(NUM_PAGES)]
    return store(blocks, range(NUM_PAGES)) if is_store else load(range(NUM_PAGES), blocks)


@pytest.mark.parametrize("is_first", [True, False], ids=["first", "behind another"])
@DIRECTIONS
@PATHS
def test_a_large_job(
    path: CopyPath,
    is_store: bool,
    is_first: bool,
    device_place: Place,
    shm: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The first one is begun by the engine's thread, which must not wait for room: here it would
    wait for itself, since only it lets the device go on."""
    if path is CopyPath.KERNEL:
        monkeypatch.setattr(page_kernel, "MOST_ENTRIES", 1)
    device_place.use(path)
    small = store([1], [1]) if is_store else load([1], [1])
    jobs = [large_job(is_store)] if is_first else [small, large_job(is_store)]
    layout = plain_layout(16, num_blocks=NUM_PAGES)
    with open_rig(device_place, layout, shm, num_slots=NUM_PAGES) as rig:
        with a_full_device(rig):
            for job_id, job in enumerate(jobs):
                assert job.submit(rig.worker, job_id)
        assert all(result.success for result in finish(rig.worker, range(len(jobs))))
        rig.apply(*jobs)
        rig.check()


def test_half_of_the_room_is_enough_for_any_part() -> None:
    """So that whoever has waited for that need not wait any more."""
    largest = max(page_mover._MOST_COPIES, page_mover._LAUNCH_COPIES)
    assert largest + window._OF_EVENTS <= window._MOST_ENTRIES // 2
