"""The region is pinned while there is a worker. If it cannot be pinned, copies are slow but right,
and a warning says so."""

from __future__ import annotations

import threading
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvtier.cpu import gpu_worker
from kvtier.cpu.cuda.driver import CudaDriver, CudaError
from kvtier.cpu.gpu_worker import GPUOffloadingWorker
from kvtier.cpu.shared_offload_region import SharedOffloadRegion
from tests.gpu.cache_layout import CacheLayout, plain_layout
from tests.gpu.checked_worker import finish, open_checked_worker, row_bytes
from tests.gpu.histories import NUM_SLOTS, histories
from tests.gpu.jobs import Job, load, store
from tests.gpu.places import Place, finish_everything, refuse_device_call
from tests.gpu.simulated_cuda import SimulatedDriver

LAYOUT = plain_layout(4096, 64, num_blocks=16)


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]


def test_a_region_that_cannot_be_pinned_is_said_loudly_with_the_remedy(
    device_place: Place,
    shm: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    refuse_device_call(monkeypatch, "register_host", CudaError("injected"))
    threads_before = set(threading.enumerate())
    with open_checked_worker(device_place, LAYOUT, shm, num_slots=8) as rig:
        (warning,) = warnings(caplog)
        assert "could not be pinned: injected." in warning
        assert "memlock" in warning or "cpu_bytes_to_use" in warning
        rig.do(store(range(8), range(8)), by_polling=True)
        rig.do(load(range(8), range(8, 16)))
        rig.check()
    assert set(threading.enumerate()) - threads_before == set()
    assert warnings(caplog) == [warning]  # nothing is unpinned that was not pinned


@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(history=histories(), seed=st.integers(0, 2**16), by_polling=st.booleans())
def test_every_byte_is_right_without_pinning(
    device_place: Place,
    shm: Path,
    monkeypatch: pytest.MonkeyPatch,
    history: tuple[CacheLayout, list[Job]],
    seed: int,
    by_polling: bool,
) -> None:
    layout, jobs = history
    with monkeypatch.context() as patch:
        refuse_device_call(patch, "register_host", CudaError("injected"))
        with open_checked_worker(device_place, layout, shm, num_slots=NUM_SLOTS, seed=seed) as rig:
            for job in jobs:
                rig.do(job, by_polling=by_polling)
                rig.check()


@pytest.mark.parametrize("is_other_stream", [False, True])
def test_order_without_pinning(
    device_place: Place, is_other_stream: bool, shm: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stores and loads come after the compute before them."""
    refuse_device_call(monkeypatch, "register_host", CudaError("injected"))
    with open_checked_worker(device_place, LAYOUT, shm, num_slots=8) as rig:
        rig.do(store(range(8), range(8)))
        read = device_place.upload(rig.expected_memory[0] * 0)
        before = rig.expected_memory[0].copy()
        with device_place.other_stream() if is_other_stream else nullcontext():
            device_place.delay()
            device_place.compute(lambda: read.copy_(rig.memory[0]))
            rig.do(load(range(8), range(8, 16)))
            device_place.delay()
            device_place.compute(lambda: rig.memory[0].fill_(3))
            rig.expected_memory[0][:] = 3
            rig.do(store(range(8, 16), range(8)))
        rig.check()
        assert (device_place.download(read) == before).all()


def test_a_copy_that_fails_without_pinning_fails_its_job_alone(
    device_place: Place, shm: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    refuse_device_call(monkeypatch, "register_host", CudaError("injected"))
    with open_checked_worker(device_place, LAYOUT, shm, num_slots=8) as rig:
        with monkeypatch.context() as patch:
            refuse_device_call(patch, "copy_batch", CudaError("injected"))
            assert store([1], [1]).submit(rig.worker, 1)
            assert load([1], [1]).submit(rig.worker, 2)
            results = finish(rig.worker, [1, 2])
            assert [result.success for result in results] == [False, False]
        rig.check()
        rig.do(store([1], [1]), load([2], [2]), first_id=1)
        rig.check()


@pytest.mark.parametrize("is_store", [True, False])
def test_nothing_of_a_copy_that_failed_without_pinning_goes_on(
    is_store: bool, device_place: Place, shm: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After the failure the caller writes the memory anew."""
    refuse_device_call(monkeypatch, "register_host", CudaError("injected"))
    job = store(range(8), range(8)) if is_store else load(range(8), range(8))
    with open_checked_worker(device_place, LAYOUT, shm, num_slots=8) as rig:
        with monkeypatch.context() as patch:
            fail_after_copy_batch(patch)
            assert job.submit(rig.worker, 1)
            (result,) = finish(rig.worker, [1])
            assert not result.success
        rig.rows[:] = rig.expected_rows[:] = 0x33
        for allocation, expected in zip(rig.memory, rig.expected_memory, strict=True):
            device_place.compute(lambda a=allocation: a.fill_(0x44))  # type: ignore[misc]
            expected[:] = 0x44
        device_place.finish_compute()
        finish_everything(device_place)
        rig.check()


def fail_after_copy_batch(patch: pytest.MonkeyPatch) -> None:
    """The driver accepts the copies, and fails then."""
    for driver in (CudaDriver, SimulatedDriver):

        def fail(*arguments: Any, copy_batch: Any = driver.copy_batch) -> None:
            copy_batch(*arguments)
            raise CudaError("injected")

        patch.setattr(driver, "copy_batch", fail)


class KeptRegion(SharedOffloadRegion):
    """The worker may release it; the test does so later."""

    def cleanup(self) -> None:
        pass

    def let_go(self) -> None:
        super().cleanup()


def open_region(directory: Path) -> KeptRegion:
    return KeptRegion(
        "engine", 4, 0, row_bytes(LAYOUT, 1), LAYOUT.cell_bytes, directory=str(directory)
    )


def test_the_region_is_pinned_until_the_end(
    device_place: Place, shm: Path, caplog: pytest.LogCaptureFixture
) -> None:
    region = open_region(shm)
    memory = [device_place.upload(allocation) for allocation in LAYOUT.new_memory(1)]
    try:
        worker = device_place.open_worker(LAYOUT.canonical(memory), region, 1)
        driver = device_place.driver()
        with pytest.raises(CudaError, match="cuMemHostRegister"):
            driver.register_host(region.address, region.size_bytes)
        worker.shutdown()
        driver.register_host(region.address, region.size_bytes)
        driver.unregister_host(region.address)
    finally:
        region.let_go()
    assert warnings(caplog) == []


def test_a_worker_that_cannot_be_opened_leaves_nothing_pinned(
    device_place: Place, shm: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise RuntimeError("injected")

    region = open_region(shm)
    memory = [device_place.upload(allocation) for allocation in LAYOUT.new_memory(1)]
    try:
        with monkeypatch.context() as patch:
            patch.setattr(gpu_worker, "StreamCopies", fail)
            with pytest.raises(RuntimeError, match="injected"):
                GPUOffloadingWorker(LAYOUT.canonical(memory), region, 1)
        driver = device_place.driver()
        driver.register_host(region.address, region.size_bytes)
        driver.unregister_host(region.address)
    finally:
        region.let_go()


def test_the_worker_cleans_up_its_region(
    any_place: Place, shm: Path, caplog: pytest.LogCaptureFixture
) -> None:
    region = SharedOffloadRegion(
        "engine", 4, 0, row_bytes(LAYOUT, 1), LAYOUT.cell_bytes, directory=str(shm)
    )
    memory = [any_place.upload(allocation) for allocation in LAYOUT.new_memory(1)]
    worker = any_place.open_worker(LAYOUT.canonical(memory), region, 1)
    assert store([1, 2], [3, 0]).submit(worker, 1)
    assert load([3], [5]).submit(worker, 2)
    worker.shutdown()
    assert list(shm.iterdir()) == []
    assert [result.success for result in finish(worker, [1, 2])] == [True, True]
    assert warnings(caplog) == []
