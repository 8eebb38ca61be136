"""How a run ended, and the command that starts runs by their seeds."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol
from zlib import crc32

from tests.arguments import one_of
from tests.lives import LivesCommand
from tests.tiering.crash.mutants import Mutants
from tests.tiering.crash.oracle import Violation
from tests.tiering.crash.processes import EngineProcesses, Report

__all__ = [
    "CrashSuite",
    "Outcome",
    "Run",
    "first_violation",
    "run_in",
    "sum_up",
    "too_rare",
    "violations_in",
]


@dataclass(slots=True)
class Outcome:
    """How a run ended."""

    seed: int
    num_steps: int
    """Number of lives."""
    digest: int
    tally: Counter[str]
    violation: Exception | None
    trace: list[str]


class Run(Protocol):
    """Several lives in one directory."""

    num_lives: int
    trace: list[str]
    """The orders of each life, and what was done to its files."""
    reports: list[Report]

    @property
    def tally(self) -> Counter[str]: ...

    def run(self) -> None:
        """Raises `Violation`. No life is left running."""

    def keep(self) -> None:
        """Called after a violation: put into the directory whatever else helps to explain it."""


def run_in(
    directory: Path | None, seed: int, make_run: Callable[[Path], Run], is_kept: bool
) -> Outcome:
    """Run in a new directory inside `directory`. After a violation, and if `is_kept`, the new
    directory stays, with trace and reports, and the violation names it; otherwise it is removed."""
    own = Path(tempfile.mkdtemp(prefix="kvtier-crash-", dir=directory))
    violation: Violation | None = None
    try:
        run = make_run(own)
        try:
            run.run()
        except Violation as seen:
            violation = seen
            if is_kept:
                run.keep()
                (own / "trace.txt").write_text("\n".join(run.trace))
                (own / "reports.jsonl").write_text("\n".join(map(json.dumps, run.reports)))
                violation = Violation(f"{seen} (files and reports: {own})")
    finally:
        if violation is None or not is_kept:
            shutil.rmtree(own)
    digest = crc32("\n".join(run.trace).encode())
    return Outcome(seed, run.num_lives, digest, run.tally, violation, run.trace)


def violations_in(outcomes: Iterable[Outcome]) -> str:
    """One line for each run with a violation; empty if there is none."""
    return "\n".join(
        f"seed {outcome.seed} ({outcome.num_steps} lives): {outcome.violation}"
        for outcome in outcomes
        if outcome.violation is not None
    )


def sum_up(outcomes: Iterable[Outcome]) -> Counter[str]:
    tally: Counter[str] = Counter()
    for outcome in outcomes:
        tally.update(outcome.tally)
    return tally


def too_rare(outcomes: Iterable[Outcome], at_least: Mapping[str, int]) -> dict[str, int]:
    """Of the things that must happen, those that did not happen often enough."""
    tally = sum_up(outcomes)
    return {what: tally[what] for what, least in at_least.items() if tally[what] < least}


def first_violation(outcomes: Iterable[Outcome]) -> str | None:
    """Start runs until one has a violation, and return that; None: none has."""
    for outcome in outcomes:
        if outcome.violation is not None:
            return f"seed {outcome.seed}: {outcome.violation}"
    return None


@dataclass(frozen=True, slots=True)
class CrashSuite:
    """The runs of one tier: everything that the command and the tests need."""

    package: str
    """Such as "tests.tiering.disk.crash"; its module `child` has the lives."""
    make_run: Callable[[int, EngineProcesses, Path, str | None], Run]
    """Makes a run from a seed, the processes, an empty directory, and the name of a mutant."""
    mutants: Mutants[Any]

    def processes(self) -> EngineProcesses:
        """A context manager; all runs of a test module share it."""
        return EngineProcesses(f"{self.package}.child")

    def run(
        self,
        seed: int,
        processes: EngineProcesses,
        directory: Path | None = None,
        mutant: str | None = None,
    ) -> Outcome:
        """Run all lives of one seed, in a new directory inside `directory`. After a violation, that
        directory is kept, unless it was a planted bug."""
        return run_in(
            directory,
            seed,
            lambda own: self.make_run(seed, processes, own, mutant),
            is_kept=mutant is None,
        )

    def main(self, about: str | None) -> None:
        """The command: one seed, a range of seeds, or as many as there is time for."""
        with self.processes() as processes:
            live = partial(self.run, processes=processes)
            command_line = f"python -m {self.package}"
            command = LivesCommand(again=f"{command_line} --seed {{seed}}", live=live)
            parser = command.parser(command_line, about)
            parser.add_argument(
                "--mutant",
                metavar="NAME",
                type=one_of("mutant", self.mutants),
                help="with this planted bug",
            )
            arguments = parser.parse_args()
            command.prepare()
            if arguments.mutant:
                live = partial(live, mutant=arguments.mutant)
                again = f"{command.again} --mutant {arguments.mutant}"
                command = LivesCommand(again=again, live=live)
            if arguments.seed is not None:
                outcome = live(arguments.seed)
                for line in outcome.trace:
                    print(line)
                command.end_with(outcome)
            command.run(parser, arguments)
