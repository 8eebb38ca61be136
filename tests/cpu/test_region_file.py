"""How processes make, join and remove the file of a region, also if some of them die."""

from __future__ import annotations

import mmap
import os
import random
import re
import signal
import stat
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from kvtier.cpu.region_file import RegionFile, RegionShape
from tests.cpu.kernel_view import (
    open_files,
    wait_until_blocked,
    wait_until_dead,
)
from tests.cpu.region_process import Lend, RegionMaker

PAGE = mmap.PAGESIZE


# ---------------------------------------------------------------------------------------------
# Several processes at once
# ---------------------------------------------------------------------------------------------


def test_racing_processes_share_one_new_region(shm: Path, lend: Lend) -> None:
    """Every round: all open at once, see zeros, see each other's bytes, and leave at once."""
    rng = random.Random(1)
    with lend(str(shm), 4) as processes:
        open_files_before = [process.call("num_open_files") for process in processes]
        for round_number in range(100):
            engine_id = f"engine-{round_number % 3}"  # ids come again
            order = list(enumerate(processes))
            rng.shuffle(order)
            for rank, process in order:
                process.send_open(engine_id, rank)
            for process in processes:
                process.receive()
            assert len({process.call("inode") for process in processes}) == 1
            assert len(list(shm.iterdir())) == 1
            assert all(process.call("is_zero") for process in processes)
            for rank, process in order:
                process.call("write", row=1, offset=rank, value=rank + 1)
            for process in processes:
                assert process.call("read", row=1)[:5] == [1, 2, 3, 4, 0]
            for _, process in order:
                process.send("cleanup")
            for process in processes:
                process.receive()
            assert list(shm.iterdir()) == []
        assert [process.call("num_open_files") for process in processes] == open_files_before


def test_opening_may_race_with_leaving(shm: Path, lend: Lend) -> None:
    with lend(str(shm), 4) as processes:
        for process in processes:
            process.send("churn", directory=str(shm), engine_id="engine", times=150)
        for process in processes:
            process.receive()
    assert list(shm.iterdir()) == []


def test_processes_may_be_killed_at_any_time(make: RegionMaker, shm: Path, lend: Lend) -> None:
    rng = random.Random(2)
    with lend(str(shm), 2) as survivors:
        for survivor in survivors:
            survivor.send("churn", directory=str(shm), engine_id="engine", times=400)
        for _ in range(6):
            with lend(str(shm), 1) as (victim,):
                victim.call("churn", directory=str(shm), engine_id="engine", times=1)
                victim.send("churn", directory=str(shm), engine_id="engine", times=10**9)
                time.sleep(rng.uniform(0, 0.02))
        for survivor in survivors:
            survivor.receive()
    region = make("engine", num_blocks=2, kv_bytes_per_block=4096, cpu_page_size=4096)
    assert not np.asarray(region.create_kv_memoryview()).any()
    assert [path.name for path in shm.iterdir()] == [os.path.basename(region.path)]


@pytest.mark.parametrize(
    ("point", "others_wait"),
    [
        ("before the file has a name", False),
        ("before sizing", True),
        ("amid sizing", True),
        ("after sizing", True),
    ],
)
def test_a_killed_maker_is_replaced(point: str, others_wait: bool, shm: Path, lend: Lend) -> None:
    with lend(str(shm), 4) as (maker, *others):
        maker.call("stop_at", point=point)
        maker.send_open("engine", 0)
        assert maker.receive() == "stopped"
        for rank, process in enumerate(others, start=1):
            process.send_open("engine", rank)
        if others_wait:
            for process in others:
                wait_until_blocked(process.pid)
            assert len(list(shm.iterdir())) == 1
        maker.kill()
        for process in others:
            process.receive()
        assert len({process.call("inode") for process in others}) == 1
        assert len(list(shm.iterdir())) == 1
        assert all(process.call("is_zero") for process in others)
        for process in others:
            process.call("fill", value=1)  # every byte is there to be written
            process.call("cleanup")


def test_a_maker_that_fails_lets_the_others_try(shm: Path, small_tmpfs: str, lend: Lend) -> None:
    """No process hangs on a region that was begun and given up: each one gets the error."""
    with lend(small_tmpfs, 4) as processes:
        for process in processes:
            process.send_open("engine", num_blocks=1000)
        for process in processes:
            with pytest.raises(AssertionError, match="NotEnoughMemory"):
                process.receive()
    assert os.listdir(small_tmpfs) == []


def test_a_joiner_of_another_shape_is_refused(make: RegionMaker, shm: Path) -> None:
    region = make(num_blocks=4, kv_bytes_per_block=PAGE, cpu_page_size=PAGE)
    before = open_files()
    with pytest.raises(ValueError, match="'engine' already uses") as refusal:
        make(num_blocks=2, kv_bytes_per_block=2 * PAGE, cpu_page_size=PAGE)  # of the same size
    assert f"num_blocks=4, kv_bytes_per_block={PAGE}, cpu_page_size={PAGE}" in str(refusal.value)
    assert f"num_blocks=2, kv_bytes_per_block={2 * PAGE}" in str(refusal.value)
    assert open_files() == before
    assert [str(path) for path in shm.iterdir()] == [region.path]


# ---------------------------------------------------------------------------------------------
# What dead processes leave
# ---------------------------------------------------------------------------------------------


def test_dead_regions_are_reclaimed_and_live_ones_are_not(
    make: RegionMaker, shm: Path, lend: Lend
) -> None:
    with lend(str(shm), 3) as (dead, half_dead, live):
        dead.open("dead")
        half_dead.open("shared")
        live.open("shared", rank=1)
        live.call("fill", value=5)
        dead.kill()
        half_dead.kill()
        assert len(list(shm.iterdir())) == 2
        new = make("new")
        assert {path.stat().st_ino for path in shm.iterdir()} == {
            live.call("inode"),
            os.stat(new.path).st_ino,
        }
        assert set(live.call("read", row=0)) == {5}
        live.call("cleanup")


def test_a_dead_engines_bytes_are_never_seen(make: RegionMaker, shm: Path, lend: Lend) -> None:
    with lend(str(shm), 1) as (dead,):
        dead.open("engine")
        dead.call("fill", value=255)
        dead.kill()
    (left,) = shm.iterdir()
    assert left.stat().st_size > 0
    region = make("engine", num_blocks=2, kv_bytes_per_block=8192, cpu_page_size=2048)
    assert not np.asarray(region.create_kv_memoryview()).any()


def test_a_forked_child_keeps_the_region_alive(make: RegionMaker, shm: Path, lend: Lend) -> None:
    with lend(str(shm), 1) as (parent,):
        parent.open("engine")
        parent.call("fill", value=3)
        child = parent.call("fork")
        parent.kill()
    (path,) = shm.iterdir()
    try:
        make("other")
        assert path.exists()
    finally:
        os.kill(child, signal.SIGKILL)
    wait_until_dead(child)
    make("another")
    assert not path.exists()


def test_a_subprocess_does_not(make: RegionMaker, shm: Path, lend: Lend) -> None:
    with lend(str(shm), 1) as (parent,):
        parent.open("engine")
        child = parent.call("spawn")
        parent.kill()
    (path,) = shm.iterdir()
    try:
        make("other")
        assert not path.exists()
    finally:
        os.kill(child, signal.SIGKILL)


def test_foreign_files_are_never_touched(make: RegionMaker, shm: Path) -> None:
    region = make("known")
    name = os.path.basename(region.path)
    region.cleanup()
    like_ours = [f"kvtier-{digit * 32}.region" for digit in "0123"]
    assert re.fullmatch(r"kvtier-[0-9a-f]{32}\.region", name), "the names above mean nothing now"
    (shm / "psm_12345").write_bytes(b"someone's")
    (shm / "kvtier-notes.txt").write_bytes(b"someone's")
    (shm / like_ours[0]).write_bytes(b"someone's, though it has our name")
    (shm / like_ours[1]).touch()
    (shm / like_ours[2]).symlink_to(shm / "psm_12345")
    (shm / like_ours[3]).mkdir()
    before = sorted(path.name for path in shm.iterdir())
    make("engine").cleanup()
    try:
        assert sorted(path.name for path in shm.iterdir()) == before
        assert (shm / like_ours[0]).read_bytes() == b"someone's, though it has our name"
    finally:
        (shm / like_ours[3]).rmdir()
        for path in shm.iterdir():
            path.unlink()


@pytest.mark.parametrize("kind", ["file", "symlink", "directory", "fifo"])
def test_a_foreign_file_of_our_name_is_refused(kind: str, make: RegionMaker, shm: Path) -> None:
    region = make("engine")
    path = Path(region.path)
    region.cleanup()
    if kind == "file":
        path.write_bytes(b"someone's")
    elif kind == "symlink":
        path.symlink_to("/etc/passwd")
    elif kind == "directory":
        path.mkdir()
    else:
        os.mkfifo(path)
    before = open_files()
    try:
        with pytest.raises(
            ValueError, match=f"{path}.*remove that file or choose another engine_id"
        ):
            make("engine")
        assert os.path.lexists(path)
        assert open_files() == before
    finally:
        if kind == "directory":
            path.rmdir()
        else:
            path.unlink()


def test_another_users_region_is_not_ours(make: RegionMaker, shm: Path, lend: Lend) -> None:
    if os.geteuid() != 0:
        pytest.skip("only root can give a file away")
    with lend(str(shm), 1) as (process,):
        process.open("engine")
        process.kill()
    (path,) = shm.iterdir()
    os.chown(path, 12345, -1)
    try:
        make("other")
        assert path.exists()
        with pytest.raises(ValueError, match="owned by user 12345"):
            make("engine")
    finally:
        path.unlink()


# ---------------------------------------------------------------------------------------------
# Names and permissions
# ---------------------------------------------------------------------------------------------


HOSTILE_IDS = [
    "",
    ".",
    "..",
    "/",
    "../../etc/passwd",
    "a/b",
    "a_b",
    "a b",
    "a\nb",
    "a\0b",
    "%2e%2e",
    "*",
    "$(id)",
    "é",
    "e\u0301",
    "\ud800",
    "A",
    "a",
    "x" * 10_000,
    "x" * 10_001,
    "🦀" * 200,
]


def test_any_engine_id_has_a_file_of_its_own_in_the_directory(make: RegionMaker, shm: Path) -> None:
    regions = [make(engine_id, num_blocks=1) for engine_id in HOSTILE_IDS]
    assert len(list(shm.iterdir())) == len(HOSTILE_IDS)
    assert {Path(region.path) for region in regions} == set(shm.iterdir())
    for number, region in enumerate(regions):
        np.asarray(region.create_kv_memoryview())[:] = number
    again = [make(engine_id, num_blocks=1) for engine_id in HOSTILE_IDS]
    for number, region in enumerate(again):
        assert (np.asarray(region.create_kv_memoryview()) == number).all()


@pytest.mark.parametrize("umask", [0, 0o777])
def test_only_the_user_can_read_it(umask: int, make: RegionMaker) -> None:
    previous = os.umask(umask)
    try:
        region = make()
    finally:
        os.umask(previous)
    assert stat.S_IMODE(os.stat(region.path).st_mode) == 0o600


def test_a_region_without_a_name_ends_with_its_users_even_if_they_are_killed(shm: Path) -> None:
    code = (
        "import signal; from kvtier.cpu.region_file import *\n"
        f"file = RegionFile.make_or_join({str(shm)!r}, 'engine', RegionShape(8, 4096, 4096))\n"
        "rows = file.map_rows(); rows[:5] = b'there'\n"
        "file.remove_name(); print('named no more', flush=True); signal.pause()"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as user:
        assert user.stdout is not None
        user.stdout.readline()
        assert list(shm.iterdir()) == []
        os.kill(user.pid, signal.SIGKILL)
    assert list(shm.iterdir()) == []


def test_removing_the_name_leaves_a_file_of_the_same_name_alone(shm: Path) -> None:
    shape = RegionShape(8, PAGE, PAGE)
    file = RegionFile.make_or_join(str(shm), "engine", shape)
    file.remove_name()
    assert RegionFile.join(str(shm), "engine", shape) is None
    another = RegionFile.make_or_join(str(shm), "engine", shape)
    file.remove_name()
    file.leave()
    assert Path(another.path).exists()
    another.leave()
    assert list(shm.iterdir()) == []
