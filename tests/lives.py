"""The command that lives random lives by their seeds, whatever kind of life it is."""

from __future__ import annotations

import argparse
import logging
import os
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Protocol

from tests.arguments import positive_number, seeds


class Outcome(Protocol):
    """How a life went, as far as the command has to know."""

    seed: int
    num_steps: int
    digest: int
    tally: Counter[str]

    @property
    def violation(self) -> Exception | None: ...


@dataclass(frozen=True, slots=True)
class LivesCommand:
    """`--seed`, `--seeds`, `--minutes` and so on, for one kind of life."""

    again: str
    """The command that lives one life again; its seed is put in."""
    live: Callable[[int], Outcome]
    describe: Callable[[Exception], str] = str
    """What to say of a violation."""

    def parser(self, prog: str, description: str | None) -> argparse.ArgumentParser:
        """The options that all kinds of lives have."""
        parser = argparse.ArgumentParser(prog=prog, description=description)
        parser.add_argument("--seed", type=int, help="live this one life, and show it")
        parser.add_argument("--seeds", type=seeds, metavar="A-B", help="live these lives")
        parser.add_argument(
            "--minutes", type=positive_number, help="live from --seeds, or 0, on for so long"
        )
        parser.add_argument("--keep-going", action="store_true", help="do not end with a violation")
        parser.add_argument("--tally", action="store_true", help="print how often what happened")
        return parser

    def prepare(self) -> None:
        """Strict, and quiet: the tiers do all that there is to complain about."""
        os.environ["KVTIER_STRICT"] = "1"
        logging.disable()

    def end_with(self, outcome: Outcome) -> None:
        """Show one life, and end with a non-zero status if it went wrong."""
        self._show(outcome)
        raise SystemExit(outcome.violation is not None)

    def run(self, parser: argparse.ArgumentParser, arguments: argparse.Namespace) -> None:
        """Live many lives; end with a non-zero status if one of them went wrong."""
        chosen: Iterable[int] = arguments.seeds or seeds("0")
        if not isinstance(chosen, range) and not arguments.minutes:
            parser.error("give --seed, --seeds A-B, or --minutes with --seeds A-")
        start = time.monotonic()
        num_lives = 0
        tally: Counter[str] = Counter()
        failed: list[Outcome] = []
        for seed in chosen:
            outcome = self.live(seed)
            num_lives += 1
            tally += outcome.tally
            if outcome.violation is not None:
                failed.append(outcome)
                self._show(outcome)
                if not arguments.keep_going:
                    break
            if arguments.minutes and time.monotonic() - start > arguments.minutes * 60:
                break
        elapsed = time.monotonic() - start
        if arguments.tally:
            for what, n in sorted(tally.items()):
                print(f"{n:10d} {what}")
        print(
            f"{num_lives} lives in {elapsed:.1f} s: {num_lives / elapsed * 60:.0f} per minute; "
            f"{len(failed)} went wrong"
        )
        if failed:
            shortest = min(failed, key=lambda outcome: outcome.num_steps)
            print(f"the shortest of them: seed {shortest.seed}, {shortest.num_steps} steps")
        raise SystemExit(bool(failed))

    def _show(self, outcome: Outcome) -> None:
        """Say how a life went, and how to see it again."""
        where = f"seed {outcome.seed}, {outcome.num_steps} steps, digest {outcome.digest:08x}"
        if outcome.violation is None:
            print(f"{where}: as it should be")
            return
        print(f"{where}: {self.describe(outcome.violation)}")
        print(f"  again: {self.again.format(seed=outcome.seed)}")
        sys.stdout.flush()
