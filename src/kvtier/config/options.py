"""What the user may set: the keys of `extra_config`, parsed once into typed values."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from copy import deepcopy
from dataclasses import dataclass, field, fields
from enum import StrEnum
from typing import TYPE_CHECKING, Any

from kvtier.config.errors import ConfigError, Problem
from kvtier.config.kinds import (
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
    one_of,
    whole_number,
)
from kvtier.config.reader import OptionReader
from kvtier.config.redaction import describe

if TYPE_CHECKING:
    from kvtier.base import Locality

logger = logging.getLogger(__name__)

CPU_SPEC = "CPUOffloadingSpec"
TIERING_SPEC = "TieringOffloadingSpec"

VLLM_ONLY_KEYS = {
    "canonical_layout": "kvtier stores blocks in the layout of the engine's own cache",
    "backpressure": "kvtier bounds a slow tier by its timeouts and its max_pinned_share",
}
"""Keys of vLLM 0.32's offloading that kvtier has no use for, each with the reason."""

VLLM_ONLY_TIER_KEYS = {"backpressure": VLLM_ONLY_KEYS["backpressure"]}
"""The same, inside an entry of `secondary_tiers`."""


class ResetScope(StrEnum):
    """How far `reset_cache` reaches."""

    ALL = "all"
    """Earlier blocks become unreachable in every tier."""
    PRIMARY = "primary"
    """Only the primary tier is emptied."""


class WritePolicyName(StrEnum):
    """When blocks go from the primary tier to a tier below."""

    THROUGH = "through"
    """As soon as they are stored in the primary tier."""


@dataclass(frozen=True, slots=True)
class TierConfig:
    """One entry of `secondary_tiers`: the keys all tiers share, and the tier's own."""

    type: str
    """A registered name, or the class's name inside `module_path`."""
    position: int = 0
    """Place in lookup order, from 0."""
    module_path: str | None = None
    enable_kv_events: bool = False
    locality: Locality | None = None
    """None: the tier decides."""
    lookup_timeout_ms: float | None = None
    """None, for this and the next three: what `kvtier.tiering.health.TierSettings` says."""
    load_timeout_ms: float | None = None
    store_timeout_ms: float | None = None
    max_pinned_share: float | None = None
    """Part of the primary tier's slots that stores to this tier may pin at once."""
    write_policy: WritePolicyName = WritePolicyName.THROUGH
    options: Mapping[str, Any] = field(default_factory=dict, repr=False)
    """The tier's own keys, unparsed. Not in `repr`: it may hold passwords."""

    @property
    def at(self) -> str:
        """Where the entry stands, for messages about its keys."""
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
    """The user's settings. The names are the user's keys; a missing key has the value here."""

    cpu_bytes_to_use: int
    spec_name: str = CPU_SPEC
    spec_module_path: str | None = None
    block_size: int | None = None
    """Tokens of one offloaded block. At most one of this and `blocks_per_chunk` is set."""
    blocks_per_chunk: int | None = None
    """Device blocks of one offloaded block."""
    eviction_policy: str = "lru"
    cache_policy_module_path: str | None = None
    store_threshold: int = 1
    """A block is stored when the n-th request brings it; 1 stores every block."""
    max_tracker_size: int = 64_000
    offload_prompt_only: bool = True
    self_describing_kv_events: bool = False
    secondary_tiers: tuple[TierConfig, ...] = ()
    """In lookup order."""
    cache_namespace: str | None = None
    reset_scope: ResetScope = ResetScope.ALL
    prefill_tokens_per_s: float | None = None
    """How fast the engine computes a prompt. None: learnt while it runs. 0: not to be asked."""
    shutdown_timeout_ms: float = 10_000.0
    """How long the tiers together may take to end."""
    allow_unproven_models: bool = False
    """Serve a model of a kind that no test has served. Read by integrations with engines."""
    engine_config: Any = field(default=None, repr=False)
    """Opaque to kvtier; tiers find it through the spec."""

    @classmethod
    def from_extra_config(cls, extra_config: Mapping[str, Any]) -> OffloadingOptions:
        """Parse the user's keys, or raise `ConfigError` with all that is wrong with them.

        Checks what can be checked without knowing the engine; `OffloadingConfig` does the rest.
        Later changes to `extra_config` do not reach the result.
        """
        _require_object(extra_config)
        reader = OptionReader(_without_vllm_only(extra_config, VLLM_ONLY_KEYS, at=""))
        tiers = _read_tiers(reader)
        options = cls(
            cpu_bytes_to_use=reader.required("cpu_bytes_to_use", SIZE),
            spec_name=reader.get("spec_name", TEXT, TIERING_SPEC if tiers else CPU_SPEC),
            spec_module_path=reader.optional("spec_module_path", MODULE_PATH),
            block_size=reader.optional("block_size", whole_number(1)),
            blocks_per_chunk=reader.optional("blocks_per_chunk", whole_number(1)),
            eviction_policy=reader.get("eviction_policy", TEXT, "lru"),
            cache_policy_module_path=reader.optional("cache_policy_module_path", MODULE_PATH),
            # vLLM writes 0 for "no threshold"; here one value means one thing.
            store_threshold=reader.get("store_threshold", whole_number(0), 1) or 1,
            max_tracker_size=reader.get("max_tracker_size", whole_number(1), 64_000),
            offload_prompt_only=reader.get("offload_prompt_only", BOOLEAN, True),
            self_describing_kv_events=reader.get("self_describing_kv_events", BOOLEAN, False),
            secondary_tiers=tiers,
            cache_namespace=reader.optional("cache_namespace", TEXT),
            reset_scope=reader.get("reset_scope", one_of(ResetScope), ResetScope.ALL),
            prefill_tokens_per_s=reader.optional("prefill_tokens_per_s", RATE),
            shutdown_timeout_ms=reader.get("shutdown_timeout_ms", MILLISECONDS, 10_000.0),
            allow_unproven_models=reader.get("allow_unproven_models", BOOLEAN, False),
            engine_config=reader.optional("engine_config", OPAQUE),
        )
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


USER_KEYS = tuple(key.name for key in fields(OffloadingOptions))
"""Every key a user may set."""

TIER_KEYS = tuple(key.name for key in fields(TierConfig) if key.name not in ("position", "options"))
"""Every key that all entries of `secondary_tiers` understand."""


def read_secondary_tiers(extra_config: Mapping[str, Any]) -> tuple[TierConfig, ...]:
    """The tiers of a user's configuration, in lookup order, or `ConfigError`.

    For those who have no other use for it: nothing else is looked at, or needs to be there.
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
                'Write {"cpu_bytes_to_use": "8GiB"}, for one',
            )
        )


def _parse_locality(value: object) -> Locality:
    # Here, because `kvtier.base` loads numpy, which reading a configuration does not need.
    from kvtier.base import Locality

    return one_of(Locality).parse(value)


_SAMPLE_ENTRY = '{"type": "example"}'
_TIER_TYPE = Kind(
    'the name of a tier, such as "example", or of a class in module_path', REQUIRED_TEXT.parse
)
_LOCALITY = Kind('"LOCAL" or "REMOTE"', _parse_locality)


def _read_tiers(reader: OptionReader) -> tuple[TierConfig, ...]:
    entries: object = reader.optional("secondary_tiers", OPAQUE)
    if entries is None:
        return ()
    if not isinstance(entries, (list, tuple)):
        reader.refuse(
            "secondary_tiers",
            f"a list of objects such as [{_SAMPLE_ENTRY}]",
            "Put the one tier in brackets" if isinstance(entries, Mapping) else "Write a list",
        )
        return ()
    return tuple(_read_tier(reader.problems, entry, place) for place, entry in enumerate(entries))


def _read_tier(problems: list[Problem], entry: object, position: int) -> TierConfig:
    at = f"secondary_tiers[{position}]"
    if not isinstance(entry, Mapping):
        named = isinstance(entry, str) and entry.isidentifier()
        meant = f'{{"type": "{entry}"}}' if named else _SAMPLE_ENTRY
        problems.append(Problem(at, describe(entry), 'an object with a "type"', f"Write {meant}"))
        return TierConfig(type="", position=position)
    reader = OptionReader(_without_vllm_only(entry, VLLM_ONLY_TIER_KEYS, at), at)
    tier = TierConfig(
        type=reader.required(
            "type", _TIER_TYPE, f"Write {_SAMPLE_ENTRY}, or the name of an installed tier"
        ),
        position=position,
        module_path=reader.optional("module_path", MODULE_PATH),
        enable_kv_events=reader.get("enable_kv_events", BOOLEAN, False),
        locality=reader.optional("locality", _LOCALITY),
        lookup_timeout_ms=reader.optional("lookup_timeout_ms", MILLISECONDS),
        load_timeout_ms=reader.optional("load_timeout_ms", MILLISECONDS),
        store_timeout_ms=reader.optional("store_timeout_ms", MILLISECONDS),
        max_pinned_share=reader.optional("max_pinned_share", SHARE),
        write_policy=reader.get("write_policy", one_of(WritePolicyName), WritePolicyName.THROUGH),
        options=deepcopy(reader.unread()),
    )
    problems.extend(reader.problems)
    return tier


def _without_vllm_only(
    given: Mapping[str, Any], vllm_only: Mapping[str, str], at: str
) -> dict[str, Any]:
    for key, reason in vllm_only.items():
        if key in given:
            logger.warning(
                "%s has no effect: it is a key of vLLM's own offloading, and %s. Remove it.",
                f"{at}.{key}" if at else key,
                reason,
            )
    return {key: value for key, value in given.items() if key not in vllm_only}


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
    if options.secondary_tiers and options.spec_name == CPU_SPEC:
        # Better no engine than one that quietly keeps nothing where the user wants it kept.
        reader.refuse(
            "spec_name",
            f'"{TIERING_SPEC}", since there are secondary_tiers: {CPU_SPEC} has none',
            "Remove spec_name, or remove secondary_tiers",
        )
