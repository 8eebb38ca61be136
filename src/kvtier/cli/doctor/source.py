"""Reads the configuration that an operator has: a script with a `vllm serve` command, the JSON of
its flag, or the keys of kvtier alone."""

from __future__ import annotations

import errno
import json
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from kvtier.config import ConfigError, load_user_config, parse_user_config

__all__ = ["GivenConfig", "WrongSource", "read_source"]

_FLAG = "--kv-transfer-config"
_EXTRA = "kv_connector_extra_config"
_MODULE = "vllm.entrypoints.openai.api_server"
_LARGEST = 1 << 20
_VARIABLE = re.compile(r"([A-Za-z_][A-Za-z0-9_]*)=(.*)", re.DOTALL)
_CONNECTORS = ("KVTierConnector", "OffloadingConnector")
_WHAT_TO_GIVE = (
    "give a script from `kvtier vllm-config`, or the JSON of --kv-transfer-config or of "
    "kv_connector_extra_config, as a file or a text"
)


class WrongSource(Exception):
    """There is no configuration of kvtier there. The message says what to give."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GivenConfig:
    """A configuration, not checked yet."""

    name: str
    """Where it comes from, for people."""
    extra_config: Mapping[str, Any] = field(repr=False)
    """The keys of kvtier. They may hold passwords."""
    is_plain: bool = False
    """True: it uses vLLM's own connector."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """Variables that the script sets for vLLM."""
    uses_vllm_command: bool = True
    """False for a script that starts the server's module with Python."""
    options: Mapping[str, str] = field(default_factory=dict)
    """Further options of vLLM in the script, by name: `--model` and others with one value."""

    @property
    def model(self) -> str | None:
        return self.options.get("--model")

    @property
    def world_size(self) -> int:
        size = 1
        for names in (("--tensor-parallel-size", "-tp"), ("--pipeline-parallel-size", "-pp")):
            value = next((self.options[name] for name in names if name in self.options), "1")
            size *= int(value) if value.isdecimal() and int(value) else 1
        return size


def read_source(text: str) -> GivenConfig:
    """Read the configuration in a file of this name, or in this text itself. Raises `WrongSource`
    and `ConfigError`."""
    if text.lstrip().startswith("{"):
        return _of_object("the given text", parse_user_config(text, "json", source="CONFIG"))
    path = Path(text)
    if path.suffix == ".toml" and path.is_file():
        return _of_object(text, load_user_config(path))
    content = _content_of(path)
    if content.lstrip().startswith("{"):
        return _of_object(text, parse_user_config(content, "json", source=text))
    return _of_script(text, content)


def _content_of(path: Path) -> str:
    try:
        with path.open("rb") as file:
            content = file.read(_LARGEST + 1)
        if len(content) > _LARGEST:
            raise WrongSource(f"{path} has more than {_LARGEST} bytes: {_WHAT_TO_GIVE}")
        return content.decode()
    except UnicodeDecodeError:
        raise WrongSource(f"{path} is not text: {_WHAT_TO_GIVE}") from None
    except OSError as error:
        if error.errno in (errno.ENOENT, errno.ENAMETOOLONG):
            raise WrongSource(f"there is no {str(path)[:200]}: {_WHAT_TO_GIVE}") from None
        raise WrongSource(f"{path}: {error.strerror}: {_WHAT_TO_GIVE}") from None


def _of_object(
    name: str,
    given: Mapping[str, Any],
    environment: Mapping[str, str] | None = None,
    options: Mapping[str, str] | None = None,
) -> GivenConfig:
    """`given`: vLLM's object with the connector, or the keys of kvtier."""
    extra: object = given
    is_plain = False
    if _EXTRA in given or "kv_connector" in given:
        connector = given.get("kv_connector")
        if connector not in _CONNECTORS:
            raise WrongSource(
                f"{name}: kv_connector is {json.dumps(connector)[:60]}, so vLLM does not use "
                f"kvtier: set one of {', '.join(_CONNECTORS)}; `kvtier vllm-config` writes it"
            )
        extra = given.get(_EXTRA, {})
        is_plain = connector == "OffloadingConnector"
    if not isinstance(extra, Mapping):
        raise WrongSource(f"{name}: {_EXTRA} is no object: {_WHAT_TO_GIVE}")
    return GivenConfig(
        name=name,
        extra_config=extra,
        is_plain=is_plain,
        environment=environment or {},
        options=options or {},
    )


# --- scripts -----------------------------------------------------------------------------------


def _of_script(name: str, content: str) -> GivenConfig:
    try:
        words = shlex.split(content, comments=True)
    except ValueError as error:
        raise WrongSource(
            f"{name} is neither JSON nor a script that a shell could read ({error}): "
            f"{_WHAT_TO_GIVE}"
        ) from None
    flags = [value for option, value in _options_in(words) if option == _FLAG]
    if len(flags) != 1:
        raise WrongSource(
            f"{name} has {len(flags) or 'no'} {_FLAG}, and one is needed: {_WHAT_TO_GIVE}"
        )
    variables = {match[1]: match[2] for word in words if (match := _VARIABLE.fullmatch(word))}
    options = dict(_options_in(words))
    if "serve" in words[:-1] and not (model := words[words.index("serve") + 1]).startswith("-"):
        options["--model"] = model
    try:
        given = parse_user_config(flags[0], "json", source=f"{name}: {_FLAG}")
    except ConfigError as error:
        raise WrongSource(f"{error}") from None
    given_config = _of_object(name, given, variables, options)
    return replace(given_config, uses_vllm_command=_MODULE not in words)


def _options_in(words: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Options with a value, written as one word or as two."""
    for position, word in enumerate(words):
        if not word.startswith("-"):
            continue
        option, equals, value = word.partition("=")
        if equals:
            yield option, value
        elif position + 1 < len(words):
            yield option, words[position + 1]
