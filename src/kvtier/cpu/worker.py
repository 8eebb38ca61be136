"""What the workers for host and device caches share.

`SlotWorker` is their base class, `plan_transfer` checks a job and matches device blocks with places
in slots, and the functions at the end check the caches of an engine.

A slot holds the block of one key: `blocks_per_chunk` consecutive device blocks of one group, each
at its *place*, counted from 0. A transfer may begin in the middle of its first slot, because an
engine may need, or have, only the end of an attention window. It uses all later slots from place 0.
"""

from __future__ import annotations

import sys
from abc import abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvtier.base import (
    BlockIDsLoadStoreSpec,
    CanonicalKVCaches,
    CanonicalKVCacheTensor,
    GPULoadStoreSpec,
    LoadStoreSpec,
    Medium,
    OffloadingWorker,
)
from kvtier.cpu.notice_board import NoticeBoard
from kvtier.cpu.shared_offload_region import SharedOffloadRegion

__all__ = [
    "JobSpec",
    "GroupTransfer",
    "Piece",
    "SlotWorker",
    "TransferRefused",
    "device_pages",
    "is_on_cuda",
    "plan_transfer",
    "require_pages",
    "require_refs",
]


class SlotWorker(OffloadingWorker):
    """Copies between a rank's caches and its cells, the parts of a region's slots that belong to
    the rank. The worker owns the region."""

    def __init__(self, region: SharedOffloadRegion) -> None:
        self._region = region

    @property
    def board(self) -> NoticeBoard:
        """The board on which this rank writes notes for the scheduler. Valid until `shutdown`."""
        return self._region.board

    def submit_store(
        self, job_id: int, src_spec: GPULoadStoreSpec, dst_spec: LoadStoreSpec
    ) -> bool:
        return self._submit(job_id, src_spec, dst_spec, is_store=True)

    def submit_load(self, job_id: int, src_spec: LoadStoreSpec, dst_spec: GPULoadStoreSpec) -> bool:
        return self._submit(job_id, dst_spec, src_spec, is_store=False)

    @abstractmethod
    def _submit(
        self, job_id: int, device_spec: GPULoadStoreSpec, slot_spec: LoadStoreSpec, is_store: bool
    ) -> bool:
        """Start a store or a load. Called by `submit_store` and `submit_load`."""


# --- the plan of a job ----------------------------------------------------------------------------


class TransferRefused(Exception):
    """The two sides of a transfer do not fit together, or point outside the caches."""


class JobSpec(NamedTuple):
    """The blocks and slots of a job. `take` copies them, so the caller may reuse its arrays."""

    blocks: NDArray[np.int64]
    slots: NDArray[np.int64]
    group_sizes: tuple[int, ...]
    first_indices: tuple[int, ...]

    @classmethod
    def take(cls, device_spec: GPULoadStoreSpec, slot_spec: LoadStoreSpec) -> JobSpec:
        """Copy the two sides of a job. Raises `TransferRefused` if they have the wrong types."""
        if not isinstance(device_spec, GPULoadStoreSpec):
            raise TransferRefused(f"the device side is {device_spec!r}, not a GPULoadStoreSpec")
        if not isinstance(slot_spec, BlockIDsLoadStoreSpec) or slot_spec.medium() != Medium.CPU:
            raise TransferRefused(f"the host side is {slot_spec!r}, not a CPULoadStoreSpec")
        blocks, slots = device_spec.block_ids.copy(), slot_spec.block_ids.copy()
        return cls(blocks, slots, device_spec.group_sizes, device_spec.block_indices)


class Piece(NamedTuple):
    """Pages to copy with one call: an index into an array of device blocks, and one into an array
    of shape (slots, places)."""

    blocks: slice | NDArray[np.int64]
    places: tuple[int | slice | NDArray[np.int64], int | slice | NDArray[np.int64]]


@dataclass(eq=False)
class GroupTransfer:
    """The part of a transfer that belongs to one group.

    Never changed after it is made. Not a frozen dataclass, because creating one takes longer than
    the rest of the plan.
    """

    group_idx: int
    blocks_per_chunk: int
    blocks: NDArray[np.int64]
    """Device blocks."""
    block_slots: NDArray[np.int64]
    """The slot of each device block, in the order of `blocks`."""
    first_place: int
    """The place in the first slot at which the transfer begins."""
    slots: NDArray[np.int64]
    """The slots, each once."""

    @cached_property
    def block_places(self) -> NDArray[np.int64]:
        """The place of each block in its slot, from 0 to `blocks_per_chunk - 1`."""
        return np.arange(self.first_place, self.first_place + len(self.blocks)) % (
            self.blocks_per_chunk
        )

    @cached_property
    def run_starts(self) -> NDArray[np.int64]:
        """The index in `blocks` at which each run starts. A run is a series of blocks that are
        consecutive in the engine's cache and in the slots."""
        # With one place per slot, a run continues in the next slot; otherwise it ends in its slot.
        slot_step = 1 if self.blocks_per_chunk == 1 else 0
        breaks = (np.diff(self.blocks) != 1) | (np.diff(self.block_slots) != slot_step)
        return np.append(0, np.flatnonzero(breaks) + 1)

    @property
    def pages_per_run(self) -> float:
        """Mean number of pages in a run."""
        return len(self.blocks) / len(self.run_starts)

    @cached_property
    def runs(self) -> list[Piece]:
        """The transfer as one pair of slices for each run."""
        starts = self.run_starts
        lengths = np.diff(starts, append=len(self.blocks))
        pieces = []
        for block, slot, place, length in zip(
            self.blocks[starts].tolist(),
            self.block_slots[starts].tolist(),
            self.block_places[starts].tolist(),
            lengths.tolist(),
            strict=True,
        ):
            blocks = slice(block, block + length)
            if self.blocks_per_chunk == 1:
                pieces.append(Piece(blocks, (slice(slot, slot + length), place)))
            else:
                pieces.append(Piece(blocks, (slot, slice(place, place + length))))
        return pieces

    def portions(self, pages: int) -> Iterator[Piece]:
        """The transfer as index arrays of at most `pages` pages."""
        for start in range(0, len(self.blocks), pages):
            part = slice(start, start + pages)
            yield Piece(self.blocks[part], (self.block_slots[part], self.block_places[part]))


def plan_transfer(
    spec: JobSpec,
    *,
    is_store: bool,
    blocks_per_chunk: int,
    num_slots: int,
    num_blocks_of_group: list[int],
) -> list[GroupTransfer]:
    """Match device blocks with places in slots. Groups without blocks are left out.

    Raises `TransferRefused` if the job is invalid. Copies nothing. Any thread.
    """
    blocks, slots, group_sizes, first_indices = spec
    if blocks.ndim != 1 or slots.ndim != 1:
        raise TransferRefused(f"block_ids of shapes {blocks.shape} and {slots.shape} are not flat")
    if not len(group_sizes) == len(first_indices) == len(num_blocks_of_group):
        raise TransferRefused(
            f"{len(group_sizes)} group_sizes and {len(first_indices)} block_indices for "
            f"{len(num_blocks_of_group)} groups"
        )
    if min((*group_sizes, *first_indices), default=0) < 0 or sum(group_sizes) != len(blocks):
        raise TransferRefused(
            f"group_sizes {group_sizes} and block_indices {first_indices} do not describe "
            f"{len(blocks)} device blocks"
        )
    first_places = [index % blocks_per_chunk for index in first_indices]
    slot_counts = [
        -(-(place + size) // blocks_per_chunk) if size else 0
        for place, size in zip(first_places, group_sizes, strict=True)
    ]
    if sum(slot_counts) != len(slots):
        raise TransferRefused(
            f"{len(slots)} slots, but group_sizes {group_sizes} at block_indices {first_indices} "
            f"need {slot_counts} slots of {blocks_per_chunk} blocks"
        )
    _require_within("slot", slots, num_slots)
    if is_store:
        _require_storable(slots, num_slots, group_sizes, first_places, blocks_per_chunk)
    transfers = []
    block_start = slot_start = 0
    for group_idx, size in enumerate(group_sizes):
        if size == 0:
            continue
        group_blocks = blocks[block_start : block_start + size]
        group_slots = slots[slot_start : slot_start + slot_counts[group_idx]]
        block_start += size
        slot_start += slot_counts[group_idx]
        num_blocks = num_blocks_of_group[group_idx]
        _require_within(f"device block of group {group_idx}", group_blocks, num_blocks)
        first_place = first_places[group_idx]
        block_slots = group_slots
        if blocks_per_chunk > 1:
            order = np.arange(first_place, first_place + size) // blocks_per_chunk
            block_slots = group_slots[order]
        transfers.append(
            GroupTransfer(
                group_idx, blocks_per_chunk, group_blocks, block_slots, first_place, group_slots
            )
        )
    return transfers


def _require_within(what: str, ids: NDArray[np.int64], count: int) -> None:
    # As unsigned integers, negative numbers are large. Not `ids.max()`, which is a Python function
    # and therefore slower.
    if len(ids) and np.maximum.reduce(ids.view(np.uint64)) >= count:
        outside = ids[(ids < 0) | (ids >= count)]
        raise TransferRefused(f"{what} {outside[0]} is not one of 0 to {count - 1}")


def _require_storable(
    slots: NDArray[np.int64],
    num_slots: int,
    group_sizes: tuple[int, ...],
    first_places: list[int],
    blocks_per_chunk: int,
) -> None:
    """Raise `TransferRefused` if a store does not fill its last slot, or names a slot twice.

    A key is stored when its last device block is complete, so a store ends at the end of a slot. If
    an engine leaves out a block in the middle of a group, all later blocks get wrong places. Then
    either the group ends before the end of its last slot, which is refused here, or the job has
    more slots than its blocks need, which `plan_transfer` refuses.
    """
    for group_idx, (place, size) in enumerate(zip(first_places, group_sizes, strict=True)):
        if size and (place + size) % blocks_per_chunk:
            raise TransferRefused(
                f"group {group_idx} stores {size} device blocks from place {place} of a slot on, "
                f"which does not fill its last slot of {blocks_per_chunk} blocks"
            )
    if _has_duplicates(slots, num_slots):
        raise TransferRefused(f"slots {slots.tolist()} name one slot twice")


def _has_duplicates(slots: NDArray[np.int64], num_slots: int) -> bool:
    """True if a slot is named twice. A set is faster for few slots, an array for many."""
    if len(slots) < 256:
        return len(set(slots.tolist())) != len(slots)
    is_named = np.zeros(num_slots, np.bool_)
    is_named[slots] = True
    return int(np.count_nonzero(is_named)) != len(slots)


# --- the caches of an engine ----------------------------------------------------------------------


def is_on_cuda(kv_caches: CanonicalKVCaches) -> bool:
    """True if the first tensor is a torch tensor on a CUDA device."""
    torch = sys.modules.get("torch")  # imported already if there is a torch tensor
    first = kv_caches.tensors[0].tensor if kv_caches.tensors else None
    return torch is not None and isinstance(first, torch.Tensor) and bool(first.is_cuda)


def device_pages(kv_caches: CanonicalKVCaches) -> list[NDArray[np.uint8]]:
    """The memory of every tensor as an array (num_blocks, page_size_bytes), without a copy.

    Takes numpy arrays and torch tensors in host memory. Raises `TypeError` for any other type, and
    `ValueError` if a tensor does not consist of pages, or if `require_refs` refuses a group.
    """
    require_refs(kv_caches)
    return [_pages(tensor) for tensor in kv_caches.tensors]


def require_refs(kv_caches: CanonicalKVCaches) -> None:
    """Raise `ValueError` if a group refers to a tensor or to bytes of a page that do not exist."""
    for group_idx, refs in enumerate(kv_caches.group_data_refs):
        for ref in refs:
            if not 0 <= ref.tensor_idx < len(kv_caches.tensors):
                raise ValueError(
                    f"group {group_idx} refers to tensor {ref.tensor_idx}, but there are "
                    f"{len(kv_caches.tensors)} tensors, counted from 0"
                )
            page = kv_caches.tensors[ref.tensor_idx].page_size_bytes
            if not 0 < ref.page_size_bytes <= page:
                raise ValueError(
                    f"group {group_idx} refers to {ref.page_size_bytes} bytes of each page of "
                    f"tensor {ref.tensor_idx}, whose pages have {page}"
                )


def _pages(canonical: CanonicalKVCacheTensor) -> NDArray[np.uint8]:
    array = _as_array(canonical.tensor)
    page = canonical.page_size_bytes
    require_pages(_shape_in_bytes(array), array.strides, array.itemsize, page)
    if not array.flags.writeable:
        raise ValueError("a canonical tensor is read-only: blocks must be loaded into it")
    return array.view(np.uint8)[:, :page]


def _shape_in_bytes(array: NDArray[Any]) -> tuple[int, ...]:
    return (*array.shape[:-1], array.shape[-1] * array.itemsize) if array.ndim else ()


def require_pages(
    shape: tuple[int, ...], strides: tuple[int, ...], item_bytes: int, page_bytes: int
) -> None:
    """Raise `ValueError` if a tensor does not consist of pages.

    The last dimension of `shape` and all other arguments are in bytes.
    """
    if len(shape) != 2 or not 0 < page_bytes <= shape[1]:
        raise ValueError(
            f"a canonical tensor of shape {shape} in bytes with page_size_bytes={page_bytes}: give "
            "one of shape (num_blocks, page_size_bytes or more)"
        )
    if page_bytes > item_bytes and strides[1] != item_bytes:
        raise ValueError(
            f"a canonical tensor with strides of {strides} bytes: give one in which the bytes of a "
            "page follow each other, so that the second stride is one element"
        )


def _as_array(tensor: Any) -> NDArray[Any]:
    if isinstance(tensor, np.ndarray):
        return tensor
    torch = sys.modules.get("torch")  # imported already if there is a torch tensor
    if torch is None or not isinstance(tensor, torch.Tensor):
        raise TypeError(
            f"a canonical tensor is a {type(tensor).__module__}.{type(tensor).__qualname__}: give "
            "a numpy array or a torch tensor on the device 'cpu'"
        )
    if tensor.device.type != "cpu":
        raise TypeError(
            f"a canonical tensor is on the device {str(tensor.device)!r}, but this worker copies "
            "within host memory: it takes numpy arrays and torch tensors on the device 'cpu'"
        )
    # Viewed as bytes first, because numpy lacks some of torch's types.
    array: NDArray[Any] = tensor.detach().view(torch.uint8).numpy()
    return array
