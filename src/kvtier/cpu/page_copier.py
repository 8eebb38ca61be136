"""Copies pages between caches in host memory and one rank's cells in the shared region."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvtier.base import CanonicalKVCacheRef, CanonicalKVCaches
from kvtier.cpu.cell_size import require_cell_fits
from kvtier.cpu.device_pages import device_pages
from kvtier.cpu.shared_offload_region import SharedOffloadRegion
from kvtier.cpu.transfer_plan import GroupTransfer, Piece

__all__ = ["PageCopier"]

# Runs of this many bytes are worth a call each. Shorter ones are gathered and scattered, many in
# one call, through a temporary that stays in the processor's cache.
_RUN_BYTES = 1 << 14
_GATHERED_BYTES = 1 << 18


class PageCopier:
    """Knows where every page is on both sides.

    A cell holds the canonical tensors one after the other; of each, the pages of the slot's
    device blocks. A group uses some of the tensors, and of their pages perhaps only a part.

    Any thread, several at a time as long as they are given different slots and blocks. The GIL
    is free while bytes are copied.
    """

    def __init__(
        self, kv_caches: CanonicalKVCaches, region: SharedOffloadRegion, blocks_per_chunk: int
    ) -> None:
        device = device_pages(kv_caches)
        # Before there are views, which would outlive this.
        require_cell_fits([pages.shape[1] for pages in device], region, blocks_per_chunk)
        self.blocks_per_chunk = blocks_per_chunk
        self.num_slots = region.num_blocks
        host = [
            _as_places(region.create_next_worker_view(pages.shape[1] * blocks_per_chunk), pages)
            for pages in device
        ]
        self._groups = [_group(refs, device, host) for refs in kv_caches.group_data_refs]
        self.num_blocks_of_group = [group.num_blocks for group in self._groups]

    def store(self, transfer: GroupTransfer) -> int:
        """Copy device pages into slots and zero what is left of these; bytes copied."""
        group = self._groups[transfer.group_idx]
        for tensor in group.tensors:
            device, host, pieces = tensor.pieces(transfer)
            for piece in pieces:
                host[piece.places] = device[piece.blocks]
            tensor.zero_rest(transfer)
        for places in group.unused:
            places[transfer.slots] = 0
        return len(transfer.blocks) * group.bytes_per_block

    def load(self, transfer: GroupTransfer) -> int:
        """Copy pages of slots to the device; bytes copied."""
        group = self._groups[transfer.group_idx]
        for tensor in group.tensors:
            device, host, pieces = tensor.pieces(transfer)
            for piece in pieces:
                device[piece.blocks] = host[piece.places]
        return len(transfer.blocks) * group.bytes_per_block


@dataclass(frozen=True, slots=True)
class _GroupTensor:
    """One canonical tensor as one group uses it: the first `data_bytes` of every page."""

    device: NDArray[np.uint8]
    """(num_blocks, page bytes)"""
    host: NDArray[np.uint8]
    """(num_slots, blocks_per_chunk, page bytes)"""
    data_bytes: int

    def pieces(self, transfer: GroupTransfer) -> tuple[NDArray[Any], NDArray[Any], Iterable[Piece]]:
        """The two sides, and which of their elements go together."""
        device, host = self.device[:, : self.data_bytes], self.host[:, :, : self.data_bytes]
        if transfer.pages_per_run * self.data_bytes >= _RUN_BYTES:
            return device, host, transfer.runs
        # One element per page: numpy copies elements faster than rows.
        page = np.dtype((np.void, self.data_bytes))
        portion = max(1, _GATHERED_BYTES // self.data_bytes)
        return device.view(page)[:, 0], host.view(page)[:, :, 0], transfer.portions(portion)

    def zero_rest(self, transfer: GroupTransfer) -> None:
        """Zero what the transfer left alone in its slots: padding, and places before the first."""
        if self.data_bytes < self.host.shape[2]:
            self.host[transfer.slots, :, self.data_bytes :] = 0
        self.host[transfer.slots[0], : transfer.first_place] = 0


@dataclass(frozen=True, slots=True)
class _Group:
    tensors: list[_GroupTensor]
    unused: list[NDArray[np.uint8]]
    """The host side of all other tensors."""
    num_blocks: int
    """Device blocks that every one of its tensors has."""
    bytes_per_block: int


def _group(
    refs: Sequence[CanonicalKVCacheRef],
    device: Sequence[NDArray[np.uint8]],
    host: Sequence[NDArray[np.uint8]],
) -> _Group:
    data_bytes: dict[int, int] = {}
    for ref in refs:  # layers that share a tensor share its pages: they are copied once
        data_bytes[ref.tensor_idx] = max(ref.page_size_bytes, data_bytes.get(ref.tensor_idx, 0))
    return _Group(
        [_GroupTensor(device[t], host[t], count) for t, count in data_bytes.items()],
        [places for t, places in enumerate(host) if t not in data_bytes],
        min((len(device[t]) for t in data_bytes), default=0),
        sum(data_bytes.values()),
    )


def _as_places(cell_part: NDArray[np.uint8], pages: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """A rank's view (num_slots, bytes) as (num_slots, places, page bytes), without a copy."""
    return cell_part.reshape(len(cell_part), -1, pages.shape[1])
