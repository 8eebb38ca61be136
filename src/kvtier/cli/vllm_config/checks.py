"""All checks, in the order in which they are shown."""

from __future__ import annotations

import os
from collections.abc import Iterator

from kvtier.cli.vllm_config.disk_tier import DiskChecks
from kvtier.cli.vllm_config.findings import Finding, Status
from kvtier.cli.vllm_config.fs_tier import check_fs_tier
from kvtier.cli.vllm_config.machine import Machine
from kvtier.cli.vllm_config.memlock import check_memlock
from kvtier.cli.vllm_config.memory import check_memory
from kvtier.cli.vllm_config.ranks import check_ranks
from kvtier.cli.vllm_config.validation import CheckedOptions, CheckedTier
from kvtier.cli.vllm_config.vllm_checks import (
    check_hash_seed,
    check_namespace,
    check_vllm,
    installed_version,
)
from kvtier.tiering.disk.options import DiskOptions
from kvtier.tiering.fs.options import FsOptions

__all__ = ["findings"]


def findings(
    config: CheckedOptions,
    world_size: int,
    machine: Machine,
    *,
    is_plain: bool,
    sets_variables: bool,
) -> Iterator[Finding]:
    """Look at this machine. Nothing is made, changed or left behind. `sets_variables`: the command
    that is printed sets the environment variables that vLLM needs."""
    cpu_bytes = config.options.cpu_bytes_to_use
    yield from check_vllm(machine)
    yield from check_memory(cpu_bytes, machine)
    yield check_memlock(cpu_bytes, machine)
    if world_size > 1:
        yield check_ranks(world_size, cpu_bytes, machine)
    yield from _shared_paths(config.tiers)
    disks = DiskChecks()
    for tier in config.tiers:
        yield from _of_tier(tier, disks)
    lasting = [tier.config.type for tier in config.lasting_tiers]
    if lasting:
        yield check_hash_seed(
            installed_version(machine), lasting, machine, is_set_by_command=sets_variables
        )
        yield check_namespace(config.options.cache_namespace, lasting, is_plain=is_plain)


def _of_tier(tier: CheckedTier, disks: DiskChecks) -> Iterator[Finding]:
    at = tier.config.at
    if tier.refusal is not None:
        found = f"got {tier.refusal.given}; allowed: {tier.refusal.allowed}"
        yield Finding(tier.refusal.key, Status.PROBLEM, found, tier.refusal.remedy)
    elif isinstance(tier.options, DiskOptions):
        yield from disks.findings(at, tier.options)
    elif isinstance(tier.options, FsOptions):
        yield from check_fs_tier(at, tier.options)
    else:
        found = f"the tier {tier.config.type} knows its keys; it looks at them when it starts"
        yield Finding(at, Status.OK, found)


def _shared_paths(tiers: list[CheckedTier]) -> Iterator[Finding]:
    """Two tiers cannot be in one place."""
    taken: dict[str, str] = {}
    for tier in tiers:
        options = tier.options
        if options is None:
            continue
        path = options.path if isinstance(options, DiskOptions) else options.root_dir
        first = taken.setdefault(os.path.realpath(path), tier.config.at)
        if first != tier.config.at:
            yield Finding(
                tier.config.at,
                Status.PROBLEM,
                f"{path} is where {first} is",
                "Give each tier a place of its own",
            )
