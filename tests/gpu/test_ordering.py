"""Copies come after the compute before them, and before the compute that waits for them.

Compute is delayed on purpose, so that a copy that does not wait for it is certainly too early. The
last test removes the waits, and sees every other test fail.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path

import pytest

from kvtier.cpu.cuda.copies import CopyPath
from kvtier.cpu.cuda.resources import Event
from tests.gpu.cache_layout import plain_layout
from tests.gpu.checked_worker import POISON, CheckedWorker, finish, open_checked_worker
from tests.gpu.jobs import Job, load, store
from tests.gpu.places import Place

LAYOUT = plain_layout(64 << 10, num_blocks=40)
BLOCKS, OTHER_BLOCKS, SLOTS = range(20), range(20, 40), range(20)


def write(rig: CheckedWorker, blocks: range, value: int) -> None:
    """Compute that writes all bytes of these blocks."""
    for block in blocks:
        page = rig.page(0, block)
        rig.place.compute(lambda page=page: page.fill_(value))  # type: ignore[misc]


def expect_written(rig: CheckedWorker, blocks: range, value: int) -> None:
    for block in blocks:
        rig.layout.page(rig.expected_memory, 0, block)[:] = value


def store_after_compute(rig: CheckedWorker) -> None:
    """A store finds what the current stream was to compute before it."""
    rig.place.delay()
    write(rig, BLOCKS, 7)
    expect_written(rig, BLOCKS, 7)
    rig.do(store(BLOCKS, SLOTS))


def store_before_overwriting(rig: CheckedWorker, *, by_polling: bool = False) -> None:
    """Compute after the end of a store does not change what was stored."""
    rig.place.delay()
    rig.do(store(BLOCKS, SLOTS), by_polling=by_polling)
    with rig.place.other_stream():  # behind no delay
        write(rig, BLOCKS, 9)
        rig.place.finish_compute()
    expect_written(rig, BLOCKS, 9)


def store_before_overwriting_polled(rig: CheckedWorker) -> None:
    store_before_overwriting(rig, by_polling=True)


def load_after_compute(rig: CheckedWorker) -> None:
    """A load does not overwrite what the current stream still has to read."""
    before = rig.place.download(rig.memory[0])
    read = rig.place.upload(before * 0)
    rig.place.delay()
    rig.place.compute(lambda: read.copy_(rig.memory[0]))
    rig.do(load(SLOTS, OTHER_BLOCKS))
    assert (rig.place.download(read) == before).all(), "what was read had been overwritten"


def load_before_reading(rig: CheckedWorker, *, by_polling: bool = False) -> None:
    """As soon as a load has ended, any stream reads what it brought."""
    read = rig.place.upload(rig.expected_memory[0] * 0)
    rig.place.delay()
    rig.do(load(SLOTS, OTHER_BLOCKS), by_polling=by_polling)
    with rig.place.other_stream():  # behind no delay
        rig.place.compute(lambda: read.copy_(rig.memory[0]))
        rig.place.finish_compute()
    assert (rig.place.download(read) == rig.expected_memory[0]).all(), "it was not there yet"


def load_before_reading_polled(rig: CheckedWorker) -> None:
    load_before_reading(rig, by_polling=True)


Scenario = Callable[[CheckedWorker], None]
SCENARIOS: list[Scenario] = [
    store_after_compute,
    store_before_overwriting,
    store_before_overwriting_polled,
    load_after_compute,
    load_before_reading,
    load_before_reading_polled,
]


@contextmanager
def open_warm_rig(place: Place, directory: Path) -> Iterator[CheckedWorker]:
    """Do one-time work that may wait for the device."""
    with open_checked_worker(place, LAYOUT, directory, num_slots=len(SLOTS)) as rig:
        rig.do(store(BLOCKS, SLOTS))
        rig.do(load(SLOTS, OTHER_BLOCKS))
        write(rig, range(40), 5)
        expect_written(rig, range(40), 5)
        rig.rows[:] = rig.expected_rows[:] = POISON
        rig.check()
        yield rig


@pytest.mark.parametrize("is_other_stream", [False, True])
@pytest.mark.parametrize("path", CopyPath)
@pytest.mark.parametrize("scenario", SCENARIOS)
def test_order(
    scenario: Scenario, path: CopyPath, is_other_stream: bool, device_place: Place, shm: Path
) -> None:
    device_place.use(path)
    with open_warm_rig(device_place, shm) as rig:
        with device_place.other_stream() if is_other_stream else nullcontext():
            scenario(rig)
        rig.check()


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_order_without_a_choice_of_paths(scenario: Scenario, place: Place, shm: Path) -> None:
    with open_warm_rig(place, shm) as rig:
        scenario(rig)
        rig.check()


@pytest.mark.parametrize("path", CopyPath)
def test_each_of_several_stores_waits_for_its_own_compute(
    path: CopyPath, device_place: Place, shm: Path
) -> None:
    """It does not wait for the event of the job before, which is reached long before."""
    device_place.use(path)
    with open_warm_rig(device_place, shm) as rig:
        for job_id, blocks in enumerate((BLOCKS[:10], OTHER_BLOCKS[:10])):
            write(rig, blocks, 10 + job_id)
            expect_written(rig, blocks, 10 + job_id)
            job = store(blocks, SLOTS[10 * job_id :][:10])
            assert job.submit(rig.worker, job_id)
            rig.apply(job)
            device_place.delay()
        assert all(result.success for result in finish(rig.worker, range(2)))
        rig.check()


@pytest.mark.parametrize("is_store", [True, False])
def test_jobs_of_a_direction_are_done_in_order_whatever_their_paths(
    is_store: bool, device_place: Place, shm: Path
) -> None:
    """The large ones begin in two streams, and the small one must not overtake either half."""
    device_place.use(*CopyPath)
    with open_checked_worker(device_place, LAYOUT, shm, num_slots=len(SLOTS)) as rig:
        if is_store:
            large = [store(BLOCKS, SLOTS), store(OTHER_BLOCKS, SLOTS)]
            small = [store([block], [slot]) for block, slot in ((3, 19), (4, 0), (5, 10))]
        else:
            large = [load(SLOTS, BLOCKS), load(SLOTS[::-1], BLOCKS)]
            small = [load([slot], [block]) for slot, block in ((3, 19), (4, 0), (5, 10))]
            rig.do(store(OTHER_BLOCKS, SLOTS))
        for _ in range(3):
            rig.do(*(job for one in small for job in (*large, one)))
            rig.check()


# ---------------------------------------------------------------------------------------------
# These tests can fail
# ---------------------------------------------------------------------------------------------


Sabotage = Callable[[pytest.MonkeyPatch], None]


def nothing_waits(patch: pytest.MonkeyPatch) -> None:
    """The worker's streams wait for no compute."""
    patch.setattr(Event, "hold", lambda *_: None)


def nobody_waits(patch: pytest.MonkeyPatch) -> None:
    """The test goes on without waiting for jobs."""

    def submit(rig: CheckedWorker, job: Job, **_: bool) -> None:
        assert job.submit(rig.worker, 0)
        rig.apply(job)

    patch.setattr(CheckedWorker, "do", submit)


@pytest.mark.parametrize(
    ("scenario", "sabotage"),
    [
        (store_after_compute, nothing_waits),
        (load_after_compute, nothing_waits),
        (store_before_overwriting, nobody_waits),
        (load_before_reading, nobody_waits),
    ],
)
@pytest.mark.parametrize("path", CopyPath)
def test_what_does_not_wait_is_found_out(
    scenario: Scenario,
    sabotage: Sabotage,
    path: CopyPath,
    device_place: Place,
    shm: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    device_place.use(path)
    # Streams may share a queue of the device; then one is late although it did not wait.
    assert any(is_found_out(scenario, sabotage, device_place, shm, monkeypatch) for _ in range(5))


def is_found_out(
    scenario: Scenario, sabotage: Sabotage, place: Place, directory: Path, patch: pytest.MonkeyPatch
) -> bool:
    with open_warm_rig(place, directory) as rig, patch.context() as sabotaged:
        sabotage(sabotaged)
        try:
            scenario(rig)
            rig.check()
        except AssertionError:
            return True
    return False
