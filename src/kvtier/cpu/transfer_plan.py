"""Which device block goes with which place in which slot, for one transfer.

A slot holds one key: `blocks_per_chunk` consecutive device blocks of one group. A transfer may
begin inside a slot (an engine that needs only the end of a window, or has only that), but every
slot after the first is used from its first place on.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvtier.base import BlockIDsLoadStoreSpec, GPULoadStoreSpec, LoadStoreSpec, Medium

__all__ = ["Asked", "GroupTransfer", "Piece", "TransferRefused", "plan_transfer"]


class TransferRefused(Exception):
    """The two sides of a transfer do not fit together, or point outside the caches."""


class Asked(NamedTuple):
    """Blocks and slots of a transfer as they were when it was asked for, whatever the caller does
    with its arrays afterwards."""

    blocks: NDArray[np.int64]
    slots: NDArray[np.int64]
    group_sizes: tuple[int, ...]
    first_indices: tuple[int, ...]

    @classmethod
    def take(cls, device_spec: GPULoadStoreSpec, slot_spec: LoadStoreSpec) -> Asked:
        """Raises `TransferRefused` if these are no such sides."""
        if not isinstance(device_spec, GPULoadStoreSpec):
            raise TransferRefused(f"the device side is {device_spec!r}, not a GPULoadStoreSpec")
        if not isinstance(slot_spec, BlockIDsLoadStoreSpec) or slot_spec.medium() != Medium.CPU:
            raise TransferRefused(f"the host side is {slot_spec!r}, not a CPULoadStoreSpec")
        blocks, slots = device_spec.block_ids.copy(), slot_spec.block_ids.copy()
        return cls(blocks, slots, device_spec.group_sizes, device_spec.block_indices)


class Piece(NamedTuple):
    """Pages to be copied at once: indices into (blocks,) and into (slots, places)."""

    blocks: slice | NDArray[np.int64]
    places: tuple[int | slice | NDArray[np.int64], int | slice | NDArray[np.int64]]


@dataclass(eq=False)
class GroupTransfer:
    """The part of a transfer that belongs to one group, one entry per device block. Not changed
    once it is made, but not frozen: that would take longer than most of the rest."""

    group_idx: int
    blocks_per_chunk: int
    blocks: NDArray[np.int64]
    """Device blocks."""
    block_slots: NDArray[np.int64]
    """The slot of each of them."""
    first_place: int
    """How many places of the first slot are not part of the transfer."""
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
        """Where in these arrays pages cease to follow each other on both sides."""
        # A slot of one page is followed by the next slot, a larger one by its own next place.
        slot_step = 1 if self.blocks_per_chunk == 1 else 0
        breaks = (np.diff(self.blocks) != 1) | (np.diff(self.block_slots) != slot_step)
        return np.append(0, np.flatnonzero(breaks) + 1)

    @property
    def pages_per_run(self) -> float:
        """Mean length of a run."""
        return len(self.blocks) / len(self.run_starts)

    @cached_property
    def runs(self) -> list[Piece]:
        """The transfer as slices, as few as possible."""
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
        """The transfer as index arrays of at most so many pages."""
        for start in range(0, len(self.blocks), pages):
            part = slice(start, start + pages)
            yield Piece(self.blocks[part], (self.block_slots[part], self.block_places[part]))


def plan_transfer(
    asked: Asked,
    *,
    is_store: bool,
    blocks_per_chunk: int,
    num_slots: int,
    num_blocks_of_group: list[int],
) -> list[GroupTransfer]:
    """Match device blocks with places in slots; groups without blocks are left out.

    Raises `TransferRefused` before anything is copied. Pure: any thread.
    """
    blocks, slots, group_sizes, first_indices = asked
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
    # Without signs, numbers below 0 are large. The method `max` takes a detour through Python.
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
    """A key is stored when its last device block is complete, so a store ends where a slot ends.

    One that does not comes from an engine that left out blocks in the middle of a group: they
    would all be one place off from there on. The two requirements leave no way for that to go
    unseen, since every block left out makes the group end early or need fewer slots.
    """
    for group_idx, (place, size) in enumerate(zip(first_places, group_sizes, strict=True)):
        if size and (place + size) % blocks_per_chunk:
            raise TransferRefused(
                f"group {group_idx} stores {size} device blocks from place {place} of a slot on, "
                f"which does not fill its last slot of {blocks_per_chunk}"
            )
    if _has_duplicates(slots, num_slots):
        raise TransferRefused(f"slots {slots.tolist()} name one slot twice")


def _has_duplicates(slots: NDArray[np.int64], num_slots: int) -> bool:
    """Whichever way is quicker for so many."""
    if len(slots) < 256:
        return len(set(slots.tolist())) != len(slots)
    is_named = np.zeros(num_slots, np.bool_)
    is_named[slots] = True
    return int(np.count_nonzero(is_named)) != len(slots)
