"""A run with a violation leaves what is needed to explain it."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

from tests.tiering.crash.oracle import Violation
from tests.tiering.crash.runs import run_in


class _Failing:
    """A run of one life, with a violation."""

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


def test_a_run_that_goes_wrong_keeps_its_files_and_reports(tmp_path: Path) -> None:
    outcome = run_in(tmp_path, 1, _Failing, is_kept=True)
    [kept] = tmp_path.iterdir()
    assert str(outcome.violation) == f"it went wrong (files and reports: {kept})"
    assert (kept / "kv.slab").read_bytes() == b"as it was left"
    assert (kept / "before.slab").read_bytes() == b"as it was found"
    assert (kept / "trace.txt").read_text() == "what it was told"
    assert json.loads((kept / "reports.jsonl").read_text()) == [1, "wrong"]


def test_the_files_of_a_planted_bug_are_not_kept(tmp_path: Path) -> None:
    assert run_in(tmp_path, 1, _Failing, is_kept=False).violation is not None
    assert not list(tmp_path.iterdir())
