"""What the oracle of the crash sagas must not blame the tier for, and what it must."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tests.tiering import sagas
from tests.tiering.disk.crash.nursery import Report
from tests.tiering.disk.crash.oracle import Oracle
from tests.tiering.sagas import Violation

OURS = "00" * 16
FIRST, SECOND = 1 << 20, 2 << 20
"""Generations of one block: stored in the first life, and in the second."""


def opened(generations: list[int]) -> list[Report]:
    """A life opens the slab and finds these."""
    return [
        ["opened", OURS, 0.1, 0, 0],
        ["clock", "slab", 100],
        ["found", generations],
        ["inspected"],
    ]


def stored(generation: int) -> list[Report]:
    """A life stores the block, and its index is in the file."""
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
        oracle.follow(report)


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


class _Failing:
    """A saga of one life that goes wrong."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self.num_lives = 1
        self.trace = ["what it was told"]
        self.reports: list[list[Any]] = [[1, "wrong"]]
        self.tally: Counter[str] = Counter()

    def run(self) -> None:
        (self._directory / "kv.slab").write_bytes(b"as it was left")
        raise Violation("it went wrong")

    def keep(self) -> None:
        (self._directory / "before.slab").write_bytes(b"as it was found")


def test_a_saga_that_goes_wrong_keeps_its_files_and_reports(tmp_path: Path) -> None:
    outcome = sagas.live(1, _Failing, tmp_path, is_kept=True)
    [kept] = tmp_path.iterdir()
    assert str(outcome.violation) == f"it went wrong (files and reports: {kept})"
    assert (kept / "kv.slab").read_bytes() == b"as it was left"
    assert (kept / "before.slab").read_bytes() == b"as it was found"
    assert (kept / "trace.txt").read_text() == "what it was told"
    assert json.loads((kept / "reports.jsonl").read_text()) == [1, "wrong"]


def test_the_files_of_a_planted_bug_are_not_kept(tmp_path: Path) -> None:
    assert sagas.live(1, _Failing, tmp_path, is_kept=False).violation is not None
    assert not list(tmp_path.iterdir())
