"""Whether all ranks of the engine can be on this machine, where the scheduler's memory is."""

from __future__ import annotations

from kvtier.cli.store.amounts import as_size
from kvtier.cli.vllm_config.findings import Finding, Status
from kvtier.cli.vllm_config.machine import Machine

__all__ = ["check_ranks"]


def check_ranks(world_size: int, cpu_bytes: int, machine: Machine) -> Finding:
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
        f"{found}. There are {num_gpus} GPUs here, so that some ranks run elsewhere",
        "Let all ranks of an engine run on one machine: an engine whose ranks do not share memory "
        "is refused at start. For several machines, run an engine on each, and share blocks "
        "through an fs tier",
    )
