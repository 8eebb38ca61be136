"""Lives an engine's lives: one seed, a range of them, or as many as there is time for."""

from __future__ import annotations

import argparse
import logging
import os
import sys
import time
import traceback
from collections import Counter
from collections.abc import Iterator
from itertools import count

import pytest

from tests.e2e.life import Outcome, live
from tests.e2e.mutants import MUTANTS
from tests.e2e.workload import draw


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.e2e", description=__doc__)
    parser.add_argument("--seed", type=int, help="live this one life, and show it")
    parser.add_argument("--seeds", metavar="A-B", help="live these lives")
    parser.add_argument("--minutes", type=float, help="live from --seeds, or 0, on for so long")
    parser.add_argument("--mutant", metavar="NAME", help="with this planted bug: who notices it?")
    parser.add_argument("--keep-going", action="store_true", help="do not end with a violation")
    parser.add_argument("--tally", action="store_true", help="print how often what happened")
    arguments = parser.parse_args()
    os.environ["KVTIER_STRICT"] = "1"
    logging.disable()  # the tiers do all that there is to complain about
    if arguments.mutant:
        [mutant] = [mutant for mutant in MUTANTS if mutant.name == arguments.mutant]
        mutant.plant(pytest.MonkeyPatch())
    if arguments.seed is not None:
        workload = draw(arguments.seed)
        print(workload.setup)
        for action, num_steps in workload.actions:
            print(f"  {action}, then {num_steps} steps")
        outcome = live(arguments.seed)
        if outcome.violation is not None:
            traceback.print_exception(outcome.violation)
        show(outcome)
        raise SystemExit(outcome.violation is not None)
    first, _, last = (arguments.seeds or "0-").partition("-")
    seeds: Iterator[int] = iter(range(int(first), int(last) + 1)) if last else count(int(first))
    if not last and not arguments.minutes:
        parser.error("give --seed, --seeds A-B, or --minutes")
    run(seeds, arguments.minutes, arguments.keep_going, arguments.tally)


def run(seeds: Iterator[int], minutes: float | None, keeps_going: bool, shows_tally: bool) -> None:
    """Live many lives; end with a non-zero status if one of them went wrong."""
    start = time.monotonic()
    num_lives = num_failed = 0
    tally: Counter[str] = Counter()
    for seed in seeds:
        outcome = live(seed)
        num_lives += 1
        tally += outcome.tally
        if outcome.violation is not None:
            num_failed += 1
            show(outcome)
            if not keeps_going:
                break
        if minutes and time.monotonic() - start > minutes * 60:
            break
    elapsed = time.monotonic() - start
    if shows_tally:
        for what, n in sorted(tally.items()):
            print(f"{n:10d} {what}")
    print(
        f"{num_lives} lives in {elapsed:.1f} s: {num_lives / elapsed * 60:.0f} per minute; "
        f"{num_failed} went wrong"
    )
    raise SystemExit(num_failed > 0)


def show(outcome: Outcome) -> None:
    """Say how a life went, and how to see it again."""
    where = f"seed {outcome.seed}, {outcome.num_steps} steps, digest {outcome.digest:08x}"
    if outcome.violation is None:
        print(f"{where}: as it should be")
        return
    print(f"{where}: {type(outcome.violation).__name__}: {outcome.violation}")
    print(f"  again: python -m tests.e2e --seed {outcome.seed}")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
