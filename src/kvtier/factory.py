"""Finds the class that a name in the configuration refers to."""

from __future__ import annotations

import importlib
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Generic, TypeVar

from kvtier.config.errors import ConfigError, Problem, describe
from kvtier.config.fields import CLASS_NAME, MODULE_PATH, REQUIRED_TEXT
from kvtier.config.options import CPU_SPEC, TIERING_SPEC
from kvtier.config.reader import nearest

if TYPE_CHECKING:
    from importlib.metadata import EntryPoints

    from kvtier.base import OffloadingSpec
    from kvtier.config import OffloadingConfig, OffloadingOptions

logger = logging.getLogger(__name__)

T = TypeVar("T")

_MAX_NAMED = 5
"""Largest number of classes that the error about a missing class lists."""


@dataclass(frozen=True, slots=True)
class _Source:
    """Where a class was found, and the keys that named it."""

    module_path: str
    class_name: str
    origin: str
    """Where the class comes from, worded to follow "the tier X is" in a message."""
    name: str
    name_key: str
    module_path_key: str | None
    """The key that gave the module; None if the name alone did."""


class ClassRegistry(Generic[T]):
    """Resolves names to classes of one kind. Imports a module only when its class is needed.

    A name is looked up first among the registered names, then among the entry points of installed
    packages, and last as a class in the module that the configuration names. So neither an
    installed package nor a module path changes the meaning of a registered name.
    """

    def __init__(
        self,
        kind: str,
        load_base: Callable[[], type[T]],
        entry_point_group: str,
        name_key: str,
        module_path_key: str,
    ) -> None:
        self._kind = kind
        self._load_base = load_base
        self._entry_point_group = entry_point_group
        self._name_key = name_key
        self._module_path_key = module_path_key
        self._registered: dict[str, tuple[str, str]] = {}
        self._names_compared: set[str] = set()

    def register(self, name: str, module_path: str, class_name: str) -> None:
        """Register `class_name` of `module_path` as `name`. The module is imported when first used.

        Registering the same class again changes nothing: engines load their plug-ins more than
        once. Raises `ValueError` if the name is taken by another class or an argument is malformed.
        """
        for what, kind, given in (
            (f"{self._kind}'s name", REQUIRED_TEXT, name),
            ("module_path", MODULE_PATH, module_path),
            ("class_name", CLASS_NAME, class_name),
        ):
            problem = kind.refusal(what, given)
            if problem is not None:
                raise ValueError(str(problem))
        if self._registered.get(name, (module_path, class_name)) != (module_path, class_name):
            raise ValueError(
                f"{self._kind} {name!r} is already registered, as "
                f"{'.'.join(self._registered[name])}: register {class_name} under another name"
            )
        self._registered[name] = (module_path, class_name)

    def resolve(self, name: str, module_path: str | None = None, at: str = "") -> type[T]:
        """Return the class that `name` refers to, or raise `ConfigError`. Called at engine start.

        `at`: the entry of the configuration that gives `name` and `module_path`, such as
        `secondary_tiers[1]`.
        """
        source = self._find(name, module_path, f"{at}." if at else "")
        if module_path is not None and source.module_path_key is None:
            logger.warning(
                "%s = %s has no effect: %s %r is %s.",
                f"{at}.{self._module_path_key}" if at else self._module_path_key,
                describe(module_path),
                self._kind,
                name,
                source.origin,
            )
        return self._checked(_load(source), source)

    def known_names(self) -> list[str]:
        """Registered names in the order of registration, then the names of entry points, sorted."""
        return list(dict.fromkeys((*self._registered, *sorted(self._entry_points().names))))

    def _find(self, name: str, module_path: str | None, prefix: str) -> _Source:
        name_key, module_path_key = prefix + self._name_key, prefix + self._module_path_key
        if name in self._registered:
            self._warn_of_shadowed_entry_points(name)
            found, class_name = self._registered[name]
            origin = f"registered as {found}.{class_name}"
            return _Source(found, class_name, origin, name, name_key, None)
        installed = self._entry_points()
        claims = sorted({point.value for point in installed.select(name=name)})
        if len(claims) > 1:
            raise ConfigError(
                Problem(
                    name_key,
                    describe(name),
                    f"a name that only one installed package uses, not {' and '.join(claims)}",
                    f"Uninstall all but one of the packages with this {self._kind}",
                )
            )
        if claims:
            (value,) = claims
            # An entry point may end in "[extras]", which are not part of the class's name.
            found, _, class_name = value.partition("[")[0].strip().partition(":")
            origin = f"the installed entry point {value!r} of group {self._entry_point_group}"
            return _Source(found, class_name, origin, name, name_key, None)
        if module_path is not None:
            origin = f"to be found in {module_path}"
            return _Source(module_path, name, origin, name, name_key, module_path_key)
        known = sorted({*self._registered, *installed.names})
        meant = nearest(name, known)
        raise ConfigError(
            Problem(
                name_key,
                describe(name),
                f"a known {self._kind} ({', '.join(known)}), "
                f"or a class's name together with {module_path_key}",
                f'Did you mean "{meant}"?'
                if meant
                else f"Choose a known one, or set {module_path_key} to the class's module",
            )
        )

    def _warn_of_shadowed_entry_points(self, name: str) -> None:
        # Checked once per name, because reading the installed entry points takes milliseconds.
        if name in self._names_compared:
            return
        self._names_compared.add(name)
        for point in self._entry_points().select(name=name):
            logger.warning(
                "The entry point %r of group %s has no effect: %s %r is registered already. "
                "Give the entry point another name.",
                point.value,
                self._entry_point_group,
                self._kind,
                name,
            )

    def _entry_points(self) -> EntryPoints:
        # Imported here, because it takes longer than all imports at the top together.
        from importlib.metadata import entry_points

        return entry_points(group=self._entry_point_group)

    def _checked(self, found: object, source: _Source) -> type[T]:
        base = self._load_base()
        base_name = f"{base.__module__}.{base.__qualname__}"
        if not isinstance(found, type) or not issubclass(found, base):
            raise ConfigError(
                Problem(
                    source.name_key,
                    f"{describe(source.name)} ({source.origin})",
                    f"the name of a subclass of {base_name}",
                    _why_no_class(found, source, base),
                )
            )
        missing: frozenset[str] = getattr(found, "__abstractmethods__", frozenset())
        if missing:
            raise ConfigError(
                Problem(
                    source.name_key,
                    f"{describe(source.name)} ({source.origin})",
                    f"a class with every method of {base_name}",
                    f"Implement {', '.join(sorted(missing))} in {found.__qualname__}",
                )
            )
        return found


def _load(source: _Source) -> object:
    try:
        # Both calls may import: a module may load its classes on first access.
        return getattr(importlib.import_module(source.module_path), source.class_name, None)
    except Exception as error:
        key, given = (
            (source.module_path_key, describe(source.module_path))
            if source.module_path_key
            else (source.name_key, f"{describe(source.name)} ({source.origin})")
        )
        raise ConfigError(
            Problem(key, given, "a module that can be imported", _why_no_module(error, source))
        ) from error


def _why_no_module(error: Exception, source: _Source) -> str:
    missing = error.name if isinstance(error, ModuleNotFoundError) else None
    # True if the module itself or a parent package is missing, rather than a module it imports.
    if missing and f"{source.module_path}.".startswith(f"{missing}."):
        return (
            f"There is no module {missing!r} here: install its package in the engine's "
            "environment, or add its folder to PYTHONPATH"
        )
    if missing:
        return (
            f"{source.module_path} needs the module {missing!r}, which is not here: install its "
            "package in the engine's environment, or fix the import"
        )
    return f"Importing {source.module_path} fails with {type(error).__name__} ({error}): fix that"


def _why_no_class(found: object, source: _Source, base: type[object]) -> str:
    if isinstance(found, type):
        return f"Derive {found.__qualname__} from {base.__qualname__}"
    if found is not None:
        return f"{source.module_path}.{source.class_name} is not a class: give the name of a class"
    fitting = _fitting_classes(source, base)
    if not source.class_name:
        example = fitting[0] if fitting else "MyClass"
        return f"Write the entry point as '{source.module_path}:{example}'"
    there = f"There is no {source.class_name!r} in {source.module_path}"
    if not fitting:
        return f"{there}: define it"
    meant = nearest(source.class_name, fitting)
    if meant and source.module_path_key:
        return f'{there}. Did you mean "{meant}"?'
    named = [meant] if meant else fitting[:_MAX_NAMED]
    more = "" if meant or len(fitting) <= _MAX_NAMED else ", and others"
    return f"{there}; it has {', '.join(named)}{more}"


def _fitting_classes(source: _Source, base: type[object]) -> list[str]:
    """Return the names of the module's subclasses of `base`, its own before imported ones."""
    module = importlib.import_module(source.module_path)
    fitting = {
        name: value
        for name, value in vars(module).items()
        if isinstance(value, type) and issubclass(value, base) and value is not base
    }
    return sorted(fitting, key=lambda name: fitting[name].__module__ != source.module_path)


def _load_spec_base() -> type[OffloadingSpec]:
    from kvtier.base import OffloadingSpec

    return OffloadingSpec


class OffloadingSpecFactory:
    """Makes the spec that `spec_name` and `spec_module_path` name.

    Further specs come from entry points of the group `kvtier.specs`.
    """

    _registry: ClassVar[ClassRegistry[OffloadingSpec]] = ClassRegistry(
        kind="spec",
        load_base=_load_spec_base,
        entry_point_group="kvtier.specs",
        name_key="spec_name",
        module_path_key="spec_module_path",
    )

    @classmethod
    def register_spec(cls, name: str, module_path: str, class_name: str) -> None:
        """Register `class_name` of `module_path` as `name`. See `ClassRegistry.register`."""
        cls._registry.register(name, module_path, class_name)

    @classmethod
    def get_spec_cls(cls, options: OffloadingOptions) -> type[OffloadingSpec]:
        """Return the class of the spec, or raise `ConfigError`."""
        return cls._registry.resolve(options.spec_name, options.spec_module_path)

    @classmethod
    def create_spec(cls, config: OffloadingConfig) -> OffloadingSpec:
        """Make the spec. Called once on the scheduler side and once in every worker."""
        return cls.get_spec_cls(config.options)(config)


OffloadingSpecFactory.register_spec(CPU_SPEC, "kvtier.cpu.spec", "CPUOffloadingSpec")
OffloadingSpecFactory.register_spec(TIERING_SPEC, "kvtier.tiering.spec", "TieringOffloadingSpec")
