"""Random workloads on an engine with offloading: tokens, logits and events are right, and nothing
is left behind.

A failure names its seed: `python -m tests.e2e --seed N` repeats it.
"""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from random import SystemRandom

import pytest

from tests.e2e.fixed_lives import SEEDS, outcome_of, say
from tests.e2e.life import live
from tests.e2e.workload import draw

AT_LEAST = {
    "requests": 500,
    "tokens compared": 1000,
    "requests that loaded": 130,
    "tokens loaded": 4500,
    "tokens loaded in exams": 3000,
    "requests that follow an answer": 30,
    "ids used again": 8,
    "matches behind tokens of the device": 80,
    "matches that were pending": 500,
    "loads": 160,
    "loads of several groups": 90,
    "loads of a window": 80,
    "loads that begin inside a chunk": 35,
    "failed loads": 8,
    "failed stores": 50,
    "refused loads": 2,
    "refused stores": 6,
    "jobs reported by some ranks only": 80,
    "stores": 450,
    "stores waited for": 60,
    "copies made because they were waited for": 90,
    "preemptions": 60,
    "aborts": 10,
    "aborts during a load": 6,
    "resets": 25,
    "other weights": 8,
    "stores under way at a reset": 15,
    "loads under way at a reset": 8,
    "jobs flushed": 18,
    "black holes": 3,
    "events": 1500,
    "tiers compared with their events": 15,
    "lives by the real clock": 3,
    "groups: 1": 8,
    "groups: 2": 15,
    "ranks: 1": 15,
    "ranks: 2": 8,
    **{f"blocks per chunk: {n}": 7 for n in (1, 2, 3)},
    "counted: cpu_stored_blocks": 900,
    "counted: cpu_loaded_blocks": 700,
    "counted: cpu_evicted_blocks": 500,
    "counted: cpu_promoted_blocks": 100,
    "fault: corrupt": 6,
    "fault: delay": 10,
    "fault: drop": 3,
    "fault: duplicate": 2,
    "fault: fail": 10,
    "fault: garbage": 6,
    "fault: late_write": 6,
    "fault: partial": 6,
    "fault: raise": 8,
}
"""Events that must occur in the lives of `SEEDS`, or they prove nothing."""

SOAK_MINUTES = float(os.environ.get("KVTIER_E2E_SOAK_MINUTES", "30"))


@pytest.fixture(scope="module", autouse=True)
def _no_logs() -> Iterator[None]:
    """The tiers commit every fault that is logged."""
    logging.disable()
    yield
    logging.disable(logging.NOTSET)


@pytest.mark.parametrize("seed", SEEDS)
def test_offloading_changes_nothing(seed: int) -> None:
    outcome = outcome_of(seed)
    assert outcome.violation is None, say(outcome)


def test_everything_happens() -> None:
    tally: Counter[str] = Counter()
    for seed in SEEDS:
        tally += outcome_of(seed).tally
    too_rare = {what: tally[what] for what, least in AT_LEAST.items() if tally[what] < least}
    assert not too_rare


def test_a_seed_is_one_life() -> None:
    seed = next(seed for seed in SEEDS if draw(seed).setup.tiers)
    command = [sys.executable, "-m", "tests.e2e", "--seed", str(seed)]
    env = os.environ | {"PYTHONHASHSEED": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    again = subprocess.run(command, env=env, check=True, stdout=subprocess.PIPE, text=True).stdout
    outcome = outcome_of(seed)
    assert f"seed {seed}, {outcome.num_steps} steps, digest {outcome.digest:08x}" in again


@pytest.mark.soak
def test_offloading_changes_nothing_in_new_lives() -> None:
    first = SystemRandom().randrange(10**9)
    deadline = time.monotonic() + SOAK_MINUTES * 60
    seed = first
    while time.monotonic() < deadline:
        outcome = live(seed)
        assert outcome.violation is None, say(outcome)
        seed += 1
    assert seed > first
