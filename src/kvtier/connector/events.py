"""Translates a manager's events into the KV-cache events of the engine."""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Iterable, Sequence
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
from kvtier.connector.descriptions import BlockDescription, DescribedRun, DescriptionBook
from kvtier.observe.kv_events import AllBlocksCleared, BlockRemoved, BlockStored, KVCacheEvent

if TYPE_CHECKING:
    from kvtier.base import OffloadingSpec
    from kvtier.config import OffloadingConfig
    from kvtier.connector.request_state import RequestOffloadState

__all__ = [
    "AllBlocksCleared",
    "BlockRemoved",
    "BlockStored",
    "EventStream",
    "EventTranslator",
    "KVCacheEvent",
    "RemovedBlocks",
    "StoredBlocks",
    "event_stream",
    "new_book",
]

Place: TypeAlias = tuple[Medium, Locality | None, str | None]
"""Where a block is, as events name it: medium, locality, and the tier if events name tiers."""


class StoredBlocks(NamedTuple):
    """Blocks that have become loadable from a place."""

    place: Place
    described: list[tuple[int, BlockDescription]]
    """Group and description. Blocks of a prompt that have come together are described together,
    which takes much less time than one by one."""
    plain: list[OffloadKey]
    """Blocks without a description."""


class RemovedBlocks(NamedTuple):
    """Device blocks that can no longer be loaded from a place, as (group, hash)."""

    place: Place
    blocks: list[tuple[int, bytes]]


class _Residence:
    """One place of one offloaded block."""

    __slots__ = ("hashes", "tiers")

    def __init__(self, hashes: list[bytes], tier: str | None) -> None:
        self.hashes = hashes
        """Its device blocks, as far as they were reported."""
        self.tiers = [tier]
        """The tiers of that place that have the block."""


class EventStream:
    """What a manager's events mean for a consumer that knows blocks of the device. Scheduler thread
    only.

    A consumer that does not distinguish tiers must not hear that a block has left a medium while
    another tier of the medium still has it. So if events do not name tiers, a block counts as
    stored when the first tier of a medium has it, and as removed when the last one has lost it.
    """

    def __init__(
        self, book: DescriptionBook | None, *, names_tiers: bool, keeps_residences: bool
    ) -> None:
        """`book`: None if events do not describe themselves. `keeps_residences`: remember where
        each reported block is. Needed if an offloaded block has several device blocks, or if
        several tiers have the same medium."""
        self._book = book
        self._names_tiers = names_tiers
        self._residences: dict[OffloadKey, dict[Place, _Residence]] | None = (
            {} if keeps_residences else None
        )
        self._num_users: Counter[tuple[Place, int, bytes]] = Counter()
        """For each device block of an offloaded block that has several: the number of offloaded
        blocks that contain it. Prompts that differ within an offloaded block share its first device
        blocks."""

    def read(self, events: Iterable[OffloadingEvent]) -> Iterable[StoredBlocks | RemovedBlocks]:
        """The meaning of these events, in the same order."""
        for event in events:
            place = (event.medium, event.locality, event.tier if self._names_tiers else None)
            if event.removed:
                removed = self._removed(event, place)
                if removed:
                    yield RemovedBlocks(place, removed)
            else:
                stored = self._stored(event, place)
                if stored.described or stored.plain:
                    yield stored

    def clear(self) -> None:
        """Forget all reported blocks: the consumer is told that everything is gone."""
        if self._residences is not None:
            self._residences.clear()
            self._num_users.clear()

    def _stored(self, event: OffloadingEvent, place: Place) -> StoredBlocks:
        stored = StoredBlocks(place, [], [])
        if self._book is None and self._residences is None:
            stored.plain.extend(event.keys)
        elif self._residences is None:
            self._describe_together(event, stored)
        else:
            for position, key in enumerate(event.keys):
                self._describe_one(event, position, key, stored)
        return stored

    def _describe_together(self, event: OffloadingEvent, stored: StoredBlocks) -> None:
        assert self._book is not None
        find = self._book.find
        run, group, start, end = None, 0, 0, 0  # blocks that follow each other
        for position, key in enumerate(event.keys):
            found = find(key)
            if found is None:
                if run is not None:  # the next block may be a child of these
                    stored.described.append((group, run.span(start, end)))
                    run = None
                self._add(self._kept(event, position), key, stored)
            elif found[0] is run and found[1] == end:
                end += 1
            else:
                if run is not None:
                    stored.described.append((group, run.span(start, end)))
                run, start = found
                group, end = get_offload_group_idx(key), start + 1
        if run is not None:
            stored.described.append((group, run.span(start, end)))

    def _describe_one(
        self, event: OffloadingEvent, position: int, key: OffloadKey, stored: StoredBlocks
    ) -> None:
        found = None if self._book is None else self._book.find(key)
        block = self._kept(event, position) if found is None else found[0][found[1]]
        if self._arrives(key, stored.place, event.tier, block):
            if block is not None and len(block.block_hashes) > 1:
                block = self._without_known(key, stored.place, block)
            self._add(block, key, stored)

    def _kept(self, event: OffloadingEvent, position: int) -> BlockDescription | None:
        """The description that a tier has kept with the block."""
        if self._book is None or event.descriptions is None:
            return None
        kept: BlockDescription | None = event.descriptions[position]
        return kept

    def _add(self, block: BlockDescription | None, key: OffloadKey, stored: StoredBlocks) -> None:
        if block is None:
            stored.plain.append(key)
        else:
            stored.described.append((get_offload_group_idx(key), block))

    def _arrives(
        self, key: OffloadKey, place: Place, tier: str | None, block: BlockDescription | None
    ) -> bool:
        """Note that a tier has the block. False if another tier of the place had it."""
        assert self._residences is not None
        places = self._residences.setdefault(key, {})
        residence = places.get(place)
        if residence is None:
            hashes = [get_offload_block_hash(key)] if block is None else block.block_hashes
            places[place] = _Residence(hashes, tier)
            return True
        if tier not in residence.tiers:
            residence.tiers.append(tier)
        return False

    def _without_known(
        self, key: OffloadKey, place: Place, block: BlockDescription
    ) -> BlockDescription:
        """The block without those of its first device blocks that another offloaded block has in
        common with it. Consumers know these already."""
        group = get_offload_group_idx(key)
        num_known = 0
        for block_hash in block.block_hashes:
            use = (place, group, block_hash)
            num_known += self._num_users[use] > 0
            self._num_users[use] += 1
        if not num_known:
            return block
        return block._replace(
            block_hashes=block.block_hashes[num_known:],
            parent=block.block_hashes[num_known - 1],
            token_ids=block.token_ids[num_known * block.block_size :],
            extra_keys=None if block.extra_keys is None else block.extra_keys[num_known:],
        )

    def _removed(self, event: OffloadingEvent, place: Place) -> list[tuple[int, bytes]]:
        if self._residences is None:
            return [(get_offload_group_idx(key), get_offload_block_hash(key)) for key in event.keys]
        removed: list[tuple[int, bytes]] = []
        for key in event.keys:
            group = get_offload_group_idx(key)
            hashes = self._leaves(key, place, event.tier)
            if len(hashes) > 1:
                hashes = [each for each in hashes if self._is_last_user((place, group, each))]
            removed += ((group, each) for each in hashes)
        return removed

    def _is_last_user(self, use: tuple[Place, int, bytes]) -> bool:
        self._num_users[use] -= 1
        if self._num_users[use] > 0:
            return False
        del self._num_users[use]
        return True

    def _leaves(self, key: OffloadKey, place: Place, tier: str | None) -> list[bytes]:
        """The device blocks to report as removed."""
        assert self._residences is not None
        places = self._residences.get(key, {})
        residence = places.get(place)
        if residence is None or tier not in residence.tiers:
            return []
        residence.tiers.remove(tier)
        if residence.tiers:
            return []
        del places[place]
        if not places:
            del self._residences[key]
        return residence.hashes


def event_stream(
    config: OffloadingConfig, book: DescriptionBook | None, media: Sequence[Medium | None]
) -> EventStream:
    """The stream for an engine of this configuration. `media`: those of host memory and of all
    tiers."""
    return EventStream(
        book,
        names_tiers=config.options.name_tier_in_events,
        keeps_residences=config.cache.blocks_per_chunk > 1
        or len(set(media)) < len(media)
        or None in media,
    )


def new_book(config: OffloadingConfig) -> DescriptionBook | None:
    """A book for this engine; None if its events do not describe themselves."""
    if not (config.enable_kv_cache_events and config.options.self_describing_kv_events):
        return None
    most = max(group.tokens_per_block for group in config.groups) * config.cache.blocks_per_chunk
    return DescriptionBook(config.num_blocks * most)


class EventTranslator:
    """Turns the events of the reference connector's manager into KV-cache events. Scheduler thread
    only."""

    def __init__(self, spec: OffloadingSpec, media: Sequence[Medium | None]) -> None:
        """`media`: as in `event_stream`."""
        self._book = spec.describer = new_book(spec.config)
        self._stream = event_stream(spec.config, self._book, media)

    def describe(self, state: RequestOffloadState) -> None:
        """Remember the tokens of a request's blocks, in case the blocks are stored or promoted.
        Not those of private blocks: neither events nor tiers get their tokens."""
        if self._book is None or state.hints.namespace is not None:
            return
        hashes = state.req.block_hashes
        for group in state.group_states:
            first, end = group.num_described, len(group.keys)
            if first == end:
                continue
            geometry = group.geometry
            per_chunk = geometry.hashes_per_chunk
            blocks, block_size = geometry.blocks_per_chunk, geometry.tokens_per_block
            if per_chunk % blocks:  # a device block does not end where a hash ends
                blocks, block_size = 1, geometry.tokens_per_chunk
            per_block = per_chunk // blocks
            size = geometry.tokens_per_chunk
            salt = getattr(state.req, "cache_salt", None)
            num_blocks = (end - first) * blocks
            self._book.add(
                group.keys[first:end],
                DescribedRun(
                    array("I", state.req.token_ids[first * size : end * size]),
                    hashes[first * per_chunk + per_block - 1 : end * per_chunk : per_block],
                    hashes[first * per_chunk - 1] if first else None,
                    blocks,
                    block_size,
                    geometry.kind,
                    geometry.window_tokens,
                    getattr(state.req, "lora_name", None),
                    # Like vLLM: the first hash covers the salt, and through it all others do.
                    extra_keys=[[salt], *[None] * (num_blocks - 1)] if salt and not first else None,
                ),
            )
            group.num_described = end

    def translate(self, events: Iterable[OffloadingEvent]) -> list[KVCacheEvent]:
        """The engine's events for these events of the manager, in the same order."""
        translated: list[KVCacheEvent] = []
        for change in self._stream.read(events):
            medium, locality, tier = change.place
            if isinstance(change, RemovedBlocks):
                groups = [group for group, _ in change.blocks]
                hashes = [block_hash for _, block_hash in change.blocks]
                translated.append(BlockRemoved(hashes, groups, medium, locality, tier))
                continue
            if change.plain:
                hashes = [get_offload_block_hash(key) for key in change.plain]
                groups = [get_offload_group_idx(key) for key in change.plain]
                translated.append(BlockStored(hashes, groups, medium, locality, tier=tier))
            for group, block in change.described:
                translated.append(
                    BlockStored(
                        block.block_hashes,
                        [group] * len(block.block_hashes),
                        medium,
                        locality,
                        block.block_size,
                        block.parent,
                        block.token_ids.tolist(),
                        None if block.kind is None else AttentionKind(block.kind),
                        tier,
                        block.window,
                        block.lora_name,
                        block.extra_keys,
                    )
                )
        return translated

    def clear(self) -> None:
        """Forget all reported blocks: `AllBlocksCleared` is about to be reported."""
        self._stream.clear()
