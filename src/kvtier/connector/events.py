"""The engine's KV-cache events for offloaded blocks: their types, and their translation from a
manager's events."""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

from kvtier.base import (
    Locality,
    Medium,
    OffloadingEvent,
    OffloadKey,
    get_offload_block_hash,
    get_offload_group_idx,
)
from kvtier.config import AttentionKind

if TYPE_CHECKING:
    from kvtier.connector.request_state import RequestOffloadState

__all__ = ["AllBlocksCleared", "BlockRemoved", "BlockStored", "EventTranslator", "KVCacheEvent"]

_MAX_TOKENS = 1 << 22
"""Largest number of tokens kept for self-describing events, at eight bytes each. The oldest are
dropped first; the event for a block whose tokens were dropped is not self-describing."""


@dataclass(slots=True)
class BlockStored:
    """Blocks that can be loaded from a medium from now on.

    A *self-describing* event is about one block, and names the tokens that the block holds. The
    option `self_describing_kv_events` turns self-describing events on.
    """

    block_hashes: list[bytes]
    group_indices: list[int]
    """The KV-cache group of each block. Blocks of several groups may share an event."""
    medium: Medium
    locality: Locality | None = None
    block_size: int = 0
    """Tokens of the block. 0 unless the event is self-describing, because blocks of different
    groups may differ in size."""
    parent_block_hash: bytes | None = None
    """Self-describing events: hash of the block before; None at the start of a prompt."""
    token_ids: list[int] = field(default_factory=list)
    """Self-describing events: the tokens of the block."""
    group_kind: AttentionKind | None = None
    """Self-describing events: the attention kind of the group."""
    tier: str | None = None
    """Name of the tier below host memory, as in `OffloadingEvent`; None for host memory."""


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
    """No block that was offloaded before can be loaded any more, from any medium."""


KVCacheEvent: TypeAlias = BlockStored | BlockRemoved | AllBlocksCleared


class _Description(NamedTuple):
    parent: bytes | None
    token_ids: array[int]
    kind: AttentionKind


class EventTranslator:
    """Turns a manager's events into KV-cache events of the engine. Scheduler thread only."""

    def __init__(self, self_describing: bool) -> None:
        self._self_describing = self_describing
        self._descriptions: OrderedDict[OffloadKey, _Description] = OrderedDict()
        self._num_tokens = 0

    def describe(self, state: RequestOffloadState) -> None:
        """Remember the tokens of a request's blocks, in case the blocks are stored or promoted."""
        if not self._self_describing:
            return
        tokens = state.req.token_ids
        for group in state.group_states:
            size = group.geometry.tokens_per_chunk
            for chunk in range(group.num_described, len(group.keys)):
                parent = get_offload_block_hash(group.keys[chunk - 1]) if chunk else None
                token_ids = array("q", tokens[chunk * size : (chunk + 1) * size])
                self._remember(
                    group.keys[chunk], _Description(parent, token_ids, group.geometry.kind)
                )
            group.num_described = len(group.keys)

    def _remember(self, key: OffloadKey, description: _Description) -> None:
        former = self._descriptions.pop(key, None)
        self._num_tokens += len(description.token_ids) - (len(former.token_ids) if former else 0)
        self._descriptions[key] = description
        while self._num_tokens > _MAX_TOKENS:
            _, oldest = self._descriptions.popitem(last=False)
            self._num_tokens -= len(oldest.token_ids)

    def translate(self, events: Iterable[OffloadingEvent]) -> list[KVCacheEvent]:
        """The engine's events for these events of the manager, in the same order."""
        translated: list[KVCacheEvent] = []
        for event in events:
            if event.removed:
                translated.append(
                    BlockRemoved(
                        *_hashes_and_groups(event.keys), event.medium, event.locality, event.tier
                    )
                )
            else:
                translated += self._stored(event)
        return translated

    def _stored(self, event: OffloadingEvent) -> Iterable[BlockStored]:
        plain = [key for key in event.keys if key not in self._descriptions]
        if plain:
            yield BlockStored(
                *_hashes_and_groups(plain), event.medium, event.locality, tier=event.tier
            )
        for key in event.keys:
            described = self._descriptions.get(key)
            if described is not None:
                yield BlockStored(
                    *_hashes_and_groups([key]),
                    event.medium,
                    event.locality,
                    len(described.token_ids),
                    described.parent,
                    list(described.token_ids),
                    described.kind,
                    event.tier,
                )


def _hashes_and_groups(keys: list[OffloadKey]) -> tuple[list[bytes], list[int]]:
    return (
        [get_offload_block_hash(key) for key in keys],
        [get_offload_group_idx(key) for key in keys],
    )
