"""What an engine must not say about itself, and what must fit between engine and user."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, TypeVar

from kvtier.config.engine import (
    AttentionKind,
    OffloadingCacheConfig,
    OffloadingGroupConfig,
    OffloadingModelConfig,
    OffloadingParallelConfig,
)
from kvtier.config.errors import ConfigError, Problem
from kvtier.config.kinds import BOOLEAN, REQUIRED_TEXT, TEXT, Kind, Unfit, whole_number
from kvtier.config.options import OffloadingOptions
from kvtier.config.redaction import describe
from kvtier.config.sizes import LARGEST_SIZE, format_size

if TYPE_CHECKING:
    from kvtier.config.offloading import OffloadingConfig

T = TypeVar("T")


def _parse_attention_kind(value: object) -> AttentionKind:
    # Not even the right text: kinds are compared by identity.
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
    """The parts of the engine's side that are not even of the right class."""
    refusals = [kind.refusal(part, getattr(config, part)) for part, kind in _PARTS.items()]
    return [problem for problem in refusals if problem is not None]


def engine_problems(config: OffloadingConfig) -> list[Problem]:
    """Everything wrong with the values in those parts. Does not look at `options`.

    Types are checked too: adapters take these values from engines without types.
    """
    return [*_field_problems(config), *_group_problems(config), *_rank_problems(config.parallel)]


def resolve_blocks_per_chunk(config: OffloadingConfig, options: OffloadingOptions) -> int:
    """Device blocks of one offloaded block: the user's word, else the engine's."""
    if options.blocks_per_chunk is not None:
        return options.blocks_per_chunk
    if options.block_size is None:
        return config.cache.blocks_per_chunk
    sizes = sorted({group.tokens_per_block for group in config.groups})
    if len(sizes) > 1:
        raise ConfigError(
            Problem(
                "block_size",
                str(options.block_size),
                "only where all KV-cache groups have device blocks of one size; "
                f"here they have {', '.join(map(str, sizes))} tokens",
                "Set blocks_per_chunk instead",
            )
        )
    blocks, rest = divmod(options.block_size, sizes[0])
    if rest:
        nearest = [str(count * sizes[0]) for count in (blocks, blocks + 1) if count]
        raise ConfigError(
            Problem(
                "block_size",
                str(options.block_size),
                f"a multiple of the device's block size, {sizes[0]} tokens",
                f"Write {' or '.join(nearest)}",
            )
        )
    return blocks


def require_one_block(config: OffloadingConfig) -> None:
    """Raise `ConfigError` unless the CPU budget holds at least one offloaded block."""
    budget, row_bytes = config.options.cpu_bytes_to_use, config.row_bytes
    if budget >= row_bytes:
        return
    raise ConfigError(
        Problem(
            "cpu_bytes_to_use",
            f"{describe(config.extra_config['cpu_bytes_to_use'])} ({budget} bytes)",
            f"at least one block, {row_bytes} bytes (worker_kv_bytes_per_block "
            f"{config.worker_kv_bytes_per_block} x blocks_per_chunk "
            f"{config.cache.blocks_per_chunk} x world_size {config.parallel.world_size}, "
            "rounded up to the page size)",
            _remedy_for_small_budget(config),
        )
    )


def _remedy_for_small_budget(config: OffloadingConfig) -> str:
    chosen = [
        key
        for key in ("block_size", "blocks_per_chunk")
        if getattr(config.options, key) is not None and config.cache.blocks_per_chunk > 1
    ]
    if chosen and config.row_bytes > LARGEST_SIZE:
        return f"Lower {chosen[0]}"
    lower = f", or lower {chosen[0]}" if chosen else ""
    enough = format_size(config.row_bytes)
    return f'Write "{enough}" or more{lower}; a useful cache holds thousands of blocks'


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
        # No upper bound: engines renumber replicas of dense models as one of one.
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
            "Leave the window out, or give the kind that has one",
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
            "Hash as many tokens as divide every group's block; "
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
