"""Device blocks are matched with the right places, or the transfer is refused."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtier.base import GPULoadStoreSpec
from kvtier.cpu.common import CPULoadStoreSpec
from kvtier.cpu.worker import GroupTransfer, JobSpec, TransferRefused, plan_transfer

NULL = 0
NUM_BLOCKS = 1000
NUM_SLOTS = 1000


@dataclass(frozen=True)
class Engine:
    """An engine's data for a transfer: block tables, and the keys to move."""

    blocks_per_chunk: int
    tables: list[list[int]]
    """For each group, the device blocks of a request. NULL: the engine has dropped it."""
    chosen: list[list[int]]
    """For each group, the offloaded blocks to be moved, by their index in the request."""
    slots: list[int]

    @property
    def truth(self) -> dict[tuple[int, int, int], int]:
        """(group, slot, place) of every block that the engine still has."""
        remaining = iter(self.slots)
        return {
            (group, slot, place): block
            for group, (table, chunks) in enumerate(zip(self.tables, self.chosen, strict=True))
            for chunk, slot in zip(chunks, remaining)  # noqa: B905
            for place, block in enumerate(self.chunk(table, chunk))
            if block != NULL
        }

    def chunk(self, table: list[int], index: int) -> list[int]:
        return table[index * self.blocks_per_chunk : (index + 1) * self.blocks_per_chunk]

    @property
    def has_gaps(self) -> bool:
        """True if a block is missing anywhere but at the start of a group's first slot."""
        for table, chunks in zip(self.tables, self.chosen, strict=True):
            blocks = [block for chunk in chunks for block in self.chunk(table, chunk)]
            leading = next((n for n, block in enumerate(blocks) if block != NULL), 0)
            if NULL in blocks[leading:]:
                return True
        return False

    def store_specs(self) -> tuple[GPULoadStoreSpec, CPULoadStoreSpec]:
        """The transfer as vLLM's connector describes it: missing blocks are left out."""
        blocks: list[int] = []
        sizes, first_indices = [], []
        for table, chunks in zip(self.tables, self.chosen, strict=True):
            present = [
                (chunk * self.blocks_per_chunk + place, block)
                for chunk in chunks
                for place, block in enumerate(self.chunk(table, chunk))
                if block != NULL
            ]
            blocks += [block for _, block in present]
            sizes.append(len(present))
            first_indices.append(present[0][0] if present else 0)
        return GPULoadStoreSpec(blocks, sizes, first_indices), CPULoadStoreSpec(self.slots)


@st.composite
def engines(draw: st.DrawFn) -> Engine:
    blocks_per_chunk = draw(st.integers(1, 4))
    num_groups = draw(st.integers(1, 3))
    next_block = iter(draw(st.permutations(range(1, 100))))
    tables, chosen = [], []
    for _ in range(num_groups):
        num_chunks = draw(st.integers(0, 4))
        # Windows have a missing start; blocks taken away meanwhile are missing anywhere.
        window_start = draw(st.integers(0, num_chunks * blocks_per_chunk))
        missing = draw(st.sets(st.integers(0, num_chunks * blocks_per_chunk), max_size=2))
        table = [
            NULL if index < window_start or index in missing else next(next_block)
            for index in range(num_chunks * blocks_per_chunk)
        ]
        # A key is offered when the last of its blocks is there.
        offered = [n for n in range(num_chunks) if table[(n + 1) * blocks_per_chunk - 1] != NULL]
        tables.append(table)
        chosen.append([n for n in offered if draw(st.booleans())])
    num_slots = sum(map(len, chosen))
    slots = draw(st.permutations(range(20)))[:num_slots]
    return Engine(blocks_per_chunk, tables, chosen, list(slots))


def plan(
    device: GPULoadStoreSpec,
    slots: CPULoadStoreSpec,
    is_store: bool,
    blocks_per_chunk: int,
    num_groups: int | None = None,
) -> list[GroupTransfer]:
    return plan_transfer(
        JobSpec.take(device, slots),
        is_store=is_store,
        blocks_per_chunk=blocks_per_chunk,
        num_slots=NUM_SLOTS,
        num_blocks_of_group=[NUM_BLOCKS] * (num_groups or len(device.group_sizes)),
    )


def places_of(transfers: list[GroupTransfer]) -> dict[tuple[int, int, int], int]:
    found = {}
    for transfer in transfers:
        for block, slot, place in zip(
            transfer.blocks.tolist(),
            transfer.block_slots.tolist(),
            transfer.block_places.tolist(),
            strict=True,
        ):
            assert (transfer.group_idx, slot, place) not in found
            found[transfer.group_idx, slot, place] = block
    return found


@given(engines())
def test_a_store_goes_to_the_right_places_or_nowhere(engine: Engine) -> None:
    device, slots = engine.store_specs()
    if engine.has_gaps:
        with pytest.raises(TransferRefused):
            plan(device, slots, True, engine.blocks_per_chunk)
    else:
        found = plan(device, slots, True, engine.blocks_per_chunk)
        assert places_of(found) == engine.truth
        for transfer in found:
            assert set(transfer.slots.tolist()) == set(transfer.block_slots.tolist())
            assert len(transfer.slots) == len(engine.chosen[transfer.group_idx])


@given(
    blocks_per_chunk=st.integers(1, 4),
    spans=st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), min_size=1, max_size=3),
    slots=st.permutations(range(30)),
)
def test_a_load_may_begin_and_end_inside_a_slot(
    blocks_per_chunk: int, spans: list[tuple[int, int]], slots: list[int]
) -> None:
    blocks: list[int] = []
    used: list[int] = []
    truth = {}
    for group, (start, size) in enumerate(spans):
        slot_of_chunk: dict[int, int] = {}
        for index in range(start, start + size):
            chunk, place = divmod(index, blocks_per_chunk)
            if chunk not in slot_of_chunk:
                slot_of_chunk[chunk] = slots[len(used)]
                used.append(slots[len(used)])
            blocks.append(100 + len(blocks))
            truth[group, slot_of_chunk[chunk], place] = blocks[-1]
    device = GPULoadStoreSpec(blocks, [size for _, size in spans], [start for start, _ in spans])
    assert places_of(plan(device, CPULoadStoreSpec(used), False, blocks_per_chunk)) == truth


@given(engines(), st.integers(1, 5))
def test_pieces_are_the_transfer(engine: Engine, portion: int) -> None:
    if engine.has_gaps:
        return
    device, slots = engine.store_specs()
    every_block = np.arange(NUM_BLOCKS)
    every_place = np.arange(NUM_SLOTS * engine.blocks_per_chunk).reshape(NUM_SLOTS, -1)
    for transfer in plan(device, slots, True, engine.blocks_per_chunk):
        places = every_place[transfer.block_slots, transfer.block_places]
        expected = list(zip(transfer.blocks.tolist(), places.tolist(), strict=True))
        for pieces in (transfer.runs, list(transfer.portions(portion))):
            found = [
                pair
                for piece in pieces
                for pair in zip(
                    every_block[piece.blocks].tolist(),
                    every_place[piece.places].tolist(),
                    strict=True,
                )
            ]
            assert found == expected


def test_runs_are_as_few_as_possible() -> None:
    device = GPULoadStoreSpec([5, 6, 7, 3, 4, 9], [6], [0])
    (one,) = plan(device, CPULoadStoreSpec([1, 2, 3, 4, 5, 7]), False, 1)
    assert len(one.runs) == 3
    (two,) = plan(device, CPULoadStoreSpec([1, 2, 3]), False, 2)
    assert len(two.runs) == 5  # a run does not leave its slot: 56 7 3 4 9
    assert one.pages_per_run == 2


@pytest.mark.parametrize(
    ("blocks", "sizes", "indices", "slots", "blocks_per_chunk", "reason"),
    [
        ([1, 2], [2], [0], [0], 1, r"1 slots, but .* need \[2\]"),
        ([1, 2], [2], [0], [0, 1, 2], 1, r"3 slots, but .* need \[2\]"),
        ([1, 2], [2], [1], [0], 2, r"1 slots, but .* at block_indices \(1,\) need \[2\]"),
        ([1, 2], [1, 1], [0, 0], [0], 2, r"need \[1, 1\]"),
        ([1], [1], [0], [-1], 1, "slot -1 is not one of 0 to 999"),
        ([1], [1], [0], [NUM_SLOTS], 1, "slot 1000 is not one of 0 to 999"),
        ([-1], [1], [0], [0], 1, "device block of group 0 -1 is not"),
        ([NUM_BLOCKS], [1], [0], [0], 1, "device block of group 0 1000 is not"),
        ([1], [1], [-1], [0], 1, "do not describe"),
        ([1, 2], [3, -1], [0, 0], [0, 1], 1, "do not describe"),
    ],
)
@pytest.mark.parametrize("is_store", [True, False])
def test_what_does_not_fit_is_refused(
    blocks: list[int],
    sizes: list[int],
    indices: list[int],
    slots: list[int],
    blocks_per_chunk: int,
    reason: str,
    is_store: bool,
) -> None:
    with pytest.raises(TransferRefused, match=reason):
        plan(
            GPULoadStoreSpec(blocks, sizes, indices),
            CPULoadStoreSpec(slots),
            is_store,
            blocks_per_chunk,
        )


def test_the_wrong_number_of_groups_is_refused() -> None:
    with pytest.raises(TransferRefused, match="1 group_sizes and 1 block_indices for 2 groups"):
        plan(GPULoadStoreSpec([1], [1], [0]), CPULoadStoreSpec([0]), True, 1, num_groups=2)


def test_sides_of_the_wrong_kind_are_refused() -> None:
    device, slots = GPULoadStoreSpec([1], [1], [0]), CPULoadStoreSpec([0])
    with pytest.raises(TransferRefused, match=r"the host side is GPULoadStoreSpec\(\[1\]\)"):
        plan(device, device, True, 1)  # type: ignore[arg-type]
    with pytest.raises(TransferRefused, match=r"the device side is CPULoadStoreSpec\(\[0\]\)"):
        JobSpec.take(slots, slots)  # type: ignore[arg-type]
    with pytest.raises(TransferRefused, match="not flat"):
        plan(device, CPULoadStoreSpec(np.zeros((1, 1), np.int64)), True, 1)


def test_a_store_must_fill_its_last_slot() -> None:
    device = GPULoadStoreSpec([1, 2, 3], [3], [0])
    with pytest.raises(TransferRefused, match="group 0 stores 3 device blocks from place 0"):
        plan(device, CPULoadStoreSpec([0, 1]), True, 2)
    assert len(plan(device, CPULoadStoreSpec([0, 1]), False, 2)) == 1


def test_a_store_must_not_use_a_slot_twice() -> None:
    device = GPULoadStoreSpec([1, 2], [2], [0])
    with pytest.raises(TransferRefused, match=r"slots \[4, 4\] name one slot twice"):
        plan(device, CPULoadStoreSpec([4, 4]), True, 1)
    assert len(plan(device, CPULoadStoreSpec([4, 4]), False, 1)) == 1
