"""Sizes as people read them never say more than there is."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtier.cli.store.amounts import as_size
from kvtier.config import parse_size


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1000, "0.97 KiB"),
        (1024, "1 KiB"),
        (65_536_000, "62.5 MiB"),
        ((1 << 30) - 1, "0.99 GiB"),
        (999 << 20, "999 MiB"),
        (int(199.9 * 2**30), "199 GiB"),
        (int(9.999 * 2**40), "9.99 TiB"),
        (5000 << 40, "5000 TiB"),
    ],
)
def test_sizes(num_bytes: int, text: str) -> None:
    assert as_size(num_bytes) == text


@given(st.integers(0, 2**50))
def test_a_size_is_rounded_down(num_bytes: int) -> None:
    told = parse_size(as_size(num_bytes), may_be_zero=True)
    assert told <= num_bytes
    assert num_bytes - told <= max(1, num_bytes // 50)
