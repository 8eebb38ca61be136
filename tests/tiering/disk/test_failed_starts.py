"""Engines that fail to start, or leave a child behind: nothing of them stays."""

from __future__ import annotations

import mmap
import os
import signal
import struct
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from kvtier.testing.harness import sample_spec
from kvtier.tiering.disk import file as file_module
from kvtier.tiering.disk import ownership
from kvtier.tiering.disk.layout import SUPERBLOCK_OFFSETS
from kvtier.tiering.disk.manager import DiskSecondaryTierManager
from kvtier.tiering.disk.ownership import SlabRefused
from kvtier.tiering.io.page import PAGE_BYTES, close_page
from tests.tiering.disk.harness import ROW_BYTES, bytes_for, disk_harness

_VERSION_AT = 8


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "kv.slab"


# --- threads that cannot be started ------------------------------------------------------------


def num_queues() -> int:
    """Number of asynchronous I/O queues of this process."""
    return Path("/proc/self/maps").read_text().count("[aio]")


@pytest.mark.parametrize("name", ["kvtier-disk-0", "kvtier-disk-1", "kvtier-disk-index"])
def test_a_thread_that_cannot_be_started_leaves_nothing_behind(
    path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    start: Callable[[threading.Thread], None] = threading.Thread.start

    def start_unless(thread: threading.Thread) -> None:
        if thread.name == name:
            raise RuntimeError("can't start new thread")
        start(thread)

    with disk_harness(path):
        assert num_queues() > 0
    threads, queues = set(threading.enumerate()), num_queues()
    descriptors = set(os.listdir("/proc/self/fd"))
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", start_unless)
        with pytest.raises(RuntimeError, match="can't start") as refused:
            disk_harness(path, io_threads=2)
        assert refused.value.__traceback__ is not None  # it is held, and holds nothing
        assert set(threading.enumerate()) <= threads
        assert num_queues() == queues
        assert set(os.listdir("/proc/self/fd")) <= descriptors
    with disk_harness(path) as harness:
        (report,) = harness.wait_for(harness.store(harness.keys(4)))
        assert report.result.success


# --- the primary tier's memory -----------------------------------------------------------------


def start_on(memory: mmap.mmap, row_bytes: int, path: Path) -> Exception:
    """The refusal of a tier at this path."""
    num_rows = len(memory) // row_bytes
    with memoryview(memory) as whole, whole[: num_rows * row_bytes] as used:
        view = used.cast("B", (num_rows, row_bytes))
        spec = sample_spec(PAGE_BYTES, num_rows, "weights", engine_id="second")
        try:
            DiskSecondaryTierManager(
                spec, view, "disk", path=str(path), max_bytes=bytes_for(8, row_bytes)
            )
        except Exception as error:
            return error
        finally:
            view.release()
    raise AssertionError("it was made")


def test_a_refused_start_lets_go_of_the_memory(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ownership, "_LOCK_PATIENCE_S", 0.02)
    memory = mmap.mmap(-1, 16 * ROW_BYTES)
    with disk_harness(path):
        error = start_on(memory, ROW_BYTES, path)
    assert isinstance(error, SlabRefused)
    memory.close()  # though the error is still there, with all its frames


def test_rows_that_cannot_be_used_are_let_go_of(path: Path) -> None:
    memory = mmap.mmap(-1, 16 * ROW_BYTES)
    error = start_on(memory, 5000, path)
    assert isinstance(error, ValueError)
    memory.close()


# --- another version ---------------------------------------------------------------------------


@pytest.mark.parametrize("damaged", SUPERBLOCK_OFFSETS)
def test_a_slab_of_another_version_is_left_alone_though_it_is_damaged(
    path: Path, damaged: int
) -> None:
    with disk_harness(path) as harness:
        harness.wait_for(harness.store(harness.keys(4)))
    content = bytearray(path.read_bytes())
    for offset in SUPERBLOCK_OFFSETS:
        page = memoryview(content)[offset : offset + PAGE_BYTES]
        struct.pack_into("<H", page, _VERSION_AT, 2)
        close_page(page)
    content[damaged + 100] ^= 1
    path.write_bytes(content)
    with pytest.raises(SlabRefused, match="version"):
        disk_harness(path)
    assert path.read_bytes() == content


# --- no O_DIRECT -------------------------------------------------------------------------------


@pytest.mark.parametrize("is_damaged", [False, True])
def test_a_slab_that_needs_o_direct_in_vain_is_left_alone(
    path: Path, monkeypatch: pytest.MonkeyPatch, is_damaged: bool
) -> None:
    """Though this engine would have emptied it: its blocks have another size, or no superblock can
    be read."""
    with disk_harness(path) as harness:
        harness.wait_for(harness.store(harness.keys(4)))
    content = bytearray(path.read_bytes())
    if is_damaged:
        for offset in SUPERBLOCK_OFFSETS:
            content[offset + 100] ^= 1
        path.write_bytes(content)
    monkeypatch.setattr(file_module, "set_o_direct", lambda _: False)
    with pytest.raises(SlabRefused, match="does not allow O_DIRECT"):
        disk_harness(path, row_bytes=ROW_BYTES // 2, use_o_direct=True)
    assert path.read_bytes() == content


# --- a child -----------------------------------------------------------------------------------

_ENGINE_THAT_FORKS = """
import os, signal, sys, time
from pathlib import Path
from tests.tiering.disk.harness import disk_harness
harness = disk_harness(Path(sys.argv[1]))
child = os.fork()
if not child:
    time.sleep(600)
print(child, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_forked_child_does_not_keep_the_slab_of_a_killed_engine(path: Path) -> None:
    command = [sys.executable, "-c", _ENGINE_THAT_FORKS, str(path)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=environment) as engine:
        assert engine.stdout is not None
        child = int(engine.stdout.readline())
        try:
            assert engine.wait() == -signal.SIGKILL
            os.kill(child, 0)  # it lives
            with disk_harness(path) as harness:
                (report,) = harness.wait_for(harness.store(harness.keys(4)))
                assert report.result.success
        finally:
            os.kill(child, signal.SIGKILL)
