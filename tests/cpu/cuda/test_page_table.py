"""Pages are those of a plain loop over blocks, tensors and places."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtier.base import CanonicalKVCacheRef, GPULoadStoreSpec
from kvtier.cpu.common import CPULoadStoreSpec
from kvtier.cpu.cuda.page_table import (
    _SIZES_KEPT,
    ALIGNMENT,
    DeviceTensor,
    Grid,
    HostCell,
    PageTable,
)
from kvtier.cpu.worker import GroupTransfer, JobSpec, plan_transfer

ZEROS = 1 << 50
HOST = 1 << 46
NUM_SLOTS = 5

Entry = tuple[int, int, int]
"""An address on the device, one on the host, and bytes."""


@dataclass(frozen=True)
class Case:
    tensors: list[DeviceTensor]
    groups: list[dict[int, int]]
    cell: HostCell
    transfers: list[GroupTransfer]
    is_store: bool

    def table(self) -> PageTable:
        refs = [[CanonicalKVCacheRef(*ref) for ref in group.items()] for group in self.groups]
        return PageTable(self.tensors, refs, self.cell, ZEROS)

    def grids(self) -> list[Grid]:
        return self.table().grids(self.transfers, is_store=self.is_store)

    def run_bytes(self) -> int:
        """Transfers of the only group."""
        return self.grids()[0].run_bytes

    def is_aligned(self) -> bool:
        return all(grid.columns.is_aligned for grid in self.grids())

    def host(self, slot: int, tensor_idx: int, place: int) -> int:
        """The address of a page in a slot: tensors in order; of each, the slot's places."""
        address = self.cell.address + slot * self.cell.row_bytes
        for tensor in self.tensors[:tensor_idx]:
            address += tensor.page_bytes * self.cell.blocks_per_chunk
        return address + place * self.tensors[tensor_idx].page_bytes

    def data(self) -> list[Entry]:
        entries = []
        for transfer in self.transfers:
            for i, block in enumerate(transfer.blocks.tolist()):
                slot, place = int(transfer.block_slots[i]), int(transfer.block_places[i])
                for tensor_idx, data_bytes in self.groups[transfer.group_idx].items():
                    tensor = self.tensors[tensor_idx]
                    entries.append(
                        (
                            tensor.address + block * tensor.stride_bytes,
                            self.host(slot, tensor_idx, place),
                            data_bytes,
                        )
                    )
        return entries

    def cells(self) -> list[tuple[int, int]]:
        """The address ranges of this rank's cells in all slots of the transfers."""
        size = sum(tensor.page_bytes for tensor in self.tensors) * self.cell.blocks_per_chunk
        starts = [
            self.host(slot, 0, 0) for transfer in self.transfers for slot in transfer.slots.tolist()
        ]
        return sorted((start, start + size) for start in starts)


@st.composite
def cases(draw: st.DrawFn) -> Case:
    unit = draw(st.sampled_from([1, ALIGNMENT]))
    sizes = st.integers(1, 40).map(lambda count: count * unit)
    num_blocks, chunk = draw(st.integers(4, 12)), draw(st.sampled_from([1, 1, 2, 3, 4]))
    page = draw(sizes)  # often the same for all, as in most models
    tensors = []
    for i in range(draw(st.integers(1, 6))):
        page_bytes = draw(st.sampled_from([page, draw(sizes)]))
        gap = draw(st.sampled_from([0, unit]))
        tensors.append(DeviceTensor((i + 1) << 40, num_blocks, page_bytes + gap, page_bytes))
    groups = []
    for _ in range(draw(st.integers(1, 3))):
        indices = st.integers(0, len(tensors) - 1)
        used = draw(st.one_of(st.just(set(range(len(tensors)))), st.sets(indices)))
        groups.append(
            {
                t: draw(st.sampled_from([tensors[t].page_bytes, unit]))
                for t in draw(st.one_of(st.just(sorted(used)), st.permutations(sorted(used))))
            }
        )
    cell_bytes = sum(tensor.page_bytes for tensor in tensors) * chunk
    rank, row_bytes = draw(st.integers(0, 2)), 3 * cell_bytes + draw(st.sampled_from([0, 32, 8]))
    cell = HostCell(HOST + rank * cell_bytes, row_bytes, NUM_SLOTS, chunk)
    is_store = draw(st.booleans())
    transfers = draw(_transfers(groups, num_blocks, chunk, is_store))
    return Case(tensors, groups, cell, transfers, is_store)


@st.composite
def _transfers(
    draw: st.DrawFn, groups: list[dict[int, int]], num_blocks: int, chunk: int, is_store: bool
) -> list[GroupTransfer]:
    slots, blocks, sizes, first_places = draw(st.permutations(range(NUM_SLOTS))), [], [], []
    num_slots = 0
    for group in groups:
        most = min(NUM_SLOTS - num_slots, num_blocks // chunk) if group else 0
        count = draw(st.integers(0, most))
        head = draw(st.integers(0, chunk - 1)) if count else 0
        tail = 0 if is_store or count < 2 else draw(st.integers(0, chunk - 1))
        sizes.append(count * chunk - head - tail)
        first_places.append(head)
        blocks += draw(st.permutations(range(num_blocks)))[: sizes[-1]]
        num_slots += count
    return plan_transfer(
        JobSpec.take(
            GPULoadStoreSpec(blocks, sizes, first_places), CPULoadStoreSpec(slots[:num_slots])
        ),
        is_store=is_store,
        blocks_per_chunk=chunk,
        num_slots=NUM_SLOTS,
        num_blocks_of_group=[num_blocks] * len(groups),
    )


def entries_of(grids: Iterable[Grid]) -> list[Entry]:
    return [entry for grid in grids for entry in pages_of(grid, 0, len(grid.blocks))]


def pages_of(grid: Grid, start: int, stop: int) -> list[Entry]:
    pages = grid.pages(start, stop)
    for column in pages:  # the driver is told where they are, and nothing of steps
        assert column.flags.c_contiguous
        assert column.dtype == np.uint64
    return list(zip(*(column.tolist() for column in pages), strict=True))


@given(cases())
def test_pages_are_those_of_a_plain_loop(case: Case) -> None:
    grids = case.grids()
    data = [entry for entry in entries_of(grids) if entry[0] != ZEROS]
    assert sorted(data) == sorted(case.data())
    num_bytes = sum(size for _, _, size in data)
    sizes = {transfer.group_idx: len(transfer.blocks) for transfer in case.transfers}
    assert case.table().num_bytes([sizes.get(g, 0) for g in range(len(case.groups))]) == num_bytes
    assert case.table().most_pages == max(map(len, case.groups))
    assert all(grid.num_pages > 0 for grid in grids)
    assert sum(grid.num_bytes for grid in grids) == sum(size for _, _, size in entries_of(grids))


@given(cases(), st.data())
def test_pages_of_some_blocks_are_some_of_the_pages(case: Case, data: st.DataObject) -> None:
    for grid in case.grids():
        cut = data.draw(st.integers(0, len(grid.blocks)))
        assert pages_of(grid, 0, cut) + pages_of(grid, cut, len(grid.blocks)) == entries_of([grid])


@given(cases())
def test_a_kernel_finds_the_same_pages(case: Case) -> None:
    """Computes addresses as the kernel does, from blocks, slots and columns."""
    for grid in case.grids():
        found = []
        chunk = grid.cell.blocks_per_chunk
        for index, (block, slot) in enumerate(grid.entries().tolist()):
            place = (grid.first_place + index) % chunk
            cell = grid.cell.address + slot * grid.cell.row_bytes
            for base, step, offset, place_step, size in grid.columns.table.T.tolist():
                found.append((base + block * step, cell + offset + place * place_step, size))
        assert found == entries_of([grid])
        assert grid.columns.largest == max(size for _, _, size in found)


@given(cases())
def test_what_is_copied_as_a_whole_is_the_pages_and_little_else(case: Case) -> None:
    for grid in case.grids():
        if not grid.run_bytes:
            continue
        pages = entries_of([grid])
        cells = grid.slot_addresses().tolist()
        per_cell, rest = divmod(len(pages), len(cells))
        assert rest == 0
        for number, cell in enumerate(cells):
            places = pages[number * per_cell : (number + 1) * per_cell]
            assert min(host for _, host, _ in places) >= cell
            assert max(host + size for _, host, size in places) <= cell + grid.run_bytes
            assert sum(size for _, _, size in places) >= 0.75 * grid.run_bytes


@given(cases())
def test_a_store_covers_its_cells_once_and_a_load_adds_nothing(case: Case) -> None:
    entries = entries_of(case.grids())
    if not case.is_store:
        assert len(entries) == len(case.data())
        return
    parts = sorted((host, host + size) for _, host, size in entries)
    covered: list[tuple[int, int]] = []
    for start, end in parts:
        assert start < end
        if covered and start == covered[-1][1]:
            covered[-1] = (covered[-1][0], end)
        else:
            assert not covered or start > covered[-1][1], "a byte is written twice"
            covered.append((start, end))
    cells: list[tuple[int, int]] = []
    for start, end in case.cells():  # neighbours become one here as well
        if cells and start == cells[-1][1]:
            cells[-1] = (cells[-1][0], end)
        else:
            cells.append((start, end))
    assert covered == cells


@given(cases())
def test_what_is_said_about_pages_is_so(case: Case) -> None:
    for grid in case.grids():
        entries = entries_of([grid])
        largest = max(tensor.page_bytes for tensor in case.tensors)
        assert all(size <= largest for _, _, size in entries)  # or there are not enough zeros
        if grid.columns.is_aligned:
            assert all(number % ALIGNMENT == 0 for entry in entries for number in entry)


def test_all_columns_are_known_beforehand() -> None:
    case = simple_case(page=64, num_tensors=3, chunk=2)
    table = PageTable(
        case.tensors,
        [[CanonicalKVCacheRef(0, 64), CanonicalKVCacheRef(1, 32)]],
        case.cell,
        ZEROS,
    )
    (transfer,) = case.transfers
    head = replace(
        transfer,
        blocks=transfer.blocks[1:],
        block_slots=transfer.block_slots[1:],
        first_place=1,
    )
    grids = table.grids([head], is_store=True)
    assert len(grids) == 4  # data, the place that is left out, padding, another tensor
    assert {grid.columns for grid in grids} == set(table.columns)


def simple_case(page: int, num_tensors: int, chunk: int = 1, offset: int = 0) -> Case:
    tensors = [DeviceTensor((i + 1) << 40, 8, page, page) for i in range(num_tensors)]
    cell_bytes = num_tensors * page * chunk
    transfers = plan_transfer(
        JobSpec.take(GPULoadStoreSpec(range(4), [4], [0]), CPULoadStoreSpec(range(4 // chunk))),
        is_store=True,
        blocks_per_chunk=chunk,
        num_slots=NUM_SLOTS,
        num_blocks_of_group=[8],
    )
    cell = HostCell(HOST + offset, 2 * cell_bytes, NUM_SLOTS, chunk)
    return Case(tensors, [dict.fromkeys(range(num_tensors), page)], cell, transfers, True)


def test_the_usual_caches_are_for_the_kernel_and_for_staging() -> None:
    case = simple_case(page=4096, num_tensors=32)
    assert case.is_aligned()
    assert case.run_bytes() == 32 * 4096
    assert [grid.num_pages for grid in case.grids()] == [4 * 32]


def test_pages_that_a_thread_cannot_read_at_once_are_not_aligned() -> None:
    assert not simple_case(page=4088, num_tensors=2).is_aligned()
    assert not simple_case(page=4096, num_tensors=2, offset=8).is_aligned()


def test_nor_are_those_that_lie_between_others_at_odd_steps() -> None:
    """A stride, a part of a page, or an unused tensor: each shifts the rest."""
    case = simple_case(page=64, num_tensors=2)
    case.tensors[1] = case.tensors[1]._replace(stride_bytes=64 + 8)
    assert not case.is_aligned()
    case = simple_case(page=64, num_tensors=2)
    case.tensors[1] = case.tensors[1]._replace(address=(2 << 40) + 8)
    assert not case.is_aligned()
    case = simple_case(page=48, num_tensors=2)
    case.groups[0][1] = 40
    assert not case.is_aligned()
    case = simple_case(page=64, num_tensors=2)
    case.tensors[0] = case.tensors[0]._replace(page_bytes=24)
    case.groups[0] = {1: 64}
    for is_store in (True, False):
        assert not replace(case, is_store=is_store).is_aligned()
    case = simple_case(page=64, num_tensors=2)
    for cell in (
        case.cell._replace(row_bytes=case.cell.row_bytes + 8),
        case.cell._replace(address=HOST + 8),
    ):
        assert not replace(case, cell=cell).is_aligned()


def test_pages_of_several_blocks_lie_together_in_slots_that_are_filled() -> None:
    case = simple_case(page=4096, num_tensors=2, chunk=2)
    assert case.run_bytes() == 4 * 4096
    (transfer,) = case.transfers
    head = replace(
        transfer,
        blocks=transfer.blocks[1:],
        block_slots=transfer.block_slots[1:],
        first_place=1,
    )
    assert replace(case, transfers=[head]).run_bytes() == 0


@pytest.mark.parametrize("num_blocks", [_SIZES_KEPT, _SIZES_KEPT + 1, _SIZES_KEPT + 1000])
def test_sizes_beyond_those_that_are_kept_ready(num_blocks: int) -> None:
    table = PageTable(
        [DeviceTensor(1 << 40, num_blocks, 64, 64), DeviceTensor(2 << 40, num_blocks, 32, 32)],
        [[CanonicalKVCacheRef(0, 64), CanonicalKVCacheRef(1, 32)]],
        HostCell(HOST, 4096, num_blocks, 1),
        ZEROS,
    )
    transfers = plan_transfer(
        JobSpec.take(
            GPULoadStoreSpec(range(num_blocks), [num_blocks], [0]),
            CPULoadStoreSpec(range(num_blocks)),
        ),
        is_store=True,
        blocks_per_chunk=1,
        num_slots=num_blocks,
        num_blocks_of_group=[num_blocks],
    )
    (grid,) = table.grids(transfers, is_store=True)
    pages = grid.pages(0, num_blocks)
    assert pages.sizes.tolist() == [64, 32] * num_blocks
    assert grid.num_bytes == 96 * num_blocks
    assert pages.host[-1] == HOST + (num_blocks - 1) * 4096 + 64


def test_pages_lie_together_in_whatever_order_they_are_named_but_not_without_one() -> None:
    case = simple_case(page=4096, num_tensors=3)
    for order in ((2, 1, 0), (1, 0, 2), (0, 2), (1, 2)):
        case.groups[0] = dict.fromkeys(order, 4096)
        for is_store in (True, False):
            grids = replace(case, is_store=is_store).grids()
            assert [entry for entry in entries_of(grids) if entry[0] != ZEROS] == case.data()
            assert grids[0].run_bytes == (3 * 4096 if len(order) == 3 else 0)


def test_each_group_of_a_job_is_for_itself() -> None:
    case = simple_case(page=64, num_tensors=2)
    (transfer,) = case.transfers
    transfers = [replace(transfer, group_idx=group_idx) for group_idx in range(2)]
    both = replace(
        case, groups=[{0: 64, 1: 64}, {0: 64, 1: 16}], transfers=transfers, is_store=False
    )
    assert [grid.run_bytes for grid in both.grids()] == [128, 0]


def test_pages_may_be_of_several_sizes_with_some_zeros_between_them_but_not_too_many() -> None:
    for refs, run_bytes in (
        ([(0, 64), (1, 48)], 128),
        ([(0, 64), (1, 32)], 128),
        ([(0, 64), (1, 31)], 0),
        ([(0, 64)], 0),
        ([(0, 32), (1, 32)], 0),
    ):
        case = simple_case(page=64, num_tensors=2)
        table = PageTable(
            case.tensors, [[CanonicalKVCacheRef(*ref) for ref in refs]], case.cell, ZEROS
        )
        for is_store in (True, False):
            assert table.grids(case.transfers, is_store=is_store)[0].run_bytes == run_bytes
    case = simple_case(page=64, num_tensors=2)
    case.tensors[1] = case.tensors[1]._replace(page_bytes=32)
    case.groups[0][1] = 32
    assert case.run_bytes() == 96


def test_layers_that_share_a_tensor_are_copied_once_with_the_larger_page() -> None:
    shared = [CanonicalKVCacheRef(0, page) for page in (32, 64, 16)]
    refs = [*shared[:2], CanonicalKVCacheRef(1, 32), shared[2]]
    case = simple_case(page=64, num_tensors=2)
    table = PageTable(case.tensors, [refs], case.cell, ZEROS)
    (grid,) = table.grids(case.transfers, is_store=False)
    pages = grid.pages(0, 4)
    assert pages.sizes.tolist() == [64, 32] * 4
    assert grid.num_bytes == 4 * (64 + 32)
    assert len(set(pages.host.tolist())) == 8


def test_a_group_has_the_blocks_that_all_of_its_tensors_have() -> None:
    tensors = [
        DeviceTensor((i + 1) << 40, num_blocks, 64, 64) for i, num_blocks in enumerate((8, 6))
    ]
    groups = [
        [CanonicalKVCacheRef(0, 64), CanonicalKVCacheRef(1, 64)],
        [CanonicalKVCacheRef(0, 64)],
    ]
    table = PageTable(tensors, [*groups, []], HostCell(HOST, 4096, NUM_SLOTS, 1), ZEROS)
    assert table.num_blocks_of_group == [6, 8, 0]
    assert (table.num_slots, table.blocks_per_chunk) == (NUM_SLOTS, 1)
