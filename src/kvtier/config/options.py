"""The keys that a user may set. Each is declared once, and parsed according to its declaration.

`OffloadingOptions` declares the keys at the top of the user's object, `TierConfig` those that every
entry of `secondary_tiers` may have. A tier declares its own keys in its own package.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from copy import deepcopy
from dataclasses import dataclass, field, replace
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvtier.config.errors import ConfigError, Problem, describe
from kvtier.config.fields import (
    BOOLEAN,
    MILLISECONDS,
    MODULE_PATH,
    OPAQUE,
    RATE,
    REQUIRED_TEXT,
    SHARE,
    SIZE,
    TEXT,
    Kind,
    absolute_path,
    declared_keys,
    key,
    one_of,
    whole_number,
)
from kvtier.config.reader import OptionReader
from kvtier.config.tenants import NO_RULES, TenantRules, read_tenants, tier_label

if TYPE_CHECKING:
    from kvtier.base import Locality

logger = logging.getLogger(__name__)

CPU_SPEC = "CPUOffloadingSpec"
TIERING_SPEC = "TieringOffloadingSpec"

VLLM_ONLY_KEYS = {
    "canonical_layout": "kvtier stores blocks in the layout of the engine's own cache",
    "backpressure": "kvtier bounds a slow tier by its timeouts and its max_pinned_share",
}
"""Keys of vLLM 0.32's own offloading that have no effect in kvtier, each with the reason."""

VLLM_ONLY_TIER_KEYS = {"backpressure": VLLM_ONLY_KEYS["backpressure"]}
"""The same, inside an entry of `secondary_tiers`."""


class ResetScope(StrEnum):
    """The tiers that `reset_cache` affects."""

    ALL = "all"
    """Earlier blocks become unreachable in every tier."""
    PRIMARY = "primary"
    """Only the primary tier is emptied."""


class StatusSocketChoice(StrEnum):
    """Where an engine answers questions, if not at a path that the user gives."""

    AUTO = "auto"
    """In the directory in which commands look for engines."""
    OFF = "off"
    """Nowhere."""


class WritePolicyName(StrEnum):
    """When blocks go from the primary tier to a tier below."""

    THROUGH = "through"
    """As soon as they are stored in the primary tier."""
    SECOND_USE = "second_use"
    """Once a second request has used them."""
    ON_EVICT = "on_evict"
    """When they are about to leave the primary tier."""
    ADAPTIVE = "adaptive"
    """Like ON_EVICT, but only blocks that requests will probably read from the tier."""


def _parse_locality(value: object) -> Locality:
    # Imported here: `kvtier.base` loads numpy, which reading a configuration does not need.
    from kvtier.base import Locality

    return one_of(Locality).parse(value)


def _parse_socket(value: object) -> Path | StatusSocketChoice:
    for choice in StatusSocketChoice:
        if value == choice.value:
            return choice
    return _SOCKET_PATH.parse(value)


def _parse_threshold(value: object) -> int:
    # vLLM uses 0 for "no threshold", which means the same as 1.
    return whole_number(0).parse(value) or 1


_SAMPLE_ENTRY = '{"type": "example"}'
_TIER_TYPE = Kind(
    'the name of a tier, such as "example", or of a class in module_path', REQUIRED_TEXT.parse
)
_TIER_LIST = Kind(f"a list of objects such as [{_SAMPLE_ENTRY}]", OPAQUE.parse)
_TENANTS = Kind("an object with one entry for each tenant", OPAQUE.parse)
_LOCALITY = Kind('"LOCAL" or "REMOTE"', _parse_locality)
_TRACE_FILE = absolute_path(
    "the path of a file", 'Write the path in quotes, such as "/var/tmp/kvtier-trace.jsonl"'
)
_SOCKET_PATH = absolute_path(
    "the path of a socket", 'Write "auto", "off", or a path such as "/run/kvtier/chat.sock"'
)
_STATUS_SOCKET = Kind('"auto", "off", or the path of a socket, from /', _parse_socket)
_THRESHOLD = Kind(whole_number(0).allowed, _parse_threshold)


@dataclass(frozen=True, slots=True)
class TierConfig:
    """One entry of `secondary_tiers`: the keys that all tiers share, and the tier's own keys."""

    type: str = key(
        _TIER_TYPE,
        "A built-in tier, an installed one, or a class's name inside `module_path`.",
        remedy_if_missing=f"Write {_SAMPLE_ENTRY}, or the name of an installed tier",
    )
    position: int = 0
    """Index in lookup order, from 0."""
    module_path: str | None = key(
        MODULE_PATH, "Module that holds the tier class named by `type`.", default=None
    )
    enable_kv_events: bool | None = key(
        BOOLEAN, "Publish events for blocks that appear in this tier or leave it.", default=None
    )
    locality: Locality | None = key(
        _LOCALITY,
        "Whether the tier's storage belongs to this machine or is reached over a network.",
        default=None,
    )
    # For this key and the next three, None means the default in
    # `kvtier.tiering.health.TierSettings`.
    lookup_timeout_ms: float | None = key(
        MILLISECONDS,
        "How long a request waits for the tier to find out whether it has a block.",
        default=None,
    )
    load_timeout_ms: float | None = key(
        MILLISECONDS, "How long a request waits for blocks that the tier is loading.", default=None
    )
    store_timeout_ms: float | None = key(
        MILLISECONDS, "How long the tier may take to write blocks.", default=None
    )
    max_pinned_share: float | None = key(
        SHARE,
        "The part of host memory's slots that stores to this tier may pin at once.",
        default=None,
    )
    write: WritePolicyName = key(
        one_of(WritePolicyName),
        "Which blocks go to this tier, and when.",
        default=WritePolicyName.THROUGH,
    )
    write_budget: int | None = key(
        SIZE, "Bytes that kvtier may write to this tier in a day, on average.", default=None
    )
    options: Mapping[str, Any] = field(default_factory=dict, repr=False)
    """The tier's own keys, unparsed. Not in `repr`: they may hold passwords."""

    @property
    def at(self) -> str:
        """The path of the entry, for messages about its keys."""
        return f"secondary_tiers[{self.position}]"

    @classmethod
    def from_entry(cls, entry: Mapping[str, Any], position: int = 0) -> TierConfig:
        """Parse one entry as a user writes it, or raise `ConfigError` with all its problems."""
        problems: list[Problem] = []
        tier = _read_tier(problems, entry, position)
        if problems:
            raise ConfigError(*problems)
        return tier


@dataclass(frozen=True, slots=True)
class OffloadingOptions:
    """The user's settings. The names of the fields are the user's keys."""

    cpu_bytes_to_use: int = key(
        SIZE, "Host memory for the primary tier, shared by all ranks of the engine."
    )
    spec_name: str = key(
        TEXT, "The class that builds the manager and the workers.", default=CPU_SPEC
    )
    spec_module_path: str | None = key(
        MODULE_PATH, "Module that holds the spec class named by `spec_name`.", default=None
    )
    block_size: int | None = key(whole_number(1), "Tokens of one offloaded block.", default=None)
    blocks_per_chunk: int | None = key(
        whole_number(1), "Device blocks of one offloaded block.", default=None
    )
    eviction_policy: str = key(TEXT, "Which block leaves the primary tier first.", default="lru")
    cache_policy_module_path: str | None = key(
        MODULE_PATH, "Module that holds the policy class named by `eviction_policy`.", default=None
    )
    store_threshold: int = key(
        _THRESHOLD, "Number of requests that must bring a block before it is stored.", default=1
    )
    max_tracker_size: int = key(
        whole_number(1),
        "Blocks whose requests are counted for `store_threshold`.",
        default=64_000,
    )
    offload_prompt_only: bool = key(
        BOOLEAN,
        "Offload the blocks of prompts only, not those of generated tokens.",
        default=True,
    )
    self_describing_kv_events: bool = key(
        BOOLEAN,
        "Give the events of offloaded blocks their tokens, parent and block size.",
        default=True,
    )
    name_tier_in_events: bool = key(
        BOOLEAN, "Name the tier in events, not only its medium and locality.", default=False
    )
    secondary_tiers: tuple[TierConfig, ...] = key(
        _TIER_LIST, "The tiers below host memory, in lookup order.", default=()
    )
    cache_namespace: str | None = key(TEXT, "Your own name for these weights.", default=None)
    seal_key_file: Path | None = key(
        absolute_path("the path of a file", 'Write the path in quotes, such as "/etc/kvtier.keys"'),
        "File of secret keys that sign every block in the tiers.",
        default=None,
    )
    tenants: TenantRules | None = key(
        _TENANTS,
        "What each tenant may have: its part of each tier, its tiers, and who finds its blocks.",
        default=None,
    )
    tenant_key_file: Path | None = key(
        absolute_path(
            "the path of a file", 'Write the path in quotes, such as "/etc/kvtier-tenants.keys"'
        ),
        "File of the secret keys that make the namespaces of private tenants.",
        default=None,
    )
    max_retained_share: float = key(
        SHARE,
        "The part of a tier that blocks with the hint `retain_s` may take together.",
        default=0.25,
    )
    reset_scope: ResetScope = key(
        one_of(ResetScope),
        "The tiers that a cache reset of the engine affects.",
        default=ResetScope.ALL,
    )
    prefill_tokens_per_s: float | None = key(
        RATE, "How many prompt tokens the engine computes in a second.", default=None
    )
    record_trace: Path | None = key(
        _TRACE_FILE,
        "A new file for the requests of this engine, as a trace that `kvtier replay` reads.",
        default=None,
    )
    record_trace_bytes: int = key(
        SIZE, "The most bytes of `record_trace`. Then the recording ends.", default=256 << 20
    )
    status_socket: Path | StatusSocketChoice = key(
        _STATUS_SOCKET,
        "The unix socket on which the engine answers `kvtier top`, `explain` and others.",
        default=StatusSocketChoice.AUTO,
    )
    shutdown_timeout_ms: float = key(
        MILLISECONDS,
        "How long all tiers together may take to finish their work when the engine ends.",
        default=10_000.0,
    )
    allow_unproven_models: bool = key(
        BOOLEAN,
        "Serve kinds of models that kvtier is not tested with.",
        default=False,
    )
    engine_config: Any = key(
        OPAQUE,
        "Anything that your engine passes on to its own spec or tiers.",
        default=None,
        in_repr=False,
    )

    @property
    def tenant_rules(self) -> TenantRules:
        """The rules of all tenants; those of "default" alone if the user has set none."""
        return self.tenants or NO_RULES

    @classmethod
    def from_extra_config(cls, extra_config: Mapping[str, Any]) -> OffloadingOptions:
        """Parse the user's keys, or raise `ConfigError` with every problem in them.

        Checks everything that does not depend on the engine; `OffloadingConfig` checks the rest.
        Later changes to `extra_config` do not change the result, except in `engine_config`.
        """
        _require_object(extra_config)
        reader = OptionReader(_without_vllm_only(extra_config, VLLM_ONLY_KEYS, at=""))
        tiers = _read_tiers(reader)
        keys = declared_keys(cls)
        del keys["secondary_tiers"], keys["tenants"]
        if tiers:
            keys["spec_name"] = replace(keys["spec_name"], default=TIERING_SPEC)
        values = {name: reader.declared(name, declared) for name, declared in keys.items()}
        options = cls(secondary_tiers=tiers, tenants=_read_tenants(reader, tiers), **values)
        _refuse_contradictions(reader, options)
        reader.refuse_unread(
            "Give the content of kv_connector_extra_config alone, not the object around it"
            if "kv_connector_extra_config" in extra_config
            else "Remove it; a tier's own key belongs in its entry of secondary_tiers, and what "
            "only your own spec reads belongs in engine_config",
            elsewhere=TIER_KEYS,
            where="in an entry of secondary_tiers",
        )
        reader.raise_problems()
        return options


USER_KEYS = tuple(declared_keys(OffloadingOptions))
"""Every key that a user may set at the top of the object."""

TIER_KEYS = tuple(declared_keys(TierConfig))
"""Every key that any entry of `secondary_tiers` may have, whatever its type."""


def read_secondary_tiers(extra_config: Mapping[str, Any]) -> tuple[TierConfig, ...]:
    """Return the tiers of a user's configuration, in lookup order, or raise `ConfigError`.

    All other keys are ignored. Used to define metrics, before the other keys are parsed.
    """
    _require_object(extra_config)
    reader = OptionReader(extra_config)
    tiers = _read_tiers(reader)
    reader.raise_problems()
    return tiers


def _require_object(extra_config: object) -> None:
    if not isinstance(extra_config, Mapping):
        raise ConfigError(
            Problem(
                "extra_config",
                describe(extra_config),
                "an object with the user's keys",
                'Write an object such as {"cpu_bytes_to_use": "8GiB"}',
            )
        )


def _read_tiers(reader: OptionReader) -> tuple[TierConfig, ...]:
    entries: object = reader.optional("secondary_tiers", _TIER_LIST)
    if entries is None:
        return ()
    if not isinstance(entries, (list, tuple)):
        reader.refuse(
            "secondary_tiers",
            _TIER_LIST.allowed,
            "Put the one tier in brackets" if isinstance(entries, Mapping) else "Write a list",
        )
        return ()
    return tuple(_read_tier(reader.problems, entry, place) for place, entry in enumerate(entries))


def _read_tenants(reader: OptionReader, tiers: tuple[TierConfig, ...]) -> TenantRules | None:
    given: object = reader.optional("tenants", _TENANTS)
    if given is None:
        return None
    return read_tenants(
        given,
        [(tier_label(tier.position, tier.type), tier.type) for tier in tiers],
        reader.problems,
    )


def _read_tier(problems: list[Problem], entry: object, position: int) -> TierConfig:
    at = f"secondary_tiers[{position}]"
    if not isinstance(entry, Mapping):
        named = isinstance(entry, str) and entry.isidentifier()
        meant = f'{{"type": "{entry}"}}' if named else _SAMPLE_ENTRY
        problems.append(Problem(at, describe(entry), 'an object with a "type"', f"Write {meant}"))
        return TierConfig(type="", position=position)
    reader = OptionReader(_without_vllm_only(entry, VLLM_ONLY_TIER_KEYS, at), at)
    values = {
        name: reader.declared(name, declared)
        for name, declared in declared_keys(TierConfig).items()
    }
    tier = TierConfig(position=position, options=deepcopy(reader.unread()), **values)
    problems.extend(reader.problems)
    return tier


def _without_vllm_only(
    given: Mapping[str, Any], vllm_only: Mapping[str, str], at: str
) -> dict[str, Any]:
    for name, reason in vllm_only.items():
        if name in given:
            logger.warning(
                "%s has no effect: it is a key of vLLM's own offloading, and %s. Remove it.",
                f"{at}.{name}" if at else name,
                reason,
            )
    return {name: value for name, value in given.items() if name not in vllm_only}


def _refuse_contradictions(reader: OptionReader, options: OffloadingOptions) -> None:
    if reader.has("block_size") and reader.has("blocks_per_chunk"):
        reader.refuse(
            "block_size",
            "block_size (in tokens) or blocks_per_chunk (in device blocks), not both",
            f"Remove one of them; blocks_per_chunk is {describe(options.blocks_per_chunk)}",
        )
    if reader.has("spec_module_path") and not reader.has("spec_name"):
        reader.refuse(
            "spec_module_path",
            "a module, together with the name of the class to take from it",
            "Set spec_name to the class's name",
        )
    if reader.has("cache_policy_module_path") and not reader.has("eviction_policy"):
        reader.refuse(
            "cache_policy_module_path",
            "a module, together with the name of the class to take from it",
            "Set eviction_policy to the class's name",
        )
    if options.tenant_key_file is None and any(rule.is_private for rule in options.tenant_rules):
        reader.refuse(
            "tenant_key_file",
            "the path of a file, where a tenant is private",
            "Make one: openssl rand -hex 32 > /etc/kvtier-tenants.keys; chmod 600 it",
        )
    if options.secondary_tiers and options.spec_name == CPU_SPEC:
        # Otherwise the engine would silently store nothing in the user's tiers.
        reader.refuse(
            "spec_name",
            f'"{TIERING_SPEC}", since there are secondary_tiers: {CPU_SPEC} has none',
            "Remove spec_name, or remove secondary_tiers",
        )
