"""Each planted bug fails one of the lives, all of which pass without it.

`pytest -k NAME` runs one of them; `-s` prints the violation that caught it.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from itertools import islice

import pytest

from tests.e2e.fixed_lives import SEEDS, outcome_of, say
from tests.e2e.life import live_through
from tests.e2e.mutants import MUTANTS, Mutant
from tests.e2e.workload import draw

MOST_LIVES = 8


@pytest.fixture(scope="module", autouse=True)
def _no_logs() -> Iterator[None]:
    """Silence the warnings of broken code."""
    logging.disable()
    yield
    logging.disable(logging.NOTSET)


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_a_planted_bug_is_noticed(mutant: Mutant, monkeypatch: pytest.MonkeyPatch) -> None:
    workloads = map(draw, mutant.seeds)
    concerned = (w for w in workloads if w.setup.worker.is_stepwise and mutant.concerns(w))
    for workload in islice(concerned, MOST_LIVES):
        with monkeypatch.context() as planted:
            mutant.plant(planted)
            outcome = live_through(workload)
        if outcome.violation is not None:
            print(f"seed {outcome.seed}: {type(outcome.violation).__name__}: {outcome.violation}")
            healthy = outcome_of(workload.seed)
            assert healthy.violation is None, say(healthy)
            return
    pytest.fail(
        f"nobody noticed that {mutant.name.replace('_', ' ')}; lives in which it shows are found "
        f"by: python -m tests.e2e --mutant {mutant.name} --seeds 0-1000"
    )


def test_the_planted_bugs_are_not_there_afterwards() -> None:
    assert outcome_of(SEEDS[0]).violation is None
