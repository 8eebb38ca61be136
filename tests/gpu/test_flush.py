"""After a flush all jobs are on the device: synchronizing it waits for them."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvtier.cpu.cuda.copies import CopyPath
from kvtier.cpu.cuda.driver import CudaError
from kvtier.cpu.gpu_worker import GPUOffloadingWorker
from tests.gpu.cache_layout import plain_layout
from tests.gpu.checked_worker import finish, open_checked_worker
from tests.gpu.jobs import load, store
from tests.gpu.places import Place, finish_everything, put_off_threads, refuse_device_call

LAYOUT = plain_layout(4096, 4096, num_blocks=24)


@pytest.mark.parametrize("is_store", [True, False], ids=["mostly stores", "mostly loads"])
@pytest.mark.parametrize("is_pinned", [True, False])
def test_the_caches_can_go_when_the_device_is_done(
    is_pinned: bool,
    is_store: bool,
    device_place: Place,
    shm: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As an engine that sleeps: it unmaps its caches without asking the worker."""
    if not is_pinned:
        refuse_device_call(monkeypatch, "register_host", CudaError("injected"))
    put_off_threads(monkeypatch, 0.01)
    device_place.use(*CopyPath)
    jobs = (
        [store(range(8), range(8)), store([1, 2], [3, 4]), load([8], [9])]
        if is_store
        else [load(range(8, 12), range(8, 12)), load([8], [20]), store([1], [3])]
    ) * 2
    with open_checked_worker(device_place, LAYOUT, shm, num_slots=12) as rig:
        assert isinstance(rig.worker, GPUOffloadingWorker)
        rig.worker.flush()  # there is nothing yet
        device_place.delay()
        for job_id, job in enumerate(jobs):
            assert job.submit(rig.worker, job_id)
        rig.worker.flush()
        finish_everything(device_place)
        rig.apply(*jobs)
        rig.check()
        for allocation, expected in zip(rig.memory, rig.expected_memory, strict=True):
            device_place.compute(lambda a=allocation: a.fill_(0x44))  # type: ignore[misc]
            expected[:] = 0x44
        finish_everything(device_place)
        assert all(result.success for result in finish(rig.worker, range(len(jobs))))
        rig.check()
