"""Which blocks of a request are loaded, and which are stored.

Three units meet here. A *device block* is what the engine allocates. A *chunk* is what is
offloaded: `blocks_per_chunk` device blocks under one key. Matches are counted in *tokens*, because
groups may have blocks of different sizes. Everything runs on the scheduler thread.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import lcm
from typing import TYPE_CHECKING, NamedTuple

from kvtier.base import BlockIDsLoadStoreSpec, GPULoadStoreSpec, LookupResult
from kvtier.config import AttentionKind
from kvtier.connector.common import NO_DEVICE_BLOCK
from kvtier.cpu.common import CPULoadStoreSpec

if TYPE_CHECKING:
    from kvtier.base import OffloadingManager, OffloadKey
    from kvtier.config import OffloadingConfig
    from kvtier.connector.common import ScheduledRequest
    from kvtier.connector.request_state import RequestGroupState, RequestOffloadState

__all__ = [
    "DeviceRange",
    "Geometry",
    "GroupGeometry",
    "Matcher",
    "Offer",
    "device_range",
    "prepare_store",
    "take_offers",
]

logger = logging.getLogger(__name__)


# --- tokens, device blocks and chunks -----------------------------------------------------------


@dataclass(frozen=True, slots=True)
class GroupGeometry:
    """The sizes of one KV-cache group. Positions count from the start of the prompt."""

    group_idx: int
    """The number of the group in keys."""
    kind: AttentionKind
    tokens_per_block: int
    blocks_per_chunk: int
    hashes_per_chunk: int
    window_tokens: int | None

    @property
    def tokens_per_chunk(self) -> int:
        """Tokens of one offloaded block."""
        return self.tokens_per_block * self.blocks_per_chunk

    @property
    def is_prefix(self) -> bool:
        """True if a token needs the cache of all earlier tokens, so that a match ends at the first
        missing chunk."""
        return self.kind is AttentionKind.FULL

    def warn_if_rarely_stored(self) -> None:
        """Warn if chunks of this group can rarely be stored: storing a chunk needs all of its
        blocks on the device at the same time."""
        kept = 1 if self.kind is AttentionKind.STATE_SPACE else self.window_tokens
        if kept is not None and self.blocks_per_chunk > 1 and kept < self.tokens_per_chunk:
            logger.warning(
                "Group %d keeps %d tokens on the device, but an offloaded block has %d: most of "
                "its blocks cannot be stored, and then nothing can be loaded. Set "
                "blocks_per_chunk to a smaller number, such as 1.",
                self.group_idx,
                kept,
                self.tokens_per_chunk,
            )

    def first_needed_token(self, end: int) -> int:
        """The first token before `end` whose cache is needed to compute the token at `end`."""
        if self.kind is AttentionKind.FULL:
            return 0
        if self.kind is AttentionKind.STATE_SPACE:
            return max(0, end - 1)
        assert self.window_tokens is not None
        if self.kind is AttentionKind.CHUNKED_LOCAL:
            return end // self.window_tokens * self.window_tokens
        return max(0, end - self.window_tokens + 1)


class Geometry:
    """The sizes of all groups of an engine."""

    def __init__(self, config: OffloadingConfig) -> None:
        """Raises `ValueError` for groups that cannot be offloaded."""
        bpc, tokens_per_hash = config.cache.blocks_per_chunk, config.cache.tokens_per_hash
        self.groups = tuple(
            GroupGeometry(
                group_idx=group.group_id,
                kind=group.kind,
                tokens_per_block=group.tokens_per_block,
                blocks_per_chunk=bpc,
                hashes_per_chunk=group.tokens_per_block * bpc // tokens_per_hash,
                window_tokens=group.window_tokens,
            )
            for group in config.groups
        )
        for group in self.groups:
            if group.kind is AttentionKind.UNKNOWN:
                raise ValueError(
                    f"the attention kind of group {group.group_idx} is unknown: an engine has to "
                    "say which of a request's blocks it needs"
                )
            group.warn_if_rarely_stored()
            if group.tokens_per_chunk % tokens_per_hash:
                raise ValueError(
                    f"an offloaded block of group {group.group_idx} has {group.tokens_per_chunk} "
                    f"tokens, not a multiple of tokens_per_hash={tokens_per_hash}: choose "
                    "another blocks_per_chunk"
                )
        self.alignment = lcm(*(group.tokens_per_chunk for group in self.groups))
        """A hit ends at a multiple of this number of tokens: there, chunks of all groups end."""
        self.is_one_prefix = len(self.groups) == 1 and self.groups[0].is_prefix
        """True if there is one group, whose chunks are matched from the start of a prompt."""


# --- loading ------------------------------------------------------------------------------------


class DeviceRange(NamedTuple):
    """The device blocks of one group that a load fills, and the keys it fills them from."""

    first_block: int
    end_block: int
    keys: list[OffloadKey]


def device_range(state: RequestGroupState, start: int, end: int) -> DeviceRange:
    """The blocks of a group to load, so that a request that has `start` tokens on the device can
    compute the token at position `end`."""
    geometry = state.geometry
    first_token = max(start, geometry.first_needed_token(end))
    first_block = first_token // geometry.tokens_per_block
    end_block = -(-end // geometry.tokens_per_block)
    first_chunk = first_block // geometry.blocks_per_chunk
    end_chunk = -(-end_block // geometry.blocks_per_chunk)
    return DeviceRange(first_block, end_block, state.keys[first_chunk:end_chunk])


class Match(NamedTuple):
    """How much of a request can be loaded."""

    end: int
    """Number of tokens, from the start of the request, that the device can have after a load. If
    the device has as many already, there is nothing to load."""
    is_pending: bool
    """True if the manager does not know yet whether it has some of these blocks, or if some of them
    are not readable yet."""


class Matcher:
    """Asks the manager how much of a request can be loaded."""

    def __init__(self, manager: OffloadingManager, geometry: Geometry) -> None:
        self._manager = manager
        self._alignment = geometry.alignment

    def match(self, state: RequestOffloadState, start: int, limit: int) -> Match:
        """The longest match that begins at `start` tokens and ends at `limit` at the latest.

        Groups that need all earlier tokens come first, because no other group can match beyond
        their end. A group with a window may shorten the match. Then all other groups have to match
        up to the new end.
        """
        prefixes = [group for group in state.group_states if group.geometry.is_prefix]
        end, is_pending = self._match_prefixes(prefixes, state, start, self._aligned(limit))
        windowed = [group for group in state.group_states if not group.geometry.is_prefix]
        while end > start:
            before, windows_pending = end, False
            for group in windowed:
                matched = self._match_window(group, state, start, end)
                end = self._aligned(matched.end)
                windows_pending = windows_pending or matched.is_pending
                if end <= start:
                    return Match(end, is_pending=False)
            if end == before:
                return Match(end, is_pending or windows_pending)
            if is_pending:
                # The pending blocks may be after the new end, so ask again up to the new end.
                end, is_pending = self._match_prefixes(prefixes, state, start, end)
        return Match(end, is_pending)

    def _match_prefixes(
        self, groups: list[RequestGroupState], state: RequestOffloadState, start: int, end: int
    ) -> Match:
        """The longest match up to `end` in all of these groups, which need all earlier tokens."""
        is_pending = False
        for group in groups:
            if end > start:
                matched = self._match_prefix(group, state, start, end)
                end = self._aligned(matched.end)
                is_pending = is_pending or matched.is_pending
        return Match(end, is_pending)

    def blocks_to_match(
        self,
        state: RequestOffloadState,
        count_cached: Callable[[], int],
        update_keys: Callable[[RequestOffloadState], None],
    ) -> Sequence[OffloadKey]:
        """The blocks that `match` will look up for a waiting request with a single group.
        `count_cached`: returns the number of its tokens on the device. `update_keys`: makes keys
        for its blocks."""
        update_keys(state)
        (group,) = state.group_states
        start, end = count_cached(), self._aligned(state.req.num_tokens - 1)
        per_chunk = group.geometry.tokens_per_chunk
        return group.keys[start // per_chunk : end // per_chunk]

    def _aligned(self, tokens: int) -> int:
        return tokens // self._alignment * self._alignment

    def _match_prefix(
        self, group: RequestGroupState, state: RequestOffloadState, start: int, end: int
    ) -> Match:
        per_chunk = group.geometry.tokens_per_chunk
        first = start // per_chunk
        keys = group.keys[first : end // per_chunk]
        num_hits, is_final = self._manager.lookup_prefix(keys, state.req_context)
        return Match((first + num_hits) * per_chunk, not is_final)

    def _match_window(
        self, group: RequestGroupState, state: RequestOffloadState, start: int, end: int
    ) -> Match:
        """The longest match up to `end` whose whole window can be loaded, searched backwards."""
        per_chunk = group.geometry.tokens_per_chunk
        is_pending = False
        while end > start:
            needed = max(start, group.geometry.first_needed_token(end))
            for chunk in range(end // per_chunk - 1, needed // per_chunk - 1, -1):
                result = self._manager.lookup(group.keys[chunk], state.req_context)
                if result is LookupResult.MISS:
                    # No window that includes this block can be loaded: try windows that end before
                    # it. The blocks found pending so far are after it, so they no longer count.
                    end, is_pending = self._aligned(chunk * per_chunk), False
                    break
                is_pending = is_pending or result is not LookupResult.HIT
            else:
                return Match(end, is_pending)
        return Match(0, is_pending=False)


# --- storing ------------------------------------------------------------------------------------


class Offer(NamedTuple):
    """A chunk that is complete on the device."""

    end: int
    """Where it ends in the prompt, in tokens."""
    place: int
    """Index of its group among the engine's groups."""
    key: OffloadKey
    blocks: list[int]
    """Its device blocks."""


class Store(NamedTuple):
    """A copy from the device to host memory."""

    keys: list[OffloadKey]
    device: GPULoadStoreSpec
    offloaded: CPULoadStoreSpec
    device_blocks: list[int]


def take_offers(
    state: RequestOffloadState, scheduled: ScheduledRequest, limit: int
) -> tuple[list[Offer], list[int]]:
    """The chunks that have become complete since the last offer, in prompt order, and for each
    group the number of chunks that need no further offer.

    Leaves out chunks that were loaded, and chunks that have a block outside the window.
    """
    offers, num_offered = [], []
    tokens = min(scheduled.num_computed_tokens, limit)
    for place, group in enumerate(state.group_states):
        geometry = group.geometry
        bpc = geometry.blocks_per_chunk
        table = scheduled.block_ids[place]
        num_complete = max(
            group.num_offered, min(tokens // geometry.tokens_per_chunk, len(group.keys))
        )
        for chunk in range(group.num_offered, num_complete):
            if chunk in group.loaded:
                continue
            blocks = list(table[chunk * bpc : (chunk + 1) * bpc])
            if len(blocks) == bpc and NO_DEVICE_BLOCK not in blocks:
                end = (chunk + 1) * geometry.tokens_per_chunk
                offers.append(Offer(end, place, group.keys[chunk], blocks))
        num_offered.append(num_complete)
    # Sort by position, not by group: in every group, the start of the prompt is worth the most.
    offers.sort(key=lambda offer: (offer.end, offer.place))
    return offers, num_offered


def prepare_store(
    manager: OffloadingManager, offers: list[Offer], state: RequestOffloadState
) -> Store | None:
    """Ask the manager for slots. Returns None if it cannot store now, and a store without keys if
    no block needs to be copied."""
    output = manager.prepare_store([offer.key for offer in offers], state.req_context)
    if output is None:
        return None
    assert isinstance(output.store_spec, BlockIDsLoadStoreSpec)
    slots = dict(zip(output.keys_to_store, output.store_spec.block_ids.tolist(), strict=True))
    # A transfer lists its blocks group by group.
    chosen = sorted(
        (offer for offer in offers if offer.key in slots), key=lambda offer: offer.place
    )
    bpc = state.config.groups[0].blocks_per_chunk
    num_groups = len(state.group_states)
    sizes = [0] * num_groups
    for offer in chosen:
        sizes[offer.place] += bpc
    blocks = [block for offer in chosen for block in offer.blocks]
    return Store(
        keys=[offer.key for offer in chosen],
        device=GPULoadStoreSpec(blocks, sizes, [0] * num_groups),
        offloaded=CPULoadStoreSpec([slots[offer.key] for offer in chosen]),
        device_blocks=blocks,
    )
