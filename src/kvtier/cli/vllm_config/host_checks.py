"""Checks of this machine: shared memory, host memory, locked memory, ranks."""

from __future__ import annotations

import mmap
import os
import re
import resource
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from os import environ
from pathlib import Path

from kvtier.config import format_size
from kvtier.config.sizes import as_size
from kvtier.cpu.host_memory import (
    RoomLimit,
    cgroup_limits,
    filesystem_limit,
    machine_limit,
)
from kvtier.cpu.region_file import RegionShape

__all__ = ["Finding", "Machine", "Status", "check_memlock", "check_memory", "check_ranks"]

_NVIDIA_GPU = re.compile(r"nvidia\d+")
_NAMES_OF_OTHERS = ("kfd", "accel", "habanalabs", "davinci_manager")
"""Names in /dev: AMD GPUs, then accelerators that are not GPUs."""
_REGIONS = "kvtier-*.region"
_LEAST_USEFUL = 64 << 10
_CAP_IPC_LOCK = 14


class Status(StrEnum):
    """How a finding affects an engine that is started with the printed `--kv-transfer-config`."""

    OK = "ok"
    WARNING = "warning"
    """The engine starts, but something is probably not intended."""
    PROBLEM = "problem"
    """The engine does not start, or a tier is useless."""


@dataclass(frozen=True, slots=True)
class Finding:
    """The result of one check."""

    name: str
    status: Status
    found: str
    """What the check found, without the remedy."""
    remedy: str = ""
    """What to do. Empty if nothing is to be done."""

    @classmethod
    def of_refusal(cls, name: str, sentence: str) -> Finding:
        """Make a finding from an engine's refusal to start. `sentence`: the refusal, in the form
        "what is wrong: remedy"."""
        found, _, remedy = sentence.rpartition(": ")
        return cls(name, Status.PROBLEM, found or sentence, remedy if found else "")

    def as_json(self) -> dict[str, str]:
        return {
            "name": self.name,
            "status": self.status.value,
            "found": self.found,
            "remedy": self.remedy,
        }


@dataclass(frozen=True, slots=True)
class Machine:
    """The files and variables that the checks read. Tests give other paths."""

    shared_memory: Path = Path("/dev/shm")
    devices: Path = Path("/dev")
    process_status: Path = Path("/proc/self/status")
    cgroup_membership: Path = Path("/proc/self/cgroup")
    cgroup_mount: Path = Path("/sys/fs/cgroup")
    environment: Mapping[str, str] = field(default_factory=lambda: environ)

    @property
    def num_nvidia_gpus(self) -> int:
        """GPUs that a process in this container can open."""
        return sum(_NVIDIA_GPU.fullmatch(path.name) is not None for path in self.devices.iterdir())

    @property
    def other_accelerators(self) -> list[str]:
        return [name for name in _NAMES_OF_OTHERS if (self.devices / name).exists()]


def check_memory(cpu_bytes: int, machine: Machine) -> Iterator[Finding]:
    """Check whether the host-memory tier fits into shared memory, into this machine's memory, and
    into the limit of the control group. `cpu_bytes`: the size of the tier."""
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
            "Mount a tmpfs there: the ranks and the scheduler share memory through it",
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
        found += ", which leaves hardly any memory for the weights and other processes"
        return Finding(name, Status.WARNING, found, remedy)
    if asked <= limit.available + left_over:
        found += (
            f". Shared memory of kvtier engines takes {as_size(left_over)}: the next engine that "
            "starts removes what ended engines have left"
        )
        remedy = "Check whether those engines have ended, or will run beside this one"
        return Finding(name, Status.WARNING, found, remedy)
    return Finding(name, Status.PROBLEM, found, remedy)


def _bytes_of_regions(machine: Machine) -> int:
    """Return the bytes of shared memory that kvtier engines hold, including engines that were
    killed. Locking a region would show whether its engine is alive, but a check must not take a
    lock that an engine may be waiting for."""
    total = 0
    for path in machine.shared_memory.glob(_REGIONS):
        try:
            total += path.stat().st_blocks * 512
        except FileNotFoundError:  # its engine has just ended
            continue
    return total


def check_memlock(cpu_bytes: int, machine: Machine) -> Finding:
    """Check whether this process may lock enough memory for the host-memory tier.

    NVIDIA's driver pins host memory regardless of the limit: with 64 KiB allowed, and without any
    capability, `cuMemHostRegister` pins a GiB (measured with driver 580). Drivers of other vendors
    are untested.
    """
    limit, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if limit == resource.RLIM_INFINITY:
        return Finding("memlock", Status.OK, "no limit")
    found = f"the limit is {as_size(limit)}"
    if _may_lock_anything(machine):
        return Finding("memlock", Status.OK, f"{found}, and this process may exceed it")
    if limit >= cpu_bytes:
        return Finding("memlock", Status.OK, f"{found}, enough for the tier")
    if machine.num_nvidia_gpus:
        return Finding("memlock", Status.OK, f"{found}; NVIDIA's driver ignores it")
    others = machine.other_accelerators
    if others:
        return Finding(
            "memlock",
            Status.WARNING,
            f"{found}, less than the {as_size(cpu_bytes)} that may have to be pinned for "
            f"/dev/{others[0]}",
            "Raise it (ulimit -l unlimited; in Docker --ulimit memlock=-1) if the engine cannot "
            "pin its memory",
        )
    return Finding("memlock", Status.OK, f"{found}; without a GPU nothing is pinned")


def _may_lock_anything(machine: Machine) -> bool:
    for line in machine.process_status.read_text().splitlines():
        name, _, value = line.partition(":")
        if name == "CapEff":
            return bool(int(value, 16) >> _CAP_IPC_LOCK & 1)
    return False


def check_ranks(world_size: int, cpu_bytes: int, machine: Machine) -> Finding:
    """Check whether all ranks of the engine can run on this machine, where its shared memory is."""
    found = (
        f"{world_size} ranks share the {as_size(cpu_bytes)}: "
        f"{as_size(cpu_bytes // world_size)} for the blocks of each"
    )
    num_gpus = machine.num_nvidia_gpus
    if not num_gpus or num_gpus >= world_size:
        return Finding("ranks", Status.OK, found)
    return Finding(
        "ranks",
        Status.WARNING,
        f"{found}. There are {num_gpus} GPUs here, so some ranks run elsewhere",
        "Let all ranks of an engine run on one machine: an engine whose ranks do not share memory "
        "is refused at start. For several machines, run an engine on each, and share blocks "
        "through an fs tier",
    )
