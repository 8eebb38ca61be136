"""The KV-cache events of an engine, as its connector reports them and `EventPublisher` sends
them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from kvtier.base import Locality, Medium
from kvtier.config import AttentionKind

__all__ = ["AllBlocksCleared", "BlockRemoved", "BlockStored", "KVCacheEvent"]


@dataclass(slots=True)
class BlockStored:
    """Blocks that can be loaded from a medium from now on.

    A *self-describing* event is about consecutive blocks of one prompt and one group, and names the
    tokens that they hold.
    """

    block_hashes: list[bytes]
    group_indices: list[int]
    """The KV-cache group of each block. Only in events that do not describe themselves may the
    groups differ."""
    medium: Medium
    locality: Locality | None = None
    block_size: int = 0
    """Tokens of one block. 0 unless the event is self-describing, because blocks of different
    groups may differ in size."""
    parent_block_hash: bytes | None = None
    """Self-describing events: hash of the block before the first one; None at the start of a
    prompt."""
    token_ids: list[int] = field(default_factory=list)
    """Self-describing events: the tokens of all blocks."""
    group_kind: AttentionKind | None = None
    """Self-describing events: the attention kind of the group."""
    tier: str | None = None
    """Name of the tier below host memory, as in `OffloadingEvent`, if events name tiers."""
    group_window: int | None = None
    """Self-describing events: `window_tokens` of the group."""
    lora_name: str | None = None
    """Self-describing events: the adapter that computed the blocks."""
    extra_keys: Sequence[Sequence[Any] | None] | None = None
    """Self-describing events: for each block, what its hash covers besides tokens and adapter, such
    as a salt. None: nothing, for any block."""


@dataclass(slots=True)
class BlockRemoved:
    """Blocks that can no longer be loaded from a medium."""

    block_hashes: list[bytes]
    group_indices: list[int]
    medium: Medium
    locality: Locality | None = None
    tier: str | None = None
    """As in `BlockStored`."""


@dataclass(slots=True)
class AllBlocksCleared:
    """No block that was reported before can be loaded any more, from any medium."""


KVCacheEvent: TypeAlias = BlockStored | BlockRemoved | AllBlocksCleared
