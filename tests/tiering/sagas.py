"""What sagas of lives that are killed have in common: how they went, and the command for them."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections import Counter
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol
from zlib import crc32

from tests.arguments import one_of
from tests.lives import LivesCommand

__all__ = ["Outcome", "Saga", "Violation", "live", "say", "sum_up", "told_by"]


class Violation(Exception):
    """Something that must not happen."""


@dataclass(slots=True)
class Outcome:
    """How a saga went."""

    seed: int
    num_steps: int
    """Lives."""
    digest: int
    tally: Counter[str]
    violation: Exception | None
    trace: list[str]


class Saga(Protocol):
    """Several lives in one directory."""

    num_lives: int
    trace: list[str]
    """The orders of each life, and what was done to its files."""
    reports: list[list[Any]]

    @property
    def tally(self) -> Counter[str]: ...

    def run(self) -> None:
        """Raises `Violation`. Nothing of the saga runs afterwards."""

    def keep(self) -> None:
        """It went wrong: put into its directory whatever else helps to see why."""


def live(
    seed: int, make_saga: Callable[[Path], Saga], directory: Path | None, is_kept: bool
) -> Outcome:
    """Run a saga in a new directory inside `directory`. If it goes wrong and `is_kept`, the new
    directory stays, with trace and reports, and the violation names it; otherwise it is removed."""
    own = Path(tempfile.mkdtemp(prefix="kvtier-crash-", dir=directory))
    violation: Violation | None = None
    try:
        saga = make_saga(own)
        try:
            saga.run()
        except Violation as seen:
            violation = seen
            if is_kept:
                saga.keep()
                (own / "trace.txt").write_text("\n".join(saga.trace))
                (own / "reports.jsonl").write_text("\n".join(map(json.dumps, saga.reports)))
                violation = Violation(f"{seen} (files and reports: {own})")
    finally:
        if violation is None or not is_kept:
            shutil.rmtree(own)
    digest = crc32("\n".join(saga.trace).encode())
    return Outcome(seed, saga.num_lives, digest, saga.tally, violation, saga.trace)


def say(outcomes: Iterable[Outcome]) -> str:
    """What has gone wrong; empty if nothing has."""
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


def told_by(
    command_line: str,
    about: str | None,
    tell: Callable[..., Outcome],
    nursery: Any,
    mutants: Collection[str],
) -> None:
    """The command that tells sagas: one seed, a range of them, or as many as there is time for."""
    command = LivesCommand(
        again=f"{command_line} --seed {{seed}}", live=partial(tell, nursery=nursery)
    )
    parser = command.parser(command_line, about)
    parser.add_argument(
        "--mutant", metavar="NAME", type=one_of("mutant", mutants), help="with this planted bug"
    )
    arguments = parser.parse_args()
    command.prepare()
    if arguments.mutant:
        command = LivesCommand(
            again=f"{command.again} --mutant {arguments.mutant}",
            live=partial(tell, nursery=nursery, mutant=arguments.mutant),
        )
    if arguments.seed is not None:
        outcome = tell(arguments.seed, nursery, mutant=arguments.mutant)
        for line in outcome.trace:
            print(line)
        command.end_with(outcome)
    command.run(parser, arguments)
