"""Whether the host-memory tier has room: in shared memory, on this machine, in this container."""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterator

from kvtier.cli.store.amounts import as_size
from kvtier.cli.vllm_config.findings import Finding, Status
from kvtier.cli.vllm_config.machine import Machine
from kvtier.config import format_size
from kvtier.cpu.host_memory import (
    RoomLimit,
    cgroup_limits,
    filesystem_limit,
    machine_limit,
)
from kvtier.cpu.region_file import RegionShape

__all__ = ["check_memory"]

_REGIONS = "kvtier-*.region"
_LEAST_USEFUL = 64 << 10


def check_memory(cpu_bytes: int, machine: Machine) -> Iterator[Finding]:
    """`cpu_bytes`: of the host-memory tier."""
    if cpu_bytes < _LEAST_USEFUL:
        yield Finding(
            "cpu_bytes_to_use",
            Status.PROBLEM,
            f"{as_size(cpu_bytes)} of host memory hold no block of any model",
            f"Give a size with its unit, such as {cpu_bytes}GiB",
        )
    asked = RegionShape(cpu_bytes // mmap.PAGESIZE, mmap.PAGESIZE, mmap.PAGESIZE).file_bytes
    directory = machine.shared_memory
    try:
        left_over = _bytes_of_regions(machine)
        in_shared_memory = next(filesystem_limit(asked, str(directory)), None)
        whole = os.statvfs(directory)
    except OSError as error:
        yield Finding(
            "shared_memory",
            Status.PROBLEM,
            f"{directory}: {error.strerror}",
            "mount a tmpfs there: ranks and scheduler share their memory in it",
        )
        return
    if in_shared_memory is None:
        yield Finding("shared_memory", Status.OK, f"{directory} has no limit of its own")
    else:
        size = as_size(whole.f_blocks * whole.f_frsize)
        what = f"{directory} ({size} in all)"
        yield _judged("shared_memory", asked, in_shared_memory, what, left_over)
    for limit in machine_limit():
        yield _judged("memory", asked, limit, "this machine", left_over)
    limits = list(cgroup_limits(machine.cgroup_membership, machine.cgroup_mount))
    if limits:
        tightest = min(limits, key=lambda limit: limit.available)
        yield _judged("control_group", asked, tightest, tightest.where, 0)
    else:
        yield Finding("control_group", Status.OK, "no memory limit of a control group was found")


def _judged(name: str, asked: int, limit: RoomLimit, where: str, left_over: int) -> Finding:
    found = f"{where} has {as_size(limit.available)} free; the tier takes {as_size(asked)}"
    if asked <= limit.advisable:
        return Finding(name, Status.OK, found)
    fits = format_size(max(0, limit.advisable - mmap.PAGESIZE) >> 20 << 20)
    remedy = f"{limit.remedy}, or lower --cpu to {fits} at most"
    if asked <= limit.available:
        found += ", which leaves hardly anything for the weights and everything else"
        return Finding(name, Status.WARNING, found, remedy)
    if asked <= limit.available + left_over:
        found += (
            f". {as_size(left_over)} are taken by regions of kvtier engines: those of engines that "
            "have ended are removed when the next one starts"
        )
        remedy = "See whether those engines have ended, or are to run beside this one"
        return Finding(name, Status.WARNING, found, remedy)
    return Finding(name, Status.PROBLEM, found, remedy)


def _bytes_of_regions(machine: Machine) -> int:
    """Of engines that run, and of those that were killed: only a lock would tell, and a check
    takes none that an engine could stumble over."""
    total = 0
    for path in machine.shared_memory.glob(_REGIONS):
        try:
            total += path.stat().st_blocks * 512
        except FileNotFoundError:  # its engine has just ended
            continue
    return total
