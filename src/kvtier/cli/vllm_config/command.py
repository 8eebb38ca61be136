"""Runs `kvtier vllm-config`: validates the options, checks this machine, and prints the flag.

Keys are validated by the code that an engine runs at start.
"""

from __future__ import annotations

import json
import logging
import mmap
import os
import signal
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, TypeVar

from kvtier.base import Locality, Medium
from kvtier.cli.output import CannotWrite, NobodyReads, finish, note, write
from kvtier.cli.vllm_config.flag import (
    RequestedConfig,
    WrongOption,
    command_of,
    flags_of,
    shutdown_seconds,
    transfer_config,
)
from kvtier.cli.vllm_config.host_checks import (
    Finding,
    Machine,
    Status,
    check_memlock,
    check_memory,
    check_ranks,
)
from kvtier.cli.vllm_config.server_checks import check_obj_tier, check_valkey_tier
from kvtier.cli.vllm_config.tier_checks import DiskChecks, check_fs_tier
from kvtier.cli.vllm_config.vllm_checks import (
    check_hash_seed,
    check_namespace,
    check_vllm,
    installed_version,
    interpreter_to_use,
    missing_variables,
)
from kvtier.config import (
    ConfigError,
    OffloadingOptions,
    Problem,
    TierConfig,
)
from kvtier.config.errors import describe
from kvtier.cpu.policies.factory import CachePolicyFactory
from kvtier.tiering.disk.options import DiskOptions
from kvtier.tiering.disk.ownership import SlabRefused
from kvtier.tiering.disk.slab import geometry_for
from kvtier.tiering.factory import PlannedTier, SecondaryTierFactory
from kvtier.tiering.fs.options import FsOptions
from kvtier.tiering.obj.options import ObjOptions
from kvtier.tiering.valkey.options import ValkeyOptions

__all__ = ["Answer", "CheckedOptions", "CheckedTier", "checked", "findings", "run_vllm_config"]

_NAME = "kvtier vllm-config"
_SHOWN = {Status.OK: "ok", Status.WARNING: "WARNING", Status.PROBLEM: "PROBLEM"}
T = TypeVar("T")
_LEAST_BLOCK = mmap.PAGESIZE
"""Bytes of the smallest possible block. Only the engine knows the real size."""


def run_vllm_config(
    requested: RequestedConfig,
    *,
    model: str | None,
    is_plain: bool,
    world_size: int,
    is_checked: bool,
    as_json: bool,
) -> int:
    """Print the flags, or the command that serves `model`, and the findings. Returns the exit
    code."""
    try:
        answer = _answer(requested, model, is_plain, world_size, is_checked)
    except WrongOption as wrong:
        note(f"{_NAME}: {wrong.option}: {wrong}")
        return 2
    except ConfigError as refused:
        for problem in refused.problems:
            note(f"{_NAME}: {requested.option_of(problem.key)}: {problem}")
        return 2
    if not as_json:  # before the flag, so that a terminal shows the flag last
        for remark in answer.remarks():
            note(remark)
    try:
        write((answer.as_json() if as_json else answer.text) + "\n")
        finish()
    except NobodyReads:
        return 128 + signal.SIGPIPE
    except CannotWrite as error:
        note(f"{_NAME}: {error}")
        return 2
    return 0 if answer.is_ok else 1


def _answer(
    requested: RequestedConfig, model: str | None, is_plain: bool, world_size: int, is_checked: bool
) -> Answer:
    """Run the checks and return what to print. Raises `WrongOption` or `ConfigError`."""
    config = transfer_config(requested.extra_config(), is_plain=is_plain)
    machine = Machine()
    with _warnings_of_kvtier() as said:
        options = checked(config["kv_connector_extra_config"])
        found: Iterable[Finding] = ()
        environment: Mapping[str, str] = {}
        if is_checked:
            if options.lasting_tiers:
                environment = missing_variables(machine)
            found = findings(
                options, world_size, machine, is_plain=is_plain, sets_variables=model is not None
            )
        return Answer(
            config,
            [*found, *said],
            shutdown_seconds(options.options.shutdown_timeout_ms)
            if options.lasting_tiers
            else None,
            environment,
            model,
            interpreter_to_use(machine) if is_checked else None,
        )


@contextmanager
def _warnings_of_kvtier() -> Iterator[list[Finding]]:
    """A context that collects the warnings that kvtier logs, as findings. An engine would log them
    at start."""
    said: list[Finding] = []

    class Listener(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            said.append(Finding("configuration", Status.WARNING, record.getMessage()))

    logger, listener = logging.getLogger("kvtier"), Listener(logging.WARNING)
    logger.addHandler(listener)
    try:
        yield said
    finally:
        logger.removeHandler(listener)


# --- the answer --------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Answer:
    config: dict[str, Any]
    findings: list[Finding]
    shutdown_timeout_s: int | None = None
    """vLLM's `--shutdown-timeout`. None if no tier outlives the process."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """Environment variables that vLLM needs and that are not set."""
    model: str | None = None
    """The model to serve. None: print flags rather than a command."""
    python: str | None = None
    """The interpreter that runs vLLM, if the command `vllm` does not work. See `command_of`."""

    @property
    def is_ok(self) -> bool:
        """True if no check found a problem."""
        return all(finding.status is not Status.PROBLEM for finding in self.findings)

    @property
    def flag(self) -> str:
        """The flags for vLLM."""
        return flags_of(self.config, self.shutdown_timeout_s)

    @property
    def command(self) -> str | None:
        if self.model is None:
            return None
        return command_of(self.model, self.flag, self.environment, self.python)

    @property
    def text(self) -> str:
        """The output for a shell: the flags, or a script that accepts further flags.

        The script replaces its process with the server, so that a supervisor's signals reach it.
        """
        if self.command is None:
            return self.flag
        start = "exec env" if self.environment else "exec"
        return f'{start} {self.command} "$@"'

    def as_json(self) -> str:
        document = {
            "flag": self.flag,
            "environment": dict(self.environment),
            "command": self.command,
            "config": self.config,
            "checks": [finding.as_json() for finding in self.findings],
            "ok": self.is_ok,
        }
        return json.dumps(document, indent=2)

    def remarks(self) -> Iterator[str]:
        """Yield the findings as text: one line for each, and one for its remedy."""
        width = max((len(finding.name) for finding in self.findings), default=0)
        for finding in self.findings:
            yield f"{_SHOWN[finding.status]:7}  {finding.name:{width}}  {finding.found}"
            if finding.remedy:
                yield f"{'':7}  {'':{width}}  -> {finding.remedy}"


# --- validation --------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class CheckedTier:
    """A tier whose keys are valid. It may still not work on this machine."""

    config: TierConfig
    is_lasting: bool
    """True if its blocks outlive the process."""
    options: DiskOptions | FsOptions | ValkeyOptions | ObjOptions | None = None
    """None for a tier of another package, or if the tier cannot work on this machine."""
    refusal: Problem | None = None
    """Why it cannot work on this machine, such as a missing directory."""


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
    if isinstance(own, ValkeyOptions | ObjOptions):
        _require_fitting(own, config)
        return CheckedTier(config, is_lasting, own)
    if not isinstance(own, DiskOptions | FsOptions):
        return CheckedTier(config, is_lasting)
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
        return CheckedTier(config, is_lasting, refusal=refusal)
    except ConfigError as refused:
        return CheckedTier(config, is_lasting, refusal=_placed(refused, config).problems[0])
    return CheckedTier(config, is_lasting, own)


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


def _require_fitting(own: ValkeyOptions | ObjOptions, config: TierConfig) -> None:
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
    else:
        found = f"the tier {tier.config.type} checks the values of its keys when it starts"
        yield Finding(at, Status.OK, found)


def _shared_paths(tiers: list[CheckedTier]) -> Iterator[Finding]:
    """Yield a finding for each tier whose path another tier has already."""
    taken: dict[str, str] = {}
    for tier in tiers:
        options = tier.options
        if not isinstance(options, DiskOptions | FsOptions):
            continue
        path = options.path if isinstance(options, DiskOptions) else options.root_dir
        first = taken.setdefault(os.path.realpath(path), tier.config.at)
        if first != tier.config.at:
            yield Finding(
                tier.config.at,
                Status.PROBLEM,
                f"{path} is also the path of {first}",
                "Give each tier its own path",
            )
