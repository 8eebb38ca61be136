"""Entries of the index are read back from its pages, and a damaged page is empty."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtier.tiering.disk.index import EMPTY, IN_HEADER, INLINE, MAX_INLINE_KEY, IndexTable
from kvtier.tiering.disk.layout import Geometry
from kvtier.tiering.io.page import PAGE_BYTES, close_page

UUID = bytes(range(16))
OTHER_UUID = bytes(range(1, 17))
numbers = st.integers(0, 2**64 - 1)


def table(num_slots: int, raw: bytes | None = None, uuid: bytes = UUID) -> IndexTable:
    return IndexTable(Geometry(PAGE_BYTES, num_slots), uuid, raw)


def pages_of(index: IndexTable) -> bytes:
    """All pages as they are written to the file."""
    pages = bytearray(index.geometry.num_index_pages * PAGE_BYTES)
    view = memoryview(pages)
    for page_no in range(index.geometry.num_index_pages):
        index.copy_page(page_no, view[page_no * PAGE_BYTES :][:PAGE_BYTES])
    return bytes(pages)


def listed(index: IndexTable) -> dict[int, tuple[int, int, int, bytes]]:
    """Sequence number, last use, tag and key of each slot that has an entry."""
    return {
        slot: (
            int(entry["seq"]),
            int(entry["used"]),
            int(entry["tag"]),
            bytes(entry["key"])[: entry["key_len"]],
        )
        for slot, entry in enumerate(index.entries())
        if entry["state"] != EMPTY
    }


puts = st.dictionaries(
    st.integers(0, 199),
    st.tuples(numbers, st.integers(0, 2**32 - 1), st.binary(min_size=1, max_size=MAX_INLINE_KEY)),
    max_size=30,
)


@given(puts=puts, cleared=st.sets(st.integers(0, 199), max_size=10))
def test_entries_come_back_from_the_pages(
    puts: dict[int, tuple[int, int, bytes]], cleared: set[int]
) -> None:
    """Entries on several pages, including keys that end with zeros."""
    index = table(200)
    for slot, (seq, tag, key) in puts.items():
        index.put(slot, seq, tag, key)
    for slot in cleared:
        index.clear(slot)
    expected = {
        slot: (seq, seq, tag, key) for slot, (seq, tag, key) in puts.items() if slot not in cleared
    }
    assert listed(index) == expected
    again = table(200, pages_of(index))
    assert again.damaged_pages == []
    assert listed(again) == expected


def test_a_long_key_is_not_in_the_pages() -> None:
    index = table(70)
    index.put(65, 9, 1, b"k" * (MAX_INLINE_KEY + 1))
    index.put(66, 9, 1, b"k" * MAX_INLINE_KEY)
    states = index.entries()["state"]
    assert (states[65], states[66]) == (IN_HEADER, INLINE)
    assert index.long_keys == {65: b"k" * (MAX_INLINE_KEY + 1)}
    index.clear(65)
    assert index.long_keys == {}


def test_entries_that_are_set_are_there() -> None:
    source, target = table(200), table(130)
    for slot in range(200):
        source.put(slot, slot + 1, 7, b"key-%d" % slot)
    target.set_entries(source.entries()[:130])
    assert listed(target) == {slot: listed(source)[slot] for slot in range(130)}
    assert target.take_changed() == [0, 1, 2]


def test_uses_are_noted_where_they_belong() -> None:
    index = table(200)
    for slot in (0, 62, 63, 199):
        index.put(slot, 1, 7, b"key-%d" % slot)
    index.take_changed()
    index.mark_used(np.array([62, 199]), np.array([50, 60]))
    assert {slot: used for slot, (_, used, _, _) in listed(index).items()} == {
        0: 1,
        62: 50,
        63: 1,
        199: 60,
    }
    assert index.take_changed() == [0, 3]


def test_changes_are_taken_once_unless_they_are_given_back() -> None:
    index = table(200)
    assert index.take_changed() == []
    index.put(64, 1, 7, b"key")
    index.clear(3)
    assert index.take_changed() == [0, 1]
    assert index.take_changed() == []
    index.give_back([1])
    assert index.take_changed() == [1]


@pytest.mark.parametrize("num_slots", [1, 62, 63, 64, 126, 127])
def test_every_slot_has_a_place_in_one_page(num_slots: int) -> None:
    index = table(num_slots)
    pages = [index.slots_of_page(n) for n in range(index.geometry.num_index_pages)]
    assert [slot for page in pages for slot in page] == list(range(num_slots))
    for slot in range(num_slots):
        index.put(slot, slot + 1, 7, b"key-%d" % slot)
    assert list(listed(table(num_slots, pages_of(index)))) == list(range(num_slots))


# --- damage ------------------------------------------------------------------------------------


def filled() -> IndexTable:
    index = table(150)
    for slot in range(150):
        index.put(slot, slot + 1, 7, b"key-%d" % slot)
    return index


@given(at=st.integers(0, 3 * PAGE_BYTES * 8 - 1))
def test_a_flipped_bit_empties_one_page(at: int) -> None:
    raw = bytearray(pages_of(filled()))
    raw[at // 8] ^= 1 << at % 8
    index = table(150, bytes(raw))
    page_no = at // 8 // PAGE_BYTES
    assert index.damaged_pages == [page_no]
    assert set(listed(index)) == set(range(150)) - set(index.slots_of_page(page_no))
    assert index.take_changed() == [page_no]  # to be written again


@given(length=st.integers(0, 3 * PAGE_BYTES - 1))
def test_what_is_cut_off_is_damaged(length: int) -> None:
    index = table(150, pages_of(filled())[:length])
    assert index.damaged_pages == list(range(length // PAGE_BYTES, 3))


def test_pages_in_the_wrong_place_or_of_another_slab_are_damaged() -> None:
    raw = pages_of(filled())
    swapped = raw[PAGE_BYTES : 2 * PAGE_BYTES] + raw[:PAGE_BYTES] + raw[2 * PAGE_BYTES :]
    assert table(150, swapped).damaged_pages == [0, 1]
    assert table(150, raw, OTHER_UUID).damaged_pages == [0, 1, 2]


@given(data=st.data())
def test_entries_of_any_content_are_read(data: st.DataObject) -> None:
    """A page with a valid checksum may contain anything: unknown states, lengths beyond the key."""
    raw = bytearray(pages_of(filled()))
    for _ in range(data.draw(st.integers(1, 4), label="changes")):
        at = data.draw(st.integers(24, 4087), label="at")
        content = data.draw(st.binary(min_size=1, max_size=min(64, 4088 - at)), label="content")
        raw[at : at + len(content)] = content
    page = raw[:PAGE_BYTES]
    close_page(page)
    raw[:PAGE_BYTES] = page
    index = table(150, bytes(raw))
    assert index.damaged_pages == []
    for _, _, _, key in listed(index).values():
        assert len(key) <= MAX_INLINE_KEY
