"""The lives that every test run lives."""

from __future__ import annotations

from functools import cache

from tests.e2e.life import Outcome, live

__all__ = ["SEEDS", "outcome_of", "say"]

SEEDS = range(40)


@cache
def outcome_of(seed: int) -> Outcome:
    """How one of them went, without any planted bug. Lived once in a process."""
    return live(seed)


def say(outcome: Outcome) -> str:
    """What went wrong, and how to see it again."""
    error = outcome.violation
    return f"{type(error).__name__}: {error}\nagain: python -m tests.e2e --seed {outcome.seed}"
