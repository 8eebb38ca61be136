"""Engines that fail to start, or leave a child process, leave nothing else behind."""

from __future__ import annotations

import mmap
import os
import signal
import struct
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from xxhash import xxh3_64_intdigest

from kvtier.config import ConfigError
from kvtier.testing.harness import sample_spec
from kvtier.tiering.fs.access import RootRefused
from kvtier.tiering.fs.manager import FsSecondaryTierManager
from kvtier.tiering.io import lane
from kvtier.tiering.io.aio import AioUnavailable
from kvtier.tiering.io.page import PAGE_BYTES
from tests.tiering.descriptors import no_more_descriptors
from tests.tiering.disk.small_disk import loop_disk
from tests.tiering.fs.accounts import load_all, store_all
from tests.tiering.fs.hardship import directory_for_everybody, somebody_else
from tests.tiering.fs.harness import ROW_BYTES, bytes_for, fs_harness
from tests.tiering.patience import wait_until


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "root"


@pytest.fixture
def public_directory() -> Iterator[Path]:
    with directory_for_everybody() as directory:
        yield directory


def refusal_of(root: Path) -> str:
    """The error of a tier that cannot start. It leaves no thread and no descriptor."""
    threads, descriptors = set(threading.enumerate()), set(os.listdir("/proc/self/fd"))
    with pytest.raises(RootRefused) as refused:
        fs_harness(root)
    assert set(threading.enumerate()) <= threads
    assert set(os.listdir("/proc/self/fd")) <= descriptors
    return str(refused.value)


def engines_in(root: Path) -> list[str]:
    return os.listdir(root / "engines")


# --- threads that cannot be started ------------------------------------------------------------


def num_queues() -> int:
    """Number of this process's asynchronous I/O queues."""
    return Path("/proc/self/maps").read_text().count("[aio]")


@pytest.mark.parametrize(
    "name",
    [
        "kvtier-fs-lookup-0",
        "kvtier-fs-lookup-2",
        "kvtier-fs-uses",
        "kvtier-fs-read-0",
        "kvtier-fs-write-1",
        "kvtier-fs-publisher",
        "kvtier-fs-sweeper",
    ],
)
def test_a_thread_that_cannot_be_started_leaves_nothing_behind(
    root: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    start: Callable[[threading.Thread], None] = threading.Thread.start
    tried: list[str] = []

    def start_unless(thread: threading.Thread) -> None:
        tried.append(thread.name)
        if thread.name == name:
            raise RuntimeError("can't start new thread")
        start(thread)

    with fs_harness(root):
        assert num_queues() > 0
    threads, queues = set(threading.enumerate()), num_queues()
    descriptors = set(os.listdir("/proc/self/fd"))
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", start_unless)
        with pytest.raises(RuntimeError, match="can't start") as refused:
            fs_harness(root)
        assert name in tried
        assert refused.value.__traceback__ is not None  # the error keeps nothing open
        assert set(threading.enumerate()) <= threads
        assert num_queues() == queues
        assert set(os.listdir("/proc/self/fd")) <= descriptors
    assert engines_in(root) == []
    with fs_harness(root) as harness:
        store_all(harness, harness.keys(4))


def test_no_room_in_the_kernel_is_refused_at_start(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    too_many = 2 * int(Path("/proc/sys/fs/aio-max-nr").read_text())  # or others would have none
    threads = set(threading.enumerate())
    with monkeypatch.context() as patch:
        patch.setattr(lane, "_LEAST_DEPTH", too_many)
        patch.setattr(lane, "_MOST_DEPTH", too_many)
        with pytest.raises(AioUnavailable, match=r"fs\.aio-max-nr"):
            fs_harness(root, row_bytes=1 << 20, num_rows=4)
    assert set(threading.enumerate()) <= threads
    assert engines_in(root) == []
    with fs_harness(root) as harness:
        store_all(harness, harness.keys(2))


# --- the primary tier's memory -----------------------------------------------------------------


def start_on(memory: mmap.mmap, row_bytes: int, root: Path) -> Exception:
    """The error of a tier that cannot be made there."""
    num_rows = len(memory) // row_bytes
    with memoryview(memory) as whole, whole[: num_rows * row_bytes] as used:
        view = used.cast("B", (num_rows, row_bytes))
        spec = sample_spec(PAGE_BYTES, num_rows, "weights", engine_id="second")
        try:
            FsSecondaryTierManager(
                spec, view, "fs", root_dir=str(root), max_bytes=bytes_for(64, row_bytes)
            )
        except Exception as error:
            return error
        finally:
            view.release()
    raise AssertionError("it was made")


def test_a_refused_start_lets_go_of_the_memory(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    memory = mmap.mmap(-1, 16 * ROW_BYTES)
    error = start_on(memory, ROW_BYTES, tmp_path / "file")
    assert isinstance(error, RootRefused)
    memory.close()  # though the error is still there, with all its frames


def test_rows_that_cannot_be_used_are_let_go_of(root: Path) -> None:
    memory = mmap.mmap(-1, 16 * ROW_BYTES)
    error = start_on(memory, 5000, root)
    assert isinstance(error, ValueError)
    memory.close()
    assert not root.exists()


# --- directories that are not to be had --------------------------------------------------------


def test_a_file_in_the_place_of_the_root_is_refused(root: Path) -> None:
    root.write_bytes(b"mine")
    assert str(root) in refusal_of(root)
    assert root.read_bytes() == b"mine"


def test_a_directory_of_other_things_is_left_alone(root: Path) -> None:
    root.mkdir()
    (root / "thesis.tex").write_bytes(b"mine")
    assert "thesis.tex" in refusal_of(root)
    assert os.listdir(root) == ["thesis.tex"]


@pytest.mark.parametrize("name", ["ledger", "engines", "blocks"])
@pytest.mark.parametrize("put", ["directory", "file", "fifo", "symlink", "dangling symlink"])
def test_something_else_in_the_place_of_a_part_of_the_root(
    tmp_path: Path, root: Path, name: str, put: str
) -> None:
    """Refused with the path, or used if it is what it should be. A link is never followed to the
    outside, and a pipe never waited for."""
    outside = tmp_path / "outside"
    outside.mkdir()
    root.mkdir(mode=0o700)
    part = root / name
    if put == "directory":
        part.mkdir()
    elif put == "file":
        part.write_bytes(b"")
    elif put == "fifo":
        os.mkfifo(part)
    else:
        part.symlink_to(outside if put == "symlink" else tmp_path / "nowhere")
    if (name == "ledger") == (put == "file") and put in ("file", "directory"):
        with fs_harness(root) as harness:
            store_all(harness, harness.keys(4))
    else:
        assert str(root) in refusal_of(root)
    assert os.listdir(outside) == []
    assert not (tmp_path / "nowhere").exists()


def test_a_parent_that_is_missing_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="mount the file system"):
        fs_harness(tmp_path / "not" / "there")
    assert os.listdir(tmp_path) == []


def test_a_root_of_someone_else_is_refused(public_directory: Path) -> None:
    root = public_directory / "root"
    with fs_harness(root) as harness:
        store_all(harness, harness.keys(4))
    with somebody_else():
        refusals = [refusal_of(root), refusal_of(public_directory / "theirs")]
    for refusal, name in zip(refusals, ("root", "theirs"), strict=True):
        assert str(public_directory / name) in refusal
        assert "Permission denied" in refusal
        assert "uid 65534" in refusal
    assert os.listdir(public_directory) == ["root"]
    with fs_harness(root) as harness:
        load_all(harness, harness.keys(4))


def test_a_root_on_a_read_only_mount_is_refused(tmp_path: Path) -> None:
    with loop_disk(tmp_path, 32 << 20) as disk, fs_harness(disk.root / "root"):
        pass
    content = disk.image.read_bytes()
    (tmp_path / "again").mkdir()
    with loop_disk(tmp_path / "again", 32 << 20, read_only=True, content=content) as disk:
        refusals = [refusal_of(disk.root / name) for name in ("root", "new")]
    for refusal, name in zip(refusals, ("root", "new"), strict=True):
        assert str(disk.root / name) in refusal
        assert "read-only" in refusal.lower()


def test_a_start_on_a_full_file_system_is_refused(tmp_path: Path) -> None:
    with loop_disk(tmp_path, 32 << 20) as disk:
        disk.fill()
        assert "make room" in refusal_of(disk.root / "root")
        (disk.root / "of-others").unlink()
        with fs_harness(disk.root / "root") as harness:
            store_all(harness, harness.keys(4))


def test_a_start_without_a_descriptor_is_refused(root: Path) -> None:
    with no_more_descriptors(), pytest.raises(RootRefused, match="Too many open files"):
        fs_harness(root)
    with fs_harness(root) as harness:
        store_all(harness, harness.keys(4))
        wait_until(lambda: len(engines_in(root)) == 2, "no other presence than ours")


def test_a_ledger_of_another_version_is_left_alone(root: Path) -> None:
    with fs_harness(root) as harness:
        store_all(harness, harness.keys(4))
    ledger = root / "ledger"
    content = bytearray(ledger.read_bytes().ljust(32_768, b"\0"))
    for start in (0, 16_384):
        struct.pack_into("<H", content, start + 8, 2)
        (count,) = struct.unpack_from("<H", content, start + 10)
        end = start + 80 + 40 * count
        struct.pack_into("<Q", content, end, xxh3_64_intdigest(bytes(content[start:end])))
    ledger.write_bytes(content)
    assert "version" in refusal_of(root)
    assert ledger.read_bytes() == content


# --- a child -----------------------------------------------------------------------------------

_ENGINE_THAT_FORKS = """
import os, signal, sys, time
from pathlib import Path
from tests.tiering.fs.harness import fs_harness
harness = fs_harness(Path(sys.argv[1]))
harness.wait_for(harness.store(harness.keys(4)))
child = os.fork()
if not child:
    time.sleep(600)
print(child, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_forked_child_does_not_keep_the_seat_of_a_killed_engine(root: Path) -> None:
    command = [sys.executable, "-c", _ENGINE_THAT_FORKS, str(root)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=environment) as engine:
        assert engine.stdout is not None
        child = int(engine.stdout.readline())
        try:
            assert engine.wait() == -signal.SIGKILL
            os.kill(child, 0)  # it lives
            with fs_harness(root) as harness:
                load_all(harness, harness.keys(4))
                wait_until(lambda: len(engines_in(root)) == 2, "no other presence than ours")
        finally:
            os.kill(child, signal.SIGKILL)
