"""Ctrl-C in the middle of a call, and a process that cannot start more threads.

The current job is lost, and no copy of it is under way afterwards. All others end, and are reported
once.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from pathlib import Path

import pytest

from kvtier.base import OffloadingWorker
from kvtier.cpu.cuda import streams
from kvtier.cpu.cuda.copies import CopyPath
from kvtier.cpu.cuda.driver import CudaError
from kvtier.cpu.cuda.streams import StreamCopies, _StreamTicket
from kvtier.cpu.gpu_worker import GPUOffloadingWorker
from kvtier.cpu.job_thread import JobThread
from tests.gpu.cache_layout import plain_layout
from tests.gpu.checked_worker import CheckedWorker, finish, open_checked_worker
from tests.gpu.jobs import Job, load, store
from tests.gpu.places import (
    BatchStreams,
    Place,
    SimulatedPlace,
    finish_everything,
    refuse_device_call,
)

NUM_PAGES = 20
"""Pages of a job: more than the copy engines get before the other thread goes on."""
LAYOUT = plain_layout(64, num_blocks=NUM_PAGES)
PAGES = range(NUM_PAGES)
PATIENCE_S = 60

DIRECTIONS = pytest.mark.parametrize("is_store", [True, False], ids=["store", "load"])
PATHS = pytest.mark.parametrize("path", CopyPath)


def a_job(is_store: bool, first: int = 0) -> Job:
    pages = [*PAGES[first:], *PAGES[:first]]
    return store(PAGES, pages) if is_store else load(PAGES, pages)


def reuse_all_memory(rig: CheckedWorker) -> None:
    """Write the memory of a job as a caller that assumes its end. A later check shows copies that
    were still under way."""
    rig.rows[:] = rig.expected_rows[:] = 0x33
    for allocation, expected in zip(rig.memory, rig.expected_memory, strict=True):
        allocation.fill_(0x44)
        expected[:] = 0x44


def shut_down(worker: OffloadingWorker) -> None:
    ending = threading.Thread(target=worker.shutdown, daemon=True)
    ending.start()
    ending.join(PATIENCE_S)
    assert not ending.is_alive(), "the shutdown waits forever"


# ---------------------------------------------------------------------------------------------
# No more threads
# ---------------------------------------------------------------------------------------------


def refuse_threads(patch: pytest.MonkeyPatch) -> None:
    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    patch.setattr(threading.Thread, "start", refuse)


@DIRECTIONS
@pytest.mark.parametrize("path", [CopyPath.ENGINES, CopyPath.ENGINES_TWICE, None])
def test_without_a_thread_a_job_fails_and_those_that_find_one_are_done(
    path: CopyPath | None,
    is_store: bool,
    device_place: Place,
    shm: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A job that is begun at once must be given up in the middle. `path` None: without pinned
    memory."""
    if path is None:
        refuse_device_call(monkeypatch, "register_host", CudaError("no pinning"))
    else:
        device_place.use(path)
    with open_checked_worker(device_place, LAYOUT, shm, num_slots=NUM_PAGES) as rig:
        device_place.delay()
        with monkeypatch.context() as patch:
            refuse_threads(patch)
            for job_id in range(2):
                assert a_job(is_store).submit(rig.worker, job_id)
            for result in finish(rig.worker, range(2), by_polling=True):
                assert not result.success
                assert not result.transfer_size
        reuse_all_memory(rig)
        finish_everything(device_place)
        rig.check()
        rig.do(a_job(is_store, 3), a_job(is_store, 5), by_polling=True)
        rig.check()
        shut_down(rig.worker)
    assert "can't start new thread" in caplog.text


# ---------------------------------------------------------------------------------------------
# Ctrl-C
# ---------------------------------------------------------------------------------------------


def interrupt(*_: object) -> None:
    raise KeyboardInterrupt


def interrupt_before_it_is_queued(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(JobThread, "put", interrupt)


def interrupt_after_it_is_queued(patch: pytest.MonkeyPatch) -> None:
    put = JobThread.put

    def put_and_be_interrupted(thread: JobThread, work: Callable[[], None]) -> None:
        put(thread, work)
        raise KeyboardInterrupt

    patch.setattr(JobThread, "put", put_and_be_interrupted)


def interrupt_after_the_thread_has_started(patch: pytest.MonkeyPatch) -> None:
    start = threading.Thread.start

    def start_and_be_interrupted(thread: threading.Thread) -> None:
        start(thread)
        raise KeyboardInterrupt

    patch.setattr(threading.Thread, "start", start_and_be_interrupted)


Interrupt = Callable[[pytest.MonkeyPatch], None]
INTERRUPTS: list[Interrupt] = [
    interrupt_before_it_is_queued,
    interrupt_after_it_is_queued,
    interrupt_after_the_thread_has_started,
]


def require_others_done(rig: CheckedWorker, is_store: bool, *job_ids: int) -> None:
    """Check that these jobs, which were under way at the interrupt of another one, are reported,
    and that new ones run."""
    results = finish(rig.worker, job_ids, by_polling=True)
    assert all(result.success for result in results)
    reuse_all_memory(rig)
    rig.do(a_job(is_store, 3), a_job(is_store, 5), first_id=10, by_polling=True)
    rig.do(a_job(not is_store, 7), first_id=10, by_polling=True)
    rig.check()
    shut_down(rig.worker)
    assert rig.worker.get_finished() == []


@pytest.mark.parametrize("num_before", [0, 2])
@DIRECTIONS
@PATHS
@pytest.mark.parametrize("interrupted", INTERRUPTS)
def test_an_interrupt_while_a_job_is_left_to_the_thread(
    interrupted: Interrupt,
    path: CopyPath,
    is_store: bool,
    num_before: int,
    device_place: Place,
    shm: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    device_place.use(path)
    with open_checked_worker(device_place, LAYOUT, shm, num_slots=NUM_PAGES) as rig:
        for job_id in range(num_before):
            assert a_job(is_store).submit(rig.worker, job_id)
        device_place.delay()
        reported = list(range(num_before))
        with monkeypatch.context() as patch:
            interrupted(patch)
            try:
                assert a_job(is_store).submit(rig.worker, 5)
            except KeyboardInterrupt:
                pass
            else:
                # The kernel's were given to the device at once, or the thread was there already.
                reported.append(5)
        require_others_done(rig, is_store, *reported)


class _InterruptedOnce(deque[_StreamTicket]):
    """Interrupted right after a job was put into its queue."""

    is_interrupted = False

    def append(self, ticket: _StreamTicket) -> None:
        super().append(ticket)
        if not self.is_interrupted:
            self.is_interrupted = True
            raise KeyboardInterrupt


@DIRECTIONS
@PATHS
def test_an_interrupt_when_a_job_is_noted(
    path: CopyPath, is_store: bool, device_place: Place, shm: Path
) -> None:
    device_place.use(path)
    with open_checked_worker(device_place, LAYOUT, shm, num_slots=NUM_PAGES) as rig:
        assert isinstance(rig.worker, GPUOffloadingWorker)
        assert isinstance(rig.worker.copies, StreamCopies)
        copies = rig.worker.copies
        (copies._stores if is_store else copies._loads)._under_way = _InterruptedOnce()
        with pytest.raises(KeyboardInterrupt):
            a_job(is_store).submit(rig.worker, 5)
        require_others_done(rig, is_store)


@DIRECTIONS
@pytest.mark.parametrize(
    ("path", "call", "after"),
    [
        (CopyPath.ENGINES, "copy_batch", 0),
        (CopyPath.KERNEL, "launch", 0),
        (CopyPath.STAGED, "launch", 0),
        (CopyPath.STAGED, "copy_batch", 0),
    ],
)
def test_an_interrupt_while_a_job_is_begun(
    path: CopyPath,
    call: str,
    after: int,
    is_store: bool,
    device_place: Place,
    shm: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In the engine's thread, which raises it. In the other thread, which Python does not
    interrupt, it would be an error of the job."""
    device_place.use(path)
    with open_checked_worker(device_place, LAYOUT, shm, num_slots=NUM_PAGES) as rig:
        rig.do(a_job(is_store))
        device_place.delay()
        with monkeypatch.context() as patch:
            refuse_device_call(patch, call, KeyboardInterrupt(), after=after)
            if streams._SMALL_JOB_PAGES < NUM_PAGES:
                with pytest.raises(KeyboardInterrupt):
                    a_job(is_store).submit(rig.worker, 5)
            else:
                assert a_job(is_store).submit(rig.worker, 5)
                (result,) = finish(rig.worker, [5], by_polling=True)
                assert not result.success
        reuse_all_memory(rig)
        finish_everything(device_place)
        rig.check()
        require_others_done(rig, is_store)


@DIRECTIONS
@PATHS
def test_an_interrupt_at_the_end_leaves_nothing_behind(
    path: CopyPath,
    is_store: bool,
    device_place: Place,
    shm: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The memory is freed all the same, so the work on both streams must end before."""
    device_place.use(path)
    with open_checked_worker(device_place, LAYOUT, shm, num_slots=NUM_PAGES) as rig:
        with monkeypatch.context() as patch:
            batches = BatchStreams(patch)
            device_place.delay()
            assert a_job(is_store).submit(rig.worker, 0)
            patch.setattr(_StreamTicket, "wait", interrupt)
            with pytest.raises(KeyboardInterrupt):
                rig.worker.shutdown()
        assert len(batches) == {CopyPath.KERNEL: 0, CopyPath.ENGINES_TWICE: 2}.get(path, 1)
        if isinstance(device_place, SimulatedPlace):
            assert len(device_place.simulated.destroyed) == 4
            assert not any(stream.work for stream in device_place.simulated.destroyed)
        rig.worker.shutdown()
        assert not a_job(is_store).submit(rig.worker, 1)
        rig.let_go()
    assert list(shm.iterdir()) == []
    assert [record for record in caplog.records if record.levelname == "ERROR"] == []
