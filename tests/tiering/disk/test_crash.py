"""The disk tier is killed again and again, at every point and at any moment: what the next engine
finds in the slab is what was stored there, all that was in the index, and nothing else.

To repeat a run with a violation: `python -m tests.tiering.disk.crash --seed N`.
"""

from __future__ import annotations

from typing import ClassVar

from kvtier.config.options import WritePolicyName
from tests.tiering.crash.checks import CrashChecks
from tests.tiering.crash.runs import Outcome, sum_up
from tests.tiering.disk.crash.points import POINTS
from tests.tiering.disk.crash.run import SUITE


class TestDisk(CrashChecks):
    suite = SUITE
    num_runs = 16
    most_runs_for_a_mutant = 25
    at_least: ClassVar[dict[str, int]] = {
        "kills": 90,
        "inspections": 50,
        "blocks found": 300,
        "durable blocks found": 150,
        "evictions": 100,
        **{f"blocks stored with {policy}": 5 for policy in WritePolicyName},
    }
    least_points = len(POINTS) * 2 // 3

    def test_there_are_power_cuts(self, outcomes: list[Outcome]) -> None:
        assert any(what.startswith("power cut: ") for what in sum_up(outcomes))
