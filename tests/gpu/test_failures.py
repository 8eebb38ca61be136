"""A job that fails, for any reason, is reported once, as failed, and then no copy of it is under
way."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from kvtier.base import GPULoadStoreSpec
from kvtier.cpu.common import CPULoadStoreSpec
from kvtier.cpu.cuda import resources
from kvtier.cpu.cuda.copies import CopyPath
from kvtier.cpu.cuda.driver import CudaDriver, CudaError
from kvtier.cpu.cuda.page_mover import PageMover
from kvtier.cpu.cuda.page_table import PageTable
from kvtier.cpu.gpu_worker import GPUOffloadingWorker
from tests.cpu.jobs import BAD_SPECS, BAD_SPECS_BLOCKS, BAD_SPECS_SLOTS
from tests.gpu.cache_layout import plain_layout
from tests.gpu.checked_worker import CheckedWorker, finish, open_checked_worker
from tests.gpu.jobs import Job, load, store
from tests.gpu.places import (
    BatchStreams,
    CPUPlace,
    CudaPlace,
    LaunchCount,
    Place,
    SimulatedPlace,
    finish_everything,
    refuse_device_call,
)
from tests.gpu.simulated_cuda import SimulatedStream

LAYOUT = plain_layout(64, 32, num_blocks=BAD_SPECS_BLOCKS)
NUM_SLOTS = BAD_SPECS_SLOTS
DIRECTIONS = pytest.mark.parametrize("is_store", [True, False], ids=["store", "load"])


def a_job(is_store: bool, block: int = 1, slot: int = 1) -> Job:
    return store([block], [slot]) if is_store else load([slot], [block])


def require_failed(rig: CheckedWorker, *job_ids: int) -> None:
    for result in finish(rig.worker, job_ids):
        assert not result.success
        assert not result.transfer_size


@DIRECTIONS
@pytest.mark.parametrize("case", BAD_SPECS)
def test_a_job_that_cannot_be_right_fails_and_copies_nothing(
    case: str,
    is_store: bool,
    any_place: Place,
    shm: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    blocks, sizes, indices, slots = BAD_SPECS[case]
    device, host = GPULoadStoreSpec(blocks, sizes, indices), CPULoadStoreSpec(slots)
    with open_checked_worker(any_place, LAYOUT, shm, num_slots=NUM_SLOTS) as rig:
        if is_store:
            assert rig.worker.submit_store(7, device, host)
        else:
            assert rig.worker.submit_load(7, host, device)
        require_failed(rig, 7)
        rig.check()
        rig.do(store([3], [2]), load([4], [5]), first_id=7)
        rig.check()
    (record,) = [record for record in caplog.records if record.levelname == "ERROR"]
    assert record.exc_info is None  # it would keep the job's memory
    message = record.getMessage()
    assert message.startswith(f"{'Store' if is_store else 'Load'} job 7 failed: ")


@DIRECTIONS
def test_an_id_is_taken_until_it_is_reported(any_place: Place, is_store: bool, shm: Path) -> None:
    with open_checked_worker(any_place, LAYOUT, shm, num_slots=NUM_SLOTS) as rig:
        assert a_job(is_store).submit(rig.worker, 5)
        assert not a_job(True, 2, 2).submit(rig.worker, 5)
        assert not a_job(False, 2, 2).submit(rig.worker, 5)
        rig.worker.wait([5])
        assert not a_job(True, 2, 2).submit(rig.worker, 5)  # ended, but not reported
        finish(rig.worker, [5])
        rig.apply(a_job(is_store))
        rig.do(a_job(not is_store, 3, 3), first_id=5)
        rig.check()
        assert rig.worker.submit_store(6, GPULoadStoreSpec([99], [1], [0]), CPULoadStoreSpec([0]))
        assert not a_job(is_store).submit(rig.worker, 6)  # failed, but not reported
        require_failed(rig, 6)
        rig.do(a_job(is_store), first_id=6)


def test_a_job_after_the_end_is_refused(any_place: Place, shm: Path) -> None:
    with open_checked_worker(any_place, LAYOUT, shm, num_slots=NUM_SLOTS) as rig:
        assert store([1], [1]).submit(rig.worker, 1)
        assert load([2], [2]).submit(rig.worker, 2)
        rig.worker.shutdown()
        assert not store([1], [1]).submit(rig.worker, 3)
        assert not load([1], [1]).submit(rig.worker, 4)
        rig.worker.wait([1, 2, 3, 4])
        assert [result.success for result in finish(rig.worker, [1, 2])] == [True, True]
        rig.apply(store([1], [1]), load([2], [2]))
        rig.check()
        rig.worker.shutdown()


@DIRECTIONS
def test_a_job_that_is_refused_by_the_copies_fails(
    is_store: bool, shm: Path, caplog: pytest.LogCaptureFixture
) -> None:
    place = CPUPlace()
    with open_checked_worker(place, LAYOUT, shm, num_slots=NUM_SLOTS) as rig:
        place.copies.refusal = CudaError("injected")
        assert a_job(is_store).submit(rig.worker, 1)
        require_failed(rig, 1)
        place.copies.refusal = None
        rig.do(a_job(is_store), first_id=1)
        rig.check()
    assert "injected" in caplog.text


@DIRECTIONS
@pytest.mark.parametrize(
    ("path", "call", "after"),
    [
        (CopyPath.ENGINES, "copy_batch", 0),
        (CopyPath.ENGINES_TWICE, "copy_batch", 0),
        (CopyPath.ENGINES_TWICE, "copy_batch", 1),
        (CopyPath.ENGINES_TWICE, "copy_batch", 2),
        (CopyPath.KERNEL, "launch", 0),
        (CopyPath.STAGED, "launch", 0),
        (CopyPath.STAGED, "copy_batch", 0),
    ],
)
def test_a_job_that_the_driver_refuses_fails_and_nothing_of_it_goes_on(
    path: CopyPath,
    call: str,
    after: int,
    is_store: bool,
    device_place: Place,
    shm: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    device_place.use(path)
    pages = range(20)  # more than the copy engines are given first, which is in one stream
    layout = plain_layout(64, num_blocks=20)
    job = store(pages, pages) if is_store else load(pages, pages)
    with open_checked_worker(device_place, layout, shm, num_slots=20) as rig:
        with monkeypatch.context() as patch:
            batches = BatchStreams(patch)
            rig.do(job)  # one-time work is done
            assert len(batches) == {CopyPath.KERNEL: 0, CopyPath.ENGINES_TWICE: 2}.get(path, 1)
        device_place.delay()  # copies under way begin late
        with monkeypatch.context() as patch:
            refuse_device_call(patch, call, CudaError("injected"), after=after)
            assert job.submit(rig.worker, 1)
            require_failed(rig, 1)
        # Half of it may have been copied. After the failure the caller writes the memory anew.
        rig.rows[:] = rig.expected_rows[:] = 0x33
        for allocation, expected in zip(rig.memory, rig.expected_memory, strict=True):
            allocation.fill_(0x44)
            expected[:] = 0x44
        finish_everything(device_place)
        rig.check()
        rig.do(job, first_id=1)
        rig.check()
    assert "injected" in caplog.text


class BlockedSettling:
    """Settling waits until a test continues it, but not in the engine's thread."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.has_begun, self.may_end = threading.Event(), threading.Event()
        self.threads: set[threading.Thread] = set()
        settle, engine = PageMover.settle, threading.current_thread()

        def settle_late(mover: PageMover) -> None:
            self.threads.add(threading.current_thread())
            self.has_begun.set()
            if threading.current_thread() is not engine:
                assert self.may_end.wait(60)
            settle(mover)

        patch.setattr(PageMover, "settle", settle_late)


@DIRECTIONS
@pytest.mark.parametrize(
    ("path", "call", "after"),
    [
        (CopyPath.ENGINES, "copy_batch", 1),
        (CopyPath.ENGINES_TWICE, "copy_batch", 2),
        (CopyPath.KERNEL, "launch", 0),
        (CopyPath.STAGED, "copy_batch", 0),
    ],
)
def test_nobody_hears_of_a_failure_before_all_is_settled_nor_does_the_engine_wait_for_that(
    path: CopyPath,
    call: str,
    after: int,
    is_store: bool,
    device_place: Place,
    shm: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    device_place.use(path)
    pages = range(20)
    job = store(pages, pages) if is_store else load(pages, pages)
    with open_checked_worker(
        device_place, plain_layout(64, num_blocks=20), shm, num_slots=20
    ) as rig:
        rig.do(job)
        assert isinstance(rig.worker, GPUOffloadingWorker)
        rig.worker.flush()  # from now on, jobs do not wait until their blocks are computed
        with monkeypatch.context() as patch, device_place.held():
            settling = BlockedSettling(patch)
            device_place.delay()
            refuse_device_call(patch, call, CudaError("injected"), after=after)
            try:
                assert job.submit(rig.worker, 1)
                assert threading.current_thread() not in settling.threads
                assert settling.has_begun.wait(60)
                assert rig.worker.get_finished() == []
            finally:
                settling.may_end.set()
        require_failed(rig, 1)
        assert threading.current_thread() not in settling.threads
        rig.do(job, first_id=1)
        rig.check()


@DIRECTIONS
@pytest.mark.parametrize("error", [MemoryError("injected"), SystemExit("injected")], ids=repr)
@pytest.mark.parametrize("is_pinned", [True, False])
def test_no_error_ends_the_thread_that_hands_over(
    is_pinned: bool,
    error: BaseException,
    is_store: bool,
    device_place: Place,
    shm: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Otherwise neither the failed job nor those behind it would be reported."""
    if not is_pinned:
        refuse_device_call(monkeypatch, "register_host", CudaError("no pinning"))
    engine = threading.current_thread()

    def fail_in_the_thread(*_: Any) -> None:
        assert threading.current_thread() is not engine
        raise error

    with open_checked_worker(device_place, LAYOUT, shm, num_slots=NUM_SLOTS) as rig:
        before = set(threading.enumerate())
        device_place.delay()
        for job_id in (1, 2):  # the second one finds another under way
            assert a_job(is_store).submit(rig.worker, job_id)
        (thread,) = set(threading.enumerate()) - before
        assert all(result.success for result in finish(rig.worker, [1, 2]))
        rig.apply(a_job(is_store))
        device_place.delay()
        assert a_job(is_store).submit(rig.worker, 1)
        with monkeypatch.context() as patch:
            refuse_device_call(patch, "copy_batch", error)
            refuse_device_call(patch, "launch", error)
            for stream in (torch.cuda.Stream, SimulatedStream):
                patch.setattr(stream, "synchronize", fail_in_the_thread)
            patch.setattr(CudaDriver, "synchronize_stream", fail_in_the_thread)
            assert a_job(is_store).submit(rig.worker, 2)
            results = finish(rig.worker, [1, 2], by_polling=True)
            assert not results[1].success
            thread.join(0.1)  # or the end of the worker would wait for it forever
            assert thread.is_alive()
        rig.do(a_job(is_store, 3, 3), first_id=1)
        rig.check()


def test_refused_launches_leave_no_trace(
    device_place: Place, shm: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(resources, "_MOST_ENTRIES", 4 * 72)
    device_place.use(CopyPath.KERNEL)
    with open_checked_worker(device_place, plain_layout(64, num_blocks=8), shm) as rig:
        device_place.delay()
        with monkeypatch.context() as patch:
            refuse_device_call(patch, "launch", CudaError("injected"), after=1)
            for job_id, blocks in enumerate([(0, 1, 2), (3, 4, 5)]):
                assert store(blocks, [0, 1, 2]).submit(rig.worker, job_id)
            results = finish(rig.worker, range(2))
            for job_id in range(2, 6):
                assert store([3, 4, 5], [0, 1, 2]).submit(rig.worker, job_id)
                results += finish(rig.worker, [job_id])
        assert [result.success for result in results] == [True, *[False] * 5]
        rig.apply(store([0, 1, 2], [0, 1, 2]))
        launches = LaunchCount(monkeypatch)
        rig.do(store([3, 4, 5, 6], [0, 3, 1, 2]), store([7, 2, 1, 0], [1, 2, 3, 0]))
        rig.check()
        assert launches.count == 2


class DeviceHasFailed(RuntimeError):
    pass


def test_a_device_that_fails_fails_every_job_once(
    place: Place, shm: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    if isinstance(place, CPUPlace):
        place.copies.is_held = True
    with open_checked_worker(place, LAYOUT, shm, num_slots=NUM_SLOTS) as rig:
        place.delay()
        for job_id in range(6):
            assert a_job(job_id % 2 == 0, job_id, job_id).submit(rig.worker, job_id)
        with monkeypatch.context() as patch:
            fail(place, patch)
            rig.worker.wait(range(6))  # does not raise: `get_finished` reports it
            require_failed(rig, *range(6))
            assert a_job(True).submit(rig.worker, 0)
            assert a_job(False).submit(rig.worker, 1)
            require_failed(rig, 0, 1)
            rig.worker.wait([0, 1])
    assert "injected" in caplog.text


def test_the_region_is_let_go_of_though_the_device_has_failed(
    place: Place, shm: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with open_checked_worker(place, LAYOUT, shm, num_slots=NUM_SLOTS) as rig:
        rig.do(store([1], [1]))
        with monkeypatch.context() as patch:
            fail(place, patch)
            rig.worker.shutdown()
        assert not store([1], [1]).submit(rig.worker, 3)
        rig.let_go()
        finish_everything(place)
    assert list(shm.iterdir()) == []


def fail(place: Place, patch: pytest.MonkeyPatch) -> None:
    """From now on every call to the device fails."""
    error = DeviceHasFailed("injected")

    def raise_it(*_: object) -> None:
        raise DeviceHasFailed("injected")

    if isinstance(place, CPUPlace):
        patch.setattr(place.copies, "failure", error)
    elif isinstance(place, SimulatedPlace):
        patch.setattr(place.simulated, "failure", error)
    else:
        for name in ("is_reached", "synchronize_event", "synchronize_stream"):
            patch.setattr(CudaDriver, name, raise_it)


def test_asking_never_waits(held_place: CPUPlace, shm: Path) -> None:
    with open_checked_worker(held_place, LAYOUT, shm, num_slots=NUM_SLOTS) as rig:
        for job_id in range(4):
            assert a_job(job_id < 2, job_id, job_id).submit(rig.worker, job_id)
        rig.check()
        assert rig.worker.get_finished() == []
        held_place.copies.copy_next(is_store=True)
        assert [result.job_id for result in rig.worker.get_finished()] == [0]
        rig.apply(a_job(True, 0, 0))
        rig.check()
        held_place.copies.copy_next(is_store=False)
        held_place.copies.copy_next(is_store=False)
        assert [result.job_id for result in rig.worker.get_finished()] == [2, 3]
        assert rig.worker.get_finished() == []
        rig.apply(a_job(False, 2, 2), a_job(False, 3, 3))
        rig.check()
        rig.worker.wait([2, 3, 99])  # not for the store, which was not named
        assert rig.worker.get_finished() == []
        rig.worker.wait({1})
        assert [result.job_id for result in rig.worker.get_finished()] == [1]
        rig.apply(a_job(True, 1, 1))
        rig.check()


def test_asking_never_waits_for_the_device(device_place: Place, shm: Path) -> None:
    with open_checked_worker(device_place, LAYOUT, shm, num_slots=NUM_SLOTS) as rig:
        rig.do(store([5], [5]), load([3], [4]))
        for _ in range(8):
            device_place.delay()
        for job_id in range(4):
            assert a_job(job_id < 2, job_id, job_id).submit(rig.worker, job_id)
        if isinstance(device_place, CudaPlace):  # the other one goes on when it is asked
            assert rig.worker.get_finished() == []
        assert len(finish(rig.worker, range(4))) == 4
        rig.apply(*(a_job(job_id < 2, job_id, job_id) for job_id in range(4)))
        rig.check()


def test_waiting_is_for_what_was_named_alone(held_place: CPUPlace, shm: Path) -> None:
    with open_checked_worker(held_place, LAYOUT, shm, num_slots=NUM_SLOTS) as rig:
        for slot in range(4):
            assert store([slot], [slot]).submit(rig.worker, slot)
        rig.worker.wait([])
        rig.worker.wait([17])
        rig.check()
        rig.worker.wait([1])
        rig.apply(store([0], [0]), store([1], [1]))
        rig.check()
        assert [result.job_id for result in rig.worker.get_finished()] == [0, 1]
        rig.worker.shutdown()
        assert [result.job_id for result in finish(rig.worker, [2, 3])] == [2, 3]
        rig.apply(store([2], [2]), store([3], [3]))
        rig.check()


def test_results_are_of_plain_types(any_place: Place, shm: Path) -> None:
    """Results are pickled and sent to the scheduler."""
    with open_checked_worker(any_place, LAYOUT, shm, num_slots=NUM_SLOTS) as rig:
        (result,) = rig.do(store(np.arange(3).tolist(), [3, 1, 2]))
        assert type(result.transfer_size) is int
        assert type(result.transfer_time) is float


def test_what_a_caller_does_later_with_its_numbers_does_not_matter(
    place: Place, shm: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The arrays are used in another thread, long after they were checked."""
    blocks, slots = np.array([1, 2]), np.array([3, 0])
    grids = PageTable.grids

    def overwrite_first(*arguments: Any, **options: Any) -> Any:
        blocks[:] = slots[:] = 1 << 40
        return grids(*arguments, **options)

    with open_checked_worker(place, LAYOUT, shm, num_slots=NUM_SLOTS) as rig:
        monkeypatch.setattr(PageTable, "grids", overwrite_first)
        device, host = GPULoadStoreSpec(blocks, [2], [0]), CPULoadStoreSpec(slots)
        assert rig.worker.submit_store(1, device, host)
        (result,) = finish(rig.worker, [1])
        assert result.success
        rig.apply(store([1, 2], [3, 0]))
        rig.check()
        blocks[:], slots[:] = [4, 5], [0, 3]
        assert rig.worker.submit_load(2, host, device)
        (result,) = finish(rig.worker, [2])
        assert result.success
        rig.apply(load([0, 3], [4, 5]))
        rig.check()
