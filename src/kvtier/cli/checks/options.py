"""Checks of a whole configuration: its keys, this machine, and each tier's place.

Keys are validated by the code that an engine runs at start.
"""

from __future__ import annotations

import logging
import mmap
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar

from kvtier.base import Locality, Medium
from kvtier.cli.checks.finding import Finding, Status
from kvtier.cli.checks.host import (
    Machine,
    check_memlock,
    check_memory,
    check_ranks,
    check_recording,
    check_seal_keys,
    check_tenant_keys,
)
from kvtier.cli.checks.servers import (
    check_mooncake_tier,
    check_obj_tier,
    check_valkey_tier,
)
from kvtier.cli.checks.tiers import DiskChecks, check_fs_tier
from kvtier.cli.checks.vllm import (
    check_hash_seed,
    check_namespace,
    check_vllm,
    installed_version,
)
from kvtier.config import ConfigError, OffloadingOptions, Problem, TierConfig
from kvtier.config.errors import describe
from kvtier.cpu.policies.factory import CachePolicyFactory
from kvtier.tiering.disk.options import DiskOptions
from kvtier.tiering.disk.ownership import SlabRefused
from kvtier.tiering.disk.slab import geometry_for
from kvtier.tiering.factory import PlannedTier, SecondaryTierFactory
from kvtier.tiering.fs.options import FsOptions
from kvtier.tiering.mooncake.options import MooncakeOptions
from kvtier.tiering.obj.options import ObjOptions
from kvtier.tiering.valkey.options import ValkeyOptions

__all__ = [
    "CheckedOptions",
    "CheckedTier",
    "checked",
    "findings",
    "warnings_of_kvtier",
]

T = TypeVar("T")
_LEAST_BLOCK = mmap.PAGESIZE
"""Bytes of the smallest possible block. Only the engine knows the real size."""


@contextmanager
def warnings_of_kvtier(name: str = "configuration") -> Iterator[list[Finding]]:
    """A context that collects the warnings that kvtier logs, as findings of this name. An engine
    would log them."""
    said: list[Finding] = []

    class Listener(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            said.append(Finding(name, Status.WARNING, record.getMessage()))

    logger, listener = logging.getLogger("kvtier"), Listener(logging.WARNING)
    logger.addHandler(listener)
    try:
        yield said
    finally:
        logger.removeHandler(listener)


# --- validation --------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class CheckedTier:
    """A tier whose keys are valid. It may still not work on this machine."""

    planned: PlannedTier
    is_lasting: bool
    """True if its blocks outlive the process."""
    options: DiskOptions | FsOptions | ValkeyOptions | ObjOptions | MooncakeOptions | None = None
    """None for a tier of another package, or if the tier cannot work on this machine."""
    refusal: Problem | None = None
    """Why it cannot work on this machine, such as a missing directory."""

    @property
    def config(self) -> TierConfig:
        return self.planned.config


@dataclass(frozen=True, slots=True)
class CheckedOptions:
    """A valid configuration. It may still not work on this machine."""

    options: OffloadingOptions
    tiers: list[CheckedTier]
    """In lookup order."""

    @property
    def lasting_tiers(self) -> list[CheckedTier]:
        return [tier for tier in self.tiers if tier.is_lasting]


def checked(extra_config: Mapping[str, Any]) -> CheckedOptions:
    """Validate the user's keys. Raises `ConfigError` with every problem, as the engine would."""
    options = OffloadingOptions.from_extra_config(extra_config)
    problems: list[Problem] = []

    def attempt(check: Callable[[], T]) -> T | None:
        try:
            return check()
        except ConfigError as refused:
            problems.extend(refused.problems)
            return None

    attempt(lambda: _require_policy(options, options.eviction_policy))
    planned = attempt(lambda: SecondaryTierFactory.plan_secondary_tiers(options.secondary_tiers))
    tiers = [attempt(partial(_checked_tier, tier, options)) for tier in planned or ()]
    if problems:
        raise ConfigError(*problems)
    return CheckedOptions(options, [tier for tier in tiers if tier is not None])


def _checked_tier(planned: PlannedTier, options: OffloadingOptions) -> CheckedTier:
    config = planned.config
    is_lasting = planned.tier_cls.medium is Medium.STORAGE or config.locality is Locality.REMOTE
    own = planned.parse_options()
    if isinstance(own, ValkeyOptions | ObjOptions | MooncakeOptions):
        _require_fitting(own, config)
        return CheckedTier(planned, is_lasting, own)
    if not isinstance(own, DiskOptions | FsOptions):
        return CheckedTier(planned, is_lasting)
    _require_values(own, config, options)
    try:
        own.require_place()
    except OSError as error:  # the user has no access to a directory above it
        path_key = "path" if isinstance(own, DiskOptions) else "root_dir"
        refusal = Problem(
            f"{config.at}.{path_key}",
            f"{own.as_given(path_key)} ({error.strerror})",
            "a path that the user of the engine can access",
            f"Let uid {os.geteuid()} enter the directories above it, or give another path",
        )
        return CheckedTier(planned, is_lasting, refusal=refusal)
    except ConfigError as refused:
        return CheckedTier(planned, is_lasting, refusal=_placed(refused, config).problems[0])
    return CheckedTier(planned, is_lasting, own)


def _require_values(
    own: DiskOptions | FsOptions, config: TierConfig, options: OffloadingOptions
) -> None:
    """Check values that a tier itself checks only when it starts."""
    try:
        if isinstance(own, FsOptions):
            own.require_room_for(_LEAST_BLOCK)
            return
        _require_policy(options, own.eviction_policy)
        if own.max_bytes is not None:
            geometry_for(own.max_bytes, _LEAST_BLOCK)
    except ConfigError as refused:
        raise _placed(refused, config) from None
    except SlabRefused as refused:
        raise ConfigError(
            Problem(
                f"{config.at}.max_bytes",
                describe(config.options["max_bytes"]),
                "room for one block at least",
                f"Give more: {refused}",
            )
        ) from None


def _require_fitting(own: ValkeyOptions | ObjOptions | MooncakeOptions, config: TierConfig) -> None:
    try:
        if isinstance(own, ObjOptions):
            own.require_fitting(_LEAST_BLOCK)
        else:
            own.require_fitting()
    except ConfigError as refused:
        raise _placed(refused, config) from None


def _require_policy(options: OffloadingOptions, name: str) -> None:
    is_of_primary_tier = name == options.eviction_policy
    module_path = options.cache_policy_module_path if is_of_primary_tier else None
    CachePolicyFactory.get_cache_policy_cls(name, module_path)


def _placed(refused: ConfigError, config: TierConfig) -> ConfigError:
    """Return the same problems, with the position of the tier's entry before their keys."""
    return ConfigError(
        *(replace(problem, key=f"{config.at}.{problem.key}") for problem in refused.problems)
    )


# --- checks ------------------------------------------------------------------------------------


def findings(
    config: CheckedOptions,
    world_size: int,
    machine: Machine,
    *,
    is_plain: bool,
    sets_variables: bool,
) -> Iterator[Finding]:
    """Run all checks, in the order in which they are shown. Nothing is changed on the machine.
    `sets_variables`: the printed command sets the environment variables that vLLM needs."""
    cpu_bytes = config.options.cpu_bytes_to_use
    yield from check_vllm(machine)
    yield from check_memory(cpu_bytes, machine)
    yield check_memlock(cpu_bytes, machine)
    if world_size > 1:
        yield check_ranks(world_size, cpu_bytes, machine)
    options = config.options
    if options.seal_key_file is not None:
        yield check_seal_keys(options.seal_key_file)
    if options.tenant_key_file is not None:
        yield check_tenant_keys(options.tenant_key_file)
    if options.record_trace is not None:
        yield check_recording(options.record_trace, options.record_trace_bytes)
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
    elif isinstance(tier.options, ValkeyOptions):
        yield from check_valkey_tier(at, tier.options)
    elif isinstance(tier.options, ObjOptions):
        yield from check_obj_tier(at, tier.options)
    elif isinstance(tier.options, MooncakeOptions):
        yield from check_mooncake_tier(at, tier.options)
    else:
        found = f"the tier {tier.config.type} checks the values of its keys when it starts"
        yield Finding(at, Status.OK, found)


def _shared_paths(tiers: list[CheckedTier]) -> Iterator[Finding]:
    """Yield a finding for each tier whose path or URL another tier has already."""
    taken: dict[str, str] = {}
    for tier in tiers:
        options = tier.options
        if isinstance(options, DiskOptions | FsOptions):
            path = options.path if isinstance(options, DiskOptions) else options.root_dir
            what, shown, place = "path", str(path), os.path.realpath(path)
        elif isinstance(options, ValkeyOptions):
            what, shown = "URL", options.shown_url
            place = f"{shown.rstrip('/')} {options.sentinel_service}"
        elif isinstance(options, ObjOptions):
            what, shown = "URL", options.shown_url
            place = f"{shown.rstrip('/')} {options.endpoint}"
        elif isinstance(options, MooncakeOptions):
            what, shown = "pool", options.where
            place = shown
        else:
            continue
        first = taken.setdefault(place, tier.config.at)
        if first != tier.config.at:
            yield Finding(
                tier.config.at,
                Status.PROBLEM,
                f"{shown} is also the {what} of {first}",
                f"Give each tier its own {what}",
            )
