"""Where every page is on both sides, as addresses.

Pure arithmetic on numbers: no CUDA call, and no memory is touched. What all blocks of a group have
in common is written down once, so that a job is hardly more than the numbers of its blocks and
slots: a kernel finds the pages itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvtier.base import CanonicalKVCacheRef
from kvtier.cpu.transfer_plan import GroupTransfer

__all__ = ["ALIGNMENT", "Columns", "DeviceTensor", "Grid", "HostCell", "PageTable", "Pages"]

Addresses = NDArray[np.uint64]

ALIGNMENT = 16
"""Of what a thread of the device reads or writes at once."""
_RUN_SHARE = 0.75
"""So much of a slot must be pages to be copied, or it is not worth copying as a whole."""
_SIZES_KEPT = 1 << 10
"""For so many blocks, the sizes of their pages are kept ready."""


class DeviceTensor(NamedTuple):
    """A canonical tensor in device memory."""

    address: int
    num_blocks: int
    stride_bytes: int
    """From one block to the next."""
    page_bytes: int


class HostCell(NamedTuple):
    """A rank's part of every slot."""

    address: int
    """Of the cell in the first slot."""
    row_bytes: int
    """From one slot to the next."""
    num_slots: int
    blocks_per_chunk: int


class Pages(NamedTuple):
    """Entry i is `sizes[i]` bytes from the device's side to or from the host's."""

    device: Addresses
    host: Addresses
    sizes: Addresses


@dataclass(frozen=True, eq=False)
class Columns:
    """The pages of a block: the same for all blocks of a group."""

    table: Addresses
    """Rows: their addresses in the first block, steps from one block to the next, offsets in the
    cell, steps from one place of a slot to the next, and sizes."""
    is_aligned: bool
    """Whether all addresses and sizes are multiples of `ALIGNMENT`."""
    run_bytes: int = 0
    """Of a rank's part of a slot, if they are most of it; otherwise 0."""

    def __len__(self) -> int:
        return len(self.table[0])

    def sizes(self, num_blocks: int) -> Addresses:
        """Of the pages of so many blocks."""
        if num_blocks <= _SIZES_KEPT:
            return self._sizes[: num_blocks * len(self)]
        return np.tile(self.table[4], num_blocks)

    @cached_property
    def _sizes(self) -> Addresses:
        return np.tile(self.table[4], _SIZES_KEPT)

    @property
    def are_zeros(self) -> bool:
        """Whether they are all the same memory, whatever the block."""
        return not self.table[1].any()

    @cached_property
    def largest(self) -> int:
        return int(self.table[4].max(initial=0))

    @cached_property
    def bytes_per_block(self) -> int:
        return int(self.table[4].sum())

    @property
    def page_bytes(self) -> float:
        """Mean size of a page."""
        return self.bytes_per_block / len(self)


class Grid(NamedTuple):
    """What a job copies: the pages of columns, of all of these blocks."""

    columns: Columns
    cell: HostCell
    blocks: NDArray[np.int64]
    slots: NDArray[np.int64]
    """The slot of each block."""
    first_place: int
    """That of the first block in its slot. Others have the next, and after a slot's last the first
    of the next slot."""
    has_whole_slots: bool

    @property
    def num_pages(self) -> int:
        return len(self.blocks) * len(self.columns)

    @property
    def num_bytes(self) -> int:
        return len(self.blocks) * self.columns.bytes_per_block

    @property
    def run_bytes(self) -> int:
        """Of a rank's part of a slot, if the pages are most of all those parts; otherwise 0. To
        copy such parts as a whole is no waste. In a store, what else they hold is zeroed by the
        grids that follow."""
        return self.columns.run_bytes if self.has_whole_slots else 0

    def entries(self) -> NDArray[np.uint32]:
        """Blocks and slots in pairs, as the kernel has them."""
        pairs = np.empty((len(self.blocks), 2), np.uint32)
        pairs[:, 0] = self.blocks
        pairs[:, 1] = self.slots
        return pairs

    def slot_addresses(self) -> Addresses:
        """Of its slots, each once. Only if they are whole."""
        return self._cells(self.slots[:: self.cell.blocks_per_chunk]).view(np.uint64)

    def pages(self, start: int, stop: int) -> Pages:
        """Of the blocks from here to there, a block's one after the other."""
        # Numbers without signs would have to be converted first, and addresses are small enough.
        device_bases, device_steps, offsets, steps, _ = self.columns.table.view(np.int64)
        blocks, cells = self.blocks[start:stop, None], self._cells(self.slots[start:stop])
        device = blocks * device_steps
        device += device_bases
        host = cells[:, None] + offsets
        chunk = self.cell.blocks_per_chunk
        if chunk > 1:
            places = np.arange(self.first_place + start, self.first_place + stop) % chunk
            host += places[:, None] * steps
        return Pages(
            device.reshape(-1).view(np.uint64),
            host.reshape(-1).view(np.uint64),
            self.columns.sizes(stop - start),
        )

    def _cells(self, slots: NDArray[np.int64]) -> NDArray[np.int64]:
        cells = slots * self.cell.row_bytes
        cells += self.cell.address
        return cells


@dataclass(frozen=True, slots=True)
class _Group:
    data: Columns
    zeros: list[Columns]
    """For what is not data in a slot that is stored: paddings, and tensors of others."""
    unused_places: Columns
    """For places that a store leaves out."""
    num_blocks: int
    """Device blocks that every one of its tensors has."""


class PageTable:
    """Turns transfers into grids of pages.

    A cell holds the canonical tensors one after the other; of each, the pages of the slot's device
    blocks. After a store its slots hold the pages of that store and zeros: these are copied as
    well, from `zeros`, an address on the device where at least the largest page's bytes are zero.
    """

    def __init__(
        self,
        tensors: Sequence[DeviceTensor],
        group_refs: Sequence[Sequence[CanonicalKVCacheRef]],
        cell: HostCell,
        zeros: int,
    ) -> None:
        self._cell = cell
        self._groups = [_group(refs, tensors, cell, zeros) for refs in group_refs]
        self.num_blocks_of_group = [group.num_blocks for group in self._groups]

    @property
    def num_slots(self) -> int:
        return self._cell.num_slots

    @property
    def blocks_per_chunk(self) -> int:
        return self._cell.blocks_per_chunk

    @property
    def columns(self) -> list[Columns]:
        """All that a grid may have."""
        return [
            columns
            for group in self._groups
            for columns in (group.data, group.unused_places, *group.zeros)
        ]

    @cached_property
    def most_pages(self) -> int:
        """Of a block's data, in whatever group."""
        return max((len(group.data) for group in self._groups), default=0)

    def num_bytes(self, group_sizes: Sequence[int]) -> int:
        """Of the caches' data in so many blocks of each group."""
        return sum(
            size * group.data.bytes_per_block
            for size, group in zip(group_sizes, self._groups, strict=True)
        )

    def grids(self, transfers: Sequence[GroupTransfer], *, is_store: bool) -> list[Grid]:
        """All that is to be copied, none of it empty."""
        cell, grids = self._cell, []
        for transfer in transfers:
            group = self._groups[transfer.group_idx]
            first_place = transfer.first_place
            num_places = len(transfer.slots) * cell.blocks_per_chunk
            grids.append(
                Grid(
                    group.data,
                    cell,
                    transfer.blocks,
                    transfer.block_slots,
                    first_place,
                    len(transfer.blocks) == num_places,
                )
            )
            if not is_store:
                continue
            if first_place:
                slots = np.full(first_place, transfer.slots[0])
                # From `zeros`, whatever the number of the block.
                grids.append(Grid(group.unused_places, cell, slots, slots, 0, False))
            if group.zeros:
                slots = np.repeat(transfer.slots, cell.blocks_per_chunk)
                grids += [Grid(columns, cell, slots, slots, 0, True) for columns in group.zeros]
        return grids


def _group(
    refs: Sequence[CanonicalKVCacheRef],
    tensors: Sequence[DeviceTensor],
    cell: HostCell,
    zeros: int,
) -> _Group:
    data_bytes: dict[int, int] = {}
    for ref in refs:  # layers that share a tensor share its pages: they are copied once
        data_bytes[ref.tensor_idx] = max(ref.page_size_bytes, data_bytes.get(ref.tensor_idx, 0))
    used = list(data_bytes)
    unused = [t for t in range(len(tensors)) if t not in data_bytes]
    pages = [tensor.page_bytes for tensor in tensors]
    offsets = np.cumsum([0, *(page * cell.blocks_per_chunk for page in pages)]).tolist()
    padded = [t for t in used if data_bytes[t] < pages[t]]

    def columns(rows: Sequence[tuple[int, int, int, int, int]], run_bytes: int = 0) -> Columns:
        table = np.array(rows, np.uint64).reshape(-1, 5).T.copy()
        numbers = (cell.address, cell.row_bytes, *table.ravel().tolist())
        return Columns(table, not any(number % ALIGNMENT for number in numbers), run_bytes)

    data = [
        (tensors[t].address, tensors[t].stride_bytes, offsets[t], pages[t], data_bytes[t])
        for t in used
    ]
    padding = [
        (zeros, 0, offsets[t] + data_bytes[t], pages[t], pages[t] - data_bytes[t]) for t in padded
    ]
    of_others = [(zeros, 0, offsets[t], pages[t], pages[t]) for t in unused]
    left_out = [(zeros, 0, offsets[t], pages[t], data_bytes[t]) for t in used]
    run_bytes = sum(pages) * cell.blocks_per_chunk
    # In a buffer, such parts lie one after the other.
    is_run = run_bytes % ALIGNMENT == 0 and sum(data_bytes.values()) >= _RUN_SHARE * sum(pages)
    return _Group(
        data=columns(data, run_bytes if is_run else 0),
        zeros=[columns(rows) for rows in (padding, of_others) if rows],
        unused_places=columns(left_out),
        num_blocks=min((tensors[t].num_blocks for t in used), default=0),
    )
