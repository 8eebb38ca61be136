"""A region that does not fit is refused before a page is touched, and leaves nothing."""

from __future__ import annotations

import mmap
import os
import re
from pathlib import Path

import pytest

from kvtier.cpu.host_memory import NotEnoughMemory, cgroup_limits
from kvtier.cpu.shared_offload_region import SharedOffloadRegion
from tests.cpu.kernel_view import assert_nothing_left, open_files
from tests.cpu.region_process import Lend

PAGE = mmap.PAGESIZE


def test_a_region_larger_than_the_filesystem_is_refused(small_tmpfs: str) -> None:
    before = open_files()
    with pytest.raises(NotEnoughMemory) as refusal:
        SharedOffloadRegion("engine", 300, 0, PAGE, PAGE, directory=small_tmpfs)
    message = str(refusal.value)
    # One page of the filesystem is in use already: the region's header. Another is for notices.
    assert f"'engine' needs 1.17 MiB ({301 * PAGE} bytes), but only 0.99 MiB" in message
    assert f"({255 * PAGE} bytes) are available in {small_tmpfs}. " in message
    assert f"mount -o remount,size=2m {small_tmpfs}" in message
    assert "--shm-size=2m" in message
    assert f"lower cpu_bytes_to_use to {254 * PAGE} at most" in message
    assert_nothing_left(small_tmpfs, before)


@pytest.mark.parametrize("row", [PAGE, 2 * PAGE, 3 * PAGE])
def test_what_the_refusal_says_fits_does_fit(row: int, small_tmpfs: str) -> None:
    with pytest.raises(NotEnoughMemory) as refusal:
        SharedOffloadRegion("engine", 300, 0, row, PAGE, directory=small_tmpfs)
    found = re.search(r"lower cpu_bytes_to_use to (\d+) at most", str(refusal.value))
    assert found
    num_blocks, rest = divmod(int(found[1]), row)
    assert rest == 0
    SharedOffloadRegion("engine", num_blocks, 0, row, PAGE, directory=small_tmpfs).cleanup()
    with pytest.raises(NotEnoughMemory):
        SharedOffloadRegion("engine", num_blocks + 1, 0, row, PAGE, directory=small_tmpfs)


def test_a_region_larger_than_dev_shm_is_refused(shm: Path) -> None:
    filesystem = os.statvfs("/dev/shm")
    size = filesystem.f_blocks * filesystem.f_frsize
    before = open_files()
    with pytest.raises(NotEnoughMemory, match="lower cpu_bytes_to_use"):
        SharedOffloadRegion("engine", size // PAGE, 0, PAGE, PAGE, directory=str(shm))
    assert_nothing_left(str(shm), before)


def test_a_region_larger_than_the_memory_is_refused(endless_tmpfs: str) -> None:
    before = open_files()
    with pytest.raises(NotEnoughMemory) as refusal:
        SharedOffloadRegion("engine", 1000, 0, 2**40, 2**40, directory=endless_tmpfs)
    message = str(refusal.value)
    assert f"needs 1000 TiB ({1000 * 2**40 + PAGE} bytes)" in message
    assert "available in this machine's memory (MemAvailable). Free memory" in message
    assert "lower cpu_bytes_to_use to 0 at most" in message
    assert_nothing_left(endless_tmpfs, before)


def test_the_advice_leaves_a_tenth_of_the_memory_to_others(endless_tmpfs: str) -> None:
    with pytest.raises(NotEnoughMemory) as refusal:
        SharedOffloadRegion("engine", 2**50 // PAGE, 0, PAGE, PAGE, directory=endless_tmpfs)
    found = re.search(r"but only .*? \((\d+) bytes\) .* to (\d+) at most", str(refusal.value))
    assert found
    available, advised = int(found[1]), int(found[2])
    # With rows of one page, every 4,096 of them need a page of notices.
    assert 0.999 * 0.9 * available <= advised <= 0.9 * available


def test_space_that_vanishes_between_asking_and_taking_is_refused(
    small_tmpfs: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    reserve = os.posix_fallocate

    def reserve_late(fd: int, offset: int, length: int) -> None:
        hog = os.open(f"{small_tmpfs}/hog", os.O_CREAT | os.O_RDWR)
        reserve(hog, 0, 2**19)
        os.close(hog)
        reserve(fd, offset, length)

    monkeypatch.setattr(os, "posix_fallocate", reserve_late)
    before = open_files()
    with pytest.raises(NotEnoughMemory, match=rf"only .* \({2**19} bytes\) are available"):
        SharedOffloadRegion("engine", 200, 0, PAGE, PAGE, directory=small_tmpfs)
    os.unlink(f"{small_tmpfs}/hog")
    assert_nothing_left(small_tmpfs, before)


def test_a_full_filesystem_is_refused(small_tmpfs: str) -> None:
    hog = Path(small_tmpfs, "hog")
    hog.write_bytes(bytes(2**20))
    before = open_files()
    with pytest.raises(NotEnoughMemory, match=r"only 0 B \(0 bytes\) are available"):
        SharedOffloadRegion("engine", 1, 0, PAGE, PAGE, directory=small_tmpfs)
    hog.unlink()
    assert_nothing_left(small_tmpfs, before)


def test_a_filesystem_without_inodes_is_refused(tmpfs_without_inodes: str) -> None:
    before = open_files()
    with pytest.raises(NotEnoughMemory, match=f"{tmpfs_without_inodes} refused .*no inodes left"):
        SharedOffloadRegion("engine", 1, 0, PAGE, PAGE, directory=tmpfs_without_inodes)
    assert_nothing_left(tmpfs_without_inodes, before)


def test_a_region_that_was_made_can_be_filled_whatever_others_take(
    small_tmpfs: str, lend: Lend
) -> None:
    """Without reservation, the write below would end the process with SIGBUS."""
    with lend(small_tmpfs, 1) as (process,):
        process.open("engine", num_blocks=60)
        Path(small_tmpfs, "hog").write_bytes(bytes(os.statvfs(small_tmpfs).f_bavail * PAGE))
        assert os.statvfs(small_tmpfs).f_bavail == 0
        process.call("fill", value=1)
        process.call("cleanup")
    assert os.listdir(small_tmpfs) == ["hog"]


def test_memory_of_dead_regions_counts_as_free(small_tmpfs: str, lend: Lend) -> None:
    with lend(small_tmpfs, 1) as (dead,):
        dead.open("dead", num_blocks=120)
        dead.kill()
    assert os.listdir(small_tmpfs) != []
    SharedOffloadRegion("engine", 200, 0, PAGE, PAGE, directory=small_tmpfs).cleanup()
    assert os.listdir(small_tmpfs) == []


# ---------------------------------------------------------------------------------------------
# Control groups, as the kernel shows them
# ---------------------------------------------------------------------------------------------


def show_level(folder: Path, files: dict[str, str]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name).write_text(text)


def v2_level(limit: str, usage: int, page_cache: int) -> dict[str, str]:
    active = page_cache // 4
    return {
        "memory.max": f"{limit}\n",
        "memory.current": f"{usage}\n",
        "memory.stat": (
            f"anon 17\ninactive_file {page_cache - 2 * active}\nactive_file {active}\n"
            f"slab_reclaimable {active}\nunevictable 5\n"
        ),
    }


def v1_level(limit: int, usage: int, page_cache: int) -> dict[str, str]:
    active = page_cache // 4
    return {
        "memory.limit_in_bytes": f"{limit}\n",
        "memory.usage_in_bytes": f"{usage}\n",
        "memory.stat": (
            f"inactive_file 3\ntotal_inactive_file {page_cache - active}\n"
            f"total_active_file {active}\n"
        ),
    }


def available(tmp_path: Path, membership: str) -> list[int]:
    (tmp_path / "membership").write_text(membership)
    return [limit.available for limit in cgroup_limits(tmp_path / "membership", tmp_path / "fs")]


def test_every_level_of_cgroup_v2_counts(tmp_path: Path) -> None:
    show_level(tmp_path / "fs/pod/container", v2_level("1000", 700, 100))
    show_level(tmp_path / "fs/pod", v2_level("900", 800, 0))
    show_level(tmp_path / "fs", {"cgroup.procs": ""})  # the root has no limit
    assert available(tmp_path, "0::/pod/container\n") == [400, 100]


def test_no_limit_is_no_limit(tmp_path: Path) -> None:
    show_level(tmp_path / "fs/pod", v2_level("max", 700, 100))
    show_level(tmp_path / "fs/memory/pod", v1_level(2**63 - 4096, 700, 100))
    assert available(tmp_path, "4:memory:/pod\n0::/pod\n") == []


def test_cgroup_v1_counts(tmp_path: Path) -> None:
    show_level(tmp_path / "fs/memory/pod", v1_level(1000, 700, 100))
    assert available(tmp_path, "5:cpu,cpuacct:/pod\n4:memory:/pod\n") == [400]


def test_a_container_that_sees_only_itself(tmp_path: Path) -> None:
    """The path is the host's; the mount shows the container's own level."""
    show_level(tmp_path / "fs/memory", v1_level(1000, 900, 0))
    assert available(tmp_path, "4:memory:/docker/0123456789abcdef\n") == [100]


def test_more_used_than_allowed_is_nothing_left(tmp_path: Path) -> None:
    show_level(tmp_path / "fs", v2_level("1000", 1200, 0))
    assert available(tmp_path, "0::/\n") == [0]


def test_the_memory_of_a_control_group_is_not_advised_as_a_whole(tmp_path: Path) -> None:
    show_level(tmp_path / "fs", v2_level("1000", 500, 0))
    (tmp_path / "membership").write_text("0::/\n")
    (limit,) = cgroup_limits(tmp_path / "membership", tmp_path / "fs")
    assert (limit.available, limit.advisable) == (500, 450)


def test_a_system_without_control_groups(tmp_path: Path) -> None:
    assert list(cgroup_limits(tmp_path / "missing", tmp_path)) == []
