"""What a value may be: each kind checks a value from outside and turns it into a typed one."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Generic, TypeVar

from kvtier.config.errors import Problem
from kvtier.config.numbers import as_int
from kvtier.config.redaction import describe
from kvtier.config.sizes import SizeError, parse_size

T = TypeVar("T")
E = TypeVar("E", bound=StrEnum)

_ONE_DAY_MS = 86_400_000
"""No engine waits longer for anything; what is larger is a slip of the unit, or means "never"."""


class Unfit(Exception):
    """The value is not of the kind; carries the remedy, one sentence without full stop."""


@dataclass(frozen=True, slots=True)
class Kind(Generic[T]):
    """One kind of value."""

    allowed: str
    """What fits, in words that follow "allowed:"."""
    parse: Callable[[object], T]
    """The typed value, or `Unfit`."""

    def refusal(self, key: str, value: object) -> Problem | None:
        """Why `value` cannot stand at `key`, or None if it can."""
        try:
            self.parse(value)
        except Unfit as unfit:
            return Problem(key, describe(value, key), self.allowed, str(unfit))
        return None


def whole_number(minimum: int) -> Kind[int]:
    """An int of `minimum` or more, or numpy's. True is no number, and neither is "8"."""

    def parse(value: object) -> int:
        number = as_int(value)
        if number is None:
            raise Unfit(_whole_number_remedy(value, minimum))
        if number < minimum:
            raise Unfit(f"Write {minimum} or more")
        return number

    return Kind(f"a whole number, {minimum} or more", parse)


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
    # `import a.py` would be legal; whoever writes it means the file.
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
    """`value` as a float, or None if it is no number. True is none, and neither is "8"."""
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
