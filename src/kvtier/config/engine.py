"""The engine's description of itself: its model, its KV cache and its ranks.

An adapter copies these values from an engine's untyped objects, so every value is checked.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from enum import StrEnum
from typing import TYPE_CHECKING, Any, TypeVar

from kvtier.config.errors import Problem, describe
from kvtier.config.fields import BOOLEAN, REQUIRED_TEXT, TEXT, Kind, Unfit, whole_number
from kvtier.config.namespace import Scalar
from kvtier.config.sizes import as_int

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

    from kvtier.config.offloading import OffloadingConfig

    D = TypeVar("D", bound=DataclassInstance)

T = TypeVar("T")


class AttentionKind(StrEnum):
    """Which of a request's earlier tokens a layer attends to."""

    FULL = "full"
    SLIDING_WINDOW = "sliding_window"
    """The last `window_tokens` tokens."""
    CHUNKED_LOCAL = "chunked_local"
    """The tokens of its own chunk. A chunk begins at each multiple of `window_tokens`."""
    STATE_SPACE = "state_space"
    """No tokens: the layer keeps a state instead."""
    UNKNOWN = "unknown"
    """The engine does not say."""

    @property
    def has_window(self) -> bool:
        """True if a group of this kind has `window_tokens`."""
        return self in (AttentionKind.SLIDING_WINDOW, AttentionKind.CHUNKED_LOCAL)


@dataclass(frozen=True, slots=True)
class OffloadingGroupConfig:
    """Layers that share block tables: one KV-cache group."""

    tokens_per_block: int
    """Tokens that one device block spans, over all context-parallel ranks."""
    layer_names: tuple[str, ...]
    """The layers, in the order of their data in a block."""
    group_id: int = 0
    """The group index in the keys of this group's blocks. Unique among the groups."""
    kind: AttentionKind = AttentionKind.FULL
    window_tokens: int | None = None
    """Tokens of the window. Set for the kinds that have a window, and None for all others."""


@dataclass(frozen=True, slots=True)
class OffloadingModelConfig:
    """Which weights computed the cache, and the cache's element type."""

    name: str
    dtype: str
    """The element type of the KV cache, such as "bfloat16" or "fp8_e4m3"."""
    weights_revision: str | None = None
    """Identifies the weights beyond their name: a hub commit, or a digest of local files. None:
    not known."""
    variant: str = ""
    """Other settings that change the computed values or their layout, in the engine's own words:
    RoPE overrides, quantization, the engine's release."""
    served_name: str = ""
    """What people call the model, if `name` is a digest or the like. Only shown."""
    unknown_because: str | None = None
    """Why `weights_revision` is None: one clause, for the error of a tier that refuses to start."""
    settings: tuple[tuple[str, Scalar], ...] = ()
    """What `variant` is made of, by name, the most telling first. A setting within another one has
    a dot in its name. No secrets: it is shown, and kept beside the blocks."""


@dataclass(frozen=True, slots=True)
class OffloadingCacheConfig:
    """How many tokens a block hash covers, and how many device blocks an offloaded block has."""

    tokens_per_hash: int
    """Tokens that one block hash covers."""
    blocks_per_chunk: int = 1
    """Device blocks in one offloaded block. If the user sets `blocks_per_chunk` or `block_size`,
    that replaces the engine's value."""
    hash_root: str = ""
    """What the engine's block hashes start from, in a few words. Engines with different roots find
    none of each other's blocks. Not in the fingerprint. Empty: it is the same in all engines, or
    not known."""


@dataclass(frozen=True, slots=True)
class OffloadingParallelConfig:
    """The ranks of one engine, and this process's place among them."""

    rank: int = 0
    """0 on the scheduler side."""
    world_size: int = 1
    """Number of ranks. Each holds a part of every block."""
    tp_size: int = 1
    pp_size: int = 1
    pcp_size: int = 1
    """Prefill context parallel size."""
    dcp_size: int = 1
    """Decode context parallel size."""
    data_parallel_index: int = 0
    data_parallel_size: int = 1


def with_plain_ints(part: D) -> D:
    """Return `part` with numpy's integers replaced by Python's, which do not overflow and can be
    written as JSON."""
    plain: dict[str, Any] = {}
    for field in fields(part):
        value = getattr(part, field.name)
        number = as_int(value)
        if number is not None and type(value) is not int:
            plain[field.name] = number
    return replace(part, **plain) if plain else part


# --- checks ------------------------------------------------------------------------------------


def _parse_attention_kind(value: object) -> AttentionKind:
    # A text such as "full" is also refused, because kinds are compared by identity.
    if not isinstance(value, AttentionKind):
        raise Unfit("Give a member of AttentionKind, such as AttentionKind.FULL")
    return value


def _parse_layer_names(value: object) -> tuple[str, ...]:
    if not isinstance(value, tuple) or not value:
        raise Unfit("Give a tuple with the names of the group's layers, in the order of their data")
    return tuple(REQUIRED_TEXT.parse(name) for name in value)


def _parse_groups(value: object) -> tuple[OffloadingGroupConfig, ...]:
    if not isinstance(value, tuple):
        raise Unfit("Give a tuple, also for one group")
    for index, group in enumerate(value):
        if not isinstance(group, OffloadingGroupConfig):
            raise Unfit(f"Make groups[{index}] an OffloadingGroupConfig")
    return value


def _instance_of(part: type[T]) -> Kind[T]:
    def parse(value: object) -> T:
        if not isinstance(value, part):
            raise Unfit(f"Make it with {part.__name__}(...)")
        return value

    return Kind(f"an instance of kvtier.{part.__name__}", parse)


_GROUPS = Kind("a tuple of kvtier.OffloadingGroupConfig", _parse_groups)
_PARTS: dict[str, Kind[Any]] = {
    "groups": _GROUPS,
    "model": _instance_of(OffloadingModelConfig),
    "cache": _instance_of(OffloadingCacheConfig),
    "parallel": _instance_of(OffloadingParallelConfig),
}
_ATTENTION_KIND = Kind(
    f"one of {', '.join(f'AttentionKind.{kind.name}' for kind in AttentionKind)}",
    _parse_attention_kind,
)
_LAYER_NAMES = Kind("a tuple of one or more layer names", _parse_layer_names)
_COUNT = whole_number(1)
_INDEX = whole_number(0)


def part_problems(config: OffloadingConfig) -> list[Problem]:
    """Return a problem for each part of the engine's description that has the wrong class."""
    refusals = [kind.refusal(part, getattr(config, part)) for part, kind in _PARTS.items()]
    return [problem for problem in refusals if problem is not None]


def engine_problems(config: OffloadingConfig) -> list[Problem]:
    """Return all problems with the engine's values. Call it only if `part_problems` found none.
    Does not check `options`."""
    return [*_field_problems(config), *_group_problems(config), *_rank_problems(config.parallel)]


def _field_problems(config: OffloadingConfig) -> Iterator[Problem]:
    parallel = config.parallel
    expected: list[tuple[str, object, Kind[Any]]] = [
        ("worker_kv_bytes_per_block", config.worker_kv_bytes_per_block, _COUNT),
        ("engine_id", config.engine_id, REQUIRED_TEXT),
        ("enable_kv_cache_events", config.enable_kv_cache_events, BOOLEAN),
        ("model.name", config.model.name, REQUIRED_TEXT),
        ("model.dtype", config.model.dtype, REQUIRED_TEXT),
        ("cache.tokens_per_hash", config.cache.tokens_per_hash, _COUNT),
        ("cache.blocks_per_chunk", config.cache.blocks_per_chunk, _COUNT),
        ("parallel.rank", parallel.rank, _INDEX),
        ("parallel.world_size", parallel.world_size, _COUNT),
        ("parallel.tp_size", parallel.tp_size, _COUNT),
        ("parallel.pp_size", parallel.pp_size, _COUNT),
        ("parallel.pcp_size", parallel.pcp_size, _COUNT),
        ("parallel.dcp_size", parallel.dcp_size, _COUNT),
        # The index may exceed the size, because engines may configure each replica of a dense model
        # as if it were the only one.
        ("parallel.data_parallel_index", parallel.data_parallel_index, _INDEX),
        ("parallel.data_parallel_size", parallel.data_parallel_size, _COUNT),
    ]
    if config.model.weights_revision is not None:
        expected.append(("model.weights_revision", config.model.weights_revision, TEXT))
    if config.kv_cache_layout is not None:
        expected.append(("kv_cache_layout", config.kv_cache_layout, TEXT))
    for index, group in enumerate(config.groups):
        at = f"groups[{index}]"
        expected.append((f"{at}.tokens_per_block", group.tokens_per_block, _COUNT))
        expected.append((f"{at}.group_id", group.group_id, _INDEX))
        expected.append((f"{at}.kind", group.kind, _ATTENTION_KIND))
        if group.window_tokens is not None:
            expected.append((f"{at}.window_tokens", group.window_tokens, _COUNT))
        expected.append((f"{at}.layer_names", group.layer_names, _LAYER_NAMES))
    for key, value, kind in expected:
        problem = kind.refusal(key, value)
        if problem is not None:
            yield problem


def _group_problems(config: OffloadingConfig) -> Iterator[Problem]:
    if not config.groups:
        yield Problem(
            "groups",
            "none",
            "at least one KV-cache group",
            "Describe the groups whose blocks are to be offloaded; "
            "a model without a KV cache cannot be offloaded",
        )
    taken: dict[int, int] = {}
    for index, group in enumerate(config.groups):
        at = f"groups[{index}]"
        valid_id = _INDEX.refusal(at, group.group_id) is None
        first = taken.setdefault(group.group_id, index) if valid_id else index
        if first != index:
            yield Problem(
                f"{at}.group_id",
                describe(group.group_id),
                f"an id of its own; groups[{first}] has this one",
                "Give every group the index that its keys carry",
            )
        yield from _window_problems(at, group)
        yield from _hash_problems(at, group, config.cache.tokens_per_hash)


def _window_problems(at: str, group: OffloadingGroupConfig) -> Iterator[Problem]:
    if not isinstance(group.kind, AttentionKind):
        return
    if group.kind.has_window and group.window_tokens is None:
        yield Problem(
            f"{at}.window_tokens",
            "nothing",
            f'the window in tokens, since the kind is "{group.kind}"',
            "Give the window of the group's layers",
        )
    if not group.kind.has_window and group.window_tokens is not None:
        yield Problem(
            f"{at}.window_tokens",
            describe(group.window_tokens),
            f'None, since the kind is "{group.kind}"',
            "Leave the window out, or give a kind that has one",
        )


def _hash_problems(
    at: str, group: OffloadingGroupConfig, tokens_per_hash: int
) -> Iterator[Problem]:
    if _COUNT.refusal(at, group.tokens_per_block) or _COUNT.refusal(at, tokens_per_hash):
        return
    if group.tokens_per_block % tokens_per_hash:
        yield Problem(
            f"{at}.tokens_per_block",
            str(group.tokens_per_block),
            f"a multiple of cache.tokens_per_hash, {tokens_per_hash}",
            "Set cache.tokens_per_hash to a divisor of every group's tokens_per_block; "
            "in vLLM, hybrid models need --enable-prefix-caching for that",
        )


def _rank_problems(parallel: OffloadingParallelConfig) -> Iterator[Problem]:
    sizes = (parallel.world_size, parallel.tp_size, parallel.pp_size, parallel.pcp_size)
    if any(_COUNT.refusal("", size) for size in sizes) or _INDEX.refusal("", parallel.rank):
        return
    if parallel.rank >= parallel.world_size:
        yield Problem(
            "parallel.rank",
            str(parallel.rank),
            f"0 to {parallel.world_size - 1}, since parallel.world_size is {parallel.world_size}",
            "Number the ranks of one engine from 0",
        )
    if parallel.world_size % (parallel.tp_size * parallel.pp_size * parallel.pcp_size):
        yield Problem(
            "parallel.world_size",
            str(parallel.world_size),
            f"a multiple of tp_size {parallel.tp_size} x pp_size {parallel.pp_size} "
            f"x pcp_size {parallel.pcp_size}",
            "Count every rank that holds a part of a block",
        )
