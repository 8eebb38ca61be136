"""Random caches and random jobs on them."""

from __future__ import annotations

from hypothesis import strategies as st

from kvtier.cpu.cuda.page_table import ALIGNMENT
from tests.cpu.jobs import Part
from tests.gpu.cache_layout import ITEM_BYTES, CacheLayout, PagedTensor
from tests.gpu.jobs import Job

NUM_SLOTS = 4

_CELL_LIMIT = 1 << 19
"""Small enough for an example to take milliseconds."""
_PAGES = st.one_of(
    st.integers(1, 40),
    st.integers(1, 64).map(lambda count: 16 * count),
    st.sampled_from([5000, 1 << 14, (1 << 14) + 8, 1 << 16, 3 << 15, 1 << 17]),
)


@st.composite
def layouts(draw: st.DrawFn) -> CacheLayout:
    """Up to 6 tensors, each alone or two in one allocation, as K and V of a layer are."""
    num_blocks, chunk = draw(st.integers(4, 12)), draw(st.sampled_from([1, 1, 2, 3, 4]))
    unit = draw(
        st.sampled_from([1, ALIGNMENT])
    )  # half of the layouts are aligned, so that the kernel can copy them
    allocations: list[int] = []
    tensors: list[PagedTensor] = []
    for _ in range(draw(st.integers(1, 3))):
        dtype = draw(st.sampled_from(sorted(ITEM_BYTES)))
        item = max(unit, ITEM_BYTES[dtype])
        room = (_CELL_LIMIT // chunk - sum(tensor.page for tensor in tensors)) // 2
        page = max(item, min(draw(_PAGES), room) // item * item)
        gap = draw(st.sampled_from([0, 16, 6, 1])) // item * item
        index, stride = len(allocations), page + gap
        kind = draw(st.sampled_from(["alone", "one after the other", "side by side"]))
        if kind == "alone":
            allocations.append(stride * num_blocks)
            tensors.append(PagedTensor(index, 0, stride, page, dtype))
        elif kind == "one after the other":
            allocations.append(2 * stride * num_blocks)
            tensors += (
                PagedTensor(index, offset, stride, page, dtype)
                for offset in (0, stride * num_blocks)
            )
        else:
            allocations.append(2 * stride * num_blocks)
            tensors += (
                PagedTensor(index, offset, 2 * stride, page, dtype) for offset in (0, stride)
            )
    return CacheLayout(
        num_blocks, tuple(allocations), tuple(tensors), draw(_groups(tensors, unit)), chunk
    )


@st.composite
def _groups(draw: st.DrawFn, tensors: list[PagedTensor], unit: int) -> tuple[dict[int, int], ...]:
    """Groups over tensors. Some tensors are used by several groups or by none, and some pages have
    padding."""
    groups = []
    for _ in range(draw(st.integers(1, 3))):
        indices = range(len(tensors))
        used = draw(st.one_of(st.just({*indices}), st.sets(st.sampled_from(indices), min_size=1)))
        groups.append(
            {
                t: draw(st.sampled_from([tensors[t].page, -(-tensors[t].page // 2 // unit) * unit]))
                for t in draw(st.one_of(st.just(sorted(used)), st.permutations(sorted(used))))
            }
        )
    return tuple(groups)


@st.composite
def jobs(draw: st.DrawFn, layout: CacheLayout) -> Job:
    is_store, places = draw(st.booleans()), layout.blocks_per_chunk
    slots = draw(st.permutations(range(NUM_SLOTS)))
    # Groups may share tensors, but not blocks of them in one job: the order is undefined.
    free = draw(st.permutations(range(layout.num_blocks)))
    parts = []
    for group_idx in range(len(layout.groups)):
        num_slots = draw(st.integers(0, min(len(slots), len(free) // places)))
        head = draw(st.integers(0, places - 1)) if num_slots else 0
        longest_tail = places - 1 - (head if num_slots == 1 else 0)
        tail = draw(st.integers(0, longest_tail)) if num_slots and not is_store else 0
        size = num_slots * places - head - tail
        blocks, free = free[:size], free[size:]
        index = head + draw(st.integers(0, 2)) * places
        parts.append(Part(group_idx, index, blocks, slots[:num_slots]))
        slots = slots[num_slots:]
    return Job(is_store, parts)


@st.composite
def histories(draw: st.DrawFn) -> tuple[CacheLayout, list[Job]]:
    layout = draw(layouts())
    return layout, draw(st.lists(jobs(layout), min_size=1, max_size=4))
