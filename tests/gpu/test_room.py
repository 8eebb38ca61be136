"""A call that keeps the interpreter never puts more on the device's queues than they hold.

Otherwise the driver would block, and with it every thread: the engine's, and those that the device
is waiting for. The simulated driver counts and asserts.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from kvtier.cpu.cuda import page_kernel, page_mover, resources, streams
from kvtier.cpu.cuda.copies import CopyPath
from tests.cpu.jobs import Part
from tests.gpu.cache_layout import plain_layout
from tests.gpu.checked_worker import CheckedWorker, finish, open_checked_worker
from tests.gpu.jobs import Job, load, store
from tests.gpu.places import Place

NUM_SMALL_JOBS = 600
"""With five entries each, the fewest that a job has, they exceed the room."""
NUM_PAGES = 2_500
"""Pages of the large job: more than there is room for, by every path."""

DIRECTIONS = pytest.mark.parametrize("is_store", [True, False], ids=["store", "load"])
PATHS = pytest.mark.parametrize("path", CopyPath)


@pytest.fixture(autouse=True)
def _much_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine's thread goes on with a job for as long as it need not wait."""
    for name in ("_AT_ONCE_S", "_MOST_AT_ONCE_S"):
        monkeypatch.setattr(streams, name, 60.0)


@contextmanager
def a_full_device(rig: CheckedWorker) -> Iterator[None]:
    """Nothing that is submitted within runs until a thread waits for room."""
    with rig.place.held():
        rig.place.delay()
        yield
        rig.place.await_waiter()


@DIRECTIONS
@PATHS
def test_many_small_jobs(path: CopyPath, is_store: bool, device_place: Place, shm: Path) -> None:
    assert 5 * NUM_SMALL_JOBS > resources._MOST_ENTRIES * 5 // 4
    device_place.use(path)
    blocks, slots = itertools.cycle(range(20)), itertools.cycle(range(12))
    jobs = [
        store([next(blocks)], [next(slots)]) if is_store else load([next(slots)], [next(blocks)])
        for _ in range(NUM_SMALL_JOBS)
    ]
    with open_checked_worker(
        device_place, plain_layout(64, num_blocks=20), shm, num_slots=12
    ) as rig:
        rig.do(store(range(12), range(12)))
        with a_full_device(rig):
            for job_id, job in enumerate(jobs):
                assert job.submit(rig.worker, job_id)
        assert all(result.success for result in finish(rig.worker, range(NUM_SMALL_JOBS)))
        rig.apply(*jobs)
        rig.check()


def test_many_jobs_without_pages(device_place: Place, shm: Path) -> None:
    """They copy nothing, but their events are in the queue."""
    jobs = [Job(is_store=True, parts=[Part(0, 0, [], [])]) for _ in range(NUM_SMALL_JOBS)]
    with open_checked_worker(
        device_place, plain_layout(64, num_blocks=20), shm, num_slots=12
    ) as rig:
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
    """The engine's thread begins the first one, and must not wait for room: here it would wait for
    itself, because only it lets the device go on."""
    if path is CopyPath.KERNEL:
        monkeypatch.setattr(page_kernel, "MOST_ENTRIES", 1)
    device_place.use(path)
    small = store([1], [1]) if is_store else load([1], [1])
    jobs = [large_job(is_store)] if is_first else [small, large_job(is_store)]
    layout = plain_layout(16, num_blocks=NUM_PAGES)
    with open_checked_worker(device_place, layout, shm, num_slots=NUM_PAGES) as rig:
        with a_full_device(rig):
            for job_id, job in enumerate(jobs):
                assert job.submit(rig.worker, job_id)
        assert all(result.success for result in finish(rig.worker, range(len(jobs))))
        rig.apply(*jobs)
        rig.check()


@DIRECTIONS
@PATHS
def test_a_large_job_does_not_fill_the_queues_before_its_blocks_are_computed(
    path: CopyPath, is_store: bool, device_place: Place, shm: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The queues may have less room than expected: streams share them, and the engine's launches
    are in them, too. So at most one part waits there for the engine's step."""
    monkeypatch.setattr(streams, "_SMALL_JOB_PAGES", 16)
    if path is CopyPath.KERNEL:
        monkeypatch.setattr(page_kernel, "MOST_ENTRIES", 1)
    device_place.use(path)
    job = large_job(is_store)
    layout = plain_layout(16, num_blocks=NUM_PAGES)
    with open_checked_worker(device_place, layout, shm, num_slots=NUM_PAGES) as rig:
        with device_place.held():
            device_place.delay()
            assert job.submit(rig.worker, 1)
            device_place.await_waiter()  # the job thread waits for the step
            assert rig.place.num_queued() <= page_mover._MOST_COPIES + 2 * resources._OF_EVENTS
        assert all(result.success for result in finish(rig.worker, [1]))
        rig.apply(job)
        rig.check()


def test_half_of_the_room_is_enough_for_any_part() -> None:
    """After one wait, the next part need not wait."""
    largest = max(page_mover._MOST_COPIES, page_mover._LAUNCH_COPIES)
    assert largest + resources._OF_EVENTS <= resources._MOST_ENTRIES // 2
