"""Where every page is on both sides, as addresses.

Pure arithmetic on numbers: no CUDA call, and no memory is touched.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvtier.base import CanonicalKVCacheRef
from kvtier.cpu.transfer_plan import GroupTransfer

__all__ = ["ALIGNMENT", "DeviceTensor", "HostCell", "PageTable", "Pages", "Run"]

Addresses = NDArray[np.uint64]

ALIGNMENT = 16
"""Of what a thread of the device reads or writes at once."""
_FIRST_PART_PAGES = 1 << 11
_PART_PAGES = 1 << 14
"""Of a large job. The first part is small, so that the device has something to do soon; it is busy
with each for longer than the next one takes to be written down."""
_SIZES_KEPT = 1 << 12
"""For jobs of so many blocks, the sizes of their pages are kept ready."""


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


class Run(NamedTuple):
    """Pages that lie together in a slot, one after the other, all of one size."""

    num_pages: int
    num_bytes: int


class Pages(NamedTuple):
    """What a job copies: entry i is `sizes[i]` bytes from the device side to or from the host's."""

    device: Addresses
    host: Addresses
    sizes: Addresses
    num_bytes: int
    """Of the caches' data; zeros do not count."""
    page_bytes: float
    """Mean size of what is not zeros."""
    is_aligned: bool
    """Whether all addresses and sizes are multiples of `ALIGNMENT`."""
    run: Run | None
    """If all entries are in such runs: each run's follow each other. None otherwise."""


@dataclass(frozen=True, slots=True)
class _Group:
    """Of the tensors it uses, in columns."""

    is_aligned: bool
    run: Run | None
    """If all pages of a slot lie together."""

    device_bases: Addresses
    device_strides: Addresses
    host_bases: Addresses
    page_bytes: Addresses
    data_bytes: Addresses
    padded: NDArray[np.bool_]
    """Which of them have pages that are not all data."""
    unused_bases: Addresses
    """Of all other tensors: the host side,"""
    unused_page_bytes: Addresses
    has_rest: bool
    """Whether there is padding or another tensor."""
    num_blocks: int
    """Device blocks that every one of its tensors has."""
    bytes_per_block: int
    sizes: Addresses
    """`data_bytes` over and over."""

    def sizes_of(self, num_blocks: int, together: int) -> Addresses:
        """Of the pages of so many blocks, in the order of `_cross`."""
        if together > 1:
            return np.tile(np.repeat(self.data_bytes, together), num_blocks // together)
        if num_blocks <= _SIZES_KEPT:
            return self.sizes[: num_blocks * len(self.data_bytes)]
        return np.tile(self.data_bytes, num_blocks)


class PageTable:
    """Turns transfers into lists of pages.

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
        self._row_bytes = np.uint64(cell.row_bytes)
        self._zeros = np.uint64(zeros)
        chunk = cell.blocks_per_chunk
        starts = np.cumsum([0] + [tensor.page_bytes * chunk for tensor in tensors])
        bases = [cell.address + int(start) for start in starts[:-1]]
        pages = [tensor.page_bytes for tensor in tensors]
        is_aligned = not any(
            number % ALIGNMENT for number in (cell.address, cell.row_bytes, zeros, *pages)
        )
        self._groups = [_group(refs, tensors, bases, is_aligned, chunk) for refs in group_refs]
        self.num_blocks_of_group = [group.num_blocks for group in self._groups]
        self._places = np.arange(chunk)
        self.runs = {group.run for group in self._groups if group.run is not None}
        """Of the groups whose pages lie together in a slot."""

    @property
    def num_slots(self) -> int:
        return self._cell.num_slots

    @property
    def blocks_per_chunk(self) -> int:
        return self._cell.blocks_per_chunk

    def num_bytes(self, transfers: Sequence[GroupTransfer]) -> int:
        """Of the caches' data in these transfers."""
        return sum(
            len(transfer.blocks) * self._groups[transfer.group_idx].bytes_per_block
            for transfer in transfers
        )

    def parts(self, transfers: Sequence[GroupTransfer], *, is_store: bool) -> Iterator[Pages]:
        """All that is to be copied: at once if it is little, otherwise in parts that are made one
        after the other, as they are asked for."""
        pages_per_slot = [
            len(self._groups[transfer.group_idx].device_bases) * self.blocks_per_chunk
            for transfer in transfers
        ]
        num_pages = sum(
            len(transfer.slots) * count
            for transfer, count in zip(transfers, pages_per_slot, strict=True)
        )
        if num_pages <= _FIRST_PART_PAGES:
            yield self.pages(transfers, is_store=is_store)
            return
        most = _FIRST_PART_PAGES
        for transfer, count in zip(transfers, pages_per_slot, strict=True):
            start = 0
            while start < len(transfer.slots):
                stop = min(start + max(1, most // count), len(transfer.slots))
                yield self.pages([transfer.of_slots(start, stop)], is_store=is_store)
                start, most = stop, _PART_PAGES

    def pages(self, transfers: Sequence[GroupTransfer], *, is_store: bool) -> Pages:
        """All that is to be copied, slot by slot, in the order in which it lies there."""
        device, host, sizes = [], [], []
        num_pages = 0
        is_aligned = True
        runs = set()
        for transfer in transfers:
            group = self._groups[transfer.group_idx]
            is_aligned &= group.is_aligned
            has_whole_slots = len(transfer.blocks) == len(transfer.slots) * self.blocks_per_chunk
            runs.add(group.run if has_whole_slots else None)
            # Blocks that share a slot, if it is filled: of each tensor, their pages are neighbours.
            together = self.blocks_per_chunk if has_whole_slots else 1
            device.append(
                _cross(transfer.blocks, group.device_strides, group.device_bases, together)
            )
            host.append(self._host(group, transfer, together))
            sizes.append(group.sizes_of(len(transfer.blocks), together))
            num_pages += len(device[-1])
            if is_store:
                for zero_host, zero_sizes in self._rest(group, transfer):
                    device.append(np.full(len(zero_host), self._zeros))
                    host.append(zero_host)
                    sizes.append(zero_sizes)
        num_bytes = self.num_bytes(transfers)
        return Pages(
            _joined(device),
            _joined(host),
            _joined(sizes),
            num_bytes,
            num_bytes / num_pages if num_pages else 0.0,
            is_aligned,
            runs.pop() if len(runs) == 1 else None,
        )

    def _host(self, group: _Group, transfer: GroupTransfer, together: int) -> Addresses:
        pages = _cross(transfer.block_slots, self._row_bytes, group.host_bases, together)
        if self.blocks_per_chunk > 1:
            pages += _cross(transfer.block_places, group.page_bytes, _NOTHING, together)
        return pages

    def _places_at(
        self,
        bases: Addresses,
        page_bytes: Addresses,
        slots: NDArray[np.int64],
        places: NDArray[np.int64],
    ) -> Addresses:
        pages = _cross(slots, self._row_bytes, bases, 1)
        pages += _cross(places, page_bytes, _NOTHING, 1)
        return pages

    def _rest(self, group: _Group, transfer: GroupTransfer) -> list[tuple[Addresses, Addresses]]:
        """What a store leaves of its slots: places before the first, padding, other tensors."""
        rest = []
        if transfer.first_place:
            before = self._places[: transfer.first_place]
            first = np.full(len(before), transfer.slots[0])
            host = self._places_at(group.host_bases, group.page_bytes, first, before)
            rest.append((host, np.tile(group.data_bytes, len(before))))
        if not group.has_rest:
            return rest
        slots = np.repeat(transfer.slots, len(self._places))
        places = np.tile(self._places, len(transfer.slots))
        if group.padded.any():
            pages, data = group.page_bytes[group.padded], group.data_bytes[group.padded]
            host = self._places_at(group.host_bases[group.padded] + data, pages, slots, places)
            rest.append((host, np.tile(pages - data, len(slots))))
        if len(group.unused_bases):
            host = self._places_at(group.unused_bases, group.unused_page_bytes, slots, places)
            rest.append((host, np.tile(group.unused_page_bytes, len(slots))))
        return rest


_NOTHING = np.zeros(1, np.uint64)


def _cross(
    numbers: NDArray[np.int64], steps: Addresses | np.uint64, bases: Addresses, together: int
) -> Addresses:
    """numbers * steps + bases for every number and every column of steps and bases.

    A number's columns follow each other; with `together`, so many numbers share each column's turn.
    """
    crossed = numbers.astype(np.uint64).reshape(-1, 1, together) * np.reshape(steps, (1, -1, 1))
    return (crossed + bases.reshape(1, -1, 1)).ravel()


def _joined(parts: list[Addresses]) -> Addresses:
    if len(parts) == 1:
        return parts[0]
    return np.concatenate(parts) if parts else np.empty(0, np.uint64)


def _group(
    refs: Sequence[CanonicalKVCacheRef],
    tensors: Sequence[DeviceTensor],
    host_bases: Sequence[int],
    is_aligned: bool,
    blocks_per_chunk: int,
) -> _Group:
    """`is_aligned`: whether the host side is."""
    data_bytes: dict[int, int] = {}
    for ref in refs:  # layers that share a tensor share its pages: they are copied once
        data_bytes[ref.tensor_idx] = max(ref.page_size_bytes, data_bytes.get(ref.tensor_idx, 0))
    used, unused = list(data_bytes), [t for t in range(len(tensors)) if t not in data_bytes]
    pages = np.array([tensors[t].page_bytes for t in used], np.uint64)
    data = np.array(list(data_bytes.values()), np.uint64)
    is_run = used == list(range(len(tensors))) and len({*pages, *data}) == 1
    numbers = [n for t in used for n in (tensors[t].address, tensors[t].stride_bytes)]
    return _Group(
        is_aligned=is_aligned and not any(n % ALIGNMENT for n in (*numbers, *data_bytes.values())),
        run=(
            Run(len(used) * blocks_per_chunk, sum(data_bytes.values()) * blocks_per_chunk)
            if is_run
            else None
        ),
        device_bases=np.array([tensors[t].address for t in used], np.uint64),
        device_strides=np.array([tensors[t].stride_bytes for t in used], np.uint64),
        host_bases=np.array([host_bases[t] for t in used], np.uint64),
        page_bytes=pages,
        data_bytes=data,
        padded=data < pages,
        unused_bases=np.array([host_bases[t] for t in unused], np.uint64),
        unused_page_bytes=np.array([tensors[t].page_bytes for t in unused], np.uint64),
        has_rest=bool(unused) or bool((data < pages).any()),
        num_blocks=min((tensors[t].num_blocks for t in used), default=0),
        bytes_per_block=sum(data_bytes.values()),
        sizes=np.tile(data, _SIZES_KEPT),
    )
