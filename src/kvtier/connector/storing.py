"""Which blocks of a step are offered for storing, and what becomes of them."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from kvtier.base import BlockIDsLoadStoreSpec, GPULoadStoreSpec
from kvtier.connector.common import NO_DEVICE_BLOCK
from kvtier.cpu.common import CPULoadStoreSpec

if TYPE_CHECKING:
    from kvtier.base import OffloadingManager, OffloadKey
    from kvtier.connector.common import ScheduledRequest
    from kvtier.connector.request_state import RequestOffloadState


class Offer(NamedTuple):
    """A chunk that is complete on the device."""

    end: int
    """Where it ends in the prompt, in tokens."""
    place: int
    """Of its group, among the engine's groups."""
    key: OffloadKey
    blocks: list[int]


class Store(NamedTuple):
    """What is to be copied."""

    keys: list[OffloadKey]
    device: GPULoadStoreSpec
    offloaded: CPULoadStoreSpec
    device_blocks: list[int]


def take_offers(
    state: RequestOffloadState, scheduled: ScheduledRequest, limit: int
) -> tuple[list[Offer], list[int]]:
    """The chunks that have become complete since the last offer, in prompt order, and for each
    group how many chunks are then dealt with. Chunks that were loaded, and those of which a block
    has left the window, are passed over."""
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
    # Groups side by side: the head of the prompt is worth the most in all of them.
    offers.sort(key=lambda offer: (offer.end, offer.place))
    return offers, num_offered


def prepare_store(
    manager: OffloadingManager, offers: list[Offer], state: RequestOffloadState
) -> Store | None:
    """Ask the manager for room. None: not now. Keys may be empty: nothing to be copied."""
    output = manager.prepare_store([offer.key for offer in offers], state.req_context)
    if output is None:
        return None
    assert isinstance(output.store_spec, BlockIDsLoadStoreSpec)
    slots = dict(zip(output.keys_to_store, output.store_spec.block_ids.tolist(), strict=True))
    # A transfer has its blocks ordered by group.
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
