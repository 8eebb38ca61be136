"""Tells sagas of engines that share a root and are killed: one seed, a range of them, or as many as
there is time for.

The same seed gives the same orders; how far each life gets with them depends on its threads.
"""

from __future__ import annotations

from functools import partial

from tests.lives import LivesCommand
from tests.tiering.fs.crash.mutants import MUTANTS
from tests.tiering.fs.crash.nursery import Nursery
from tests.tiering.fs.crash.saga import tell


def main() -> None:
    with Nursery() as nursery:
        command = LivesCommand(
            again="python -m tests.tiering.fs.crash --seed {seed}",
            live=partial(tell, nursery=nursery),
        )
        parser = command.parser("python -m tests.tiering.fs.crash", __doc__)
        parser.add_argument("--mutant", choices=sorted(MUTANTS), help="with this planted bug")
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


if __name__ == "__main__":
    main()
