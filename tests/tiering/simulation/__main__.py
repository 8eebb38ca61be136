"""Runs lives: one seed, a range of them, or as many as there is time for."""

from __future__ import annotations

import argparse
import logging
import os
import sys
import time
from collections import Counter
from collections.abc import Iterator
from itertools import count

from tests.tiering.simulation.life import Outcome, live


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.tiering.simulation", description=__doc__)
    parser.add_argument("--seed", type=int, help="live this one life")
    parser.add_argument("--seeds", metavar="A-B", help="live these lives")
    parser.add_argument("--minutes", type=float, help="live from --seeds, or 0, on for so long")
    parser.add_argument("--trace", action="store_true", help="print all that happens (--seed)")
    parser.add_argument("--keep-going", action="store_true", help="do not end with a violation")
    parser.add_argument("--tally", action="store_true", help="print how often what happened")
    arguments = parser.parse_args()
    os.environ["KVTIER_STRICT"] = "1"
    logging.disable()  # the tiers do all that there is to complain about
    if arguments.seed is not None:
        outcome = live(arguments.seed, keeps_trace=arguments.trace)
        for line in outcome.trace:
            print(line)
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
    num_lives = 0
    tally: Counter[str] = Counter()
    failed: list[Outcome] = []
    for seed in seeds:
        outcome = live(seed)
        num_lives += 1
        tally += outcome.tally
        if outcome.violation is not None:
            failed.append(outcome)
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
        f"{len(failed)} went wrong"
    )
    if failed:
        shortest = min(failed, key=lambda outcome: outcome.num_steps)
        print(f"the shortest of them: seed {shortest.seed}, {shortest.num_steps} steps")
        raise SystemExit(1)


def show(outcome: Outcome) -> None:
    """Say how a life went, and how to see it again."""
    where = f"seed {outcome.seed}, {outcome.num_steps} steps, digest {outcome.digest:08x}"
    if outcome.violation is None:
        print(f"{where}: as it should be")
        return
    print(f"{where}: {outcome.violation}")
    print(f"  again: python -m tests.tiering.simulation --seed {outcome.seed} --trace")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
