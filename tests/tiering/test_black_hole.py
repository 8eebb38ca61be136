"""Tiers that stop answering in the middle of a trace, and come back."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest

from tests import traces
from tests.tiering.black_hole import PERIODS, STEP_S, BlackHole, Death

NUM_REQUESTS = 900


@pytest.fixture(autouse=True)
def _no_logs() -> Iterator[None]:
    logging.disable()
    yield
    logging.disable(logging.NOTSET)


@pytest.fixture(scope="module")
def requests() -> list[list[int]]:
    return traces.conversation()[:NUM_REQUESTS]


def test_two_healthy_tiers_are_never_cut_off(requests: list[list[int]]) -> None:
    outcome = BlackHole(requests, 0, None).run()
    assert outcome.opened_after_s is None
    assert outcome.num_stuck == 0
    assert outcome.most_quarantined == 0


@pytest.mark.parametrize("death", Death)
@pytest.mark.parametrize("tier", [0, 1])
def test_a_tier_that_goes_hurts_nobody(tier: int, death: Death, requests: list[list[int]]) -> None:
    outcome = BlackHole(requests, tier, death).run()

    assert outcome.num_stuck == 0
    for name in PERIODS:
        assert outcome.periods[name]["num_hits"] > 0
        assert outcome.periods[name]["longest_wait_s"] <= outcome.allowed_wait_s + STEP_S
    assert outcome.periods["during"]["longest_wait_s"] > STEP_S, "nobody noticed"
    assert outcome.opened_after_s is not None
    assert outcome.opened_after_s <= outcome.periods["during"]["seconds"]
    assert outcome.closed_after_s is not None
