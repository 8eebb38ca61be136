"""The tests of a tier's crash runs, as a base class."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from random import SystemRandom
from typing import ClassVar

import pytest

from tests.tiering.crash.processes import EngineProcesses
from tests.tiering.crash.runs import (
    CrashSuite,
    Outcome,
    first_violation,
    sum_up,
    too_rare,
    violations_in,
)

__all__ = ["CrashChecks"]

NUM_RUNS_IN_SOAK = 100


class CrashChecks:
    """A tier's test class derives from this, and sets the attributes."""

    suite: ClassVar[CrashSuite]
    num_runs: ClassVar[int]
    most_runs_for_a_mutant: ClassVar[int]
    at_least: ClassVar[dict[str, int]]
    """What has to happen in `num_runs` runs, or they prove nothing."""
    least_points: ClassVar[int]
    """Different points at which lives were killed. How far a life gets depends on its threads."""

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        if "mutant" in metafunc.fixturenames:
            metafunc.parametrize("mutant", list(self.suite.mutants))

    @pytest.fixture(scope="class")
    @classmethod
    def processes(cls) -> Iterator[EngineProcesses]:
        with cls.suite.processes() as running:
            yield running

    @pytest.fixture(scope="class")
    @classmethod
    def outcomes(
        cls, processes: EngineProcesses, tmp_path_factory: pytest.TempPathFactory
    ) -> list[Outcome]:
        directory = tmp_path_factory.mktemp("crash")
        return [cls.suite.run(seed, processes, directory) for seed in range(cls.num_runs)]

    def test_nothing_goes_wrong(self, outcomes: list[Outcome]) -> None:
        assert not violations_in(outcomes)

    def test_everything_happens(self, outcomes: list[Outcome]) -> None:
        assert not too_rare(outcomes, self.at_least)
        points = [what for what in sum_up(outcomes) if what.startswith("killed: ")]
        assert len(points) >= self.least_points, points

    def test_a_planted_bug_is_noticed(
        self, mutant: str, processes: EngineProcesses, tmp_path: Path
    ) -> None:
        first = self.suite.mutants[mutant].first_seed
        seeds = range(first, first + self.most_runs_for_a_mutant)
        noticed = first_violation(
            self.suite.run(seed, processes, tmp_path, mutant) for seed in seeds
        )
        print(noticed)
        assert noticed, (
            f"nothing was noticed in {len(seeds)} runs; look for other seeds by: "
            f"python -m {self.suite.package} --mutant {mutant} --minutes 2"
        )
        self.check_violation(noticed)

    def check_violation(self, text: str) -> None:
        """For tiers that can say more about the violation of a planted bug."""

    @pytest.mark.soak
    def test_nothing_goes_wrong_in_new_runs(
        self, processes: EngineProcesses, tmp_path: Path
    ) -> None:
        first = SystemRandom().randrange(10**9)
        seeds = range(first, first + NUM_RUNS_IN_SOAK)
        ended = [self.suite.run(seed, processes, tmp_path) for seed in seeds]
        tally = sum_up(ended)
        print({what: tally[what] for what in self.at_least})
        assert not violations_in(ended)
        assert tally["kills"] >= 500
