"""Engines that share a root are killed again and again, at every point and at any moment: the quota
holds, no wrong byte is loaded, and when all have left, the ledger says what is there.

To repeat a run with a violation: `python -m tests.tiering.fs.crash --seed N`.
"""

from __future__ import annotations

from typing import ClassVar

from tests.tiering.crash.checks import CrashChecks
from tests.tiering.fs.crash.points import POINTS
from tests.tiering.fs.crash.run import SUITE


class TestFs(CrashChecks):
    suite = SUITE
    num_runs = 8
    most_runs_for_a_mutant = 12
    at_least: ClassVar[dict[str, int]] = {
        "kills": 40,
        "clean ends": 8,
        "blocks stored": 300,
        "blocks found": 150,
        "evictions": 50,
        "epochs": 2,
        "looks": 50,
        "restarts of the machine": 1,
    }
    least_points = len(POINTS) // 3

    def check_violation(self, text: str) -> None:
        """The bug itself must be noticed, and not that it no longer fits the code."""
        assert "Traceback" not in text
        assert "unexpected error" not in text
