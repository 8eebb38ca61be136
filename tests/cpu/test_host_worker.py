"""The host worker copies the right bytes, touches no other, and reports every job once."""

from __future__ import annotations

import mmap
import random
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvtier.base import GPULoadStoreSpec, TransferResult
from kvtier.cpu.common import CPULoadStoreSpec
from kvtier.cpu.host_worker import HostOffloadingWorker, PageCopier
from kvtier.cpu.shared_offload_region import SharedOffloadRegion
from kvtier.cpu.worker import GroupTransfer
from tests.cpu.caches import Bytes, Layout, finish
from tests.cpu.jobs import BAD_SPECS, BAD_SPECS_BLOCKS, BAD_SPECS_SLOTS, Part, SubmittedJob

PAGE = mmap.PAGESIZE
POISON = 0xEE
RANK, WORLD_SIZE = 1, 3  # there is a cell before this one and one behind it
NUM_SLOTS = BAD_SPECS_SLOTS
SIMPLE = Layout(pages=(64, 32), groups=({0: 64, 1: 32},), num_device_blocks=BAD_SPECS_BLOCKS)


class Rows:
    """All rows of the worker's region, as another process sees them."""

    def __init__(self, region: SharedOffloadRegion) -> None:
        self._view = region.create_kv_memoryview()

    def __getitem__(self, index: Any) -> Bytes:
        """A copy."""
        return np.array(np.asarray(self._view)[index])

    def __setitem__(self, index: Any, value: int) -> None:
        np.asarray(self._view)[index] = value


@contextmanager
def open_worker(
    layout: Layout, tensors: list[Any], directory: Path
) -> Iterator[tuple[HostOffloadingWorker, Rows]]:
    cell = layout.cell_bytes
    row = -(-WORLD_SIZE * cell // PAGE) * PAGE
    region, others = (
        SharedOffloadRegion("engine", NUM_SLOTS, rank, row, cell, directory=str(directory))
        for rank in (RANK, None)
    )
    worker = HostOffloadingWorker(layout.canonical(tensors), region, layout.blocks_per_chunk)
    try:
        yield worker, Rows(others)
    finally:
        worker.shutdown()
        others.cleanup()


# ---------------------------------------------------------------------------------------------
# Every byte
# ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Job(SubmittedJob):
    """A job, with its effect on the bytes."""

    def apply(self, layout: Layout, rows: Bytes, tensors: list[Bytes]) -> None:
        """The effect of the job, page by page."""
        cell_start = RANK * layout.cell_bytes
        for part in self.parts:
            if self.is_store:
                for slot in part.slots:
                    rows[slot, cell_start : cell_start + layout.cell_bytes] = 0
            for offset, block in enumerate(part.blocks):
                chunk, place = divmod(
                    part.first_index % layout.blocks_per_chunk + offset, layout.blocks_per_chunk
                )
                for tensor_idx, data_bytes in layout.groups[part.group_idx].items():
                    start = cell_start + layout.tensor_start(tensor_idx)
                    start += place * layout.pages[tensor_idx]
                    host = rows[part.slots[chunk], start : start + data_bytes]
                    device = tensors[tensor_idx][block, :data_bytes]
                    if self.is_store:
                        host[:] = device
                    else:
                        device[:] = host


@st.composite
def layouts(draw: st.DrawFn) -> Layout:
    # Among them sizes whose single pages, and whose runs, are worth a copy of their own.
    page = st.one_of(st.integers(1, 40), st.sampled_from([512, 5000, 1 << 14]))
    pages = draw(st.lists(page, min_size=1, max_size=4))
    groups = []
    for _ in range(draw(st.integers(1, 3))):
        # Tensors that several groups use are aliased; a smaller part of a page leaves padding.
        used = draw(st.sets(st.integers(0, len(pages) - 1), min_size=1))
        groups.append(
            {t: draw(st.sampled_from([pages[t], -(-pages[t] // 2)])) for t in sorted(used)}
        )
    return Layout(
        tuple(pages),
        tuple(groups),
        blocks_per_chunk=draw(st.integers(1, 3)),
        num_device_blocks=12,
        gap=draw(st.sampled_from([0, 5])),
    )


@st.composite
def jobs(draw: st.DrawFn, layout: Layout) -> Job:
    is_store, places = draw(st.booleans()), layout.blocks_per_chunk
    # Half of the time in their order, so that there are runs.
    slots = (
        list(range(NUM_SLOTS)) if draw(st.booleans()) else draw(st.permutations(range(NUM_SLOTS)))
    )
    parts = []
    for group_idx in range(len(layout.groups)):
        num_slots = draw(st.integers(0, min(len(slots), layout.num_device_blocks // places)))
        head = draw(st.integers(0, places - 1)) if num_slots else 0
        longest_tail = places - 1 - (head if num_slots == 1 else 0)
        tail = draw(st.integers(0, longest_tail)) if num_slots and not is_store else 0
        size = num_slots * places - head - tail
        start = draw(st.integers(0, layout.num_device_blocks - size))
        blocks = list(range(start, start + size))
        if draw(st.booleans()):
            blocks = draw(st.permutations(range(layout.num_device_blocks)))[:size]
        index = head + draw(st.integers(0, 2)) * places
        parts.append(Part(group_idx, index, blocks, slots[:num_slots]))
        slots = slots[num_slots:]
    return Job(is_store, parts)


@st.composite
def histories(draw: st.DrawFn) -> tuple[Layout, list[Job]]:
    layout = draw(layouts())
    return layout, draw(st.lists(jobs(layout), min_size=1, max_size=4))


def check_history(directory: Path, layout: Layout, steps: list[Job], seed: int) -> None:
    """Compares rows, cells of other ranks, padding and gaps after each of several jobs."""
    tensors = layout.new_tensors(seed)
    expected_tensors = [tensor.copy() for tensor in tensors]
    with open_worker(layout, tensors, directory) as (worker, rows):
        rows[:] = POISON
        expected_rows = rows[:]
        for job_id, job in enumerate(steps):
            assert job.submit(worker, job_id)
            worker.wait([job_id])
            (result,) = worker.get_finished()
            assert (result.job_id, result.success) == (job_id, True)
            assert result.transfer_size == job.size(layout)
            assert result.transfer_time is not None
            job.apply(layout, expected_rows, expected_tensors)
            np.testing.assert_array_equal(rows[:], expected_rows)
            for tensor, expected in zip(tensors, expected_tensors, strict=True):
                np.testing.assert_array_equal(tensor, expected)


@settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(history=histories(), seed=st.integers(0, 2**16))
def test_every_byte_is_as_it_should_be(
    shm: Path, history: tuple[Layout, list[Job]], seed: int
) -> None:
    check_history(shm, *history, seed)


@pytest.mark.soak
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(history=histories(), seed=st.integers(0, 2**16))
def test_every_byte_is_as_it_should_be_for_long(
    shm: Path, history: tuple[Layout, list[Job]], seed: int
) -> None:
    check_history(shm, *history, seed)


def test_what_another_group_left_in_a_slot_is_gone(shm: Path) -> None:
    """Also bytes from elsewhere: a tier below may write whole rows."""
    layout = Layout(pages=(16, 16), groups=({0: 16}, {1: 16}))
    tensors = layout.new_tensors(1)
    with open_worker(layout, tensors, shm) as (worker, rows):
        for job_id in range(2):
            rows[3] = POISON
            assert worker.submit_store(
                job_id, GPULoadStoreSpec([5], [1, 0], [0, 0]), CPULoadStoreSpec([3])
            )
            assert finish(worker, job_id) == {job_id: True}
            cell = rows[3, RANK * 32 : RANK * 32 + 32]
            assert cell.tolist() == [*tensors[0][5].tolist(), *[0] * 16]


def test_layers_that_share_a_tensor_are_copied_once(shm: Path) -> None:
    layout = Layout(pages=(16,), groups=({0: 16},))
    tensors = layout.new_tensors(1)
    caches = layout.canonical(tensors)
    caches.group_data_refs[0] *= 2
    region = SharedOffloadRegion("engine", NUM_SLOTS, 0, PAGE, 16, directory=str(shm))
    worker = HostOffloadingWorker(caches, region, 1)
    assert worker.submit_store(1, GPULoadStoreSpec([5], [1], [0]), CPULoadStoreSpec([3]))
    worker.shutdown()
    assert [result.transfer_size for result in worker.get_finished()] == [16]


# ---------------------------------------------------------------------------------------------
# Jobs that fail
# ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_store", [True, False])
@pytest.mark.parametrize("case", BAD_SPECS)
def test_a_job_that_cannot_be_right_fails_and_copies_nothing(
    case: str, is_store: bool, shm: Path, caplog: pytest.LogCaptureFixture
) -> None:
    blocks, sizes, indices, slots = BAD_SPECS[case]
    device, host = GPULoadStoreSpec(blocks, sizes, indices), CPULoadStoreSpec(slots)
    tensors = SIMPLE.new_tensors(1)
    before = [tensor.copy() for tensor in tensors]
    with open_worker(SIMPLE, tensors, shm) as (worker, rows):
        rows[:] = POISON
        if is_store:
            assert worker.submit_store(7, device, host)
        else:
            assert worker.submit_load(7, host, device)
        worker.wait([7])
        (result,) = worker.get_finished()
        assert (result.job_id, result.success, result.transfer_size) == (7, False, 0)
        assert result.transfer_time is not None
        assert worker.get_finished() == []
        assert (rows[:] == POISON).all()
        # It goes on with the next.
        assert worker.submit_store(8, GPULoadStoreSpec([3], [1], [0]), CPULoadStoreSpec([2]))
        assert finish(worker, 8) == {8: True}
    for tensor, unchanged in zip(tensors, before, strict=True):
        np.testing.assert_array_equal(tensor, unchanged)
    (message,) = caplog.messages
    assert message.startswith(f"{'Store' if is_store else 'Load'} job 7 failed: ")


def test_a_job_of_the_wrong_kind_fails(shm: Path) -> None:
    with open_worker(SIMPLE, SIMPLE.new_tensors(1), shm) as (worker, _):
        device = GPULoadStoreSpec([1], [1], [0])
        assert worker.submit_store(1, device, device)
        assert worker.submit_load(2, None, device)  # type: ignore[arg-type]
        assert finish(worker, 1, 2) == {1: False, 2: False}


@pytest.mark.parametrize("direction", ["store", "load"])
def test_an_error_while_copying_fails_the_job(
    direction: str, shm: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(copier: PageCopier, transfer: GroupTransfer) -> int:
        raise MemoryError("injected")

    with open_worker(SIMPLE, SIMPLE.new_tensors(1), shm) as (worker, _):
        job = Job(direction == "store", [Part(0, 0, [1], [1])])
        with monkeypatch.context() as patch:
            patch.setattr(PageCopier, direction, fail)
            assert job.submit(worker, 1)
            assert finish(worker, 1) == {1: False}
        assert job.submit(worker, 1)
        assert finish(worker, 1) == {1: True}
    assert "injected" in caplog.text
    caplog.clear()  # the records hold the traceback, and that the copier


# ---------------------------------------------------------------------------------------------
# Reports, threads, the end
# ---------------------------------------------------------------------------------------------


class Gate:
    """Holds a direction of the copier until it is opened, or for as long as a test may take."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, direction: str) -> None:
        self.reached, self._open = threading.Event(), threading.Event()
        original = getattr(PageCopier, direction)

        def gated(copier: PageCopier, transfer: GroupTransfer) -> int:
            self.reached.set()
            self._open.wait(timeout=30)
            copied: int = original(copier, transfer)
            return copied

        monkeypatch.setattr(PageCopier, direction, gated)

    def open(self) -> None:
        self._open.set()


@pytest.mark.parametrize(("held", "free"), [("store", "load"), ("load", "store")])
def test_no_direction_waits_for_the_other(
    held: str, free: str, shm: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with open_worker(SIMPLE, SIMPLE.new_tensors(1), shm) as (worker, _):
        gate = Gate(monkeypatch, held)
        try:
            assert Job(held == "store", [Part(0, 0, [1], [1])]).submit(worker, 1)
            gate.reached.wait()
            assert Job(free == "store", [Part(0, 0, [2], [2])]).submit(worker, 2)
            assert finish(worker, 2) == {2: True}
        finally:
            gate.open()
        assert finish(worker, 1) == {1: True}


def test_a_job_id_is_free_again_once_it_is_reported(
    shm: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, load = (Job(is_store, [Part(0, 0, [1], [1])]) for is_store in (True, False))
    with open_worker(SIMPLE, SIMPLE.new_tensors(1), shm) as (worker, _):
        gate = Gate(monkeypatch, "store")
        assert store.submit(worker, 5)
        assert not store.submit(worker, 5)  # still running
        assert not load.submit(worker, 5)
        gate.open()
        worker.wait([5])
        assert not store.submit(worker, 5)  # ended, but not reported
        assert [result.job_id for result in worker.get_finished()] == [5]
        assert load.submit(worker, 5)
        assert finish(worker, 5) == {5: True}


def test_waiting_ends_with_the_jobs_and_not_before(
    shm: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with open_worker(SIMPLE, SIMPLE.new_tensors(1), shm) as (worker, _):
        worker.wait([])
        worker.wait([1, 2, 3])  # unknown jobs count as ended
        gate = Gate(monkeypatch, "store")
        assert Job(True, [Part(0, 0, [1], [1])]).submit(worker, 1)
        assert Job(True, [Part(0, 0, [2], [2])]).submit(worker, 2)
        worker.wait([3])
        events: list[str] = []

        def wait() -> None:
            worker.wait({1, 2})
            events.append("waited")

        waiter = threading.Thread(target=wait)
        waiter.start()
        gate.reached.wait()
        events.append("opened")
        gate.open()
        waiter.join()
        assert events == ["opened", "waited"]
        assert finish(worker) == {1: True, 2: True}
        worker.wait([1, 2])  # reported jobs too


def test_many_jobs_are_reported_once_each(shm: Path) -> None:
    rng = random.Random(3)
    layout = Layout(pages=(700, 64), groups=({0: 700, 1: 64},), num_device_blocks=12)
    tensors = layout.new_tensors(2)
    originals = [tensor.copy() for tensor in tensors]
    with open_worker(layout, tensors, shm) as (worker, _):
        reported: list[TransferResult] = []
        for slot in range(NUM_SLOTS):
            assert Job(True, [Part(0, 0, [slot], [slot])]).submit(worker, slot)
        worker.wait(range(NUM_SLOTS))
        for job_id in range(NUM_SLOTS, 600):
            # What is stored again and loaded again are the same bytes, from other blocks.
            slot = rng.randrange(NUM_SLOTS)
            if rng.random() < 0.1:
                job = Job(False, [Part(0, 0, [NUM_SLOTS + slot], [-1])])
            elif rng.random() < 0.5:
                job = Job(True, [Part(0, 0, [slot], [slot])])
            else:
                job = Job(False, [Part(0, 0, [NUM_SLOTS + slot], [slot])])
            assert job.submit(worker, job_id)
            if rng.random() < 0.2:
                reported += worker.get_finished()
        worker.wait(range(600))
        reported += worker.get_finished()
        assert sorted(result.job_id for result in reported) == list(range(600))
        assert 0 < sum(not result.success for result in reported) < 200
        for tensor, original in zip(tensors, originals, strict=True):
            for slot in range(NUM_SLOTS):
                assert tensor[slot].tolist() == original[slot].tolist()
                loaded = tensor[NUM_SLOTS + slot].tolist()
                assert loaded in (original[slot].tolist(), original[NUM_SLOTS + slot].tolist())


def test_shutdown_finishes_what_was_accepted(shm: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    threads_before = set(threading.enumerate())
    tensors = SIMPLE.new_tensors(1)
    with open_worker(SIMPLE, tensors, shm) as (worker, rows):
        gate = Gate(monkeypatch, "store")
        for slot in range(3):
            assert Job(True, [Part(0, 0, [slot], [slot])]).submit(worker, slot)
        assert Job(False, [Part(0, 0, [9], [5])]).submit(worker, 3)
        gate.reached.wait()
        opener = threading.Timer(0.05, gate.open)
        opener.start()
        worker.shutdown()
        opener.join()
        assert set(threading.enumerate()) - threads_before == set()
        assert not Job(True, [Part(0, 0, [1], [1])]).submit(worker, 9)
        assert not Job(False, [Part(0, 0, [1], [1])]).submit(worker, 10)
        assert finish(worker, 0, 1, 2, 3) == dict.fromkeys(range(4), True)
        assert worker.get_finished() == []
        start = RANK * SIMPLE.cell_bytes
        for slot in range(3):
            assert rows[slot, start : start + 64].tolist() == tensors[0][slot].tolist()
        worker.shutdown()


def test_the_worker_cleans_up_its_region(shm: Path, caplog: pytest.LogCaptureFixture) -> None:
    region = SharedOffloadRegion("engine", NUM_SLOTS, 0, PAGE, PAGE, directory=str(shm))
    worker = HostOffloadingWorker(SIMPLE.canonical(SIMPLE.new_tensors(1)), region, 1)
    assert Job(True, [Part(0, 0, [1], [1])]).submit(worker, 1)
    worker.shutdown()
    assert list(shm.iterdir()) == []
    assert caplog.messages == []


def test_a_thread_that_cannot_be_had_refuses_the_job(
    shm: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_thread(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with open_worker(SIMPLE, SIMPLE.new_tensors(1), shm) as (worker, _):
        job = Job(True, [Part(0, 0, [1], [1])])
        with monkeypatch.context() as patch:
            patch.setattr(threading.Thread, "start", no_thread)
            assert not job.submit(worker, 1)
        worker.wait([1])
        assert job.submit(worker, 2)
        worker.shutdown()
        assert finish(worker) == {2: True}  # what was refused was not done later either


# ---------------------------------------------------------------------------------------------
# Caches that cannot be used, and caches of torch
# ---------------------------------------------------------------------------------------------


def make_worker(directory: Path, layout: Layout, tensors: list[Any]) -> HostOffloadingWorker:
    """A worker whose constructor fails. The region is cleaned up, as a spec would do."""
    region = SharedOffloadRegion("engine", 1, 0, PAGE, 128, directory=str(directory))
    try:
        return HostOffloadingWorker(layout.canonical(tensors), region, layout.blocks_per_chunk)
    finally:
        region.cleanup()


def read_only(array: Bytes) -> Bytes:
    array.flags.writeable = False
    return array


@pytest.mark.parametrize(
    ("tensor", "error", "complaint"),
    [
        (np.zeros((4, 63), np.uint8), ValueError, r"shape \(4, 63\) .*page_size_bytes=64"),
        (np.zeros(256, np.uint8), ValueError, r"shape \(256,\)"),
        (np.zeros((4, 31), np.float16), ValueError, r"shape \(4, 62\) in bytes"),
        (np.zeros((64, 4), np.uint8).T, ValueError, r"strides of \(1, 4\)"),
        (read_only(np.zeros((4, 64), np.uint8)), ValueError, "read-only"),
        ([[0] * 64] * 4, TypeError, r"builtins\.list: give a numpy array or a torch tensor"),
    ],
)
def test_caches_that_are_no_pages_are_refused(
    tensor: Any, error: type[Exception], complaint: str, shm: Path
) -> None:
    with pytest.raises(error, match=complaint):
        make_worker(shm, Layout(pages=(64,), groups=({0: 64},)), [tensor])


@pytest.mark.parametrize(
    ("group", "complaint"),
    [
        ({1: 64}, "group 0 refers to tensor 1, but there are 1"),
        ({-1: 64}, "group 0 refers to tensor -1"),
        ({0: 65}, "group 0 refers to 65 bytes .*tensor 0, whose pages have 64"),
        ({0: 0}, "group 0 refers to 0 bytes"),
    ],
)
def test_groups_that_refer_to_nothing_are_refused(
    group: dict[int, int], complaint: str, shm: Path
) -> None:
    with pytest.raises(ValueError, match=complaint):
        make_worker(shm, Layout((64,), (group,)), [np.zeros((4, 64), np.uint8)])


def test_caches_that_do_not_fit_the_cell_are_refused(
    shm: Path, caplog: pytest.LogCaptureFixture
) -> None:
    layout = Layout(pages=(64,), groups=({0: 64},), blocks_per_chunk=3)
    with pytest.raises(ValueError, match=r"need 192 bytes per slot .*cpu_page_size=128"):
        make_worker(shm, layout, [np.zeros((4, 64), np.uint8)])
    with pytest.raises(ValueError, match="blocks_per_chunk=0"):
        make_worker(shm, Layout((64,), ({0: 64},), 0), [np.zeros((4, 64), np.uint8)])
    assert caplog.messages == []


def test_signed_bytes_are_bytes(shm: Path) -> None:
    layout = Layout(pages=(4,), groups=({0: 4},))
    tensor = np.array([[-1, -2, 3, 127], [0, 0, 0, 0]], np.int8)
    with open_worker(layout, [tensor], shm) as (worker, rows):
        assert worker.submit_store(1, GPULoadStoreSpec([0], [1], [0]), CPULoadStoreSpec([2]))
        assert finish(worker, 1) == {1: True}
        assert rows[2, 4:8].tolist() == [255, 254, 3, 127]
        assert worker.submit_load(2, CPULoadStoreSpec([2]), GPULoadStoreSpec([1], [1], [0]))
        assert finish(worker, 2) == {2: True}
    assert tensor[1].tolist() == [-1, -2, 3, 127]


@pytest.mark.parametrize("dtype", ["int8", "uint8", "float8_e4m3fn"])
def test_torch_tensors_are_used_in_place(dtype: str, shm: Path) -> None:
    torch = pytest.importorskip("torch", reason="needs torch, which the engine brings")
    # As vLLM makes them: a byte view of another type's storage, with an offset and gaps.
    storage = torch.arange(6 * 40, dtype=torch.uint8).view(torch.bfloat16).untyped_storage()
    view = torch.tensor([], dtype=torch.uint8).set_(storage, 8, (5, 32), (40, 1))
    layout = Layout(pages=(32,), groups=({0: 32},), num_device_blocks=5)
    before = bytes(storage)
    with open_worker(layout, [view.view(getattr(torch, dtype))], shm) as (worker, rows):
        assert worker.submit_store(1, GPULoadStoreSpec([1, 4], [2], [0]), CPULoadStoreSpec([5, 0]))
        assert finish(worker, 1) == {1: True}
        assert rows[5, 32:64].tobytes() == before[48:80]
        assert rows[0, 32:64].tobytes() == before[168:200]
        assert worker.submit_load(2, CPULoadStoreSpec([5]), GPULoadStoreSpec([3], [1], [0]))
        assert finish(worker, 2) == {2: True}
    assert bytes(storage) == before[:128] + before[48:80] + before[160:]


def test_a_tensor_on_another_device_is_refused(shm: Path) -> None:
    torch = pytest.importorskip("torch", reason="needs torch, which the engine brings")
    tensor = torch.empty((4, 64), dtype=torch.uint8, device="meta")
    with pytest.raises(TypeError, match=r"on the device 'meta', .*torch tensors on .* 'cpu'"):
        make_worker(shm, Layout(pages=(64,), groups=({0: 64},)), [tensor])
