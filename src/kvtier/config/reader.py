"""Reads a mapping that a user wrote, key by key, and notes all that is wrong with it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TypeVar, cast

from kvtier.config.errors import ConfigError, Problem
from kvtier.config.kinds import Kind, Unfit
from kvtier.config.redaction import describe

T = TypeVar("T")


class OptionReader:
    """One mapping being read. The keys asked for are the keys known.

    A value that does not fit is noted in `problems` and read as None, whatever the declared
    type: call `raise_problems` before using what was read.
    """

    def __init__(self, options: Mapping[str, object], at: str = "") -> None:
        self.problems: list[Problem] = []
        self._options = options
        self._prefix = f"{at}." if at else ""
        self._asked: set[str] = set()

    def has(self, key: str) -> bool:
        """Whether the user gave `key` a value. A JSON null is none."""
        return self._options.get(key) is not None

    def required(self, key: str, kind: Kind[T], remedy: str = "This key is required: add it") -> T:
        """The value of a key that must be there. `remedy`: what to do where it is not."""
        self._asked.add(key)
        if not self.has(key):
            typo = nearest(key, map(str, self.unread()))
            self.refuse(key, kind.allowed, f'Is "{typo}" meant to be it?' if typo else remedy)
            return cast(T, None)
        return self._parse(key, kind)

    def optional(self, key: str, kind: Kind[T]) -> T | None:
        """The value of a key that may be missing or null."""
        self._asked.add(key)
        return self._parse(key, kind) if self.has(key) else None

    def get(self, key: str, kind: Kind[T], default: T) -> T:
        """The value of a key that may be missing, but not null."""
        self._asked.add(key)
        if key not in self._options:
            return default
        if self.has(key):
            return self._parse(key, kind)
        self.refuse(key, kind.allowed, f"Leave it out to have the default, {describe(default)}")
        return default

    def refuse(self, key: str, allowed: str, remedy: str) -> None:
        """Note that what stands at `key`, or its absence, cannot be."""
        given = describe(self._options[key], key) if key in self._options else "nothing"
        self.problems.append(Problem(self._prefix + key, given, allowed, remedy))

    def unread(self) -> dict[str, object]:
        """What is left after all keys asked for."""
        return {key: value for key, value in self._options.items() if key not in self._asked}

    def refuse_unread(
        self,
        remedy: str,
        elsewhere: Iterable[str] = (),
        where: str = "elsewhere",
        known_remedies: Mapping[str, str] | None = None,
    ) -> None:
        """Note every key that nobody asked for, with the known key nearest to it.

        `elsewhere`: keys that are known, but not here; `where` says in which place they are.
        `known_remedies`: of keys that are not known, but expected, whatever they resemble.
        """
        known = sorted(self._asked)
        other = tuple(elsewhere)
        for key, value in self.unread().items():
            meant = nearest(str(key), [*known, *other])
            self.problems.append(
                Problem(
                    f"{self._prefix}{key}",
                    # A misspelled "password" must not show what it holds either.
                    describe(value, f"{meant} {key}"),
                    f"only the keys {', '.join(known)}",
                    (known_remedies or {}).get(str(key))
                    or _remedy(str(key), meant, where if meant in other else "")
                    or remedy,
                )
            )

    def raise_problems(self) -> None:
        """Raise `ConfigError` with everything noted, if anything was."""
        if self.problems:
            raise ConfigError(*self.problems)

    def _parse(self, key: str, kind: Kind[T]) -> T:
        try:
            return kind.parse(self._options[key])
        except Unfit as unfit:
            self.refuse(key, kind.allowed, str(unfit))
            return cast(T, None)


def nearest(name: str, known: Iterable[str]) -> str | None:
    """The known name that `name` was probably meant to be, if there is one. Case does not count."""
    # Here, because most configurations have no typo in them.
    from difflib import get_close_matches

    spelled = {other.lower(): other for other in known}
    # A little stricter than by default: "max_blocks" is not meant to be "block_size".
    matches = get_close_matches(name.lower(), spelled, n=1, cutoff=0.65)
    if not matches:
        # A part of the name may be all that is remembered: "tiers".
        matches = [other for other in spelled if name.lower() in other.split("_")]
    return spelled[matches[0]] if len(matches) == 1 else None


def _remedy(key: str, meant: str | None, where: str) -> str | None:
    """What to do about a key that is not known here, if it is known what was meant."""
    if meant is None:
        return None
    if where:
        return f"It belongs {where}" if key == meant else f'Did you mean "{meant}" {where}?'
    return f'Did you mean "{meant}"?'
