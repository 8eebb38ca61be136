"""The declaration of a configuration key, and the kinds of values that a key may have.

A key is declared once, as a field of a frozen dataclass:

    @dataclass(frozen=True)
    class ShelfOptions(TierOptions):
        path: str = key(TEXT, "The shelf's directory.", example='"/mnt/shelf"')
        boards: int = key(whole_number(1), "Boards of the shelf.", default=3)

`kvtier.config.reader` parses a mapping according to such a class. The pages under docs/ list the
same keys; `tests/config/test_documentation.py` compares them with the declarations.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any, Generic, TypeVar

from kvtier.config.errors import Problem, describe
from kvtier.config.sizes import SizeError, as_int, parse_size

T = TypeVar("T")
E = TypeVar("E", bound=StrEnum)

REQUIRED: Any = object()
"""Marks a key that has no default, so that the user must set it."""

_ONE_DAY_MS = 86_400_000
"""Longest timeout, in ms. A larger number probably has the wrong unit, or is meant as "never"."""


class Unfit(Exception):
    """A value does not fit its kind. The message is the remedy, without a full stop."""


@dataclass(frozen=True, slots=True)
class Kind(Generic[T]):
    """One kind of value."""

    allowed: str
    """The values that fit, worded to follow "allowed:" in a message."""
    parse: Callable[[object], T]
    """Returns the typed value, or raises `Unfit`."""

    def refusal(self, key: str, value: object) -> Problem | None:
        """Return why `key` cannot have `value`, or None if it can."""
        try:
            self.parse(value)
        except Unfit as unfit:
            return Problem(key, describe(value, key), self.allowed, str(unfit))
        return None


@dataclass(frozen=True, slots=True)
class Key:
    """The declaration of one key."""

    kind: Kind[Any]
    help: str = ""
    """What the key sets: one sentence, as the documentation shows it."""
    default: Any = REQUIRED
    """The parsed value to use if the user leaves the key out."""
    null_is_default: bool = False
    """True if a JSON null means the default. Has no effect if the default is None: a null then
    always means the default."""
    example: str = ""
    """A value as the user writes it in JSON, for the message about a missing key."""
    remedy_if_missing: str = ""

    @property
    def is_required(self) -> bool:
        return self.default is REQUIRED


def key(
    kind: Kind[Any],
    help: str,  # noqa: A002 - what argparse calls it, too
    *,
    default: Any = REQUIRED,
    null_is_default: bool = False,
    example: str = "",
    remedy_if_missing: str = "",
    in_repr: bool = True,
) -> Any:
    """Declare a dataclass field as a key. See `Key` for the arguments.

    `in_repr=False` keeps a value that may hold a password out of `repr`, and so out of logs.
    """
    declared = Key(kind, help, default, null_is_default, example, remedy_if_missing)
    if default is REQUIRED:
        return dataclasses.field(repr=in_repr, metadata={"key": declared})
    return dataclasses.field(default=default, repr=in_repr, metadata={"key": declared})


def declared_keys(options: type[Any]) -> dict[str, Key]:
    """Return the keys that a dataclass declares, by name and in order."""
    return {
        field.name: field.metadata["key"]
        for field in dataclasses.fields(options)
        if "key" in field.metadata
    }


def whole_number(minimum: int) -> Kind[int]:
    """An int or a numpy integer of at least `minimum`. True and "8" are refused."""

    def parse(value: object) -> int:
        number = as_int(value)
        if number is None:
            raise Unfit(_whole_number_remedy(value, minimum))
        if number < minimum:
            raise Unfit(f"Write {minimum} or more")
        return number

    return Kind(f"a whole number, {minimum} or more", parse)


def whole_number_up_to(maximum: int, advice: str = "") -> Kind[int]:
    """An int from 1 to `maximum`. `advice`: text to append to the remedy for larger numbers."""

    def parse(value: object) -> int:
        number = whole_number(1).parse(value)
        if number > maximum:
            raise Unfit(f"Write at most {maximum}{advice}")
        return number

    return Kind(f"a whole number from 1 to {maximum}", parse)


def number_between(lowest: float, highest: float, allowed: str) -> Kind[float]:
    """A number within both bounds. `allowed` states the bounds in words, with the unit."""

    def parse(value: object) -> float:
        number = _number(value)
        if number is None or not lowest <= number <= highest:
            raise Unfit(f"Write {allowed}, without quotes")
        return number

    return Kind(allowed, parse)


def absolute_path(allowed: str, remedy: str) -> Kind[Path]:
    """An absolute path, as a text or a `Path`. `remedy`: what to write instead of a value that is
    not a path; for a relative path the remedy is fixed."""

    def parse(value: object) -> Path:
        text = str(value) if isinstance(value, Path) else value
        if not isinstance(text, str) or not text.strip() or "\0" in text:
            raise Unfit(remedy)
        path = Path(text)
        if not path.is_absolute():
            raise Unfit("Write the whole path, from /: engines start in different directories")
        return path

    return Kind(allowed, parse)


def one_of(choices: type[E]) -> Kind[E]:
    """One value of a string enum, spelled exactly."""

    def parse(value: object) -> E:
        for choice in choices:
            if value == choice.value:
                return choice
        meant = [c for c in choices if isinstance(value, str) and c.lower() == value.lower()]
        raise Unfit("Write " + " or ".join(f'"{choice}"' for choice in meant or choices))

    return Kind(" or ".join(f'"{choice}"' for choice in choices), parse)


def _boolean(value: object) -> bool:
    if isinstance(value, bool):
        return value
    if isinstance(value, str) and value.lower() in ("true", "false"):
        raise Unfit(f"Write {value.lower()} without quotes")
    raise Unfit("Write true or false")


def _text(value: object) -> str:
    if isinstance(value, str) and not value.strip():
        raise Unfit("Write at least one letter, or leave it out")
    return _required_text(value)


def _required_text(value: object) -> str:
    if not isinstance(value, str):
        raise Unfit("Write it in quotes")
    if not value.strip():
        raise Unfit("Write at least one letter")
    if value != value.strip():
        raise Unfit("Remove the white space around it")
    return value


def _module_path(value: object) -> str:
    path = _text(value)
    # `import a.py` would be legal, but the user means the file.
    if not _is_dotted_name(path) or path.endswith(".py"):
        guess = path.removesuffix(".py").replace("/", ".").replace("-", "_").strip(".")
        example = guess if _is_dotted_name(guess) else "my_package.my_module"
        raise Unfit(f'Write it as in an import statement: "{example}"')
    return path


def _class_name(value: object) -> str:
    if not isinstance(value, str) or not value.isidentifier():
        raise Unfit('Write the class\'s name alone, as in "MyClass"')
    return value


def _size(value: object) -> int:
    try:
        return parse_size(value)
    except SizeError as error:
        raise Unfit(str(error)) from None


def _size_or_zero(value: object) -> int:
    try:
        return parse_size(value, may_be_zero=True)
    except SizeError as error:
        raise Unfit(str(error)) from None


def _milliseconds(value: object) -> float:
    number = _number(value)
    if number is None:
        raise Unfit("Write a number of milliseconds without quotes or unit, such as 500")
    if number > _ONE_DAY_MS:
        raise Unfit(f"Write at most {_ONE_DAY_MS}, which is one day, or leave it out")
    if not number > 0:
        raise Unfit("Write a number of milliseconds above 0, or leave it out")
    return number


def _share(value: object) -> float:
    number = _number(value)
    if number is None:
        raise Unfit("Write a number without quotes or percent sign, such as 0.25")
    if not 0 < number <= 1:
        raise Unfit("Write a part of 1, such as 0.25 for a quarter, or leave it out")
    return number


def _rate(value: object) -> float:
    number = _number(value)
    if number is None:
        raise Unfit("Write a number without quotes or unit, such as 20000")
    if not 0 <= number < math.inf:
        raise Unfit("Write 0 or more, or leave it out")
    return number


BOOLEAN = Kind("true or false", _boolean)
TEXT = Kind("a text without white space around it", _text)
REQUIRED_TEXT = Kind(TEXT.allowed, _required_text)
MODULE_PATH = Kind('an importable module such as "my_package.my_module"', _module_path)
CLASS_NAME = Kind("the name of a class", _class_name)
SIZE = Kind('a size above 0, in bytes or as a text such as "8GiB" or "1.5GB"', _size)
SIZE_OR_ZERO = Kind(f"0, or {SIZE.allowed}", _size_or_zero)
MILLISECONDS = Kind(
    f"a number of milliseconds above 0 and at most {_ONE_DAY_MS}, one day", _milliseconds
)
SHARE = Kind("a number above 0 and at most 1", _share)
RATE = Kind("a number, 0 or more", _rate)
OPAQUE: Kind[Any] = Kind("anything", lambda value: value)


def _is_dotted_name(path: str) -> bool:
    return all(part.isidentifier() for part in path.split("."))


def _number(value: object) -> float | None:
    """Return `value` as a float, or None if it is not a number. True and "8" are not numbers."""
    number = value if isinstance(value, float) else as_int(value)
    if number is None:
        return None
    try:
        return float(number)
    except OverflowError:
        return math.inf if number > 0 else -math.inf


def _whole_number_remedy(value: object, minimum: int) -> str:
    if isinstance(value, str) and value.strip().isdecimal():
        return f"Write {value.strip()} without quotes"
    if isinstance(value, float) and value.is_integer():
        return f"Write {int(value)} without a decimal point"
    return f"Write a whole number, such as {max(minimum, 1)}"
