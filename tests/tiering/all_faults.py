"""Every fault that a tier can have, over a real tier: no wrong byte, no request waits forever, and
the tier is used again when it has recovered."""

from __future__ import annotations

import threading
from collections.abc import Callable
from itertools import count
from pathlib import Path
from random import Random
from typing import ClassVar

import pytest

from kvtier.testing import FaultKind, FaultSchedule, FaultyTier, TierHarness
from kvtier.testing.faults import FAULTS_OF, Fault
from tests.tiering.engine import Engine
from tests.tiering.patience import wait_until

__all__ = ["AllFaults"]

RATES = {
    FaultKind.DROP: 0.05,  # each takes a job's slots for good
    FaultKind.HANG: 0.05,
    FaultKind.CORRUPT: 0.5,
}
AT_THE_END = ("drain_jobs", "shutdown")


def serve_some(engine: Engine, seed: int, num_requests: int, first: int = 0) -> int:
    """Serve requests with prompts from a pool of 24, several of them in one step. Returns the
    number of loaded blocks."""
    chance = Random(seed)
    return sum(
        engine.serve(
            TierHarness.keys(5, start=first + 10 * chance.randrange(24)),
            then_step=chance.random() < 0.5,
        )
        for _ in range(num_requests)
    )


def serve_until_injected(engine: Engine, tier: FaultyTier, kinds: set[FaultKind]) -> None:
    seeds = count()

    def are_injected() -> bool:
        seed = next(seeds)
        serve_some(engine, seed, num_requests=20, first=seed % 8 * 240)
        tier.recover()  # or what hangs has all slots in the end
        return kinds <= {fault.kind for fault in tier.injected}

    wait_until(are_injected, f"faults {kinds}")


def make_well(tier: FaultyTier) -> None:
    tier.schedule = FaultSchedule()
    tier.recover()


def used_again(engine: Engine) -> None:
    """After some pauses, blocks that host memory has evicted are loaded from the tier again."""

    def is_used() -> bool:
        for first in (0, 240, 480, 720):  # more than host memory holds
            serve_some(engine, seed=5, num_requests=24, first=first)
            engine.settle()
        engine.figures()
        hits = serve_some(engine, seed=5, num_requests=24)
        promoted = sum(
            value
            for name, value in engine.figures().items()
            if "promoted_blocks" in name or 'direction="load"' in name
        )
        return hits > 0 and promoted > 0

    wait_until(is_used, "the tier is used again")


class AllFaults:
    """Derive a test class for a tier, and define how its engines are made."""

    configured_engine: ClassVar[Callable[..., Engine]]
    engine_with_faults: ClassVar[Callable[..., tuple[Engine, FaultyTier]]]

    @pytest.mark.parametrize("kind", FaultKind)
    def test_a_fault_does_no_harm(self, tmp_path: Path, kind: FaultKind) -> None:
        rates = {
            f"{method}.{kind}": RATES.get(kind, 0.2)
            for method, kinds in FAULTS_OF.items()
            if kind in kinds and method not in AT_THE_END
        }
        schedule = FaultSchedule(3, rates, delay_polls=(1, 3))
        engine, tier = self.engine_with_faults(tmp_path / "kept", schedule)
        with engine:
            serve_some(engine, seed=1, num_requests=80)
            serve_until_injected(engine, tier, {kind})
            make_well(tier)
            used_again(engine)
        with self.configured_engine(tmp_path / "kept") as after:
            serve_some(after, seed=2, num_requests=20)

    def test_all_faults_together(self, tmp_path: Path) -> None:
        rates = {
            f"{method}.{kind}": 0.002 if kind is FaultKind.DROP else 0.01
            for method, kinds in FAULTS_OF.items()
            if method not in AT_THE_END
            for kind in kinds
        }
        schedule = FaultSchedule(4, rates)
        engine, tier = self.engine_with_faults(tmp_path / "kept", schedule, num_rows=256)
        with engine:
            serve_until_injected(engine, tier, {FaultKind.FAIL, FaultKind.CORRUPT, FaultKind.HANG})
            make_well(tier)
            used_again(engine)

    def test_a_black_hole_is_a_miss_and_then_a_tier_again(self, tmp_path: Path) -> None:
        engine, tier = self.engine_with_faults(tmp_path / "kept", FaultSchedule())
        with engine:
            serve_some(engine, seed=1, num_requests=40)
            tier.go_dark()
            serve_some(engine, seed=2, num_requests=40)
            make_well(tier)
            used_again(engine)

    @pytest.mark.parametrize("method", AT_THE_END)
    def test_an_end_that_hangs_does_not_hold_up_the_engine(
        self, tmp_path: Path, method: str
    ) -> None:
        place = tmp_path / "kept"
        threads = set(threading.enumerate())
        schedule = FaultSchedule(faults=[Fault(method, 0, FaultKind.HANG)])
        engine, tier = self.engine_with_faults(place, schedule, shutdown_timeout_s=0.2)
        with engine:
            serve_some(engine, seed=1, num_requests=20)
        assert [fault.kind for fault in tier.injected] == [FaultKind.HANG]
        with pytest.raises(ValueError, match="released"):
            tier.rows[0]
        tier.recover()
        wait_until(lambda: set(threading.enumerate()) <= threads, "all threads have ended")
        with self.configured_engine(place) as after:
            serve_some(after, seed=2, num_requests=20)

    @pytest.mark.parametrize("method", AT_THE_END)
    def test_an_end_that_raises_lets_go_of_what_is_kept(self, tmp_path: Path, method: str) -> None:
        place = tmp_path / "kept"
        schedule = FaultSchedule(faults=[Fault(method, 0, FaultKind.RAISE)])
        engine, _ = self.engine_with_faults(place, schedule)
        with engine:
            serve_some(engine, seed=1, num_requests=20)
        with self.configured_engine(place) as after:
            assert serve_some(after, seed=1, num_requests=20) > 0
