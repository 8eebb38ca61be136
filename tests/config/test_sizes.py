"""Sizes as people write them."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtier.config import SizeError, format_size, parse_size
from kvtier.config.sizes import as_size
from tests.config.sample import GiB

SIZES = {
    1: 1,
    8589934592: 8 * GiB,
    8.0 * 2**30: 8 * GiB,
    "512": 512,
    "512B": 512,
    "8GiB": 8 * GiB,
    " 8 gib ": 8 * GiB,
    "512 MiB": 512 * 1024**2,
    "1.5GB": 1_500_000_000,
    "1.5gb": 1_500_000_000,
    "1KB": 1000,
    "1KiB": 1024,
    "0.5KiB": 512,
    "2TB": 2 * 10**12,
    "2TiB": 2 * 1024**4,
    "1.25PiB": 5 * 1024**5 // 4,
    "3PB": 3 * 10**15,
    "1.1TiB": 1209462790553,
    1.3 * 2**30: 1395864371,
}

NO_SIZES: dict[Any, str] = {
    "8 gigs": 'Write "8GiB" for powers of 1024, "8GB" for powers of 1000',
    "8G": 'Write "8GiB" for powers of 1024, "8GB" for powers of 1000',
    "1.5 mb/s": "Write a number and a unit",
    "8 bytes": "Use one of the units B, KB",
    "8XiB": "Use one of the units B, KB",
    "1,5GB": "Write a number and a unit",
    "-1GiB": "Write a number and a unit",
    "1e9": "Write a number and a unit",
    "٨GiB": "Write a number and a unit",
    "": "Write a number and a unit",
    "GiB": "Write a number and a unit",
    "nan": "Write a number and a unit",
    "9" * 5000: "Write a number and a unit",
    "0GiB": "Write a size above 0",
    "0.5B": "Write a size above 0",
    "9000PiB": "is the unit right?",
    0: "Write a size above 0",
    -5: "Write a size above 0",
    0.5: "Write a size above 0",
    float("nan"): "Write a number of bytes",
    float("inf"): "Write a number of bytes",
    2**63: "is the unit right?",
    True: "Write a number of bytes",
    None: "Write a number of bytes",
    (8,): "Write a number of bytes",
}


@pytest.mark.parametrize(("written", "size"), SIZES.items())
def test_a_size_is_read_as_it_is_written(written: object, size: int) -> None:
    assert parse_size(written) == size


@pytest.mark.parametrize(("written", "remedy"), NO_SIZES.items(), ids=lambda x: str(x)[:20])
def test_what_is_no_size_is_refused_with_what_to_write(written: object, remedy: str) -> None:
    with pytest.raises(SizeError) as refused:
        parse_size(written)
    assert remedy in str(refused.value)


@given(st.integers(1, 2**63 - 1))
def test_a_formatted_size_reads_back(size: int) -> None:
    assert parse_size(format_size(size)) == size


@given(st.integers(1, 10**6), st.sampled_from([("KiB", 10), ("MiB", 20), ("GiB", 30)]))
def test_formatting_picks_the_largest_unit_that_is_exact(
    number: int, unit: tuple[str, int]
) -> None:
    name, power = unit
    shown = format_size(number << power)
    assert len(shown) <= len(f"{number}{name}")


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
def test_a_size_for_people(num_bytes: int, text: str) -> None:
    assert as_size(num_bytes) == text


@given(st.integers(0, 2**50))
def test_a_size_for_people_is_rounded_down(num_bytes: int) -> None:
    told = parse_size(as_size(num_bytes), may_be_zero=True)
    assert told <= num_bytes
    assert num_bytes - told <= max(1, num_bytes // 50)
