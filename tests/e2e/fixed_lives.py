"""The lives that every test run repeats."""

from __future__ import annotations

from functools import cache

from tests.e2e.life import Outcome, live

__all__ = ["SEEDS", "outcome_of", "say"]

SEEDS = range(40)


@cache
def outcome_of(seed: int) -> Outcome:
    """The outcome of a life without a planted bug. Each is run once per process."""
    return live(seed)


def say(outcome: Outcome) -> str:
    """The violation, and the command that repeats it."""
    error = outcome.violation
    return f"{type(error).__name__}: {error}\nagain: python -m tests.e2e --seed {outcome.seed}"
