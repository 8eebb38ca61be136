"""The user's keys from a file or a text, in JSON or TOML."""

from __future__ import annotations

import json
import os
from typing import Any, Literal, NoReturn

from kvtier.config.errors import ConfigError, Problem

Syntax = Literal["json", "toml"]

_SYNTAX_OF_SUFFIX: dict[str, Syntax] = {".json": "json", ".toml": "toml"}


def load_user_config(path: str | os.PathLike[str]) -> dict[str, Any]:
    """The content of a `.json` or `.toml` file, to be given as `extra_config`."""
    name = os.fspath(path)
    suffix = os.path.splitext(name)[1]
    syntax = _SYNTAX_OF_SUFFIX.get(suffix.lower())
    if syntax is None:
        _refuse(
            name, f"the suffix {suffix!r}", "a .json or .toml file", "Convert it to JSON or TOML"
        )
    try:
        # "utf-8-sig", because some editors put a mark before the text.
        with open(name, encoding="utf-8-sig") as file:
            text = file.read()
    except (OSError, UnicodeDecodeError) as error:
        _refuse(name, str(error), "a readable UTF-8 file", "Check the path and its permissions")
    return parse_user_config(text, syntax, source=name)


def parse_user_config(text: str, syntax: Syntax, source: str = "extra_config") -> dict[str, Any]:
    """The keys written in `text`. `source` is what messages call it."""
    try:
        content = _parse_json(text) if syntax == "json" else _parse_toml(text)
    except (ValueError, RecursionError) as error:
        _refuse(
            source, f"a text that does not parse ({error})", f"valid {syntax.upper()}", "Mend it"
        )
    if not isinstance(content, dict):
        _refuse(
            source,
            f"a {type(content).__name__} at the top",
            "an object with the user's keys",
            'Write {"cpu_bytes_to_use": "8GiB"}, for one',
        )
    return content


def _parse_json(text: str) -> Any:
    return json.loads(text, object_pairs_hook=_without_duplicates, parse_constant=_no_constant)


def _parse_toml(text: str) -> dict[str, Any]:
    import tomllib

    return tomllib.loads(text)


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    # Python's JSON would silently keep the last one; TOML refuses by itself.
    content: dict[str, Any] = {}
    for key, value in pairs:
        if key in content:
            raise ValueError(f"the key {key!r} stands there twice")
        content[key] = value
    return content


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


def _refuse(key: str, given: str, allowed: str, remedy: str) -> NoReturn:
    raise ConfigError(Problem(key, given, allowed, remedy))
