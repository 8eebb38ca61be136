"""Runs lives: one seed, a range of seeds, or as many as fit into a time."""

from __future__ import annotations

from tests.lives import LivesCommand
from tests.tiering.simulation.life import live

COMMAND = LivesCommand(again="python -m tests.tiering.simulation --seed {seed} --trace", live=live)


def main() -> None:
    parser = COMMAND.parser("python -m tests.tiering.simulation", __doc__)
    parser.add_argument(
        "--trace", action="store_true", help="print every event of one life (needs --seed)"
    )
    arguments = parser.parse_args()
    if arguments.trace and arguments.seed is None:
        parser.error("--trace shows one life: give its --seed")
    COMMAND.prepare()
    if arguments.seed is not None:
        outcome = live(arguments.seed, keeps_trace=arguments.trace)
        for line in outcome.trace:
            print(line)
        COMMAND.end_with(outcome)
    COMMAND.run(parser, arguments)


if __name__ == "__main__":
    main()
