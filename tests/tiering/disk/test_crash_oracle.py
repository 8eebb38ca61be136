"""What the oracle of the crash runs must accept, and what it must refuse."""

from __future__ import annotations

import pytest

from tests.tiering.crash.oracle import Violation
from tests.tiering.crash.processes import Report
from tests.tiering.disk.crash.oracle import Oracle

OURS = "00" * 16
FIRST, SECOND = 1 << 20, 2 << 20
"""Generations of one block: stored in the first life, and in the second."""


def opened(generations: list[int]) -> list[Report]:
    """Reports of a life that opens the slab and finds these generations."""
    return [
        ["opened", OURS, 0.1, 0, 0],
        ["clock", "slab", 100],
        ["found", generations],
        ["inspected"],
    ]


def stored(generation: int) -> list[Report]:
    """Reports of a life that stores the block and writes its index."""
    return [
        ["put", [[1, generation]]],
        ["placed", [], 2],
        ["acked", [generation]],
        ["index begins"],
        ["index ends"],
    ]


KILLED: Report = ["ended", -9]
RESET: list[Report] = [["epoch", 5, OURS], ["epoch has begun"]]
CLEAN_END: list[Report] = [["shut down"], ["ended", 0]]


def follow(oracle: Oracle, *reports: Report) -> None:
    for report in reports:
        oracle.follow([1, *report])


def test_a_cut_that_a_killed_life_never_wrote_is_not_made_by_the_clean_end_of_another() -> None:
    oracle = Oracle()
    follow(oracle, *opened([]), *stored(FIRST), *RESET, KILLED)
    follow(oracle, *opened([FIRST]), *CLEAN_END)
    follow(oracle, *opened([FIRST]))


@pytest.mark.parametrize("end", [[["cut", 5], KILLED], CLEAN_END], ids=["cut", "clean end"])
def test_a_block_from_before_a_cut_that_was_written_is_found_out(end: list[Report]) -> None:
    oracle = Oracle()
    follow(oracle, *opened([]), *stored(FIRST), *RESET, *end)
    with pytest.raises(Violation, match="from before epoch 1"):
        follow(oracle, *opened([FIRST]))


def test_an_older_copy_may_be_back_after_writes_were_lost_and_only_then() -> None:
    oracle = Oracle()
    follow(oracle, *opened([]), *stored(FIRST), ["placed", [FIRST], 3])
    follow(oracle, *stored(SECOND), KILLED)
    oracle.expect_nothing()
    follow(oracle, *opened([FIRST]), KILLED)

    oracle = Oracle()
    follow(oracle, *opened([]), *stored(FIRST), ["placed", [FIRST], 3])
    follow(oracle, *stored(SECOND), KILLED)
    with pytest.raises(Violation, match="was there once"):
        follow(oracle, *opened([FIRST]))
