"""A slab has one engine at a time; a second one is refused with the name of the first, and leaves
nothing behind."""

from __future__ import annotations

import errno
import fcntl
import os
import socket
import stat
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kvtier.base import OffloadingSpec
from kvtier.config import OffloadingParallelConfig
from kvtier.testing import TierHarness
from kvtier.tiering.disk import ownership, recovery, slab
from kvtier.tiering.disk.file import SlabFile
from kvtier.tiering.disk.layout import HOLDER_OFFSET, Holder
from kvtier.tiering.disk.manager import DiskSecondaryTierManager
from kvtier.tiering.disk.ownership import SlabRefused, refuse_orphans
from kvtier.tiering.disk.slab import Slab, open_slab
from kvtier.tiering.io.page import PAGE_BYTES
from tests.tiering.disk.harness import ROW_BYTES, bytes_for, disk_harness
from tests.tiering.disk.orphan import MAX_BYTES, PAYLOAD_BYTES, orphaned
from tests.tiering.disk.small_disk import loop_disk
from tests.tiering.patience import PATIENCE_S

ROOT = Path(__file__).parents[3]


@pytest.fixture(autouse=True)
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine waits a second for a locked slab. Here the lock is never released."""
    monkeypatch.setattr(ownership, "_LOCK_PATIENCE_S", 0.05)


class Contender:
    """An engine in another process."""

    def __init__(self, engine_id: str, num_blocks: int = 32) -> None:
        self.engine_id = engine_id
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.tiering.disk.contender", engine_id, str(num_blocks)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=ROOT,
            env=os.environ | {"PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT}"},
        )
        self.pid = self._process.pid
        assert self.answer() == "ready"

    def want(self, path: Path, at: float = 0.0) -> None:
        self._say(f"{path} {at}")

    def let_go(self) -> None:
        self._say("")
        assert self.answer() == "let go"

    def _say(self, line: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(line + "\n")
        self._process.stdin.flush()

    def answer(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline().strip()

    def kill(self) -> None:
        self._process.kill()
        self._process.communicate()


@contextmanager
def contenders(*names: str, num_blocks: int = 32) -> Iterator[list[Contender]]:
    with ExitStack() as stack:
        made = []
        for name in names:
            made.append(Contender(name, num_blocks))
            stack.callback(made[-1].kill)
        yield made


def open_here(path: Path, engine_id: str = "here", num_blocks: int = 32) -> Slab:
    return open_slab(path, ROW_BYTES, bytes_for(num_blocks), engine_id, None)


# --- who is first ------------------------------------------------------------------------------


def test_a_second_engine_is_told_who_has_the_slab(tmp_path: Path) -> None:
    path = tmp_path / "kv.slab"
    with contenders("the-first-engine") as (first,):
        first.want(path)
        assert first.answer() == "has it"
        with pytest.raises(SlabRefused) as refused:
            disk_harness(path)
        refusal = str(refused.value)
        for part in (str(path), "the-first-engine", str(first.pid), socket.gethostname()):
            assert part in refusal
        assert time.strftime("%Y-%m-%d", time.gmtime()) in refusal
        assert "path" in refusal  # the remedy
        first.let_go()
        with disk_harness(path) as harness:
            harness.wait_for(harness.store(harness.keys(4)))
    assert os.listdir(tmp_path) == ["kv.slab"]


def test_a_second_engine_of_the_same_process_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "kv.slab"
    with disk_harness(path) as harness:
        harness.wait_for(harness.store(harness.keys(8)))
        with pytest.raises(SlabRefused, match=harness.spec.config.engine_id):
            disk_harness(path)
        # By another name, too: the lock is on the file.
        (tmp_path / "link.slab").symlink_to(path)
        with pytest.raises(SlabRefused, match=harness.spec.config.engine_id):
            disk_harness(tmp_path / "link.slab")
        (report,) = harness.wait_for(harness.load(harness.keys(8)))
        assert report.result.success  # the first one is not affected


def test_an_engine_that_was_killed_does_not_hold_the_slab(tmp_path: Path) -> None:
    path = tmp_path / "kv.slab"
    with contenders("killed") as (killed,):
        killed.want(path)
        assert killed.answer() == "has it"
        killed.kill()
        open_here(path).close()


def test_an_engine_that_is_just_opening_the_slab_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Opening takes seconds when headers are read. A second engine that comes then must not be
    given the name of the former holder."""
    path = tmp_path / "kv.slab"
    open_here(path, "the-former").close()
    refusals: list[str] = []
    read_index = recovery.read_index

    def read_index_while_another_comes(*args: object) -> object:
        with pytest.raises(SlabRefused) as refused:
            ownership.lock_slab(SlabFile(path, os.O_RDWR))
        refusals.append(str(refused.value))
        return read_index(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(slab, "read_index", read_index_while_another_comes)
    open_here(path, "the-present").close()
    assert ["the-present" in refusal for refusal in refusals] == [True]


def test_an_engine_that_is_just_leaving_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ownership, "_LOCK_PATIENCE_S", 60.0)
    path = tmp_path / "kv.slab"
    former = open_here(path)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(open_here, path)
        time.sleep(0.05)
        assert not waiting.done()
        former.close()
        waiting.result().close()


# --- two at once -------------------------------------------------------------------------------

ROUNDS = pytest.mark.parametrize(
    "rounds", [pytest.param(12, id="some"), pytest.param(500, id="many", marks=pytest.mark.soak)]
)


def judge(answers: list[str], names: list[str], path: Path) -> None:
    """Exactly one engine has the slab; the others are refused with its name, or because it is being
    made."""
    winners = [i for i, answer in enumerate(answers) if answer == "has it"]
    assert len(winners) == 1, answers
    for number, answer in enumerate(answers):
        if number != winners[0]:
            assert "in use by" in answer, answers
            assert names[winners[0]] in answer, answers
    assert os.listdir(path.parent) == [path.name]


@ROUNDS
def test_of_processes_that_make_a_slab_at_once_one_wins(tmp_path: Path, rounds: int) -> None:
    names = ["engine-a", "engine-b"]
    with contenders(*names) as both:
        for number in range(rounds):
            path = tmp_path / str(number) / "kv.slab"
            path.parent.mkdir()
            start = time.time() + 0.01
            for contender in both:
                contender.want(path, start)
            judge([contender.answer() for contender in both], names, path)


@ROUNDS
def test_of_threads_that_make_a_slab_at_once_one_wins(tmp_path: Path, rounds: int) -> None:
    names = ["engine-a", "engine-b", "engine-c"]

    def contend(path: Path, name: str) -> tuple[str, Slab | None]:
        try:
            return "has it", open_here(path, name)
        except SlabRefused as refused:
            return str(refused), None

    with ThreadPoolExecutor(len(names)) as pool:
        for number in range(rounds):
            path = tmp_path / str(number) / "kv.slab"
            path.parent.mkdir()
            outcomes = list(pool.map(lambda name, path=path: contend(path, name), names))
            for _, opened in outcomes:
                if opened is not None:
                    opened.close()
            judge([answer for answer, _ in outcomes], names, path)


def test_of_engines_for_one_of_which_there_is_room_one_wins(tmp_path: Path) -> None:
    """A late engine must not take, even for a moment, space that the first one needs."""
    names = ["engine-a", "engine-b"]
    with loop_disk(tmp_path, 48 << 20) as disk, contenders(*names, num_blocks=2500) as both:
        for number in range(5):
            path = disk.root / str(number) / "kv.slab"
            path.parent.mkdir()
            start = time.time() + 0.01
            for contender in both:
                contender.want(path, start)
            judge([contender.answer() for contender in both], names, path)
            for contender in both:
                contender.let_go()
            path.unlink()


# --- what is left of those who were killed -----------------------------------------------------


def test_what_a_killed_maker_left_is_removed(tmp_path: Path) -> None:
    path = tmp_path / "kv.slab"
    for name in (".kv.slab.4711.new", ".kv.slab.4712.new"):
        (tmp_path / name).write_bytes(bytes(5000))
    others = {".other.slab.4711.new", "kv.slab.new", ".kv.slab.old"}
    for name in others:
        (tmp_path / name).write_bytes(b"not ours")
    open_here(path).close()
    assert set(os.listdir(tmp_path)) == {"kv.slab", *others}


def test_what_a_killed_maker_left_is_removed_whatever_the_name(tmp_path: Path) -> None:
    path = tmp_path / "kv[0]*.slab"
    (tmp_path / ".kv[0]*.slab.4711.new").write_bytes(bytes(5000))
    open_here(path).close()
    assert os.listdir(tmp_path) == [path.name]


def test_what_a_living_maker_is_at_is_left_alone(tmp_path: Path) -> None:
    """An engine that makes a slab locks its directory; others wait, and remove nothing
    meanwhile."""
    path, temporary = tmp_path / "kv.slab", tmp_path / ".kv.slab.4711.new"
    temporary.touch()
    with locked(tmp_path) as let_go, ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(open_here, path)
        time.sleep(0.05)
        assert not waiting.done()
        assert temporary.exists()
        let_go()
        waiting.result().close()
    assert os.listdir(tmp_path) == ["kv.slab"]


def test_a_directory_that_someone_locks_does_not_hang_a_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Any process may have locked the directory. An engine that makes no file does not need that
    lock."""
    path = tmp_path / "kv.slab"
    open_here(path).close()
    with locked(tmp_path) as let_go, ThreadPoolExecutor(1) as pool:
        opened = pool.submit(open_here, path)
        try:
            opened.result(PATIENCE_S).close()
        finally:
            let_go()


@contextmanager
def locked(directory: Path) -> Iterator[Callable[[], None]]:
    fd = os.open(directory, os.O_RDONLY)
    fcntl.flock(fd, fcntl.LOCK_EX)
    try:
        yield lambda: fcntl.flock(fd, fcntl.LOCK_UN)
    finally:
        os.close(fd)


# --- replicas, and who may read it -------------------------------------------------------------


@pytest.mark.parametrize("size", [1, 2])
def test_replicas_have_a_file_each(tmp_path: Path, size: int) -> None:
    """Even if the engine tells each replica that it is one of one."""
    with ExitStack() as stack:
        for index in (0, 1):
            parallel = OffloadingParallelConfig(data_parallel_index=index, data_parallel_size=size)
            harness = stack.enter_context(replica(tmp_path / "kv.slab", parallel))
            harness.wait_for(harness.store(harness.keys(4, start=10 * index)))
            assert harness.hits(harness.keys(20)) == set(harness.keys(4, start=10 * index))
    expected = {"kv-dp0.slab" if size > 1 else "kv.slab", "kv-dp1.slab"}
    assert set(os.listdir(tmp_path)) == expected


def replica(path: Path, parallel: OffloadingParallelConfig) -> TierHarness:
    def make_tier(spec: OffloadingSpec, view: memoryview) -> DiskSecondaryTierManager:
        spec.config = replace(spec.config, parallel=parallel)
        return DiskSecondaryTierManager(spec, view, "disk", path=str(path), max_bytes=bytes_for(16))

    return TierHarness(make_tier, row_bytes=ROW_BYTES)


def mode_of(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


@pytest.mark.parametrize("umask", [0o000, 0o022, 0o777])
def test_only_the_owner_may_read_it(tmp_path: Path, umask: int) -> None:
    path = tmp_path / "kv.slab"
    modes: set[int] = set()
    before = os.umask(umask)
    try:
        opened = open_here(path)
        modes.add(mode_of(path))
        opened.close()
    finally:
        os.umask(before)
    assert modes == {0o600}


def test_a_file_that_others_may_read_is_closed_to_them(tmp_path: Path) -> None:
    path = tmp_path / "kv.slab"
    open_here(path).close()
    path.chmod(0o644)
    open_here(path).close()
    assert mode_of(path) == 0o600


def test_it_was_never_readable_while_it_was_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    modes: list[int] = []
    allocate = SlabFile.allocate

    def allocate_and_look(file: SlabFile, length: int) -> None:
        modes.append(mode_of(file.path))
        allocate(file, length)

    monkeypatch.setattr(SlabFile, "allocate", allocate_and_look)
    before = os.umask(0)
    try:
        open_here(tmp_path / "kv.slab").close()
    finally:
        os.umask(before)
    assert set(modes) == {0o600}


def test_an_engine_whose_server_is_gone_is_named_with_the_way_to_end_it(tmp_path: Path) -> None:
    path = tmp_path / "kv.slab"
    with orphaned(path) as (engine_pid, server_pid):
        with pytest.raises(SlabRefused) as late:
            open_slab(path, PAYLOAD_BYTES, MAX_BYTES, "engine-1", None)
        with pytest.raises(SlabRefused) as early:
            refuse_orphans(path, 0.0)
    for refused in (late, early):
        assert f"process {engine_pid} on" in str(refused.value)
        assert f"whose parent, process {server_pid}, has ended" in str(refused.value)
        assert f"end it with `kill {engine_pid}`, and start again" in str(refused.value)


def test_only_orphans_are_refused_early(tmp_path: Path) -> None:
    """The check also works in an engine that has its slab."""
    path = tmp_path / "kv.slab"
    refuse_orphans(path, 0.0)
    with orphaned(path):
        pass
    refuse_orphans(path, PATIENCE_S)  # it may need a moment to end
    with disk_harness(path), contenders("other") as [other]:
        refuse_orphans(path, 0.0)
        other.want(tmp_path / "other.slab")
        other.answer()
        refuse_orphans(tmp_path / "other.slab", 0.0)


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({"pid_namespace": 1}, id="in another pid namespace"),
        pytest.param({"started_ticks": 1}, id="its number was given to another process"),
        pytest.param({"pid_namespace": 0}, id="pid namespace unknown"),
        pytest.param({"started_ticks": 0}, id="start unknown"),
        pytest.param({"pid_namespace": 0, "started_ticks": 0}, id="an earlier release"),
    ],
)
def test_no_advice_to_kill_a_process_that_may_not_be_the_holder(
    tmp_path: Path, changes: dict[str, Any]
) -> None:
    """Containers may share a host name, and each numbers its processes."""
    path = tmp_path / "kv.slab"
    with orphaned(path) as (engine_pid, _):
        with path.open("r+b") as file:
            holder = Holder.decode(os.pread(file.fileno(), PAGE_BYTES, HOLDER_OFFSET))
            assert holder.pid == engine_pid
            os.pwrite(file.fileno(), replace(holder, **changes).encode(), HOLDER_OFFSET)
        refuse_orphans(path, 0.0)
        with pytest.raises(SlabRefused) as refused:
            open_slab(path, PAYLOAD_BYTES, MAX_BYTES, "engine-1", None)
    assert f"process {engine_pid} on" in str(refused.value)
    assert "`kill" not in str(refused.value)
    assert "whose parent" not in str(refused.value)
    assert "give each engine and each tier a path of its own" in str(refused.value)


def test_a_holder_with_our_number_in_another_container_is_not_taken_for_us(tmp_path: Path) -> None:
    path = tmp_path / "kv.slab"
    with orphaned(path), path.open("r+b") as file:
        holder = Holder.decode(os.pread(file.fileno(), PAGE_BYTES, HOLDER_OFFSET))
        impostor = replace(holder, pid=os.getpid(), pid_namespace=1)
        os.pwrite(file.fileno(), impostor.encode(), HOLDER_OFFSET)
        with pytest.raises(SlabRefused, match=f"process {os.getpid()} on") as refused:
            open_slab(path, PAYLOAD_BYTES, MAX_BYTES, "engine-1", None)
    assert "this very process" not in str(refused.value)


@pytest.fixture
def _nfs(monkeypatch: pytest.MonkeyPatch) -> None:
    """NFS gives an exclusive lock only on a descriptor that is open for writing."""
    flock = fcntl.flock

    def flock_on_nfs(fd: int, operation: int) -> None:
        access = fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_ACCMODE
        is_file = stat.S_ISREG(os.fstat(fd).st_mode)
        if is_file and operation & fcntl.LOCK_EX and access == os.O_RDONLY:
            raise OSError(errno.EBADF, os.strerror(errno.EBADF))
        flock(fd, operation)

    monkeypatch.setattr(fcntl, "flock", flock_on_nfs)


@pytest.mark.usefixtures("_nfs")
def test_orphans_are_refused_early_on_nfs_too(tmp_path: Path) -> None:
    path = tmp_path / "kv.slab"
    open_here(path).close()
    refuse_orphans(path, 0.0)
    with orphaned(path), pytest.raises(SlabRefused, match="whose parent"):
        refuse_orphans(path, 0.0)


def test_a_file_that_cannot_be_locked_or_read_does_not_keep_an_engine_from_starting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The check changes nothing, and leaves failures for opening the slab to report."""
    path = tmp_path / "kv.slab"

    def fail(*_: object) -> bytes:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with orphaned(path):
        with monkeypatch.context() as patch:
            patch.setattr(SlabFile, "read", fail)
            refuse_orphans(path, 0.0)
        with monkeypatch.context() as patch:
            patch.setattr(fcntl, "flock", fail)
            refuse_orphans(path, 0.0)
    loop = tmp_path / "loop.slab"
    loop.symlink_to(loop)
    refuse_orphans(loop, 0.0)
