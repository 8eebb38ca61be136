"""What the user asks for on the command line, as the keys of `kv_connector_extra_config`."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

__all__ = ["TierWish", "Wishes", "WrongOption"]

_KEYS_OF_OPTIONS = {
    "cpu_bytes_to_use": "--cpu",
    "cache_namespace": "--namespace",
    "eviction_policy": "--policy",
    "blocks_per_chunk": "--blocks-per-chunk",
    "secondary_tiers": "--disk, --fs or --tier",
    "spec_name": "--plain",
    "spec_module_path": "--plain",
}
"""Keys that `--set` does not set."""
_PATH_KEYS = {"--disk": ("disk", "path"), "--fs": ("fs", "root_dir")}


class WrongOption(Exception):
    """An option that says nothing usable. Says what was given, and what to write."""

    def __init__(self, option: str, message: str) -> None:
        super().__init__(message)
        self.option = option


@dataclass(frozen=True, slots=True)
class TierWish:
    """A tier as one option gives it."""

    option: str
    """`--disk`, `--fs` or `--tier`."""
    text: str

    def entry(self) -> dict[str, Any]:
        """For `secondary_tiers`. Its keys are not checked. Raises `WrongOption`."""
        if self.option not in _PATH_KEYS:
            return self._object()
        kind, key = _PATH_KEYS[self.option]
        path, size = self._path_and_size()
        return {"type": kind, key: path} | ({"max_bytes": size} if size else {})

    def _path_and_size(self) -> tuple[str, str]:
        """The last colon separates them, so that a path may have others."""
        from kvtier.config.sizes import SizeError, parse_size

        path, colon, size = self.text.rpartition(":")
        if not colon:
            return self.text, ""
        if not size:
            return path, ""
        try:
            parse_size(size)
        except SizeError as error:
            raise WrongOption(
                self.option,
                f'"{self.text}": what follows the last colon is the size, and "{size}" is none. '
                f"{error}. If the colon is part of the path, put another one, and the size, "
                "behind it",
            ) from None
        return path, size

    def _object(self) -> dict[str, Any]:
        from kvtier.config import ConfigError, parse_user_config

        try:
            return parse_user_config(self.text, "json", source="the entry")
        except ConfigError as error:
            raise WrongOption(
                self.option,
                f"{error} A tier is an object such as "
                '{"type": "disk", "path": "/mnt/nvme/kv.slab", "max_bytes": "200GiB"}',
            ) from None


@dataclass(frozen=True, slots=True, kw_only=True)
class Wishes:
    """Everything that was asked for."""

    cpu: str
    tiers: Sequence[TierWish] = ()
    """In lookup order."""
    namespace: str | None = None
    policy: str | None = None
    blocks_per_chunk: int | None = None
    settings: Sequence[str] = ()
    """Of `--set`, each with its "="."""

    def extra_config(self) -> dict[str, Any]:
        """The user's keys, not checked yet. Raises `WrongOption`."""
        given: dict[str, Any] = {
            "cpu_bytes_to_use": self.cpu,
            "cache_namespace": self.namespace,
            "eviction_policy": self.policy,
            "blocks_per_chunk": self.blocks_per_chunk,
        }
        keys = {key: value for key, value in given.items() if value is not None}
        keys |= _settings(self.settings)
        if self.tiers:
            keys["secondary_tiers"] = [tier.entry() for tier in self.tiers]
        _require_text(keys)
        return keys

    def option_of(self, key: str) -> str:
        """The option by which a key of `extra_config`, or a part of it, was given."""
        for position, tier in enumerate(self.tiers):
            if key.startswith(f"secondary_tiers[{position}]"):
                return tier.option
        return _KEYS_OF_OPTIONS.get(key, "--set")


def _settings(pairs: Iterable[str]) -> dict[str, Any]:
    settings: dict[str, Any] = {}
    for pair in pairs:
        key, equals, text = pair.partition("=")
        if not equals or not key:
            raise WrongOption("--set", f'"{pair}": write key=value, such as store_threshold=2')
        if key in _KEYS_OF_OPTIONS:
            raise WrongOption("--set", f'"{pair}": use {_KEYS_OF_OPTIONS[key]} for {key}')
        if key in settings:
            raise WrongOption("--set", f'"{pair}": {key} is given twice; leave one out')
        settings[key] = _value(text)
    return settings


def _value(text: str) -> Any:
    """JSON, if it is; else the text itself, so that texts need no second pair of quotes."""
    try:
        return json.loads(text, parse_constant=_no_constant)
    except (ValueError, RecursionError):
        return text


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


def _require_text(keys: dict[str, Any]) -> None:
    """vLLM takes JSON, which is text: a path may be no text in any encoding."""
    try:
        json.dumps(keys, ensure_ascii=False, allow_nan=False).encode()
    except UnicodeEncodeError as error:
        start = max(0, error.start - 20)
        near = str(error.object)[start : error.end].encode("utf-8", "backslashreplace").decode()
        raise WrongOption(
            "an option",
            f"what stands at ...{near} is no UTF-8, and vLLM takes no other text: give the file or "
            "directory another name",
        ) from None
    except ValueError as error:
        raise WrongOption("an option", f"a number that JSON does not have ({error})") from None
