"""The checksum of a page shows any damage."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kvtier.tiering.io.page import BODY_BYTES, PAGE_BYTES, close_page, is_intact


@given(body=st.binary(max_size=64), bit=st.integers(0, 8 * PAGE_BYTES - 1))
def test_any_changed_bit_shows(body: bytes, bit: int) -> None:
    page = bytearray(body.ljust(PAGE_BYTES, b"\xff"))
    close_page(page)
    assert is_intact(page)
    assert is_intact(memoryview(page))
    assert page[:BODY_BYTES] == body.ljust(BODY_BYTES, b"\xff")
    page[bit // 8] ^= 1 << bit % 8
    assert not is_intact(page)


def test_an_empty_page_is_not_intact() -> None:
    assert not is_intact(bytes(PAGE_BYTES))


@given(length=st.integers(0, 2 * PAGE_BYTES).filter(lambda length: length != PAGE_BYTES))
def test_a_page_has_one_length(length: int) -> None:
    page = bytearray(PAGE_BYTES)
    close_page(page)
    assert not is_intact((bytes(page) * 2)[:length])
