"""The worker's resources on the device, and their release."""

from __future__ import annotations

import gc
import logging
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from kvtier.cpu.cuda import page_table, streams
from kvtier.cpu.cuda.copies import CopyPath
from kvtier.cpu.cuda.driver import CudaError
from kvtier.cpu.cuda.page_kernel import direct_threads
from kvtier.cpu.cuda.streams import StreamCopies
from kvtier.cpu.gpu_worker import GPUOffloadingWorker
from kvtier.cpu.job_thread import JobThread
from tests.gpu.cache_layout import plain_layout
from tests.gpu.checked_worker import CheckedWorker, finish, open_checked_worker
from tests.gpu.jobs import load, store
from tests.gpu.places import (
    Allocations,
    BatchStreams,
    CudaPlace,
    LaunchCount,
    Place,
    SimulatedPlace,
    refuse_device_call,
)
from tests.gpu.simulated_cuda import SimulatedDevice, SimulatedDriver, SimulatedKernel

LAYOUT = plain_layout(4096, 4096, num_blocks=8)


def stream_copies(rig: CheckedWorker) -> StreamCopies:
    assert isinstance(rig.worker, GPUOffloadingWorker)
    assert isinstance(rig.worker.copies, StreamCopies)
    return rig.worker.copies


def test_loads_go_before_stores(device_place: Place, shm: Path) -> None:
    """Requests wait for loads, not for stores. Lower numbers go first."""
    with open_checked_worker(device_place, LAYOUT, shm) as rig:
        copies = stream_copies(rig)
        of_loads, of_stores = (
            {
                device_place.stream(handle).priority
                for handle in (direction.mover.stream, direction.mover._second_stream)
            }
            for direction in (copies._loads, copies._stores)
        )
    assert len(of_loads) == len(of_stores) == 1
    assert max(of_loads) < min(of_stores)


@pytest.mark.parametrize("is_pinned", [True, False])
def test_directions_share_no_stream(
    is_pinned: bool, device_place: Place, shm: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise one would wait for the other."""
    if not is_pinned:
        refuse_device_call(monkeypatch, "register_host", CudaError("injected"))
    device_place.use(*CopyPath)
    used = {}
    with open_checked_worker(device_place, LAYOUT, shm) as rig:
        for job in (store([1, 2], [3, 1]), load([3, 1], [4, 5])):
            with monkeypatch.context() as patch:
                launches, batches = LaunchCount(patch), BatchStreams(patch)
                rig.do(*[job] * len(CopyPath))
            used[job.is_store] = launches.streams | batches
        assert used[True]
        assert used[False]
        assert used[True].isdisjoint(used[False])


def test_the_kernel_takes_few_sms_for_the_bus_and_all_for_a_moment(
    device_place: Place, shm: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While it copies over the bus, the model cannot use its SMs."""
    num_sms = SimulatedKernel.all_threads.blocks
    if isinstance(device_place, CudaPlace):
        num_sms = torch.cuda.get_device_properties(device_place.device).multi_processor_count
    for path, job, blocks in (
        (CopyPath.KERNEL, store([1, 2], [3, 1]), direct_threads(4096, is_store=True).blocks),
        (CopyPath.KERNEL, load([3, 1], [4, 5]), direct_threads(4096, is_store=False).blocks),
        (CopyPath.STAGED, store([1, 2], [3, 1]), num_sms),
        (CopyPath.STAGED, load([3, 1], [4, 5]), num_sms),
    ):
        device_place.use(path)
        with open_checked_worker(device_place, LAYOUT, shm) as rig, monkeypatch.context() as patch:
            launches = LaunchCount(patch)
            rig.do(job)
        assert {threads.blocks for threads in launches.threads} == {blocks}


def test_jobs_one_after_the_other_need_no_new_events(
    device_place: Place, shm: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    new_events, made = streams._new_events, []

    def noted(*arguments: Any) -> Any:
        made.append(new_events(*arguments))
        return made[-1]

    monkeypatch.setattr(streams, "_new_events", noted)
    with open_checked_worker(device_place, LAYOUT, shm) as rig:
        for _ in range(20):
            rig.do(store([1], [3]))
            rig.do(load([3], [2]), by_polling=True)
    assert len(made) == 2  # one set for each direction


def test_all_events_are_given_back(
    simulated_place: SimulatedPlace,
    shm: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Events of jobs that end, that fail, and that are never asked for, for all paths."""
    caplog.set_level(logging.CRITICAL, "kvtier")  # records of failures keep the frames of jobs
    simulated_place.use(*CopyPath)
    with open_checked_worker(simulated_place, LAYOUT, shm) as rig:
        jobs = [store([1, 2], [3, 1]), load([0, 2], [4, 5])] * len(CopyPath)
        rig.do(*jobs)
        with monkeypatch.context() as patch:
            for call in ("launch", "copy_batch"):
                refuse_device_call(patch, call, CudaError("injected"), after=2)
            for job_id, job in enumerate(jobs):
                assert job.submit(rig.worker, job_id)
            results = finish(rig.worker, range(len(jobs)))
            assert {result.success for result in results} == {True, False}
        for job_id, job in enumerate(jobs):
            assert job.submit(rig.worker, job_id)
    del rig, job
    gc.collect()
    device = simulated_place.simulated
    assert len(device.created_events) > 2 * 3 + 2 * 6
    assert sorted(device.destroyed_events) == device.created_events


class EventWatch:
    """Asserts that an event is reused only when its last record is reached."""

    def __init__(self, patch: pytest.MonkeyPatch, device: SimulatedDevice) -> None:
        self.of_jobs: set[int] = set()
        self.num_marks = 0
        self.too_early: list[int] = []
        new_events, record_event = streams._new_events, SimulatedDriver.record_event

        def noted(driver: Any) -> Any:
            events = new_events(driver)
            self.of_jobs |= {event._handle for event in events}
            return events

        def watched(driver: SimulatedDriver, event: int, stream: int) -> None:
            mark = device.events[event].mark
            if event in self.of_jobs:
                self.num_marks += 1
                if mark is not None and not mark.is_reached:
                    self.too_early.append(event)
            record_event(driver, event, stream)

        patch.setattr(streams, "_new_events", noted)
        patch.setattr(SimulatedDriver, "record_event", watched)


def no_thread(*_: object) -> None:
    raise RuntimeError("can't start new thread")


def test_events_are_not_used_again_while_the_device_may_reach_them(
    simulated_place: SimulatedPlace, shm: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Except those of a job that fails before the engine's compute has ended, which cannot be
    waited for."""
    simulated_place.use(CopyPath.ENGINES)
    job = store(range(8), range(8))
    with open_checked_worker(simulated_place, LAYOUT, shm, num_slots=8) as rig:
        watch = EventWatch(monkeypatch, simulated_place.simulated)
        with simulated_place.held():
            simulated_place.delay()
            with monkeypatch.context() as patch:
                patch.setattr(JobThread, "put", no_thread)
                assert job.submit(rig.worker, 0)
            (result,) = finish(rig.worker, [0], by_polling=True)
            assert not result.success
            for job_id in (1, 2):
                assert job.submit(rig.worker, job_id)
        assert all(result.success for result in finish(rig.worker, [1, 2]))
        rig.do(job, job, job)
        assert watch.num_marks > 0
        assert watch.too_early == []


@pytest.mark.parametrize("is_pinned", [True, False])
def test_whoever_keeps_a_worker_keeps_no_memory_and_no_thread_after_its_end(
    is_pinned: bool, device_place: Place, shm: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither device memory nor pinned memory: an engine keeps a worker until its process ends."""
    if not is_pinned:
        refuse_device_call(monkeypatch, "register_host", CudaError("injected"))
    taken = Allocations(monkeypatch)
    device_place.use(*CopyPath)
    threads_before = set(threading.enumerate())
    with open_checked_worker(device_place, LAYOUT, shm) as rig:
        assert len(taken) >= (3 if is_pinned else 1)
        jobs = [store([0, 1], [0, 1]), load([2, 3], [2, 3])] * len(CopyPath)
        rig.do(*jobs)
        for job_id, job in enumerate(jobs):
            assert job.submit(rig.worker, job_id)
        rig.worker.shutdown()
        assert all(result.success for result in finish(rig.worker, range(len(jobs))))
        if isinstance(device_place, SimulatedPlace):
            assert len(set(device_place.simulated.destroyed)) == (4 if is_pinned else 2)
        assert not taken
        assert set(threading.enumerate()) == threads_before


@pytest.mark.parametrize("call", ["allocate", "upload"])
@pytest.mark.parametrize("num_done", range(3))
def test_a_worker_that_cannot_have_its_memory_on_the_device_leaves_nothing_there(
    call: str, num_done: int, device_place: Place, shm: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It needs zeros, and a table of columns for the kernel of each direction."""
    taken = Allocations(monkeypatch)
    refuse_device_call(monkeypatch, call, CudaError("injected"), after=num_done)
    with pytest.raises(CudaError, match="injected"), open_checked_worker(device_place, LAYOUT, shm):
        pass
    assert not taken


def test_nothing_is_taken_of_the_memory_that_torch_has(
    device_place: Place, shm: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While an engine makes its caches, torch's pool may lose its contents in a sleep."""
    made: list[str] = []
    for name in ("empty", "zeros", "full", "tensor", "as_tensor", "from_numpy"):
        make = getattr(torch, name)

        def noted(*arguments: Any, make: Any = make, **options: Any) -> Any:
            made.append(make.__name__)
            return make(*arguments, **options)

        monkeypatch.setattr(torch, name, noted)

    def num_taken() -> int:
        if isinstance(device_place, CudaPlace):
            return int(torch.cuda.memory_stats()["allocation.all.allocated"])
        return len(made)

    grown: list[int] = []
    open_worker = device_place.open_worker

    def watched(*arguments: Any) -> Any:
        before = num_taken()
        worker = open_worker(*arguments)
        grown.append(num_taken() - before)
        return worker

    monkeypatch.setattr(device_place, "open_worker", watched)
    device_place.use(*CopyPath)
    with open_checked_worker(device_place, LAYOUT, shm) as rig:
        before = num_taken()
        rig.do(*[store([i], [i]) for i in range(len(CopyPath))])
        rig.do(*[load([i], [i]) for i in range(len(CopyPath))])
        assert num_taken() == before
    assert grown == [0]


@pytest.mark.parametrize("is_pinned", [True, False])
def test_a_thread_that_never_had_to_do_with_the_device_can_end_a_worker(
    is_pinned: bool, device_place: Place, shm: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not is_pinned:
        refuse_device_call(monkeypatch, "register_host", CudaError("injected"))
    taken = Allocations(monkeypatch)
    with open_checked_worker(device_place, LAYOUT, shm) as rig:
        rig.do(store([1, 2], [3, 1]))
        thread = threading.Thread(target=rig.worker.shutdown)
        thread.start()
        thread.join()
        assert not taken


def test_memory_is_freed_once(
    device_place: Place, shm: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Its address may belong to other memory by then."""
    with open_checked_worker(device_place, LAYOUT, shm) as rig:
        memory = stream_copies(rig)._zeros
        assert memory is not None
        rig.worker.shutdown()
        memory.free()
    assert "could not be freed" not in caplog.text


def test_a_little_memory_that_is_not_to_be_had_is_told_with_the_remedy(
    device_place: Place, shm: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    refuse_device_call(monkeypatch, "allocate", CudaError("injected"))
    with (
        pytest.raises(CudaError, match=r"device memory .*injected.*--gpu-memory-utilization"),
        open_checked_worker(device_place, LAYOUT, shm),
    ):
        pass


def test_the_engines_thread_plans_large_jobs_and_another_one_small_ones(
    device_place: Place, shm: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each address once."""
    planned: list[bool] = []
    grids = page_table.PageTable.grids

    def noted(*arguments: Any, **options: Any) -> Any:
        planned.append(threading.current_thread() is threading.main_thread())
        return grids(*arguments, **options)

    monkeypatch.setattr(page_table.PageTable, "grids", noted)
    monkeypatch.setattr(streams, "_SMALL_JOB_PAGES", 4)
    with open_checked_worker(device_place, LAYOUT, shm) as rig:
        rig.do(store([1, 2], [3, 1]))
        assert planned == [False]
        rig.do(store([1, 2, 3], [3, 1, 2]))
        assert planned == [False, True]


@pytest.mark.parametrize(
    ("call", "num_granted"),
    [("create_stream", n) for n in range(4)] + [("create_event", n) for n in (0, 3, 6, 11)],
)
def test_a_worker_that_cannot_be_made_leaves_no_stream(
    call: str,
    num_granted: int,
    simulated_place: SimulatedPlace,
    shm: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    device = simulated_place.simulated
    num_before = len(device.streams)
    refuse_device_call(monkeypatch, call, CudaError("injected"), after=num_granted)
    with (
        pytest.raises(CudaError, match="injected"),
        open_checked_worker(simulated_place, LAYOUT, shm),
    ):
        pass
    assert set(device.destroyed) == set(device.streams[num_before:])
