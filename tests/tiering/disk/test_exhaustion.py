"""No space, no descriptors, no permission, a failing disk: the engine goes on, and the log names
the cause. The file systems are real. When a fault ends, the tier recovers by itself."""

from __future__ import annotations

import errno
import os
import shutil
import tempfile
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest

from kvtier.base import OffloadKey, ReqContext
from kvtier.testing import TierHarness
from kvtier.tiering.base import TransferJob
from kvtier.tiering.disk import flusher
from kvtier.tiering.disk.layout import Geometry
from kvtier.tiering.disk.manager import FAILED, FILE_BYTES, QUEUED, REFUSED
from kvtier.tiering.disk.ownership import SlabRefused
from kvtier.tiering.io import lane
from kvtier.tiering.io.aio import AioUnavailable
from kvtier.tiering.io.metrics import error_counter
from tests.tiering.descriptors import no_more_descriptors
from tests.tiering.disk.harness import ROW_BYTES, bytes_for, disk_harness, disk_of, du, silent_disk
from tests.tiering.disk.small_disk import LoopDisk, loop_disk, small_tmpfs
from tests.tiering.patience import wait_until

NOBODY = 65534


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[LoopDisk]:
    with loop_disk(tmp_path, 24 << 20) as disk:
        yield disk


class Figures:
    """The counters of a tier, summed over calls."""

    def __init__(self, harness: TierHarness) -> None:
        self._harness = harness
        self._counters: Counter[str] = Counter()

    def __getitem__(self, name: str) -> float:
        self._counters.update(self._harness.call("get_stats").counters)
        return self._counters[name]

    def errors(self, kind: str) -> float:
        return self[error_counter("kvtier_disk", kind)]


def store_all(harness: TierHarness, count: int, start: int = 0) -> None:
    (report,) = harness.wait_for(harness.store(harness.keys(count, start)))
    assert report.result.success


def load_all(harness: TierHarness, count: int, start: int = 0) -> None:
    (report,) = harness.wait_for(harness.load(harness.keys(count, start)))
    assert report.result.success


def refusal_of(path: Path, num_blocks: int = 8, **options: Any) -> str:
    """The refusal of a tier that cannot start. It must leave no thread behind."""
    threads = set(threading.enumerate())
    with pytest.raises(SlabRefused) as refused:
        disk_harness(path, num_blocks, **options)
    assert set(threading.enumerate()) <= threads
    return str(refused.value)


# --- no room -----------------------------------------------------------------------------------


def test_a_file_that_does_not_fit_is_refused_with_the_figures(disk: LoopDisk) -> None:
    free = disk.free_bytes
    path = disk.root / "kv.slab"
    refusal = refusal_of(path, max_bytes="64MiB")
    assert str(path) in refusal
    assert str(free) in refusal
    assert "max_bytes" in refusal
    assert os.listdir(disk.root) == ["lost+found"]
    assert disk.free_bytes == free


def test_a_file_that_does_not_fit_into_memory_is_refused(tmp_path: Path) -> None:
    with small_tmpfs(tmp_path, 4 << 20) as root:
        refusal = refusal_of(root / "kv.slab", max_bytes="8MiB")
        assert "max_bytes" in refusal
        assert os.listdir(root) == []


def test_a_slab_that_cannot_grow_is_refused_and_stays_as_it_was(disk: LoopDisk) -> None:
    path = disk.root / "kv.slab"
    with disk_harness(path, 16) as harness:
        store_all(harness, 16)
    size = path.stat().st_size
    assert "max_bytes" in refusal_of(path, max_bytes="64MiB")
    assert path.stat().st_size == size
    with disk_harness(path, 16) as harness:
        load_all(harness, 16)


def test_others_who_fill_the_file_system_change_nothing(disk: LoopDisk) -> None:
    """Every byte was allocated before, even where nothing had been written."""
    path = disk.root / "kv.slab"
    with disk_harness(path, 512, num_rows=96) as harness:
        disk.fill()
        assert disk.free_bytes == 0
        for start in range(0, 2048, 64):
            store_all(harness, 64, start)
            load_all(harness, 64, start)
        figures = Figures(harness)
        assert figures[FAILED] == 0
        assert figures.errors("ENOSPC") == 0
    with disk_harness(path, 512) as harness:
        load_all(harness, 64, start=2048 - 64)
        assert du(path) <= bytes_for(512)


# --- a disk that fails -------------------------------------------------------------------------


def test_a_disk_that_fails_for_a_while(disk: LoopDisk, caplog: pytest.LogCaptureFixture) -> None:
    with disk_harness(disk.root / "kv.slab", 256) as harness:
        figures = Figures(harness)
        store_all(harness, 32)
        with disk.broken():
            load, store = harness.wait_for(
                harness.load(harness.keys(8)), harness.store(harness.keys(8, start=100))
            )
            assert not load.moved
            assert not store.moved
            assert figures.errors("EIO") >= 2
            assert figures[FAILED] == 8
            assert not harness.hits(harness.keys(8))
            assert not harness.hits(harness.keys(8, start=100))
        load_all(harness, 24, start=8)
        store_all(harness, 8)
        store_all(harness, 8, start=100)
        load_all(harness, 8)
        load_all(harness, 8, start=100)
        told = [message for message in caplog.messages if "EIO" in message]
        assert len(told) == 1, told
        assert str(disk.root / "kv.slab") in told[0]


def test_a_file_system_that_becomes_read_only(
    disk: LoopDisk, caplog: pytest.LogCaptureFixture
) -> None:
    """Stores fail and are counted by error, nothing raises, and blocks can still be loaded."""
    with disk_harness(disk.root / "kv.slab", 64) as harness:
        figures = Figures(harness)
        store_all(harness, 8)
        disk.become_read_only()
        (report,) = harness.wait_for(harness.store(harness.keys(4, start=100)))
        assert not report.moved
        assert figures[FAILED] == 4
        assert figures.errors("EROFS") >= 1
        assert sum("EROFS" in message for message in caplog.messages) == 1
        harness.wait_for(harness.load(harness.keys(8)))  # and what it brings was checked


def test_a_slab_on_a_read_only_mount_is_refused(tmp_path: Path) -> None:
    with loop_disk(tmp_path, 8 << 20) as disk, disk_harness(disk.root / "kv.slab", 4):
        pass
    content = disk.image.read_bytes()
    (tmp_path / "again").mkdir()
    with loop_disk(tmp_path / "again", 8 << 20, read_only=True, content=content) as disk:
        refusals = [refusal_of(disk.root / name) for name in ("kv.slab", "new.slab")]
    for refusal, name in zip(refusals, ("kv.slab", "new.slab"), strict=True):
        assert str(disk.root / name) in refusal
        assert "read-only" in refusal.lower()


def test_no_descriptor_is_needed_once_the_tier_runs(tmp_path: Path) -> None:
    with disk_harness(tmp_path / "kv.slab") as harness, no_more_descriptors():
        store_all(harness, 16)
        load_all(harness, 16)
        harness.begin_epoch(bytes(16))
        store_all(harness, 16)
        load_all(harness, 16)
        harness.drain()
        harness.shut_down()


def test_a_start_without_a_descriptor_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "kv.slab"
    with no_more_descriptors():
        refusal = refusal_of(path)
    assert "Too many open files" in refusal
    assert os.listdir(tmp_path) == []
    with disk_harness(path) as harness:
        store_all(harness, 4)


# --- no permission -----------------------------------------------------------------------------


@pytest.fixture
def public_directory() -> Iterator[Path]:
    """A directory that all users can read, and only its owner can change."""
    if os.geteuid() != 0:
        pytest.skip("becoming someone else needs root")
    with tempfile.TemporaryDirectory() as name:
        os.chmod(name, 0o755)
        yield Path(name)


@contextmanager
def somebody_else() -> Iterator[None]:
    os.seteuid(NOBODY)
    try:
        yield
    finally:
        os.seteuid(0)


def test_losing_the_permission_does_not_matter_to_a_running_tier(public_directory: Path) -> None:
    path = public_directory / "kv.slab"
    with disk_harness(path) as harness:
        store_all(harness, 8)
        path.chmod(0)
        with somebody_else():
            store_all(harness, 8, start=8)
            load_all(harness, 16)
            harness.drain()
            harness.shut_down()
    with disk_harness(path) as harness:
        load_all(harness, 16)


def test_a_slab_of_someone_else_is_refused(public_directory: Path) -> None:
    path = public_directory / "kv.slab"
    with disk_harness(path):
        pass
    with somebody_else():
        refusal = refusal_of(path)
    assert str(path) in refusal
    assert "Permission denied" in refusal
    path.chmod(0o666)
    with somebody_else():
        refusal = refusal_of(path)
    assert f"{path} belongs to uid 0, and this process runs as uid {NOBODY}" in refusal


def test_a_slab_that_belongs_to_another_user_is_refused_and_left_alone(
    public_directory: Path,
) -> None:
    """Even by root, who can open it: its owner could write blocks into it."""
    path = public_directory / "kv.slab"
    with disk_harness(path) as harness:
        store_all(harness, 4)
    os.chown(path, NOBODY, NOBODY)
    before = path.read_bytes()
    refusal = refusal_of(path)
    assert f"{path} belongs to uid {NOBODY}, and this process runs as uid 0" in refusal
    assert f"chown 0 {path}" in refusal
    assert path.read_bytes() == before
    os.chown(path, 0, 0)
    with disk_harness(path) as harness:
        load_all(harness, 4)


@pytest.mark.parametrize("mode", [0o620, 0o602])
def test_a_slab_that_others_may_write_to_is_refused(tmp_path: Path, mode: int) -> None:
    path = tmp_path / "kv.slab"
    with disk_harness(path) as harness:
        store_all(harness, 4)
    path.chmod(mode)
    refusal = refusal_of(path)
    assert f"may be written by others (mode {mode:o})" in refusal
    assert f"chmod 600 {path}" in refusal
    path.chmod(0o600)
    with disk_harness(path) as harness:
        load_all(harness, 4)


def test_a_directory_of_someone_else_is_refused(public_directory: Path) -> None:
    path = public_directory / "kv.slab"
    with somebody_else():
        refusal = refusal_of(path)
    assert str(path) in refusal
    assert "Permission denied" in refusal
    assert os.listdir(public_directory) == []


# --- someone is at the file --------------------------------------------------------------------


def file_bytes(harness: TierHarness) -> float:
    gauge: float = harness.call("get_stats").gauges[FILE_BYTES]
    return gauge


def _remove(path: Path) -> None:
    path.unlink()


def _remove_directory(path: Path) -> None:
    shutil.rmtree(path.parent)


def _replace(path: Path) -> None:
    shutil.copy(path, path.with_name("copy"))
    os.replace(path.with_name("copy"), path)


@pytest.mark.parametrize(
    ("lose", "what"),
    [
        (_remove, "was removed while"),
        (_remove_directory, "was removed, with its directory"),
        (_replace, "was replaced by another file while"),
    ],
)
def test_a_slab_that_is_gone_is_noticed(
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    lose: Callable[[Path], None],
    what: str,
) -> None:
    """The warning has path, meaning and remedy, and the gauge is 0."""
    monkeypatch.setattr(flusher, "_LOOK_EVERY_S", 0.02)
    path = tmp_path / "disk" / "kv.slab"
    path.parent.mkdir()
    with disk_harness(path) as harness:
        store_all(harness, 8)
        wait_until(lambda: file_bytes(harness) == du(path), "the gauge says what du says")
        lose(path)
        wait_until(lambda: file_bytes(harness) == 0, "the gauge says that it is gone")
        store_all(harness, 8, start=8)
        load_all(harness, 16)
        wait_until(lambda: bool(caplog.messages), "it is said")
    [message] = caplog.messages
    assert message.startswith(f"{path} {what}")
    assert "lost when the engine ends" in message
    assert "Restart the engine" in message


def test_a_slab_that_is_put_back_is_counted_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(flusher, "_LOOK_EVERY_S", 0.02)
    path, aside = tmp_path / "kv.slab", tmp_path / "aside"
    with disk_harness(path) as harness:
        path.rename(aside)
        wait_until(lambda: file_bytes(harness) == 0, "it is gone")
        aside.rename(path)
        wait_until(lambda: file_bytes(harness) == du(path), "it is back")


def test_a_slab_that_is_deleted_is_used_to_the_end(tmp_path: Path) -> None:
    path = tmp_path / "kv.slab"
    with disk_harness(path) as harness:
        store_all(harness, 8)
        path.unlink()
        store_all(harness, 8, start=8)
        load_all(harness, 16)
    assert os.listdir(tmp_path) == []
    with disk_harness(path) as harness:
        assert not harness.hits(harness.keys(16))
        store_all(harness, 8)


def test_a_slab_that_is_replaced_is_left_alone(tmp_path: Path) -> None:
    path, other = tmp_path / "kv.slab", tmp_path / "other.slab"
    with disk_harness(other) as harness:
        store_all(harness, 4, start=500)
    content = other.read_bytes()
    with disk_harness(path) as harness:
        store_all(harness, 8)
        other.rename(path)
        store_all(harness, 8, start=8)
        load_all(harness, 16)
    assert path.read_bytes() == content
    with disk_harness(path) as harness:
        load_all(harness, 4, start=500)


def test_a_slab_that_is_cut_off_while_it_runs(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Blocks behind the end are misses, counted by error, and new blocks can be stored there
    again."""
    path = tmp_path / "kv.slab"
    with disk_harness(path, 64) as harness:
        figures = Figures(harness)
        store_all(harness, 32)
        os.truncate(path, Geometry(ROW_BYTES, 4).file_bytes)
        (report,) = harness.wait_for(harness.load(harness.keys(32)))
        assert len(report.moved) <= 4
        assert figures.errors("ENODATA") >= 1
        assert sum("ENODATA" in message for message in caplog.messages) == 1
        store_all(harness, 32)
        load_all(harness, 32)
    with disk_harness(path, 64) as harness:
        kept = harness.hits(harness.keys(32))
        (report,) = harness.wait_for(harness.load(sorted(kept)))
        assert report.moved == kept
        assert path.stat().st_size <= du(path) <= bytes_for(64)  # allocated as before


# --- the kernel's queues -----------------------------------------------------------------------


def test_no_room_in_the_kernel_is_refused_at_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "kv.slab"
    too_many = 2 * int(
        Path("/proc/sys/fs/aio-max-nr").read_text()
    )  # or other processes would have none
    threads = set(threading.enumerate())
    with monkeypatch.context() as patch:
        patch.setattr(lane, "_LEAST_DEPTH", too_many)
        patch.setattr(lane, "_MOST_DEPTH", too_many)
        with pytest.raises(AioUnavailable, match=r"fs\.aio-max-nr"):
            disk_harness(path, 4, row_bytes=1 << 20, num_rows=4)
    assert set(threading.enumerate()) <= threads
    with disk_harness(path, 4, row_bytes=1 << 20, num_rows=4) as harness:
        store_all(harness, 2)


def test_a_kernel_queue_that_fails_fails_everything_and_hangs_nobody(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """No known fault causes this. But no caller may wait for a thread that has ended."""
    with disk_harness(tmp_path / "kv.slab", io_threads=1) as harness:
        store_all(harness, 8)
        (lane,) = disk_of(harness)._mover.lanes

        def fail(at_least: int = 1) -> list[tuple[int, int]]:
            raise OSError(errno.EINVAL, "the queue is gone")

        lane._queue.reap = fail  # type: ignore[method-assign]
        load, store = harness.wait_for(
            harness.load(harness.keys(8)), harness.store(harness.keys(4, start=20))
        )
        assert not load.moved
        assert not store.moved
        (report,) = harness.wait_for(harness.store(harness.keys(4, start=30)))
        assert not report.moved
        assert any("an I/O thread failed" in message for message in caplog.messages)


# --- more than the disk takes ------------------------------------------------------------------


def test_a_burst_reaches_a_disk_that_was_silent_meanwhile(tmp_path: Path) -> None:
    """The tier itself has no limit: waiting blocks hold slots of the primary tier, which bounds
    them."""
    with disk_harness(tmp_path / "kv.slab", 512, num_rows=300) as harness:
        figures = Figures(harness)
        with silent_disk(harness.tier):
            jobs = [harness.store(harness.keys(6, start=6 * n)) for n in range(40)]
            harness.step()
            assert harness.call("get_stats").gauges[QUEUED] == 240
        harness.wait_for(*jobs)
        load_all(harness, 240)
        assert harness.call("get_stats").gauges[QUEUED] == 0
        assert figures[REFUSED] == 0
        assert figures[FAILED] == 0


def test_stores_are_refused_and_counted_where_every_slot_is_being_written(tmp_path: Path) -> None:
    with disk_harness(tmp_path / "kv.slab", 4) as harness:
        figures = Figures(harness)
        with silent_disk(harness.tier):
            first = harness.store(harness.keys(3))
            second = harness.store(harness.keys(5, start=10))
            harness.step()
        harness.wait_for(first, second)
        assert harness.ledger.reports[second.job_id].moved == set(harness.keys(1, start=10))
        assert figures[REFUSED] == 4


# --- every byte accounted for ------------------------------------------------------------------


@contextmanager
def _ext4(directory: Path) -> Iterator[Path]:
    with loop_disk(directory, 24 << 20) as disk:
        yield disk.root


@contextmanager
def _tmpfs(directory: Path) -> Iterator[Path]:
    with small_tmpfs(directory, 24 << 20) as root:
        yield root


def keep_busy(harness: TierHarness, num_blocks: int) -> None:
    """Store `num_blocks` blocks in scattered slots, load some, and reset the tier twice. The rows'
    content does not matter, so they are not filled each time."""
    tier = harness.tier
    chance = Random(7)
    rows = np.array(harness.slots.lend(64), dtype=np.int64)
    num_open = 0
    for number in range(num_blocks // 64):
        start = 64 * number
        is_load = number % 8 == 7
        some = chance.randint(1, 64) if is_load else 64
        keys = [OffloadKey(b"%032d" % (start - 64 * is_load + i)) for i in range(some)]
        job = TransferJob(number, keys, rows[:some], is_load, ReqContext("busy"), tier.fingerprint)
        (tier.submit_load if is_load else tier.submit_store)(job)
        num_open += 1
        if number in (num_blocks // 192, num_blocks // 128):
            tier.begin_epoch(number.to_bytes(16, "big"))
        while num_open > 8:
            num_open -= len(list(tier.get_finished_jobs()))
        tier.take_events()
    tier.drain_jobs()
    assert len(list(tier.get_finished_jobs())) == num_open


@pytest.mark.parametrize("file_system", [_ext4, _tmpfs])
@pytest.mark.parametrize(
    "num_blocks",
    [
        pytest.param(50_000, id="some"),
        pytest.param(1_000_000, id="million", marks=pytest.mark.soak),
    ],
)
def test_the_gauge_is_what_du_says(
    tmp_path: Path,
    file_system: Callable[[Path], AbstractContextManager[Path]],
    num_blocks: int,
) -> None:
    with file_system(tmp_path) as root:
        path = root / "kv.slab"
        # Blocks of one page give the most slots, and the most extents, for a file size.
        with disk_harness(path, 2000, row_bytes=4096, num_rows=256) as harness:
            keep_busy(harness, num_blocks)
            tier = disk_of(harness)
            wait_until(lambda: tier.get_stats().gauges[FILE_BYTES] == du(path), "gauge")
            assert du(path) <= bytes_for(2000, 4096)
        with disk_harness(path, 2000, row_bytes=4096) as harness:
            gauge = harness.call("get_stats").gauges[FILE_BYTES]
            assert gauge == du(path) <= bytes_for(2000, 4096)
