"""The addresses of pages, on the device and in the host memory that the ranks share.

A canonical tensor is one device cache, seen as an array (device blocks, bytes). A page is the part
of one device block that is in one canonical tensor. A slot has a *place* for each of the device
blocks that it combines. A rank's *cell* is its part of a slot.

This module only computes addresses: it makes no CUDA call and accesses no page. Everything that all
blocks of a group have in common is computed once. A job then consists of little more than the
numbers of its blocks and slots, from which the kernel computes the addresses of pages.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvtier.base import CanonicalKVCacheRef, CanonicalKVCaches, CanonicalKVCacheTensor
from kvtier.cpu.worker import GroupTransfer, require_pages, require_refs

__all__ = [
    "ALIGNMENT",
    "Columns",
    "DeviceTensor",
    "Grid",
    "HostCell",
    "PageTable",
    "Pages",
    "device_of",
    "device_tensors",
]

Addresses = NDArray[np.uint64]

ALIGNMENT = 16
"""Bytes that a thread of the kernel reads or writes at once."""
_RUN_SHARE = 0.75
"""Cells are copied as a whole only if at least this share of their bytes is data of the group."""
_SIZES_KEPT = 1 << 10
"""Largest number of blocks for which an array of page sizes is kept."""


class DeviceTensor(NamedTuple):
    """A canonical tensor in device memory."""

    address: int
    num_blocks: int
    stride_bytes: int
    """Bytes from the start of one block to the start of the next."""
    page_bytes: int


def device_of(kv_caches: CanonicalKVCaches) -> Any:
    """The device of all tensors. Raises `ValueError` if they are on several."""
    devices = {canonical.tensor.device for canonical in kv_caches.tensors}
    if len(devices) != 1:
        names = ", ".join(sorted(map(str, devices)))
        raise ValueError(f"the caches are on {names}: make one worker for each device")
    return devices.pop()


def device_tensors(kv_caches: CanonicalKVCaches) -> list[DeviceTensor]:
    """The addresses and strides of all tensors. Raises `ValueError` if a tensor does not consist of
    pages or a group refers to a missing one."""
    require_refs(kv_caches)
    return [_device_tensor(canonical) for canonical in kv_caches.tensors]


def _device_tensor(canonical: CanonicalKVCacheTensor) -> DeviceTensor:
    tensor, page = canonical.tensor, canonical.page_size_bytes
    item = tensor.element_size()
    row_bytes = tensor.shape[-1] * item if tensor.ndim else 0
    strides = tuple(stride * item for stride in tensor.stride())
    require_pages((*tensor.shape[:-1], row_bytes), strides, item, page)
    return DeviceTensor(tensor.data_ptr(), tensor.shape[0], strides[0], page)


class HostCell(NamedTuple):
    """A rank's part of every slot."""

    address: int
    """Address of the cell in the first slot."""
    row_bytes: int
    """Bytes from the start of one slot to the start of the next."""
    num_slots: int
    blocks_per_chunk: int


class Pages(NamedTuple):
    """Page i has `sizes[i]` bytes at `device[i]` and at `host[i]`."""

    device: Addresses
    host: Addresses
    sizes: Addresses


@dataclass(frozen=True, eq=False)
class Columns:
    """The pages of a block, one column each. The same for all blocks of a group."""

    table: Addresses
    """Five rows: address in the first block; step from one block to the next; offset in the cell;
    step in the cell from one place to the next; size."""
    is_aligned: bool
    """True if all addresses and sizes are multiples of `ALIGNMENT`."""
    run_bytes: int = 0
    """Bytes of all pages in a cell, if cells may be copied as a whole: the number is a multiple of
    `ALIGNMENT`, and at least `_RUN_SHARE` of the bytes is the group's data. Otherwise 0."""

    def __len__(self) -> int:
        return len(self.table[0])

    def sizes(self, num_blocks: int) -> Addresses:
        """The sizes of the pages of `num_blocks` blocks."""
        if num_blocks <= _SIZES_KEPT:
            return self._sizes[: num_blocks * len(self)]
        return np.tile(self.table[4], num_blocks)

    @cached_property
    def _sizes(self) -> Addresses:
        return np.tile(self.table[4], _SIZES_KEPT)

    @property
    def are_zeros(self) -> bool:
        """True if the pages of all blocks are the same memory: the `zeros` of `PageTable`."""
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
    """Pages that a job copies: for each of `blocks`, one page in each of `columns`."""

    columns: Columns
    cell: HostCell
    blocks: NDArray[np.int64]
    slots: NDArray[np.int64]
    """The slot of each block."""
    first_place: int
    """Place of the first block in its slot. Later blocks take the places after it, and continue at
    place 0 of the next slot."""
    has_whole_slots: bool

    @property
    def num_pages(self) -> int:
        return len(self.blocks) * len(self.columns)

    @property
    def num_bytes(self) -> int:
        return len(self.blocks) * self.columns.bytes_per_block

    @property
    def run_bytes(self) -> int:
        """`Columns.run_bytes` if the grid has whole slots; otherwise 0. A store that copies whole
        cells also writes bytes that are not the group's data. Later grids of the same job
        overwrite these with zeros."""
        return self.columns.run_bytes if self.has_whole_slots else 0

    def entries(self) -> NDArray[np.uint32]:
        """Pairs of block and slot, in the kernel's format."""
        pairs = np.empty((len(self.blocks), 2), np.uint32)
        pairs[:, 0] = self.blocks
        pairs[:, 1] = self.slots
        return pairs

    def slot_addresses(self) -> Addresses:
        """The address of this rank's cell in each slot, once per slot. Only for whole slots."""
        return self._cells(self.slots[:: self.cell.blocks_per_chunk]).view(np.uint64)

    def pages(self, start: int, stop: int) -> Pages:
        """The pages of the blocks from index `start` to `stop`, block by block."""
        # Viewed as signed, like block and slot numbers, so that numpy converts nothing. Addresses
        # fit in 63 bits.
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
    """Parts of a stored slot without data: padding, and tensors of other groups."""
    unused_places: Columns
    """The data pages of places that a store leaves out, to be filled with zeros."""
    num_blocks: int
    """Number of device blocks in the smallest of its tensors."""


class PageTable:
    """Turns transfers into grids of pages.

    A cell holds pages of every canonical tensor, one tensor after the other; each tensor has one
    page for each device block of the slot. After a store, its slots hold the pages of that store
    and zeros. The zeros are copied from `zeros`, the address of a buffer on the device that is all
    zeros and at least as large as the largest page.
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
        """The columns of all grids that a job may have."""
        return [
            columns
            for group in self._groups
            for columns in (group.data, group.unused_places, *group.zeros)
        ]

    @cached_property
    def most_pages(self) -> int:
        """The largest number of data pages that a block of any group has."""
        return max((len(group.data) for group in self._groups), default=0)

    def num_bytes(self, group_sizes: Sequence[int]) -> int:
        """Number of data bytes in a job with `group_sizes[i]` blocks of group i."""
        return sum(
            size * group.data.bytes_per_block
            for size, group in zip(group_sizes, self._groups, strict=True)
        )

    def grids(self, transfers: Sequence[GroupTransfer], *, is_store: bool) -> list[Grid]:
        """The pages to copy, in grids, of which none is empty."""
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
                # With a step of 0, every block number gives the address of `zeros`.
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
    for ref in refs:  # layers that share a tensor share its pages, which are copied once
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
    # Whole cells go through a buffer on the device, where they are adjacent: align their size.
    is_run = run_bytes % ALIGNMENT == 0 and sum(data_bytes.values()) >= _RUN_SHARE * sum(pages)
    return _Group(
        data=columns(data, run_bytes if is_run else 0),
        zeros=[columns(rows) for rows in (padding, of_others) if rows],
        unused_places=columns(left_out),
        num_blocks=min((tensors[t].num_blocks for t in used), default=0),
    )
