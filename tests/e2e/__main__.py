"""Run lives: of one seed, of a range of seeds, or as many as fit into a given time."""

from __future__ import annotations

import traceback

import pytest

from tests.arguments import one_of
from tests.e2e.life import live
from tests.e2e.mutants import MUTANTS
from tests.e2e.workload import draw
from tests.lives import LivesCommand

COMMAND = LivesCommand(
    again="python -m tests.e2e --seed {seed}",
    live=live,
    describe=lambda violation: f"{type(violation).__name__}: {violation}",
)


def main() -> None:
    parser = COMMAND.parser("python -m tests.e2e", __doc__)
    mutants = {mutant.name: mutant for mutant in MUTANTS}
    parser.add_argument(
        "--mutant",
        metavar="NAME",
        type=one_of("mutant", mutants),
        help="with this planted bug: who notices it?",
    )
    arguments = parser.parse_args()
    COMMAND.prepare()
    if arguments.mutant:
        mutants[arguments.mutant].plant(pytest.MonkeyPatch())
    if arguments.seed is not None:
        workload = draw(arguments.seed)
        print(workload.setup)
        for action, num_steps in workload.actions:
            print(f"  {action}, then {num_steps} steps")
        outcome = live(arguments.seed)
        if outcome.violation is not None:
            traceback.print_exception(outcome.violation)
        COMMAND.end_with(outcome)
    COMMAND.run(parser, arguments)


if __name__ == "__main__":
    main()
