"""The orchestrator in simulated lives: no invariant is broken, and every interesting event occurs.

A failure names the seed of its life: `python -m tests.tiering.simulation --seed N --trace`.
"""

from __future__ import annotations

import logging
import mmap
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from random import SystemRandom
from typing import Any

import pytest

from kvtier.base import LookupResult
from kvtier.config.options import WritePolicyName
from kvtier.cpu.shared_offload_region import SharedOffloadRegion
from kvtier.seal import SealFailure
from kvtier.tiering import write_policy
from kvtier.tiering.manager import TieringOffloadingManager
from tests.tiering.simulation.life import Life, Outcome, live
from tests.tiering.simulation.memory import Memory
from tests.tiering.simulation.tier import SimulatedTier
from tests.tiering.simulation.violation import Violation

NUM_LIVES = 1000
NUM_LIVES_IN_SOAK = 20_000
NUM_LIVES_WITH_POLICY = 200

NOT_SIMULATED = {SealFailure.STALE, SealFailure.UNSIGNED, SealFailure.FORGED}
"""STALE is found by tiers that write into the same place again and again, the other two by engines
with keys."""

AT_LEAST = {
    "load jobs": 3000,
    "blocks in load jobs": 6000,
    "windowed blocks in load jobs": 500,
    "leased blocks": 3000,
    "store jobs": 8000,
    "known blocks in store jobs of whole requests": 500,
    "loads": 5000,
    "waits": 10_000,
    "probes": 300,
    "breakers opened": 500,
    "breakers closed again": 150,
    "steps with quarantined slots": 3000,
    "compared with metrics": 10_000,
    "resets during device transfers": 300,
    "resets during promotions": 200,
    "preemptions": 1000,
    "aborts": 1000,
    "refused stores": 2000,
    "dead tiers": 150,
    "abrupt ends": 200,
    "dropped results": 50,
    "duplicate results": 50,
    "invented results": 200,
    "garbage answers": 150,
    "weather: BLACK_HOLE": 100,
    "weather: STORM": 50,
    "raised: submit": 50,
    "raised: get_finished_jobs": 200,
    "raised: lookup": 150,
    "raised: lookup_batch": 10,
    "raised: begin_epoch": 10,
    "raised: on_new_request": 50,
    "raised: on_request_finished": 50,
    "raised: drain_jobs": 5,
    "events of tiers": 3000,
    "counted: adopted into the primary": 60,
    "counted: promoted into the primary": 4000,
    "counted: late_loads": 100,
    "counted: late_lookups": 300,
    "counted: late_stores": 300,
    "counted: failed_loads": 400,
    "counted: dropped_blocks": 500,
    "counted: shed_blocks": 1000,
    "counted: offered_again_blocks": 1000,
    "counted: held_back_blocks": 500,
    "raised: touch": 15,
    "raised: missing": 10,
    "counted: violations": 400,
    **{f"seal failures: {failure}": 5 for failure in SealFailure if failure not in NOT_SIMULATED},
}
"""Events that must occur in `NUM_LIVES` lives; without them the lives prove nothing."""


@pytest.fixture(scope="module", autouse=True)
def _no_logs() -> Iterator[None]:
    """The tiers misbehave in every way, so warnings are expected."""
    logging.disable()
    yield
    logging.disable(logging.NOTSET)


@pytest.fixture(scope="module")
def outcomes() -> list[Outcome]:
    return [live(seed) for seed in range(NUM_LIVES)]


def _say(failed: list[Outcome]) -> str:
    return "\n".join(
        f"seed {outcome.seed} ({outcome.num_steps} steps): {outcome.violation}"
        for outcome in sorted(failed, key=lambda outcome: outcome.num_steps)
    )


def test_nothing_goes_wrong(outcomes: list[Outcome]) -> None:
    failed = [outcome for outcome in outcomes if outcome.violation is not None]
    assert not failed, _say(failed)


def test_everything_happens(outcomes: list[Outcome]) -> None:
    tally: Counter[str] = Counter()
    for outcome in outcomes:
        tally.update(outcome.tally)
    too_rare = {what: tally[what] for what, least in AT_LEAST.items() if tally[what] < least}
    assert not too_rare


@pytest.mark.parametrize("seed", [3, 44])
@pytest.mark.parametrize("hash_seed", ["1", "2"])
def test_a_seed_is_one_life(seed: int, hash_seed: str) -> None:
    command = [sys.executable, "-m", "tests.tiering.simulation", "--seed", str(seed), "--trace"]
    env = os.environ | {"PYTHONHASHSEED": hash_seed}
    again = subprocess.run(command, env=env, check=True, stdout=subprocess.PIPE, text=True).stdout
    outcome = live(seed)
    assert f"seed {seed}, {outcome.num_steps} steps, digest {outcome.digest:08x}" in again
    assert "on_schedule_end" in again


@pytest.mark.parametrize("write", [each for each in WritePolicyName if each != "through"])
def test_nothing_goes_wrong_with_another_write_policy(
    write: WritePolicyName, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(write_policy, "_ENOUGH", 8)  # lives are short
    monkeypatch.setattr(write_policy, "_UNKNOWN_CAPACITY", 0)  # and few blocks are written in one
    outcomes = [live(seed, write=write) for seed in range(NUM_LIVES_WITH_POLICY)]
    failed = [outcome for outcome in outcomes if outcome.violation is not None]
    assert not failed, _say(failed)
    tally: Counter[str] = Counter()
    for outcome in outcomes:
        tally.update(outcome.tally)
    assert tally["store jobs"] > 500
    counted = "unwritten_blocks" if write == "on_evict" else "left_out_blocks"
    assert tally[f"counted: {counted}"] > 50


def _never_over(manager: TieringOffloadingManager) -> bool:
    return True


def _nothing(*args: Any) -> None:
    return None


def _always_pending(*args: Any) -> LookupResult:
    return LookupResult.HIT_PENDING


def _believed(*args: Any) -> bool:
    return True


@pytest.mark.parametrize(
    ("broken", "method", "replacement", "seen"),
    [
        (SimulatedTier, "verify_block", _believed, "does not hold"),
        (TieringOffloadingManager, "reset_cache", _nothing, "does not hold"),
        (TieringOffloadingManager, "complete_load", _nothing, "after the end"),
        (TieringOffloadingManager, "lookup", _always_pending, "has waited"),
        (TieringOffloadingManager, "has_pending_work", _never_over, "nobody will end"),
    ],
)
def test_a_broken_part_is_seen(
    broken: type,
    method: str,
    replacement: Callable[..., Any],
    seen: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(broken, method, replacement)
    violations: list[Violation] = []
    for seed in range(200):
        violation = live(seed).violation
        if violation is not None:
            violations.append(violation)
            if seen in str(violation):
                return
    pytest.fail(f"nobody saw {seen!r}; only {[str(violation) for violation in violations]}")


@pytest.mark.parametrize("seed", range(6))
def test_in_shared_memory(seed: int, tmp_path: Path) -> None:
    regions: list[SharedOffloadRegion] = []

    def shared_memory(num_blocks: int) -> Memory:
        page = mmap.PAGESIZE
        region = SharedOffloadRegion(
            f"simulated-{seed}", num_blocks, None, page, page, directory=str(tmp_path)
        )
        regions.append(region)
        return Memory(region, num_blocks, page)

    Life(seed, make_memory=shared_memory).run()

    with pytest.raises(RuntimeError, match="cleaned up"):
        regions[0].create_kv_memoryview()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.soak
def test_nothing_goes_wrong_in_new_lives() -> None:
    first = SystemRandom().randrange(10**9)
    failed = [
        outcome
        for seed in range(first, first + NUM_LIVES_IN_SOAK)
        if (outcome := live(seed)).violation is not None
    ]
    assert not failed, _say(failed)
