"""Checks of this machine: shared memory, host memory, locked memory, huge pages, NUMA nodes,
ranks."""

from __future__ import annotations

import mmap
import os
import re
import resource
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from os import environ
from pathlib import Path

from kvtier.cli.checks.finding import Finding, Status
from kvtier.config import ConfigError, format_size
from kvtier.config.sizes import as_size
from kvtier.cpu.host_memory import (
    RoomLimit,
    cgroup_limits,
    filesystem_limit,
    machine_limit,
)
from kvtier.cpu.region_file import RegionShape
from kvtier.seal.keys import SealKeys, read_keys

__all__ = [
    "Machine",
    "check_huge_pages",
    "check_memlock",
    "check_memory",
    "check_numa",
    "check_ranks",
    "check_recording",
    "check_seal_keys",
    "check_tenant_keys",
]

_NVIDIA_GPU = re.compile(r"nvidia\d+")
_NAMES_OF_OTHERS = ("kfd", "accel", "habanalabs", "davinci_manager")
"""Names in /dev: AMD GPUs, then accelerators that are not GPUs."""
_REGIONS = "kvtier-*.region"
_LEAST_USEFUL = 64 << 10
_MUCH_OF_MEMORY = 0.05
_CAP_IPC_LOCK = 14


@dataclass(frozen=True, slots=True)
class Machine:
    """The files and variables that the checks read. Tests give other paths."""

    shared_memory: Path = Path("/dev/shm")
    devices: Path = Path("/dev")
    process_status: Path = Path("/proc/self/status")
    cgroup_membership: Path = Path("/proc/self/cgroup")
    cgroup_mount: Path = Path("/sys/fs/cgroup")
    memory: Path = Path("/proc/meminfo")
    nodes: Path = Path("/sys/devices/system/node")
    pci_devices: Path = Path("/sys/bus/pci/devices")
    nvidia_gpus: Path = Path("/proc/driver/nvidia/gpus")
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
    remedy = f"{limit.remedy}, or lower cpu_bytes_to_use (--cpu) to {fits} at most"
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


def check_seal_keys(path: Path) -> Finding:
    """Whether an engine can use this `seal_key_file`. What it would warn of is logged."""
    return _key_file("seal_key_file", path, partial(SealKeys.load, path), "keys that sign blocks")


def check_tenant_keys(path: Path) -> Finding:
    """Whether an engine can use this `tenant_key_file`. What it would warn of is logged."""
    read = partial(read_keys, path, "tenant_key_file")
    return _key_file("tenant_key_file", path, read, "keys of private tenants")


def _key_file(option: str, path: Path, read: Callable[[], object], what: str) -> Finding:
    try:
        read()
    except ConfigError as refused:
        (problem,) = refused.problems
        found = f"got {problem.given}; allowed: {problem.allowed}"
        return Finding(option, Status.PROBLEM, found, problem.remedy)
    return Finding(option, Status.OK, f"{path} has {what}")


def check_recording(path: Path, max_bytes: int) -> Finding:
    """Whether an engine can make this `record_trace`."""
    name, folder = "record_trace", path.parent
    if os.path.lexists(path):
        found = f"{path} exists, so an engine would record nothing"
        return Finding(name, Status.WARNING, found, "Move it, or give record_trace another name")
    if not folder.is_dir() or not os.access(folder, os.W_OK | os.X_OK):
        what = "may not be written" if folder.is_dir() else "is not there"
        found = f"{path} cannot be made: the directory {folder} {what}"
        return Finding(name, Status.PROBLEM, found, "Make the directory, or give another path")
    found = f"the engine makes {path}, of at most {as_size(max_bytes)}"
    return Finding(name, Status.OK, found)


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


def check_huge_pages(machine: Machine) -> Finding:
    """Check that memory is not set aside in huge pages, which neither kvtier nor the weights use.
    Shared memory may be mapped with huge pages, but needs none."""
    name, values = "huge_pages", _memory_values(machine)
    reserved = values.get("HugePages_Free", 0) * values.get("Hugepagesize", 0)
    if reserved > _MUCH_OF_MEMORY * values.get("MemTotal", 0):
        return Finding(
            name,
            Status.WARNING,
            f"{as_size(reserved)} of memory are set aside for huge pages that nobody has taken, "
            "and kvtier does not use them",
            "Lower vm.nr_hugepages (sysctl), unless another program needs them",
        )
    return Finding(name, Status.OK, "no memory is set aside for them; none are needed")


def _memory_values(machine: Machine) -> dict[str, int]:
    """The values of /proc/meminfo: bytes, or numbers of huge pages."""
    values: dict[str, int] = {}
    try:
        lines = machine.memory.read_text().splitlines()
    except OSError:
        return values
    for line in lines:
        name, _, rest = line.partition(":")
        number, *unit = rest.split()
        values[name] = int(number) << (10 if unit else 0)
    return values


def check_numa(cpu_bytes: int, machine: Machine) -> Finding:
    """Check whether the processors of this process, and enough memory for the tier, are on the NUMA
    node of a GPU. Copies from another node cross the link between the processors."""
    name = "numa"
    nodes = {int(path.name.removeprefix("node")): path for path in machine.nodes.glob("node[0-9]*")}
    if len(nodes) < 2:
        return Finding(name, Status.OK, "one node")
    found = f"{len(nodes)} nodes"
    of_gpus = sorted(_nodes_of_gpus(machine) & nodes.keys())
    if not of_gpus:
        return Finding(name, Status.OK, f"{found}; the node of a GPU is not known here")
    where = " and ".join(map(str, of_gpus))
    found += f", the GPUs on node {where}"
    remedy = (
        f"Start the engine with numactl --cpunodebind={of_gpus[0]} --preferred={of_gpus[0]}, or "
        "give its container the processors of that node"
    )
    processors = os.sched_getaffinity(0)
    if not any(processors & _numbers_in(nodes[node] / "cpulist") for node in of_gpus):
        found += ", but this process may only use processors of other nodes"
        return Finding(name, Status.WARNING, found, remedy)
    free = sum(_free_on(nodes[node]) for node in of_gpus)
    if free < cpu_bytes:
        found += f", where {as_size(free)} are free; the tier takes {as_size(cpu_bytes)}"
        remedy = "Free memory there, or accept that copies of the rest are slower"
        return Finding(name, Status.WARNING, found, remedy)
    return Finding(name, Status.OK, found)


def _nodes_of_gpus(machine: Machine) -> set[int]:
    nodes = set()
    if machine.nvidia_gpus.is_dir():
        for gpu in machine.nvidia_gpus.iterdir():
            try:
                nodes.add(int((machine.pci_devices / gpu.name / "numa_node").read_text()))
            except (OSError, ValueError):
                continue
    return nodes


def _numbers_in(path: Path) -> set[int]:
    """The numbers of a list such as 0-3,8-11."""
    numbers: set[int] = set()
    for part in path.read_text().strip().split(","):
        first, _, last = part.partition("-")
        if first:
            numbers.update(range(int(first), int(last or first) + 1))
    return numbers


def _free_on(node: Path) -> int:
    """Free bytes of a node, with what the page cache would give up."""
    values = dict(re.findall(r"(MemFree|Inactive\(file\)): +(\d+) kB", _text_of(node / "meminfo")))
    return sum(int(value) << 10 for value in values.values())


def _text_of(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
