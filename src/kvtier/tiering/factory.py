"""Makes the tiers that the entries of `secondary_tiers` describe."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from traceback import clear_frames
from typing import TYPE_CHECKING, Any, ClassVar

from kvtier.config import TIER_KEYS, USER_KEYS, ConfigError, OptionReader, Problem, TierConfig
from kvtier.config.errors import describe, without_secrets
from kvtier.config.fields import OPAQUE, REQUIRED, Key, Kind, declared_keys
from kvtier.factory import ClassRegistry

if TYPE_CHECKING:
    from kvtier.base import OffloadingSpec
    from kvtier.config import TierOptions
    from kvtier.tiering.base import SecondaryTierManager

__all__ = ["PlannedTier", "SecondaryTierFactory", "TierStartError"]

_GIVEN_BY_THE_FACTORY = ("offloading_spec", "primary_kv_view", "tier_type")
_NOT_BY_NAME = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.VAR_POSITIONAL)
_SET_BY_THE_BASE = ("tier_type", "rows", "fingerprint")
_ANY_VALUE: Kind[Any] = Kind("a value", OPAQUE.parse)


class TierStartError(RuntimeError):
    """A tier could not start, for a reason outside its configuration."""


@dataclass(frozen=True, slots=True)
class PlannedTier:
    """An entry of `secondary_tiers` whose class was found and whose keys fit its constructor. Not
    started yet."""

    config: TierConfig
    tier_cls: type[SecondaryTierManager]
    keys: Mapping[str, Any] = field(repr=False)
    """The tier's own keyword arguments. They may hold passwords."""

    def parse_options(self) -> TierOptions | None:
        """Parse the keys that the tier declares, as its constructor does. None: it declares none.

        Raises `ConfigError`, with the full paths of the keys.
        """
        options_cls = _options_cls_of(self.tier_cls)
        if options_cls is None:
            return None
        declared = declared_keys(options_cls)
        given = {name: value for name, value in self.keys.items() if name in declared}
        try:
            return options_cls.parse(given)
        except ConfigError as refused:
            raise _refusal(refused, self.tier_cls, self.config) from None

    def start(
        self, primary_kv_view: memoryview, offloading_spec: OffloadingSpec
    ) -> SecondaryTierManager:
        """Start the tier. Called at engine start, on the scheduler's side.

        Raises `ConfigError` if the tier refuses a value, and `TierStartError` if it fails otherwise
        or breaks the contract. Neither error keeps a reference to the view.
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
            # The constructor's frames refer to a half-made tier, and through it to the view.
            for link in _chain(error):
                clear_frames(link.__traceback__)
            raise _refusal(error, self.tier_cls, config) from _cause_to_show(error, config)
        defect = _defect_of(tier)
        if defect is not None:
            # Imported here: a configuration is checked without numpy, which this loads.
            from kvtier.tiering.tier_calls import close_tiers

            close_tiers([tier], offloading_spec.config.options.shutdown_timeout_ms / 1000)
            del tier  # the error's frames would keep it, and through it the view
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
        """Register `class_name` of `module_path` as `type`. See `ClassRegistry.register`."""
        cls._registry.register(type, module_path, class_name)

    @classmethod
    def known_types(cls) -> list[str]:
        """The types that can be used without `module_path`: built in, registered or installed."""
        return cls._registry.known_names()

    @classmethod
    def get_secondary_tier_cls(
        cls, tier_config: TierConfig | Mapping[str, Any]
    ) -> type[SecondaryTierManager]:
        """Return the class of the tier, or raise `ConfigError`."""
        tier = _parsed(tier_config)
        return cls._registry.resolve(tier.type, tier.module_path, tier.at)

    @classmethod
    def plan_secondary_tiers(cls, tier_configs: Iterable[TierConfig]) -> list[PlannedTier]:
        """Find the classes of these tiers and check the names of their keys. Starts no tier.

        Raises one `ConfigError` with the problems of all tiers.
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
            raise refusals[0]  # unchanged: its cause shows where an import failed
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
        """Plan and start one tier. Called at engine start, on the scheduler's side.

        `tier_config`: a parsed entry, or one as the user writes it. Raises `ConfigError` for an
        entry that cannot work; otherwise as `PlannedTier.start`.
        """
        (planned,) = cls.plan_secondary_tiers([_parsed(tier_config)])
        return planned.start(primary_kv_view, offloading_spec)


def _parsed(tier_config: TierConfig | Mapping[str, Any]) -> TierConfig:
    if isinstance(tier_config, TierConfig):
        return tier_config
    return TierConfig.from_entry(tier_config)


def _options_cls_of(tier_cls: type[SecondaryTierManager]) -> type[TierOptions] | None:
    """Return the class that declares the tier's keys. None if there is none, or if the constructor
    takes no `**keys`: a subclass that lists its own parameters does not take its base's keys."""
    parameters = inspect.signature(tier_cls).parameters.values()
    takes_keys = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters)
    return tier_cls.options_cls if takes_keys else None


def _own_keys(tier_cls: type[SecondaryTierManager]) -> tuple[dict[str, Key], bool]:
    """Return the keys that the constructor takes, and whether it takes any other key as well."""
    options_cls = _options_cls_of(tier_cls)
    keys: dict[str, Key] = {}
    takes_any = False
    for name, parameter in inspect.signature(tier_cls).parameters.items():
        if name in _GIVEN_BY_THE_FACTORY or parameter.kind in _NOT_BY_NAME:
            continue
        if parameter.kind is not parameter.VAR_KEYWORD:
            is_required = parameter.default is parameter.empty
            keys[name] = Key(_ANY_VALUE, default=REQUIRED if is_required else parameter.default)
        elif options_cls is not None:
            keys |= declared_keys(options_cls)
        else:
            takes_any = True
    return keys, takes_any


def _require_fitting_class(tier_cls: type[SecondaryTierManager], config: TierConfig) -> None:
    """Raise `ConfigError` for a class whose constructor does not take a tier's arguments."""
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
    """Return the constructor's keyword arguments: the tier's own keys, and each key common to all
    tiers (`TIER_KEYS`) for which the constructor has a parameter.

    Raises `ConfigError` for unknown and missing keys. The tier checks the values when it starts.
    """
    own, takes_any = _own_keys(tier_cls)
    shared = {name: getattr(config, name) for name in TIER_KEYS if name in own}
    if "enable_kv_events" in shared:  # its default depends on the tier, which does not exist yet
        shared["enable_kv_events"] = config.enable_kv_events is True
    keys = dict(config.options)
    keys |= {name: value for name, value in shared.items() if value is not None}
    reader = OptionReader(keys, config.at)
    others = {str(key) for key in keys}.difference(_GIVEN_BY_THE_FACTORY) if takes_any else ()
    for name in (*TIER_KEYS, *others):
        reader.optional(name, OPAQUE)
    for name, key in own.items():
        if key.is_required:
            example = f', such as "{name}": {key.example}' if key.example else ""
            needed = f"The tier {describe(config.type)} needs this key: add it{example}"
            reader.required(name, _ANY_VALUE, needed)
        else:
            reader.optional(name, OPAQUE)
    remedies = dict.fromkeys(USER_KEYS, "Move it out of secondary_tiers, beside cpu_bytes_to_use")
    options_cls = _options_cls_of(tier_cls)
    if options_cls is not None:
        remedies |= options_cls.not_here
    reader.refuse_unread(
        f"Remove it; the tier {describe(config.type)} has no such key", known_remedies=remedies
    )
    reader.raise_problems()
    return keys


def _defect_of(tier: SecondaryTierManager) -> str | None:
    """Return what is wrong with a new tier, in words that follow its name; None if nothing."""
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
            return f"has {name} = {describe(value)}: set {members} or None"
    return None


def _unfit_class(
    tier_cls: type[SecondaryTierManager], config: TierConfig, allowed: str, remedy: str
) -> ConfigError:
    given = f"{describe(config.type)} ({tier_cls.__module__}.{tier_cls.__qualname__})"
    return ConfigError(Problem(f"{config.at}.type", given, allowed, remedy))


def _refusal(
    error: Exception, tier_cls: type[SecondaryTierManager], config: TierConfig
) -> ConfigError | TierStartError:
    """Return the error to raise in place of the one that a tier's constructor raised."""
    if isinstance(error, ConfigError):
        own = {*_own_keys(tier_cls)[0], *config.options}
        return ConfigError(*(_placed(problem, own, config) for problem in error.problems))
    reason = without_secrets(str(error), config.options)
    if isinstance(error, ValueError):
        return ConfigError(_value_problem(reason, config))
    from kvtier.tiering.base import TierRefused

    at = config.at
    if isinstance(error, TierRefused):
        at += _key_of_the_path_in(reason, config)
    else:
        reason = f"{type(error).__name__}: {reason}. Fix that, or remove the tier"
    return TierStartError(f"{at}: the tier {describe(config.type)} could not start: {reason}")


def _key_of_the_path_in(reason: str, config: TierConfig) -> str:
    """If the reason begins with a path that is the value of a key, or is below it, return "." and
    that key; otherwise return ""."""
    for key, value in config.options.items():
        if isinstance(value, str) and value.startswith("/") and reason.startswith(value):
            rest = reason[len(value) :]
            if not rest or value.endswith("/") or rest[0] in "/: ":  # not /mnt/kv2 for /mnt/kv
                return f".{key}"
    return ""


def _placed(problem: Problem, own_keys: set[str], config: TierConfig) -> Problem:
    """Return the problem with the full path of its key, which the tier does not know."""
    path = problem.key.removeprefix(f"{config.type}.")
    is_own = re.split(r"[.\[]", path)[0] in own_keys
    return replace(problem, key=f"{config.at}.{path}") if is_own else problem


def _value_problem(reason: str, config: TierConfig) -> Problem:
    remedy = reason.rstrip(".") or "Its constructor gives no reason: see its source"
    allowed = f"what the tier {describe(config.type)} accepts"
    named = [key for key in config.options if re.search(rf"\b{re.escape(str(key))}\b", reason)]
    if len(named) != 1:
        entry = {"type": config.type, **config.options}
        return Problem(config.at, describe(entry), allowed, remedy)
    (key,) = named
    return Problem(f"{config.at}.{key}", describe(config.options[key], key), allowed, remedy)


def _cause_to_show(error: Exception, config: TierConfig) -> Exception | None:
    """Return the error to chain; None if its text would repeat ours or show a secret."""
    texts = [str(link) for link in _chain(error)]
    secret = any(without_secrets(text, config.options) != text for text in texts)
    return None if secret or isinstance(error, ConfigError) else error


def _chain(error: BaseException) -> Iterator[BaseException]:
    """Yield the error and all errors that led to it."""
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
SecondaryTierFactory.register_secondary_tier(
    "obj", "kvtier.tiering.obj.manager", "ObjSecondaryTierManager"
)
SecondaryTierFactory.register_secondary_tier(
    "valkey", "kvtier.tiering.valkey.manager", "ValkeySecondaryTierManager"
)
SecondaryTierFactory.register_secondary_tier(
    "mooncake", "kvtier.tiering.mooncake.manager", "MooncakeSecondaryTierManager"
)
