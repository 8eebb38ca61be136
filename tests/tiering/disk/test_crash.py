"""The disk tier is killed again and again, at every point and at any moment: what the next engine
finds in the slab is what was stored there, all that was in the index, and nothing else.

A saga that goes wrong is named by its seed: `python -m tests.tiering.disk.crash --seed N`.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from random import SystemRandom

import pytest

from tests.tiering.disk.crash.mutants import MUTANTS
from tests.tiering.disk.crash.nursery import Nursery
from tests.tiering.disk.crash.points import POINTS
from tests.tiering.disk.crash.saga import tell
from tests.tiering.sagas import Outcome, say, sum_up

NUM_SAGAS = 16
NUM_SAGAS_IN_SOAK = 100
MOST_SAGAS_FOR_A_MUTANT = 25

AT_LEAST = {
    "kills": 90,
    "inspections": 50,
    "blocks found": 300,
    "durable blocks found": 150,
    "evictions": 100,
}
"""What has to happen in `NUM_SAGAS` sagas, or they prove nothing."""
LEAST_POINTS = len(POINTS) * 2 // 3
"""At so many different ones, lives have really ended. How far one gets depends on its threads."""


@pytest.fixture(scope="module")
def nursery() -> Iterator[Nursery]:
    with Nursery() as running:
        yield running


@pytest.fixture(scope="module")
def outcomes(nursery: Nursery, tmp_path_factory: pytest.TempPathFactory) -> list[Outcome]:
    directory = tmp_path_factory.mktemp("crash")
    return [tell(seed, nursery, directory) for seed in range(NUM_SAGAS)]


def test_nothing_goes_wrong(outcomes: list[Outcome]) -> None:
    assert not say(outcomes)


def test_everything_happens(outcomes: list[Outcome]) -> None:
    tally = sum_up(outcomes)
    too_rare = {what: tally[what] for what, least in AT_LEAST.items() if tally[what] < least}
    assert not too_rare
    points = [what for what in tally if what.startswith("killed: ")]
    assert len(points) >= LEAST_POINTS, points
    assert any(what.startswith("power cut: ") for what in tally)


@pytest.mark.parametrize("name", MUTANTS)
def test_a_planted_bug_is_noticed(name: str, nursery: Nursery, tmp_path: Path) -> None:
    first = MUTANTS[name].first_seed
    for seed in range(first, first + MOST_SAGAS_FOR_A_MUTANT):
        outcome = tell(seed, nursery, tmp_path, mutant=name)
        if outcome.violation is not None:
            print(f"seed {seed}: {outcome.violation}")
            return
    pytest.fail(
        f"nobody noticed that {name.replace('_', ' ')} in {MOST_SAGAS_FOR_A_MUTANT} sagas; "
        f"look for others by: python -m tests.tiering.disk.crash --mutant {name} --minutes 2"
    )


@pytest.mark.soak
def test_nothing_goes_wrong_in_new_sagas(nursery: Nursery, tmp_path: Path) -> None:
    first = SystemRandom().randrange(10**9)
    told = [tell(seed, nursery, tmp_path) for seed in range(first, first + NUM_SAGAS_IN_SOAK)]
    tally = sum_up(told)
    print({what: tally[what] for what in AT_LEAST})
    assert not say(told)
    assert tally["kills"] >= 500
