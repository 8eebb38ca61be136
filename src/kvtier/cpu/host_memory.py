"""Checks that this machine has room for a new shared-memory file, before a page is touched.

A shared-memory file that is too large can be made without an error. The process is killed later:
by SIGBUS when the filesystem is full, by the OOM killer when memory runs out. So the limits of the
filesystem, of the machine and of the control groups are read first. The error names the tightest
limit and how to raise it.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

from kvtier.config.sizes import as_size

__all__ = [
    "NotEnoughMemory",
    "RoomLimit",
    "cgroup_limits",
    "filesystem_limit",
    "machine_limit",
    "memory_limits",
    "require_room",
]

_UNLIMITED_IN_CGROUP_V1 = 1 << 60


class NotEnoughMemory(RuntimeError):
    """There is not enough memory. The message has the figures and the remedy."""


class RoomLimit(NamedTuple):
    """One bound on how much more memory may be used."""

    available: int
    where: str
    remedy: str
    advisable: int
    """Bytes that a user is advised to take. In a filesystem: all that are available. Under a limit
    of memory: a tenth less, because other processes may need memory under the same limit."""


class _CgroupFiles(NamedTuple):
    limit: str
    usage: str
    reclaimable: tuple[str, ...]
    """The lines of memory.stat that count memory which the kernel frees before it kills a process,
    mainly page cache, such as the files of a model's weights."""


_CGROUP_V2 = _CgroupFiles(
    "memory.max", "memory.current", ("inactive_file", "active_file", "slab_reclaimable")
)
_CGROUP_V1 = _CgroupFiles(
    "memory.limit_in_bytes", "memory.usage_in_bytes", ("total_inactive_file", "total_active_file")
)


def require_room(
    directory: str, purpose: str, *, num_rows: int, row_bytes: int, total: Callable[[int], int]
) -> None:
    """Raise `NotEnoughMemory` unless the rows fit in `directory` and in memory.

    `total`: returns the bytes that the file still has to allocate for a given number of rows. A row
    must add less than twice `row_bytes`; otherwise the error would advise fewer rows than fit.
    """
    asked = total(num_rows)
    limits = list(_limits(asked, directory))
    tightest = min(limits, key=lambda limit: limit.available, default=None)
    if tightest is None or asked <= tightest.available:
        return
    advisable = min(limit.advisable for limit in limits)
    rows_that_fit = advisable // row_bytes
    while rows_that_fit and total(rows_that_fit) > advisable:
        excess = total(rows_that_fit) - advisable
        rows_that_fit -= max(1, excess // (2 * row_bytes))
    raise NotEnoughMemory(
        f"{purpose} needs {as_size(asked)} ({asked} bytes), but only "
        f"{as_size(tightest.available)} ({tightest.available} bytes) are available in "
        f"{tightest.where}. {tightest.remedy}, or lower cpu_bytes_to_use to "
        f"{rows_that_fit * row_bytes} at most"
    )


def _limits(asked: int, directory: str) -> Iterator[RoomLimit]:
    yield from filesystem_limit(asked, directory)
    yield from memory_limits()


def filesystem_limit(asked: int, directory: str) -> Iterator[RoomLimit]:
    """The free space of the filesystem of `directory`, if it has a size limit. The remedy names the
    size that the filesystem needs for `asked` more bytes."""
    filesystem = os.statvfs(directory)
    if filesystem.f_blocks == 0:
        return  # a tmpfs mounted without a size limit
    used = (filesystem.f_blocks - filesystem.f_bfree) * filesystem.f_frsize
    size_needed = f"{-(-(used + asked) // 2**20)}m"
    available = filesystem.f_bavail * filesystem.f_frsize
    yield RoomLimit(
        available,
        directory,
        f"Make it larger (mount -o remount,size={size_needed} {directory}; in Docker "
        f"--shm-size={size_needed} or --ipc=host; in Kubernetes an emptyDir of medium Memory "
        f"mounted there)",
        advisable=available,
    )


def _memory_limit(available: int, where: str, remedy: str) -> RoomLimit:
    return RoomLimit(available, where, remedy, advisable=available - available // 10)


def memory_limits() -> Iterator[RoomLimit]:
    """Every limit of memory that holds for this process."""
    yield from machine_limit()
    yield from cgroup_limits(Path("/proc/self/cgroup"), Path("/sys/fs/cgroup"))


def machine_limit() -> Iterator[RoomLimit]:
    """The free memory of this machine."""
    with open("/proc/meminfo", encoding="ascii") as meminfo:
        for line in meminfo:
            if line.startswith("MemAvailable:"):
                yield _memory_limit(
                    int(line.split()[1]) * 1024,
                    "this machine's memory (MemAvailable)",
                    "Free memory on this machine",
                )


def cgroup_limits(membership: Path, mount: Path) -> Iterator[RoomLimit]:
    """The memory limit of this process's control group and of every group above it.

    Inside a container, `membership` may name a path of the host that is not visible under `mount`.
    Only the visible levels are read.
    """
    try:
        lines = membership.read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, group = line.split(":", 2)
        if controllers == "":
            yield from _climb(mount, group, _CGROUP_V2)
        elif "memory" in controllers.split(","):
            yield from _climb(mount / "memory", group, _CGROUP_V1)


def _climb(mount: Path, group: str, files: _CgroupFiles) -> Iterator[RoomLimit]:
    level = mount / group.lstrip("/")
    for folder in (level, *level.parents):
        yield from _read_level(folder, files)
        if folder == mount:
            return


def _read_level(folder: Path, files: _CgroupFiles) -> Iterator[RoomLimit]:
    try:
        limit_text = (folder / files.limit).read_text().strip()
        usage = int((folder / files.usage).read_text())
        statistics = (folder / "memory.stat").read_text()
    except OSError:
        return
    if limit_text == "max" or int(limit_text) >= _UNLIMITED_IN_CGROUP_V1:
        return
    reclaimable = 0
    for line in statistics.splitlines():
        name, _, value = line.partition(" ")
        if name in files.reclaimable:
            reclaimable += int(value)
    yield _memory_limit(
        max(0, int(limit_text) - usage + reclaimable),
        f"the memory limit of control group {folder}",
        "Raise the container's memory limit",
    )
