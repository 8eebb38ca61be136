"""How much memory a process may lock, and who asks."""

from __future__ import annotations

import resource

from kvtier.cli.store.amounts import as_size
from kvtier.cli.vllm_config.findings import Finding, Status
from kvtier.cli.vllm_config.machine import Machine

__all__ = ["check_memlock"]

_CAP_IPC_LOCK = 14


def check_memlock(cpu_bytes: int, machine: Machine) -> Finding:
    """NVIDIA's driver pins host memory without regard to the limit: with 64 KiB allowed, and
    without any capability, `cuMemHostRegister` takes a GiB (driver 580). Nobody has tried the
    drivers of others."""
    limit, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if limit == resource.RLIM_INFINITY:
        return Finding("memlock", Status.OK, "no limit")
    found = f"the limit is {as_size(limit)}"
    if _may_lock_anything(machine):
        return Finding("memlock", Status.OK, f"{found}, and this process may exceed it")
    if limit >= cpu_bytes:
        return Finding("memlock", Status.OK, f"{found}, enough for the tier")
    if machine.num_nvidia_gpus:
        return Finding(
            "memlock", Status.OK, f"{found}; NVIDIA's driver pins host memory whatever it is"
        )
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
