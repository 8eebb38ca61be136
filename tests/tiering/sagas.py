"""What sagas of lives that are killed have in common: how they went, and the command for them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

from tests.lives import LivesCommand

__all__ = ["Outcome", "say", "sum_up", "told_by"]


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
    parser.add_argument("--mutant", choices=sorted(mutants), help="with this planted bug")
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
