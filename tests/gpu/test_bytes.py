"""Every byte on both sides is right, for all layouts and paths."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvtier.cpu.cuda import page_kernel, page_mover, resources
from kvtier.cpu.cuda.copies import CopyPath
from kvtier.cpu.cuda.driver import CudaError
from kvtier.cpu.cuda.page_kernel import KernelUnavailable, PageKernel
from kvtier.cpu.cuda.page_table import ALIGNMENT
from kvtier.cpu.cuda.streams import StreamCopies
from kvtier.cpu.gpu_worker import GPUOffloadingWorker
from tests.cpu.jobs import Part
from tests.gpu.cache_layout import CacheLayout, PagedTensor, plain_layout
from tests.gpu.checked_worker import open_checked_worker
from tests.gpu.histories import NUM_SLOTS, histories
from tests.gpu.jobs import Job, load, store
from tests.gpu.places import CudaPlace, LaunchCount, Place, refuse_device_call
from tests.gpu.simulated_cuda import SimulatedKernel

History = tuple[CacheLayout, list[Job]]

WITH_FIXTURES = [HealthCheck.function_scoped_fixture]

KIB, MIB = 1 << 10, 1 << 20
PAGE_SIZES = (16, 48, 100, 2 * KIB, 16 * KIB, 64 * KIB, 200 * KIB, 512 * KIB, 2 * MIB, 2 * MIB - 8)


def check_history(
    place: Place, directory: Path, history: History, seed: int, by_polling: bool
) -> None:
    layout, jobs = history
    with open_checked_worker(place, layout, directory, num_slots=NUM_SLOTS, seed=seed) as rig:
        for job in jobs:
            rig.do(job, by_polling=by_polling)
            rig.check()


@settings(max_examples=60, suppress_health_check=WITH_FIXTURES)
@given(history=histories(), seed=st.integers(0, 2**16), by_polling=st.booleans())
def test_every_byte_is_as_it_should_be(
    any_place: Place, shm: Path, history: History, seed: int, by_polling: bool
) -> None:
    check_history(any_place, shm, history, seed, by_polling)


@pytest.mark.soak
@settings(suppress_health_check=WITH_FIXTURES)
@given(history=histories(), seed=st.integers(0, 2**16), by_polling=st.booleans())
def test_every_byte_is_as_it_should_be_for_long(
    any_place: Place, shm: Path, history: History, seed: int, by_polling: bool
) -> None:
    check_history(any_place, shm, history, seed, by_polling)


@pytest.mark.parametrize("path", CopyPath)
@settings(max_examples=25, suppress_health_check=WITH_FIXTURES)
@given(history=histories(), seed=st.integers(0, 2**16), by_polling=st.booleans())
def test_every_path_copies_every_byte(
    device_place: Place,
    path: CopyPath,
    shm: Path,
    history: History,
    seed: int,
    by_polling: bool,
) -> None:
    device_place.use(path)
    check_history(device_place, shm, history, seed, by_polling)


@pytest.mark.parametrize("page", PAGE_SIZES)
@pytest.mark.parametrize("path", CopyPath)
def test_pages_of_every_size(
    device_place: Place, path: CopyPath, page: int, shm: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also: the kernel is used where it can be, and nowhere else."""
    device_place.use(path)
    launches = LaunchCount(monkeypatch)
    num_slots = 3 if page > 256 * KIB else 20
    layout = plain_layout(page, page, num_blocks=2 * num_slots)
    blocks = [(7 * i + 3) % num_slots for i in range(num_slots)]
    with open_checked_worker(device_place, layout, shm, num_slots=num_slots) as rig:
        rig.do(store(blocks, range(num_slots)))
        rig.check()
        rig.do(load(range(num_slots), [2 * num_slots - 1 - block for block in blocks]))
        rig.check()
    by_kernel = path in {CopyPath.KERNEL, CopyPath.STAGED} and page % ALIGNMENT == 0
    assert launches.count == (2 if by_kernel else 0)


@pytest.mark.parametrize("dtype", ["bfloat16", "float8_e4m3fn", "uint8"])
@pytest.mark.parametrize("is_one_allocation", [True, False])
def test_keys_and_values_of_a_model(
    any_place: Place, dtype: str, is_one_allocation: bool, shm: Path
) -> None:
    """Layouts of engines: chunks of several blocks, begun in the middle, with an unused tensor."""
    page, num_blocks = 4 * KIB, 12
    allocations: tuple[int, ...]
    if is_one_allocation:
        allocations = (2 * page * num_blocks, page * num_blocks)
        tensors = tuple(PagedTensor(0, offset, 2 * page, page, dtype) for offset in (0, page))
    else:
        allocations = (page * num_blocks,) * 3
        tensors = tuple(PagedTensor(i, 0, page, page, dtype) for i in range(2))
    unused = PagedTensor(len(allocations) - 1, 0, page, page, dtype)
    layout = CacheLayout(
        num_blocks, allocations, (*tensors, unused), ({0: page, 1: page}, {2: page // 2}), 4
    )
    with open_checked_worker(any_place, layout, shm) as rig:
        # From the third place of the first slot on, in one group; a whole slot in the other.
        stored = Job(True, [Part(0, 6, [5, 1, 8, 0, 11, 3], [2, 0]), Part(1, 0, [7, 6, 5, 4], [3])])
        rig.do(stored)
        rig.check()
        # To the end of the second slot's third place.
        rig.do(Job(False, [Part(0, 3, [9, 10, 2, 4], [2, 0]), Part(1, 1, [9], [3])]))
        rig.check()


def test_slots_hold_nothing_from_before(any_place: Place, shm: Path) -> None:
    """Also if a tier below has written whole rows in between."""
    pages = (64, 32, 48)
    layout = CacheLayout(
        8,
        tuple(page * 8 for page in pages),
        tuple(PagedTensor(i, 0, page, page) for i, page in enumerate(pages)),
        ({0: 64}, {1: 20, 2: 48}),
        blocks_per_chunk=2,
    )
    with open_checked_worker(any_place, layout, shm) as rig:
        for filler in (0x11, 0x22):
            rig.rows[:] = rig.expected_rows[:] = filler
            rig.do(Job(True, [Part(0, 1, [5], [3]), Part(1, 0, [1, 2, 6, 7], [2, 0])]))
            rig.check()


@pytest.mark.parametrize("path", CopyPath)
@pytest.mark.parametrize("blocks_per_chunk", [1, 2])
def test_groups_whose_pages_do_not_lie_together(
    device_place: Place, blocks_per_chunk: int, path: CopyPath, shm: Path
) -> None:
    """All pages have one size, but they are not adjacent in the slot: they have another order, or
    padding or other pages between them, or the job also has a group whose pages are adjacent."""
    page, num_blocks, count = 64, 24, blocks_per_chunk
    layout = CacheLayout(
        num_blocks,
        (page * num_blocks,) * 3,
        tuple(PagedTensor(i, 0, page, page) for i in range(3)),
        (
            {0: page, 1: page, 2: page},
            {2: page, 1: page, 0: page},
            {0: page, 2: page},
            {0: page // 2, 1: page // 2, 2: page // 2},
        ),
        blocks_per_chunk,
    )
    blocks = [[*range(start, start + 2 * count)] for start in range(0, 8 * count, 2 * count)]
    device_place.use(path)
    with open_checked_worker(device_place, layout, shm, num_slots=8) as rig:
        for groups in ([0], [1], [2], [3], [0, 3], [2, 0, 1], [0, 1, 2, 3]):
            for is_store in (True, False):
                turned = blocks if is_store else [part[::-1] for part in blocks[::-1]]
                # A job names all groups, including those that it does not copy.
                parts = [
                    Part(group, 0, turned[group], [2 * group + 1, 2 * group])
                    if group in groups
                    else Part(group, 0, [], [])
                    for group in range(4)
                ]
                rig.do(Job(is_store, parts))
                rig.check()


def unavailable(*_: object) -> None:
    raise KernelUnavailable("injected")


def test_without_the_kernel_the_engines_do_it(
    device_place: Place,
    shm: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    device_place.use(CopyPath.KERNEL)
    for kernel in (PageKernel, SimulatedKernel):
        monkeypatch.setattr(kernel, "__init__", unavailable)
    with open_checked_worker(device_place, plain_layout(64, 4096, num_blocks=8), shm) as rig:
        rig.do(store([1, 2, 3], [0, 3, 1]), by_polling=True)
        rig.do(load([3, 0], [7, 6]))
        rig.check()
    (warning,) = [record for record in caplog.records if record.levelname == "WARNING"]
    assert "copy kernel cannot be used: injected" in warning.getMessage()


def test_what_is_too_long_for_a_launch_is_copied_by_the_kernel_in_parts(
    device_place: Place, shm: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also with more parts than may be under way."""
    monkeypatch.setattr(page_kernel, "MOST_ENTRIES", 2)
    monkeypatch.setattr(resources, "_MOST_ENTRIES", 8 * 72)
    refuse_device_call(monkeypatch, "copy_batch", CudaError("not by the engines"))
    device_place.use(CopyPath.KERNEL)
    launches = LaunchCount(monkeypatch)
    with open_checked_worker(
        device_place, plain_layout(4096, num_blocks=48), shm, num_slots=48
    ) as rig:
        device_place.delay()  # so that no job ends before the next begins
        rig.do(store(range(47), range(1, 48)), by_polling=True)
        rig.check()
        rig.do(load([5, 7, 9], [1, 2, 3]))
        rig.check()
        assert launches.count == 24 + 2


@pytest.mark.parametrize(("blocks_per_chunk", "head"), [(1, 0), (3, 0), (3, 1), (3, 2)])
@pytest.mark.parametrize(("least", "num_launches"), [(65, 1), (4001, 2)])
def test_more_blocks_than_a_small_and_than_a_large_launch_take(
    device_place: Place,
    least: int,
    num_launches: int,
    blocks_per_chunk: int,
    head: int,
    shm: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """64 and 4,000 blocks. The next launch continues in the middle of a slot."""
    device_place.use(CopyPath.KERNEL)
    num_slots = -(-(least + head) // blocks_per_chunk)
    num_blocks = num_slots * blocks_per_chunk - head
    layout = plain_layout(16, num_blocks=num_blocks, blocks_per_chunk=blocks_per_chunk)
    blocks = [7 * i % num_blocks for i in range(num_blocks)]
    slots = list(range(num_slots))[::-1]
    launches = LaunchCount(monkeypatch)
    with open_checked_worker(device_place, layout, shm, num_slots=num_slots) as rig:
        rig.do(Job(True, [Part(0, head, blocks, slots)]))
        rig.check()
        assert launches.count == num_launches + (head > 0)  # zeros before the first block
        rig.do(Job(False, [Part(0, head, blocks[::-1][:least], slots)]))
        rig.check()
        assert launches.count == 2 * num_launches + (head > 0)


@pytest.mark.parametrize("num_tensors", [1, 3])
def test_staged_pages_pass_through_both_buffers_again_and_again(
    device_place: Place, num_tensors: int, shm: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page, num_slots = 1024, 40
    monkeypatch.setattr(page_mover, "STAGING_BYTES", 2 * num_tensors * page + 512)  # 2 slots each
    device_place.use(CopyPath.STAGED)
    launches = LaunchCount(monkeypatch)
    layout = plain_layout(*[page] * num_tensors, num_blocks=2 * num_slots)
    blocks = [(7 * i + 3) % num_slots for i in range(num_slots)]
    with open_checked_worker(device_place, layout, shm, num_slots=num_slots) as rig:
        for count in (num_slots, 5, 1, 2, 4):  # of slots: parts that are full, and that are not
            before = launches.count
            rig.do(store(blocks[:count], range(count)), store(blocks[-count:], range(count)))
            rig.check()
            rig.do(load(range(count), range(num_slots, num_slots + count)), by_polling=True)
            rig.check()
            assert launches.count - before == 3 * -(-count // 2)


def no_memory(*_: object, **__: object) -> None:
    raise CudaError("injected")


def test_without_room_for_staging_the_kernel_does_it_directly(
    device_place: Place,
    shm: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    device_place.use(CopyPath.STAGED)
    monkeypatch.setattr(page_mover.PageMover, "make_staging", no_memory)
    launches = LaunchCount(monkeypatch)
    with open_checked_worker(device_place, plain_layout(64, 64, num_blocks=8), shm) as rig:
        rig.do(store([1, 2], [3, 1]), store([4, 5], [0, 2]))
        rig.do(load([3], [7]))
        rig.check()
    assert launches.count == 3
    (warning,) = [record for record in caplog.records if record.levelname == "WARNING"]
    assert "device memory" in warning.getMessage()


@pytest.mark.parametrize(
    ("missing", "way"), [("nothing", "staged"), ("room", "kernel"), ("kernel", "engines")]
)
def test_the_log_says_which_way_is_taken(
    missing: str,
    way: str,
    device_place: Place,
    shm: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO, "kvtier")
    if missing == "room":
        monkeypatch.setattr(page_mover.PageMover, "make_staging", no_memory)
    elif missing == "kernel":
        for kernel in (PageKernel, SimulatedKernel):
            monkeypatch.setattr(kernel, "__init__", unavailable)
    layout = plain_layout(*[16 * KIB] * 32, num_blocks=8)
    with open_checked_worker(device_place, layout, shm, num_slots=8) as rig:
        rig.do(store(range(8), range(8)))
        assert isinstance(rig.worker, GPUOffloadingWorker)
        assert isinstance(rig.worker.copies, StreamCopies)
        assert [path.words for path in rig.worker.copies.taken] == [way]
    (line,) = [text for text in caplog.messages if "large jobs by" in text]
    assert line.endswith(f"large jobs by: {way}")


def test_what_a_buffer_cannot_hold_is_not_staged(
    device_place: Place, shm: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other memory follows the buffer."""
    monkeypatch.setattr(page_mover, "STAGING_BYTES", 3 * 64)
    device_place.use(CopyPath.STAGED)
    for num_tensors, path in ((3, CopyPath.STAGED), (4, CopyPath.KERNEL)):
        with open_checked_worker(
            device_place, plain_layout(*[64] * num_tensors, num_blocks=8), shm
        ) as rig:
            rig.do(store([1, 2], [3, 1]))
            rig.do(load([3, 1], [4, 5]))
            rig.check()
            assert isinstance(rig.worker, GPUOffloadingWorker)
            assert isinstance(rig.worker.copies, StreamCopies)
            assert rig.worker.copies.taken == {path: 2}


def test_a_large_job_of_small_pages_is_staged_without_being_told(
    device_place: Place, shm: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The layout of a model with a tensor for each layer. A real device uses its buffers several
    times."""
    num_slots = 160 if isinstance(device_place, CudaPlace) else 20
    launches = LaunchCount(monkeypatch)
    layout = plain_layout(*[16 * KIB] * 32, num_blocks=num_slots, dtype="bfloat16")
    blocks = [(7 * i + 3) % num_slots for i in range(num_slots)]
    with open_checked_worker(device_place, layout, shm, num_slots=num_slots) as rig:
        for turn in range(2):
            rig.do(store(blocks, range(num_slots)), by_polling=turn == 0)
            rig.check()
            rig.do(load(range(num_slots), range(num_slots)), by_polling=turn == 0)
            rig.check()
    staged_at_once = page_mover.STAGING_BYTES // (32 * 16 * KIB)
    assert launches.count == 4 * -(-num_slots // staged_at_once)


def test_zeros_come_after_what_is_staged(device_place: Place, shm: Path) -> None:
    """A slot is copied as a whole: stale bytes of the buffer in padding must be zeroed."""
    page, num_tensors = 4096, 4
    layout = CacheLayout(
        8,
        (8 * page,) * num_tensors,
        tuple(PagedTensor(i, 0, page, page) for i in range(num_tensors)),
        ({0: page, 1: page, 2: page, 3: page // 2},),
        1,
    )
    device_place.use(CopyPath.STAGED)
    with open_checked_worker(device_place, layout, shm) as rig:
        for first in range(3):
            rig.do(store([first + 1, first + 2, first + 3], [0, 1, 2]))
            rig.check()
        rig.do(load([2, 0], [6, 7]))
        rig.check()
        assert isinstance(rig.worker, GPUOffloadingWorker)
        assert isinstance(rig.worker.copies, StreamCopies)
        assert rig.worker.copies.taken[CopyPath.STAGED] >= 4


@pytest.mark.parametrize("is_by_size", [False, True])
def test_slots_that_a_thread_cannot_reach_at_once_in_a_buffer_are_not_staged(
    is_by_size: bool, device_place: Place, shm: Path
) -> None:
    """Although all pages of the group are aligned: a page of another group follows them."""
    page, odd, num_tensors, num_blocks = 64 << 10, 24, 6, 32
    layout = CacheLayout(
        num_blocks,
        (page * num_blocks,) * num_tensors + (odd * num_blocks,),
        (
            *(PagedTensor(i, 0, page, page) for i in range(num_tensors)),
            PagedTensor(num_tensors, 0, odd, odd),
        ),
        (dict.fromkeys(range(num_tensors), page), {num_tensors: odd}),
        1,
    )
    if not is_by_size:
        device_place.use(CopyPath.STAGED)
    blocks, others, slots = (list(range(start, start + 12)) for start in (0, 12, 0))
    with open_checked_worker(device_place, layout, shm, num_slots=16, rank=0) as rig:
        rig.do(Job(True, [Part(0, 0, blocks, slots), Part(1, 0, [], [])]))
        rig.check()
        rig.do(Job(False, [Part(0, 0, others, slots), Part(1, 0, [], [])]))
        rig.check()


def test_a_launch_takes_whole_slots_of_a_buffer(
    device_place: Place, shm: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As many ranks as the row has room for."""
    monkeypatch.setattr(page_kernel, "MOST_ENTRIES", 7)
    device_place.use(CopyPath.STAGED)
    layout = plain_layout(64, 64, num_blocks=15, blocks_per_chunk=3)
    launches = LaunchCount(monkeypatch)
    with open_checked_worker(device_place, layout, shm, num_slots=5) as rig:
        rig.do(store(range(15), range(5)))
        rig.check()
        assert launches.count == 3
        rig.do(load(range(5), [*range(7, 15), *range(7)]))
        rig.check()
        assert launches.count == 6
