"""Reads the configuration that a user wrote, from a file, a text or a mapping.

`OptionReader` reads a mapping key by key and collects every problem in it.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, NoReturn, Self, TypeVar, cast

from kvtier.config.errors import ConfigError, Problem, describe
from kvtier.config.fields import Key, Kind, Unfit, declared_keys

T = TypeVar("T")
Syntax = Literal["json", "toml"]

_SYNTAX_OF_SUFFIX: dict[str, Syntax] = {".json": "json", ".toml": "toml"}
_REQUIRED = "This key is required: add it"


class OptionReader:
    """Reads one mapping. Every key that the caller reads counts as known; `refuse_unread` refuses
    all others.

    A value that does not fit is recorded in `problems` and read as None, even if the declared type
    excludes None. So call `raise_problems` before you use the values.
    """

    def __init__(self, options: Mapping[str, object], at: str = "") -> None:
        self.problems: list[Problem] = []
        self._options = options
        self._prefix = f"{at}." if at else ""
        self._asked: set[str] = set()

    def has(self, key: str) -> bool:
        """True if the user gave `key` a value. A JSON null does not count."""
        return self._options.get(key) is not None

    def required(self, key: str, kind: Kind[T], remedy: str = _REQUIRED) -> T:
        """Read a key that must be present. `remedy`: what to do if it is missing."""
        self._asked.add(key)
        if not self.has(key):
            typo = nearest(key, map(str, self.unread()))
            self.refuse(key, kind.allowed, f'Is "{typo}" a misspelling of it?' if typo else remedy)
            return cast(T, None)
        return self._parse(key, kind)

    def optional(self, key: str, kind: Kind[T]) -> T | None:
        """Read a key that may be missing or null."""
        self._asked.add(key)
        return self._parse(key, kind) if self.has(key) else None

    def get(self, key: str, kind: Kind[T], default: T) -> T:
        """Read a key that may be missing, but must not be null."""
        self._asked.add(key)
        if key not in self._options:
            return default
        if self.has(key):
            return self._parse(key, kind)
        self.refuse(key, kind.allowed, f"Leave it out to have the default, {describe(default)}")
        return default

    def declared(self, name: str, key: Key) -> Any:
        """Read a key according to its declaration."""
        if key.is_required:
            return self.required(name, key.kind, key.remedy_if_missing or _REQUIRED)
        if key.default is None:
            return self.optional(name, key.kind)
        if key.null_is_default:
            value = self.optional(name, key.kind)
            return key.default if value is None else value
        return self.get(name, key.kind, key.default)

    def refuse(self, key: str, allowed: str, remedy: str) -> None:
        """Record that the value of `key`, or its absence, is refused."""
        given = describe(self._options[key], key) if key in self._options else "nothing"
        self.problems.append(Problem(self._prefix + key, given, allowed, remedy))

    def unread(self) -> dict[str, object]:
        """Return the keys that have not been read, with their values."""
        return {key: value for key, value in self._options.items() if key not in self._asked}

    def refuse_unread(
        self,
        remedy: str,
        elsewhere: Iterable[str] = (),
        where: str = "elsewhere",
        known_remedies: Mapping[str, str] | None = None,
    ) -> None:
        """Record a problem for every key that has not been read, and suggest the nearest known key.

        `remedy`: what to do if no known key is near. `elsewhere`: keys that belong to another
        place, which `where` names. `known_remedies`: what to do about keys that users often put
        here by mistake.
        """
        known = sorted(self._asked)
        other = tuple(elsewhere)
        for key, value in self.unread().items():
            meant = nearest(str(key), [*known, *other])
            self.problems.append(
                Problem(
                    f"{self._prefix}{key}",
                    # The value of a misspelled "password" must not be shown either.
                    describe(value, f"{meant} {key}"),
                    f"only the keys {', '.join(known)}",
                    (known_remedies or {}).get(str(key))
                    or _remedy(str(key), meant, where if meant in other else "")
                    or remedy,
                )
            )

    def raise_problems(self) -> None:
        """Raise `ConfigError` with all problems recorded so far, if there are any."""
        if self.problems:
            raise ConfigError(*self.problems)

    def _parse(self, key: str, kind: Kind[T]) -> T:
        try:
            return kind.parse(self._options[key])
        except Unfit as unfit:
            self.refuse(key, kind.allowed, str(unfit))
            return cast(T, None)


@dataclass(frozen=True, slots=True)
class TierOptions:
    """Base of the frozen dataclass in which a type of tier declares its own keys.

    A tier with such a class names it in `SecondaryTierManager.options_cls`. The tier's constructor
    takes `**keys` and passes them to `parse`.
    """

    given: Mapping[str, object] = field(
        default_factory=dict, kw_only=True, repr=False, compare=False
    )
    """The keys as the user wrote them, for messages. Not in `repr`: they may hold passwords."""

    not_here: ClassVar[Mapping[str, str]] = {}
    """Keys that users set here by mistake, mostly those of other tiers, each with the remedy."""

    @classmethod
    def parse(cls, given: Mapping[str, object]) -> Self:
        """Check and convert the keys of an entry, or raise `ConfigError` with all problems.

        Does not check this machine, because a configuration may be checked on another one.
        """
        reader = OptionReader(given)
        values = {name: reader.declared(name, key) for name, key in declared_keys(cls).items()}
        reader.refuse_unread("Remove it", known_remedies=cls.not_here)
        reader.raise_problems()
        options = cls(**values, given=dict(given))
        options.require_consistent()
        return options

    def require_consistent(self) -> None:
        """Raise `ConfigError` for keys that contradict each other. Called by `parse`."""

    def require_place(self) -> None:
        """Raise `ConfigError` unless this machine has the directory that the tier needs."""

    def as_given(self, name: str) -> str:
        """Return the value of a key for a message, as the user wrote it."""
        return describe(self.given.get(name, getattr(self, name)), name)


def nearest(name: str, known: Iterable[str]) -> str | None:
    """Return the known name that the user probably meant, or None. Ignores case."""
    # Imported here, because most configurations have no typo in them.
    from difflib import get_close_matches

    spelled = {other.lower(): other for other in known}
    # The cutoff is stricter than the default, so that "max_blocks" does not match "block_size".
    matches = get_close_matches(name.lower(), spelled, n=1, cutoff=0.65)
    if not matches:
        # The user may remember only a part of the name, such as "tiers".
        matches = [other for other in spelled if name.lower() in other.split("_")]
    return spelled[matches[0]] if len(matches) == 1 else None


def _remedy(key: str, meant: str | None, where: str) -> str | None:
    """Return what to do about an unknown key, or None if no known key resembles it."""
    if meant is None:
        return None
    if where:
        return f"It belongs {where}" if key == meant else f'Did you mean "{meant}" {where}?'
    return f'Did you mean "{meant}"?'


# --- files and texts ---------------------------------------------------------------------------


def load_user_config(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Return the content of a `.json` or `.toml` file, for use as `extra_config`."""
    name = os.fspath(path)
    suffix = os.path.splitext(name)[1]
    syntax = _SYNTAX_OF_SUFFIX.get(suffix.lower())
    if syntax is None:
        _refuse(
            name, f"the suffix {suffix!r}", "a .json or .toml file", "Convert it to JSON or TOML"
        )
    try:
        # "utf-8-sig", because some editors write a byte-order mark before the text.
        with open(name, encoding="utf-8-sig") as file:
            text = file.read()
    except (OSError, UnicodeDecodeError) as error:
        _refuse(name, str(error), "a readable UTF-8 file", "Check the path and its permissions")
    return parse_user_config(text, syntax, source=name)


def parse_user_config(text: str, syntax: Syntax, source: str = "extra_config") -> dict[str, Any]:
    """Return the keys written in `text`. `source`: its name in messages."""
    try:
        content = _parse_json(text) if syntax == "json" else _parse_toml(text)
    except (ValueError, RecursionError) as error:
        _refuse(
            source, f"a text that does not parse ({error})", f"valid {syntax.upper()}", "Correct it"
        )
    if not isinstance(content, dict):
        _refuse(
            source,
            f"a {type(content).__name__} at the top",
            "an object with the user's keys",
            'Write an object such as {"cpu_bytes_to_use": "8GiB"}',
        )
    return content


def _parse_json(text: str) -> Any:
    return json.loads(text, object_pairs_hook=_without_duplicates, parse_constant=_no_constant)


def _parse_toml(text: str) -> dict[str, Any]:
    import tomllib

    return tomllib.loads(text)


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    # Python's JSON parser silently keeps the last of two equal keys; its TOML parser refuses them.
    content: dict[str, Any] = {}
    for key, value in pairs:
        if key in content:
            raise ValueError(f"the key {key!r} appears twice")
        content[key] = value
    return content


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


def _refuse(key: str, given: str, allowed: str, remedy: str) -> NoReturn:
    raise ConfigError(Problem(key, given, allowed, remedy))
