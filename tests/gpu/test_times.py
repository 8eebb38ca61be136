"""The reported time of a job is that of its copy."""

from __future__ import annotations

import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from kvtier.cpu.cuda import copies
from kvtier.cpu.cuda.copies import CopyPath
from kvtier.cpu.cuda.driver import CudaError
from tests.gpu.cache_layout import plain_layout
from tests.gpu.checked_worker import open_checked_worker
from tests.gpu.jobs import load, store
from tests.gpu.places import CudaPlace, Place, SimulatedPlace, refuse_device_call

LAYOUT = plain_layout(4096, num_blocks=8)


@pytest.mark.parametrize("path", CopyPath)
@pytest.mark.parametrize("is_store", [True, False])
def test_without_what_it_waited_for(
    is_store: bool, path: CopyPath, device_place: Place, shm: Path
) -> None:
    device_place.use(path)
    job = store([1, 2], [3, 1]) if is_store else load([3, 1], [1, 2])
    with open_checked_worker(device_place, LAYOUT, shm) as rig:
        rig.do(job)
        began = device_place.mark()
        device_place.delay()
        for _ in range(100):  # each takes some time of the simulated device
            device_place.compute(lambda: None)
        ended = device_place.mark()
        (result,) = rig.do(job)
        assert result.transfer_time is not None
        assert 0 < result.transfer_time < began.elapsed_time(ended) / 1e3 / 2


def test_without_what_it_waited_for_though_memory_is_not_pinned(
    shm: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = SimpleNamespace(now=0.0)
    monkeypatch.setattr(copies, "time", SimpleNamespace(perf_counter=lambda: clock.now))
    refuse_device_call(monkeypatch, "register_host", CudaError("injected"))
    place = SimulatedPlace(monkeypatch)

    def pass_by(seconds: float) -> None:
        clock.now += seconds

    with open_checked_worker(place, LAYOUT, shm) as rig:
        place.compute(lambda: pass_by(100.0))
        assert store([1, 2], [3, 1]).submit(rig.worker, 1)
        rig.worker.wait([1])
        (result,) = rig.worker.get_finished()
        assert result.success
        assert result.transfer_time == 0.0
        assert clock.now == 100.0


def test_in_seconds(device_place: Place, shm: Path) -> None:
    """The times of consecutive jobs add up to at most the time of all of them."""
    device_place.use(CopyPath.ENGINES)
    num_pages = 4
    job = store(range(num_pages), range(num_pages))
    with open_checked_worker(device_place, LAYOUT, shm) as rig:
        rig.do(job)
        began = time.perf_counter()
        results = [result for _ in range(20) for result in rig.do(job)]
        took = time.perf_counter() - began
        times = [result.transfer_time or 0.0 for result in results]
        if isinstance(device_place, CudaPlace):
            assert 0 < sum(times) <= took
        else:  # a microsecond for every page, and for the two events at the end
            assert times == pytest.approx([(num_pages + 2) * 1e-6] * 20)
