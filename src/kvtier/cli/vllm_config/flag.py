"""Turns options of the command line into `kv_connector_extra_config`, and that into vLLM's flag."""

from __future__ import annotations

import json
import math
import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

__all__ = [
    "TierOption",
    "RequestedConfig",
    "WrongOption",
    "command_of",
    "flags_of",
    "shutdown_seconds",
    "transfer_config",
]

_OPTION_OF_KEY = {
    "cpu_bytes_to_use": "--cpu",
    "cache_namespace": "--namespace",
    "eviction_policy": "--policy",
    "blocks_per_chunk": "--blocks-per-chunk",
    "secondary_tiers": "--disk, --fs, --obj, --valkey, --mooncake or --tier",
    "spec_name": "--plain",
    "spec_module_path": "--plain",
}
"""Keys that have an option of their own. `--set` refuses them."""
_PLACE_KEYS = {
    "--disk": ("disk", "path"),
    "--fs": ("fs", "root_dir"),
    "--obj": ("obj", "url"),
    "--valkey": ("valkey", "url"),
    "--mooncake": ("mooncake", "master"),
}
_MODULE = "kvtier.integrations.vllm"
_SECONDS_FOR_VLLM = 5
"""Seconds that vLLM itself needs to end an engine, in addition to what the tiers need."""


class WrongOption(Exception):
    """An option cannot be used. The message says what was given, and what to write."""

    def __init__(self, option: str, message: str) -> None:
        super().__init__(message)
        self.option = option


@dataclass(frozen=True, slots=True)
class TierOption:
    """One option that adds a tier."""

    option: str
    """`--tier`, or one of `_PLACE_KEYS`."""
    text: str

    def entry(self) -> dict[str, Any]:
        """Return the entry for `secondary_tiers`, with unchecked keys. Raises `WrongOption`."""
        if self.option not in _PLACE_KEYS:
            return self._object()
        kind, key = _PLACE_KEYS[self.option]
        if kind == "mooncake":
            return {"type": kind} | self._master_and_share()
        # A Valkey server has a limit of its own, and the colon in its URL is that of its port.
        place, size = (self.text, "") if kind == "valkey" else self._place_and_size()
        return {"type": kind, key: place} | ({"max_bytes": size} if size else {})

    def _master_and_share(self) -> dict[str, Any]:
        """Split HOST:PORT:SIZE, where the size may be left out."""
        if self.text.rpartition(":")[2].isdecimal():
            return {"master": self.text}
        master, size = self._place_and_size()
        return {"master": master} | ({"segment_bytes": size} if size else {})

    def _place_and_size(self) -> tuple[str, str]:
        """Split at the last colon, because a path may contain colons."""
        from kvtier.config.errors import describe
        from kvtier.config.sizes import SizeError, parse_size

        path, colon, size = self.text.rpartition(":")
        if not colon or size.startswith("//"):  # the only colon of a URL
            return self.text, ""
        if not size:
            return path, ""
        try:
            parse_size(size)
        except SizeError as error:
            raise WrongOption(
                self.option,
                f'{describe(self.text)}: the size follows the last colon, and "{size}" is no size. '
                f"{error}. If the colon is part of the path, add another colon and the size after "
                "the path",
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
class RequestedConfig:
    """The options of the command line that become configuration keys."""

    cpu: str
    tiers: Sequence[TierOption] = ()
    """In lookup order."""
    namespace: str | None = None
    policy: str | None = None
    blocks_per_chunk: int | None = None
    settings: Sequence[str] = ()
    """Values of `--set`, each as key=value."""

    def extra_config(self) -> dict[str, Any]:
        """Return the user's keys, not checked yet. Raises `WrongOption`."""
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
        """Return the option that set a key. `key`: for example `secondary_tiers[0].path`."""
        for position, tier in enumerate(self.tiers):
            if key.startswith(f"secondary_tiers[{position}]"):
                return tier.option
        return _OPTION_OF_KEY.get(key, "--set")


def _settings(pairs: Iterable[str]) -> dict[str, Any]:
    settings: dict[str, Any] = {}
    for pair in pairs:
        key, equals, text = pair.partition("=")
        if not equals or not key:
            raise WrongOption("--set", f'"{pair}": write key=value, such as store_threshold=2')
        if key in _OPTION_OF_KEY:
            raise WrongOption("--set", f'"{pair}": use {_OPTION_OF_KEY[key]} for {key}')
        if key in settings:
            raise WrongOption("--set", f'"{pair}": {key} is given twice; leave one out')
        settings[key] = _value(text)
    return settings


def _value(text: str) -> Any:
    """Parse a JSON text. Any other text is returned as it is, so that it needs no quotes."""
    try:
        return json.loads(text, parse_constant=_no_constant)
    except (ValueError, RecursionError):
        return text


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


def _require_text(keys: dict[str, Any]) -> None:
    """Raise `WrongOption` for a number that JSON cannot express, such as NaN, and for a text that
    is not valid UTF-8: vLLM takes the configuration as JSON."""
    try:
        json.dumps(keys, ensure_ascii=False, allow_nan=False).encode()
    except UnicodeEncodeError as error:
        start = max(0, error.start - 20)
        near = str(error.object)[start : error.end].encode("utf-8", "backslashreplace").decode()
        raise WrongOption(
            "an option",
            f"the text at ...{near} is not UTF-8, which vLLM needs: give the file or "
            "directory another name",
        ) from None
    except ValueError as error:
        raise WrongOption("an option", f"a number that JSON cannot express ({error})") from None


def transfer_config(extra_config: Mapping[str, Any], *, is_plain: bool) -> dict[str, Any]:
    """Return vLLM's KV transfer config. `is_plain`: use vLLM's own connector."""
    if is_plain:
        spec = {"spec_name": "KVTierOffloadingSpec", "spec_module_path": _MODULE}
        return {
            "kv_connector": "OffloadingConnector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": spec | dict(extra_config),
        }
    return {
        "kv_connector": "KVTierConnector",
        "kv_connector_module_path": _MODULE,
        "kv_role": "kv_both",
        "kv_connector_extra_config": dict(extra_config),
    }


def shutdown_seconds(shutdown_timeout_ms: float) -> int:
    """Return the value for vLLM's `--shutdown-timeout` that lets tiers finish.

    vLLM's default is 0: it kills the engine's process at once, and the blocks of its last requests
    are not stored.
    """
    return math.ceil(shutdown_timeout_ms / 1000) + _SECONDS_FOR_VLLM


def flags_of(config: Mapping[str, Any], shutdown_timeout_s: int | None) -> str:
    """Return vLLM's flags, quoted for a POSIX shell, in ASCII so that no locale changes them.

    `shutdown_timeout_s`: None if no tier outlives the process.
    """
    flag = f"--kv-transfer-config {shlex.quote(json.dumps(config))}"
    return flag if shutdown_timeout_s is None else f"--shutdown-timeout {shutdown_timeout_s} {flag}"


def command_of(model: str, flags: str, environment: Mapping[str, str], python: str | None) -> str:
    """Return the command that serves a model. `python`: the interpreter that runs vLLM's module if
    the command `vllm` does not work; otherwise None."""
    variables = [f"{name}={shlex.quote(value)}" for name, value in environment.items()]
    if python is None:
        start = f"vllm serve {shlex.quote(model)}"
    else:
        module = "vllm.entrypoints.openai.api_server"
        start = f"{shlex.quote(python)} -m {module} --model {shlex.quote(model)}"
    return " ".join([*variables, start, flags])
