"""The user's keys, judged by the same code as when an engine starts."""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar

from kvtier.base import Locality, Medium
from kvtier.config import (
    ConfigError,
    OffloadingOptions,
    OffloadingParallelConfig,
    Problem,
    TierConfig,
)
from kvtier.config.redaction import describe
from kvtier.cpu.policies.factory import CachePolicyFactory
from kvtier.tiering.disk.options import DiskOptions
from kvtier.tiering.disk.refusal import SlabRefused
from kvtier.tiering.disk.room import geometry_for
from kvtier.tiering.factory import PlannedTier, SecondaryTierFactory
from kvtier.tiering.fs.options import FsOptions

__all__ = ["CheckedOptions", "CheckedTier", "checked"]

T = TypeVar("T")

_LEAST_BLOCK = mmap.PAGESIZE
"""What a block has at least. How large it is, only the engine knows."""


@dataclass(frozen=True, slots=True)
class CheckedTier:
    """A tier whose keys could work on some machine."""

    config: TierConfig
    is_lasting: bool
    """Whether another process could find its blocks."""
    options: DiskOptions | FsOptions | None = None
    """None: only the tier itself can read its values, or it cannot work on this machine."""
    refusal: Problem | None = None
    """Why it cannot work on this machine: its directory is not there."""


@dataclass(frozen=True, slots=True)
class CheckedOptions:
    """Nothing in here is wrong wherever it is used."""

    options: OffloadingOptions
    tiers: list[CheckedTier]
    """In lookup order."""

    @property
    def lasting_tiers(self) -> list[CheckedTier]:
        return [tier for tier in self.tiers if tier.is_lasting]


def checked(extra_config: Mapping[str, Any]) -> CheckedOptions:
    """Raises `ConfigError` with all that is wrong, as the engine would."""
    options = OffloadingOptions.from_extra_config(extra_config)
    problems: list[Problem] = []

    def judged(judge: Callable[[], T]) -> T | None:
        try:
            return judge()
        except ConfigError as refused:
            problems.extend(refused.problems)
            return None

    judged(lambda: _require_policy(options, options.eviction_policy))
    planned = judged(lambda: SecondaryTierFactory.plan_secondary_tiers(options.secondary_tiers))
    tiers = [judged(partial(_checked_tier, tier, options)) for tier in planned or ()]
    if problems:
        raise ConfigError(*problems)
    return CheckedOptions(options, [tier for tier in tiers if tier is not None])


def _checked_tier(planned: PlannedTier, options: OffloadingOptions) -> CheckedTier:
    config = planned.config
    is_lasting = planned.tier_cls.medium is Medium.STORAGE or config.locality is Locality.REMOTE
    parse, path_key = _PARSERS.get(config.type, (None, ""))
    if parse is None:
        return CheckedTier(config, is_lasting)
    try:
        own = parse(planned.keys)
    except OSError as error:  # it looks for the directory, and may not
        path = describe(planned.keys[path_key])
        refusal = Problem(
            f"{config.at}.{path_key}",
            f"{path} ({error.strerror})",
            "a path that the user of the engine can look at",
            f"Let uid {os.geteuid()} enter the directories above it, or give another path",
        )
        return CheckedTier(config, is_lasting, refusal=refusal)
    except ConfigError as refused:
        here = _placed(refused, config)
        elsewhere = _in_the_root_directory(planned.keys[path_key])
        try:
            own = parse({**planned.keys, path_key: elsewhere})
        except ConfigError:
            raise here from None
        _require_values(own, config, options)
        return CheckedTier(config, is_lasting, refusal=here.problems[0])
    _require_values(own, config, options)
    return CheckedTier(config, is_lasting, own)


def _parse_disk(keys: Mapping[str, Any]) -> DiskOptions:
    return DiskOptions.parse(keys, OffloadingParallelConfig())


_PARSERS: dict[str, tuple[Callable[[Mapping[str, Any]], DiskOptions | FsOptions], str]] = {
    "disk": (_parse_disk, "path"),
    "fs": (FsOptions.parse, "root_dir"),
}
"""By type of the tier: how it reads its own keys, and the key that says where it is."""


def _in_the_root_directory(path: object) -> object:
    """The same name in a directory that is always there. What is refused even so is wrong on every
    machine."""
    if not isinstance(path, str) or not path.startswith("/"):
        return path
    return path[len(os.path.dirname(path.rstrip("/")).rstrip("/")) :]


def _require_values(
    own: DiskOptions | FsOptions, config: TierConfig, options: OffloadingOptions
) -> None:
    """What a tier looks at later than its keys."""
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


def _require_policy(options: OffloadingOptions, name: str) -> None:
    is_primarys = name == options.eviction_policy
    module_path = options.cache_policy_module_path if is_primarys else None
    CachePolicyFactory.get_cache_policy_cls(name, module_path)


def _placed(refused: ConfigError, config: TierConfig) -> ConfigError:
    """A tier does not know where its entry stands."""
    return ConfigError(
        *(replace(problem, key=f"{config.at}.{problem.key}") for problem in refused.problems)
    )
