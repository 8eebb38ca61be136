"""The configuration: the engine's description of itself, joined with the user's keys."""

from __future__ import annotations

import logging
import mmap
import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from kvtier.config.engine import (
    AttentionKind,
    OffloadingCacheConfig,
    OffloadingGroupConfig,
    OffloadingModelConfig,
    OffloadingParallelConfig,
    engine_problems,
    part_problems,
    with_plain_ints,
)
from kvtier.config.errors import ConfigError, Problem, describe
from kvtier.config.namespace import NamespaceDescription, NamespaceIdentity
from kvtier.config.options import OffloadingOptions
from kvtier.config.sizes import LARGEST_SIZE, as_int, format_size

logger = logging.getLogger(__name__)

_FORMAT_VERSION = 1
_EPOCH_BYTES = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class OffloadingConfig:
    """Everything that an `OffloadingSpec` is built from. Immutable, and can be pickled.

    Made by the engine's adapter, once on the scheduler side and once in every worker, before
    anything is allocated. The constructor parses and checks everything, and raises one
    `ConfigError` with all problems.
    """

    groups: tuple[OffloadingGroupConfig, ...]
    worker_kv_bytes_per_block: int
    """Bytes that one rank holds of one device block."""
    engine_id: str
    """Distinct for every running engine, data-parallel replicas included."""
    model: OffloadingModelConfig
    cache: OffloadingCacheConfig
    """Its `blocks_per_chunk` is the user's value, if the user set one."""
    parallel: OffloadingParallelConfig
    extra_config: Mapping[str, Any] = field(repr=False)
    """The user's mapping as given; read `options` instead. Not in `repr`: it may hold passwords."""
    kv_cache_layout: str | None = None
    """The engine's name for the order of dimensions in a block."""
    enable_kv_cache_events: bool = False
    options: OffloadingOptions = field(init=False)
    """`extra_config`, parsed."""

    def __post_init__(self) -> None:
        problems = part_problems(self)
        if not problems:
            self._take_plain_ints()
            problems = engine_problems(self)
        try:
            options = OffloadingOptions.from_extra_config(self.extra_config)
        except ConfigError as refused:
            raise ConfigError(*problems, *refused.problems) from None
        if problems:
            raise ConfigError(*problems)
        object.__setattr__(self, "options", options)
        blocks_per_chunk = _resolve_blocks_per_chunk(self, options)
        object.__setattr__(self, "cache", replace(self.cache, blocks_per_chunk=blocks_per_chunk))
        _require_one_block(self)
        self._warn_of_unpublished_events()

    @property
    def engine_config(self) -> Any:
        """The user's `engine_config`, for the engine's own spec or tiers. kvtier ignores it."""
        return self.options.engine_config

    @property
    def cpu_page_size(self) -> int:
        """Bytes that one rank holds of one offloaded block."""
        return self.worker_kv_bytes_per_block * self.cache.blocks_per_chunk

    @property
    def tokens_per_chunk(self) -> dict[int, int]:
        """Tokens of one offloaded block, by group."""
        per_chunk = self.cache.blocks_per_chunk
        return {group.group_id: group.tokens_per_block * per_chunk for group in self.groups}

    @property
    def main_group(self) -> int:
        """The group whose blocks stand for a prompt: the first one that needs all earlier tokens,
        or else the first one."""
        full = (group.group_id for group in self.groups if group.kind is AttentionKind.FULL)
        return next(full, self.groups[0].group_id)

    @property
    def row_bytes(self) -> int:
        """Bytes of one offloaded block: the parts of all ranks, rounded up to whole pages."""
        pages = -(-self.cpu_page_size * self.parallel.world_size // mmap.PAGESIZE)
        return pages * mmap.PAGESIZE

    @property
    def num_blocks(self) -> int:
        """Number of offloaded blocks that fit in `cpu_bytes_to_use`; at least 1."""
        return self.options.cpu_bytes_to_use // self.row_bytes

    def fingerprint(self, epoch: bytes = b"") -> bytes:
        """Return a digest that differs whenever one key could stand for different bytes.

        Tiers put it before a key, or into a block's seal. It covers the model and its weights, the
        namespace, the cache's layout, groups and sizes, and how a block is spread over ranks. It
        does not cover the engine's id, rank and replica, nor budgets, policies, tiers and events.
        It is equal in all processes, and on all machines with the same page size.

        `epoch` separates blocks computed before a `reset_cache` from blocks computed after it. It
        is a result of `new_epoch`, or empty while the cache has not been reset.

        Any thread may call this. It takes tens of microseconds.
        """
        return self.identity(epoch).fingerprint()

    def describe(self, fingerprint: bytes | None = None) -> NamespaceDescription:
        """What the namespace of this fingerprint is made of, for people. None: of the namespace of
        this engine before a `reset_cache`. Any thread."""
        described = self.identity().describe()
        if fingerprint is None or fingerprint.hex() == described.namespace:
            return described
        # Not the epoch itself, which the tiers do not know.
        made_of = {**described.ingredients, "after_reset": fingerprint.hex()[:8]}
        return replace(described, namespace=fingerprint.hex(), ingredients=made_of)

    def require_weights_identity(self) -> None:
        """Raise `ConfigError` unless the weights are identified beyond the model's name.

        Every tier that outlives the process calls it before it opens its storage: otherwise an
        engine with other weights under the same name would find this engine's blocks.
        """
        if self.model.weights_revision is not None or self.options.cache_namespace is not None:
            return
        why = self.model.unknown_because
        raise ConfigError(
            Problem(
                "cache_namespace",
                "nothing, and the engine does not know the weights revision "
                f"of {self.model.name!r} either{f' ({why})' if why else ''}",
                "a text that identifies the weights, when a tier keeps blocks beyond the process",
                'Set cache_namespace to your own name for these weights, such as "llama3-8b-v2", '
                "and change it whenever they change; or serve the model from a hub commit",
            )
        )

    def identity(self, epoch: bytes = b"") -> NamespaceIdentity:
        """What the fingerprint is made of. `epoch`: as for `fingerprint`."""
        model, cache, parallel = self.model, self.cache, self.parallel
        return NamespaceIdentity(
            format_version=_FORMAT_VERSION,
            epoch=epoch,
            is_signed=self.options.seal_key_file is not None,
            cache_namespace=self.options.cache_namespace,
            model_name=model.name,
            dtype=model.dtype,
            weights_revision=model.weights_revision,
            variant=model.variant,
            kv_cache_layout=self.kv_cache_layout,
            tokens_per_hash=cache.tokens_per_hash,
            blocks_per_chunk=cache.blocks_per_chunk,
            worker_kv_bytes_per_block=self.worker_kv_bytes_per_block,
            row_bytes=self.row_bytes,
            world_size=parallel.world_size,
            tp_size=parallel.tp_size,
            pp_size=parallel.pp_size,
            pcp_size=parallel.pcp_size,
            dcp_size=parallel.dcp_size,
            groups=[
                [
                    group.group_id,
                    group.tokens_per_block,
                    list(group.layer_names),
                    group.kind,
                    group.window_tokens,
                ]
                for group in self.groups
            ],
            served_name=model.served_name,
            settings=model.settings,
            hash_root=cache.hash_root,
        )

    def _take_plain_ints(self) -> None:
        plain = {
            "groups": tuple(with_plain_ints(group) for group in self.groups),
            "worker_kv_bytes_per_block": as_int(self.worker_kv_bytes_per_block),
            "cache": with_plain_ints(self.cache),
            "parallel": with_plain_ints(self.parallel),
        }
        for name, value in plain.items():
            if value is not None:
                object.__setattr__(self, name, value)

    def _warn_of_unpublished_events(self) -> None:
        if self.enable_kv_cache_events:
            return
        keys = [
            f"{tier.at}.enable_kv_events"
            for tier in self.options.secondary_tiers
            if tier.enable_kv_events
        ]
        given = ("self_describing_kv_events", "name_tier_in_events")
        keys += [key for key in given if self.extra_config.get(key)]
        for key in keys:
            logger.warning(
                "%s has no effect: the engine publishes no KV-cache events. "
                "Enable them in the engine.",
                key,
            )


def new_epoch() -> bytes:
    """Return a new name for the time after a `reset_cache`.

    It is random, not a counter, because another engine, or this one after a restart, could count to
    the same number with other weights.
    """
    return os.urandom(_EPOCH_BYTES)


def _resolve_blocks_per_chunk(config: OffloadingConfig, options: OffloadingOptions) -> int:
    """Return the number of device blocks in one offloaded block: the user's value, or the
    engine's."""
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


def _require_one_block(config: OffloadingConfig) -> None:
    """Raise `ConfigError` unless `cpu_bytes_to_use` holds at least one offloaded block."""
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
