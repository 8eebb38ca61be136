"""A thread of the process captures a CUDA graph while jobs are under way.

By default a capture affects all threads: a query of an event, or a wait, fails and ends the capture
with an error. An engine need not know that a worker queries and waits.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from types import TracebackType
from typing import Self

import pytest
import torch

from kvtier.cpu.cuda.copies import CopyPath
from kvtier.cpu.cuda.driver import CudaDriver, CudaError
from tests.gpu.cache_layout import plain_layout
from tests.gpu.checked_worker import CheckedWorker, finish, open_checked_worker, poll
from tests.gpu.jobs import load, store
from tests.gpu.places import NO_DEVICE, CudaPlace, has_cuda, refuse_device_call

LAYOUT = plain_layout(4096, 4096, num_blocks=32)
NUM_SLOTS = 32
JOBS = [store(range(16), range(16)), load(range(16, 32), range(16, 32))] * 20
"""Enough pages for the thread that submits them to wait for the device sometimes."""
PATIENCE_S = 60

_GLOBAL = 0
"""The capture mode that affects all threads; torch's default."""


@pytest.fixture
def cuda_place() -> CudaPlace:
    if not has_cuda():
        pytest.skip(NO_DEVICE)
    return CudaPlace()


class SpoiledError(Exception):
    """A forbidden call has ended a capture."""


class Capture:
    """A stream that is captured for a while. One thread.

    Without torch, which would first wait for the device. Leaving raises `SpoiledError`.
    """

    def __init__(self) -> None:
        self._library = ctypes.CDLL("libcuda.so.1")
        self._memory = torch.zeros(64, device=CudaPlace.device)
        self.stream = torch.cuda.Stream(CudaPlace.device)
        self.num_nodes = 0
        """The number of nodes in the graph."""
        with torch.cuda.stream(self.stream):
            self._memory.add_(1)  # one-time work is done
        self.stream.synchronize()

    def __enter__(self) -> Self:
        handle = ctypes.c_void_p(self.stream.cuda_stream)
        assert self._library.cuStreamBeginCapture_v2(handle, _GLOBAL) == 0
        with torch.cuda.stream(self.stream):
            self._memory.add_(1)
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc_value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        graph, count = ctypes.c_void_p(), ctypes.c_size_t()
        handle = ctypes.c_void_p(self.stream.cuda_stream)
        code = self._library.cuStreamEndCapture(handle, ctypes.byref(graph))
        if code != 0:
            raise SpoiledError(f"error {code}")
        assert self._library.cuGraphGetNodes(graph, None, ctypes.byref(count)) == 0
        assert self._library.cuGraphDestroy(graph) == 0
        self.num_nodes = count.value


def begin_here(capture: Capture) -> AbstractContextManager[object]:
    return capture


@contextmanager
def begin_in_another_thread(capture: Capture) -> Iterator[None]:
    begun, over = threading.Event(), threading.Event()
    errors: list[Exception] = []

    def work() -> None:
        try:
            torch.cuda.set_device(CudaPlace.device)
            with capture:
                begun.set()
                over.wait(PATIENCE_S)
        except Exception as error:
            errors.append(error)
            begun.set()

    thread = threading.Thread(target=work)
    thread.start()
    try:
        assert begun.wait(PATIENCE_S)
        yield
    finally:
        over.set()
        thread.join()
    for error in errors:
        raise error


Begin = Callable[[Capture], AbstractContextManager[object]]
CAPTURES = pytest.mark.parametrize("begin", [begin_in_another_thread, begin_here])


def work_during(begin: Begin, rig: CheckedWorker) -> Capture:
    """Some jobs begin before a capture and end in it; others begin in it and end there or later.
    Some are polled, some waited for."""
    rig.do(*JOBS[:2])  # one-time work is done
    num_jobs, capture = len(JOBS), Capture()
    rig.place.delay()
    for job_id, job in enumerate(JOBS):
        assert job.submit(rig.worker, job_id)
    with begin(capture):
        results = poll(rig.worker, num_jobs)
        for job_id, job in enumerate(JOBS * 2, num_jobs):
            assert job.submit(rig.worker, job_id)
            results += rig.worker.get_finished()
        rig.worker.wait(range(2 * num_jobs))
    results += poll(rig.worker, 3 * num_jobs - len(results))
    assert sorted(result.job_id for result in results) == list(range(3 * num_jobs))
    assert all(result.success for result in results)
    rig.apply(*JOBS)
    rig.check()
    return capture


@CAPTURES
@pytest.mark.parametrize("path", CopyPath)
def test_jobs_and_captures_do_not_know_of_each_other(
    path: CopyPath, begin: Begin, cuda_place: CudaPlace, shm: Path
) -> None:
    cuda_place.use(path)
    with open_checked_worker(cuda_place, LAYOUT, shm, num_slots=NUM_SLOTS) as rig:
        assert work_during(begin, rig).num_nodes == 1


@CAPTURES
def test_jobs_in_memory_that_cannot_be_pinned_know_of_no_capture(
    begin: Begin, cuda_place: CudaPlace, shm: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    refuse_device_call(monkeypatch, "register_host", CudaError("injected"))
    with open_checked_worker(cuda_place, LAYOUT, shm, num_slots=NUM_SLOTS) as rig:
        assert work_during(begin, rig).num_nodes == 1


@pytest.mark.parametrize("is_pinned", [True, False])
def test_a_job_cannot_begin_after_what_is_only_written_down(
    is_pinned: bool,
    cuda_place: CudaPlace,
    shm: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """It would become part of the graph, and run with every launch of the graph."""
    if not is_pinned:
        refuse_device_call(monkeypatch, "register_host", CudaError("injected"))
    with open_checked_worker(cuda_place, LAYOUT, shm, num_slots=NUM_SLOTS) as rig:
        rig.do(*JOBS[:2])
        with Capture() as capture, torch.cuda.stream(capture.stream):
            for job_id, job in enumerate((store([20], [3]), load([3], [20]))):
                assert job.submit(rig.worker, job_id)
            results = finish(rig.worker, range(2))
        assert capture.num_nodes == 1
        assert not any(result.success for result in results)
        rig.check()
        rig.do(*JOBS)
        rig.check()
    assert "captured into a CUDA graph" in caplog.text


# ---------------------------------------------------------------------------------------------
# These tests can fail
# ---------------------------------------------------------------------------------------------


@CAPTURES
def test_a_worker_that_heeds_no_capture_spoils_it(
    begin: Begin, cuda_place: CudaPlace, shm: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with open_checked_worker(cuda_place, LAYOUT, shm, num_slots=NUM_SLOTS) as rig:
        monkeypatch.setattr(CudaDriver, "beside_captures", lambda *_: nullcontext())
        with pytest.raises(SpoiledError):
            work_during(begin, rig)
