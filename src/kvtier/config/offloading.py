"""The configuration: what the engine says about itself, joined with what the user set."""

from __future__ import annotations

import logging
import mmap
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from kvtier.config.checks import (
    engine_problems,
    part_problems,
    require_one_block,
    resolve_blocks_per_chunk,
)
from kvtier.config.engine import (
    OffloadingCacheConfig,
    OffloadingGroupConfig,
    OffloadingModelConfig,
    OffloadingParallelConfig,
)
from kvtier.config.errors import ConfigError, Problem
from kvtier.config.fingerprint import fingerprint
from kvtier.config.numbers import as_int, with_plain_ints
from kvtier.config.options import OffloadingOptions

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class OffloadingConfig:
    """Everything an `OffloadingSpec` is built from. Immutable; pickles.

    Made by the engine's adapter, once on the scheduler side and once in every worker, before
    anything is allocated. Making it parses and checks all of it: an instance that exists fits
    together. Otherwise a `ConfigError` names every problem at once.
    """

    groups: tuple[OffloadingGroupConfig, ...]
    worker_kv_bytes_per_block: int
    """Bytes that one rank holds of one device block."""
    engine_id: str
    """Distinct for every running engine, data-parallel replicas included."""
    model: OffloadingModelConfig
    cache: OffloadingCacheConfig
    """`blocks_per_chunk` is what the user set, where the user set it."""
    parallel: OffloadingParallelConfig
    extra_config: Mapping[str, Any] = field(repr=False)
    """The user's mapping as given; read `options` instead. Not in `repr`: it may hold passwords."""
    kv_cache_layout: str | None = None
    """The engine's name for the order of dimensions inside a block."""
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
        blocks_per_chunk = resolve_blocks_per_chunk(self, options)
        object.__setattr__(self, "cache", replace(self.cache, blocks_per_chunk=blocks_per_chunk))
        require_one_block(self)
        self._warn_of_events_nobody_sees()

    @property
    def engine_config(self) -> Any:
        """What the engine passes on to its own spec and tiers; opaque to kvtier."""
        return self.options.engine_config

    @property
    def cpu_page_size(self) -> int:
        """Bytes of one rank's cell in a row of the primary tier."""
        return self.worker_kv_bytes_per_block * self.cache.blocks_per_chunk

    @property
    def row_bytes(self) -> int:
        """Bytes of one offloaded block: the cells of all ranks, up to the next whole page."""
        pages = -(-self.cpu_page_size * self.parallel.world_size // mmap.PAGESIZE)
        return pages * mmap.PAGESIZE

    @property
    def num_blocks(self) -> int:
        """Offloaded blocks that the CPU budget holds; at least 1."""
        return self.options.cpu_bytes_to_use // self.row_bytes

    def fingerprint(self, epoch: bytes = b"") -> bytes:
        """`FINGERPRINT_BYTES` that differ whenever one key could stand for different bytes.

        Tiers put it before a key, or into a block's seal. It covers the model and its weights,
        the namespace, the cache's layout, groups and sizes, and how a block is spread over
        ranks; not who is running (engine, rank, replica), nor budgets, policies, tiers and
        events. Equal in every process and on every machine of the same page size.

        `epoch` separates what was computed before a `reset_cache` from what is computed after
        it; take it from `new_epoch`. Empty: never reset. Any thread; some tens of microseconds.
        """
        return fingerprint(self, epoch)

    def require_weights_identity(self) -> None:
        """Raise `ConfigError` unless the weights are known beyond the model's name.

        Called by every tier that outlives the process, before it opens its storage: other
        weights under the same name would find this engine's blocks.
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
                'Set cache_namespace to your own word for these weights, such as "llama3-8b-v2", '
                "and change it whenever they change; or serve the model from a hub commit",
            )
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

    def _warn_of_events_nobody_sees(self) -> None:
        if self.enable_kv_cache_events:
            return
        keys = [
            f"{tier.at}.enable_kv_events"
            for tier in self.options.secondary_tiers
            if tier.enable_kv_events
        ]
        if self.options.self_describing_kv_events:
            keys.append("self_describing_kv_events")
        for key in keys:
            logger.warning(
                "%s has no effect: the engine publishes no KV-cache events. "
                "Enable them in the engine.",
                key,
            )
