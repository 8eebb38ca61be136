"""Names of tiers to their classes, and entries of `secondary_tiers` to running tiers."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from traceback import clear_frames
from typing import TYPE_CHECKING, Any, ClassVar

from kvtier.config import TIER_KEYS, ConfigError, OptionReader, Problem, TierConfig
from kvtier.config.kinds import OPAQUE, Kind
from kvtier.config.redaction import describe, without_secrets
from kvtier.factory import ClassRegistry
from kvtier.tiering.closing import close_tiers
from kvtier.tiering.key_hints import example_of, misplaced_keys

if TYPE_CHECKING:
    from kvtier.base import OffloadingSpec
    from kvtier.tiering.base import SecondaryTierManager

__all__ = ["PlannedTier", "SecondaryTierFactory", "TierStartError"]

_GIVEN_BY_THE_FACTORY = ("offloading_spec", "primary_kv_view", "tier_type")
_NOT_BY_NAME = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.VAR_POSITIONAL)
_SET_BY_THE_BASE = ("tier_type", "rows", "fingerprint")
_ANY_VALUE: Kind[Any] = Kind("a value", OPAQUE.parse)


class TierStartError(RuntimeError):
    """A tier could not start, for a reason that is not in its configuration alone."""


@dataclass(frozen=True, slots=True)
class PlannedTier:
    """An entry whose class was found, and whose keys fit its constructor. Nothing is started."""

    config: TierConfig
    tier_cls: type[SecondaryTierManager]
    keys: Mapping[str, Any] = field(repr=False)
    """What the constructor gets besides what every one does. May hold passwords."""

    def start(
        self, primary_kv_view: memoryview, offloading_spec: OffloadingSpec
    ) -> SecondaryTierManager:
        """The tier itself. Called while an engine starts, on the scheduler's side.

        `ConfigError`: the tier refuses a value. `TierStartError`: it failed otherwise, or is not
        what a tier must be. Neither keeps hold of the view, unless the tier itself does.
        """
        config = self.config
        try:
            tier = self.tier_cls(
                offloading_spec=offloading_spec,
                primary_kv_view=primary_kv_view,
                tier_type=config.type,
                **self.keys,
            )
        except Exception as error:
            # The frames of the constructor hold a half-made tier, and with it the view.
            for link in _chain(error):
                clear_frames(link.__traceback__)
            raise _refusal(error, self.tier_cls, config) from _cause_to_show(error, config)
        defect = _defect_of(tier)
        if defect is not None:
            close_tiers([tier], offloading_spec.config.options.shutdown_timeout_ms / 1000)
            del tier  # it may hold the view, and the error's frames would hold it
            raise TierStartError(f"{config.at}: the tier {describe(config.type)} {defect}")
        if config.locality is not None:
            tier.locality = config.locality
        return tier


def _load_tier_base() -> type[SecondaryTierManager]:
    from kvtier.tiering.base import SecondaryTierManager

    return SecondaryTierManager


class SecondaryTierFactory:
    """Makes the tier that an entry of `secondary_tiers` describes.

    Further tiers come from entry points of the group `kvtier.tiers`.
    """

    _registry: ClassVar[ClassRegistry[SecondaryTierManager]] = ClassRegistry(
        kind="tier",
        load_base=_load_tier_base,
        entry_point_group="kvtier.tiers",
        name_key="type",
        module_path_key="module_path",
    )

    @classmethod
    def register_secondary_tier(
        cls,
        type: str,  # noqa: A002 - the user's key
        module_path: str,
        class_name: str,
    ) -> None:
        """Let `type` mean `class_name` of `module_path`, imported when first needed.

        Once more with the same arguments changes nothing; `ValueError` otherwise.
        """
        cls._registry.register(type, module_path, class_name)

    @classmethod
    def get_secondary_tier_cls(
        cls, tier_config: TierConfig | Mapping[str, Any]
    ) -> type[SecondaryTierManager]:
        """The class of the tier, or `ConfigError`."""
        tier = _parsed(tier_config)
        return cls._registry.resolve(tier.type, tier.module_path, tier.at)

    @classmethod
    def plan_secondary_tiers(cls, tier_configs: Iterable[TierConfig]) -> list[PlannedTier]:
        """Find and check all that can be known of these tiers without starting one.

        Raises one `ConfigError` with the problems of all of them.
        """
        planned: list[PlannedTier] = []
        refusals: list[ConfigError] = []
        for config in tier_configs:
            try:
                tier_cls = cls.get_secondary_tier_cls(config)
                _require_fitting_class(tier_cls, config)
                planned.append(PlannedTier(config, tier_cls, _keys_for(tier_cls, config)))
            except ConfigError as refused:
                refusals.append(refused)
        if len(refusals) == 1:
            raise refusals[0]  # as it is: its cause shows where an import failed
        if refusals:
            raise ConfigError(*(problem for refused in refusals for problem in refused.problems))
        return planned

    @classmethod
    def create_secondary_tier(
        cls,
        tier_config: TierConfig | Mapping[str, Any],
        primary_kv_view: memoryview,
        offloading_spec: OffloadingSpec,
    ) -> SecondaryTierManager:
        """The tier itself, started. Called while an engine starts, on the scheduler's side.

        `tier_config` is parsed, or an entry as the user writes it. `ConfigError`: the entry cannot
        work. For the rest see `PlannedTier.start`.
        """
        (planned,) = cls.plan_secondary_tiers([_parsed(tier_config)])
        return planned.start(primary_kv_view, offloading_spec)


def _parsed(tier_config: TierConfig | Mapping[str, Any]) -> TierConfig:
    if isinstance(tier_config, TierConfig):
        return tier_config
    return TierConfig.from_entry(tier_config)


def _own_parameters(tier_cls: type[SecondaryTierManager]) -> dict[str, inspect.Parameter]:
    """What the constructor takes by name, and maybe `**anything`; less what it always gets."""
    return {
        name: parameter
        for name, parameter in inspect.signature(tier_cls).parameters.items()
        if name not in _GIVEN_BY_THE_FACTORY and parameter.kind not in _NOT_BY_NAME
    }


def _require_fitting_class(tier_cls: type[SecondaryTierManager], config: TierConfig) -> None:
    """Refuse a class that cannot be called as tiers are."""
    parameters = inspect.signature(tier_cls).parameters
    old = parameters.get("vllm_config")
    if old is not None and ("offloading_spec" not in parameters or old.default is old.empty):
        raise _unfit_class(
            tier_cls,
            config,
            "a tier whose constructor takes offloading_spec; this one takes vllm_config",
            "Take offloading_spec instead; what the engine wants to pass on is in "
            "offloading_spec.config.engine_config, and vLLM's own configuration is "
            "offloading_spec.engine",
        )
    by_name = {name for name, parameter in parameters.items() if parameter.kind not in _NOT_BY_NAME}
    missing = [name for name in _GIVEN_BY_THE_FACTORY if name not in by_name]
    if missing and not any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
        raise _unfit_class(
            tier_cls,
            config,
            f"a tier whose constructor takes {', '.join(_GIVEN_BY_THE_FACTORY)} by name",
            f"Let {tier_cls.__qualname__} take {' and '.join(missing)}",
        )


def _keys_for(tier_cls: type[SecondaryTierManager], config: TierConfig) -> dict[str, Any]:
    """What the constructor gets: the tier's own keys, and those of every tier that it names.

    `ConfigError`, if there are others, or too few.
    """
    parameters = _own_parameters(tier_cls)
    shared = {name: getattr(config, name) for name in TIER_KEYS if name in parameters}
    keys = dict(config.options)
    keys |= {name: value for name, value in shared.items() if value is not None}
    reader = OptionReader(keys, config.at)
    for name, parameter in parameters.items():
        if parameter.kind is parameter.VAR_KEYWORD:
            for key in {str(key) for key in keys}.difference(_GIVEN_BY_THE_FACTORY):
                reader.optional(key, OPAQUE)
        elif parameter.default is parameter.empty:
            example = example_of(config.type, name)
            needed = f"The tier {describe(config.type)} needs this key: add it{example}"
            reader.required(name, _ANY_VALUE, needed)
        else:
            reader.optional(name, OPAQUE)
    for name in TIER_KEYS:
        reader.optional(name, OPAQUE)
    reader.refuse_unread(
        f"Remove it; the tier {describe(config.type)} does not know it",
        known_remedies=misplaced_keys(config.type),
    )
    reader.raise_problems()
    return keys


def _defect_of(tier: SecondaryTierManager) -> str | None:
    """What a tier lacks that has been made, in words that follow its name; None if nothing."""
    from kvtier.base import Locality, Medium

    if not all(hasattr(tier, name) for name in _SET_BY_THE_BASE):
        return (
            "is not complete: call super().__init__(offloading_spec, primary_kv_view, tier_type) "
            "in its constructor"
        )
    kinds: tuple[tuple[str, type[Medium] | type[Locality]], ...] = (
        ("medium", Medium),
        ("locality", Locality),
    )
    for name, kind in kinds:
        value = getattr(tier, name)
        if value is not None and not isinstance(value, kind):
            members = ", ".join(f"{kind.__name__}.{member.name}" for member in kind)
            return f"says {name} = {describe(value)}: let it say {members} or None"
    return None


def _unfit_class(
    tier_cls: type[SecondaryTierManager], config: TierConfig, allowed: str, remedy: str
) -> ConfigError:
    given = f"{describe(config.type)} ({tier_cls.__module__}.{tier_cls.__qualname__})"
    return ConfigError(Problem(f"{config.at}.type", given, allowed, remedy))


def _refusal(
    error: Exception, tier_cls: type[SecondaryTierManager], config: TierConfig
) -> ConfigError | TierStartError:
    """What to raise in place of what a tier's constructor raised."""
    if isinstance(error, ConfigError):
        own = {*_own_parameters(tier_cls), *config.options}
        return ConfigError(*(_placed(problem, own, config) for problem in error.problems))
    reason = without_secrets(str(error), config.options)
    if isinstance(error, ValueError):
        return ConfigError(_value_problem(reason, config))
    from kvtier.tiering.base import TierRefused

    at = config.at
    if isinstance(error, TierRefused):
        at += _key_of_the_path_in(reason, config)
    else:
        reason = f"{type(error).__name__}: {reason}. Mend that, or remove the tier"
    return TierStartError(f"{at}: the tier {describe(config.type)} could not start: {reason}")


def _key_of_the_path_in(reason: str, config: TierConfig) -> str:
    """Under which key the user has given the path that the reason begins with."""
    for key, value in config.options.items():
        if isinstance(value, str) and value.startswith("/") and reason.startswith(value):
            return f".{key}"
    return ""


def _placed(problem: Problem, own_keys: set[str], config: TierConfig) -> Problem:
    """The problem under its whole path. A tier knows its type, but not where its entry stands."""
    path = problem.key.removeprefix(f"{config.type}.")
    is_own = re.split(r"[.\[]", path)[0] in own_keys
    return replace(problem, key=f"{config.at}.{path}") if is_own else problem


def _value_problem(reason: str, config: TierConfig) -> Problem:
    remedy = reason.rstrip(".") or "Its constructor gives no reason: look there"
    allowed = f"what the tier {describe(config.type)} accepts"
    named = [key for key in config.options if re.search(rf"\b{re.escape(str(key))}\b", reason)]
    if len(named) != 1:
        entry = {"type": config.type, **config.options}
        return Problem(config.at, describe(entry), allowed, remedy)
    (key,) = named
    return Problem(f"{config.at}.{key}", describe(config.options[key], key), allowed, remedy)


def _cause_to_show(error: Exception, config: TierConfig) -> Exception | None:
    """None where its message, printed above ours, would say the same again or show a secret."""
    texts = [str(link) for link in _chain(error)]
    secret = any(without_secrets(text, config.options) != text for text in texts)
    return None if secret or isinstance(error, ConfigError) else error


def _chain(error: BaseException) -> Iterator[BaseException]:
    """The error and all that led to it."""
    links, seen = [error], set[int]()
    while links:
        link = links.pop()
        if id(link) not in seen:
            seen.add(id(link))
            yield link
            links += [other for other in (link.__cause__, link.__context__) if other is not None]


SecondaryTierFactory.register_secondary_tier(
    "example", "kvtier.tiering.example.manager", "ExampleSecondaryTierManager"
)
SecondaryTierFactory.register_secondary_tier(
    "disk", "kvtier.tiering.disk.manager", "DiskSecondaryTierManager"
)
SecondaryTierFactory.register_secondary_tier(
    "fs", "kvtier.tiering.fs.manager", "FsSecondaryTierManager"
)
