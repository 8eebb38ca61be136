"""Helpers that store and load blocks, and compare the tier's metrics with `du`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from kvtier.base import OffloadKey
from kvtier.testing import TierHarness
from kvtier.tiering.fs import manager
from kvtier.tiering.io.metrics import error_counter
from tests.tiering.fs.harness import du, fs_of
from tests.tiering.patience import wait_until

__all__ = [
    "Figures",
    "load_all",
    "load_some",
    "store_all",
    "store_some",
    "wait_until_stored",
    "wait_until_the_gauge_is_right",
]


class Figures:
    """The counters of a tier, added up over calls."""

    def __init__(self, harness: TierHarness) -> None:
        self._harness = harness
        self._counters: Counter[str] = Counter()

    def __getitem__(self, name: str) -> float:
        self._counters.update(self._harness.call("get_stats").counters)
        return self._counters[name]

    def errors(self, kind: str) -> float:
        return self[error_counter(manager.PREFIX, kind)]


def store_some(harness: TierHarness, keys: Sequence[OffloadKey]) -> set[OffloadKey]:
    """The blocks that the tier reports as stored."""
    (report,) = harness.wait_for(harness.store(keys))
    return report.moved


def load_some(harness: TierHarness, keys: Sequence[OffloadKey]) -> set[OffloadKey]:
    """The blocks that were loaded; the harness has compared their bytes."""
    (report,) = harness.wait_for(harness.load(keys))
    return report.moved


def store_all(harness: TierHarness, keys: Sequence[OffloadKey]) -> None:
    assert store_some(harness, keys) == set(keys)


def load_all(harness: TierHarness, keys: Sequence[OffloadKey]) -> None:
    assert load_some(harness, keys) == set(keys)


def wait_until_stored(harness: TierHarness, keys: Sequence[OffloadKey]) -> None:
    """Store and load blocks again and again until the tier takes them all and has them all. It may
    take a block for stored that it has stored or seen a few seconds ago and that is gone now."""
    every = set(keys)
    wait_until(
        lambda: store_some(harness, keys) == every == load_some(harness, keys),
        "the tier stores again",
    )


def wait_until_the_gauge_is_right(harness: TierHarness, root: Path) -> None:
    """Wait until the gauge equals the output of `du`, which must stay below the limit."""

    def is_right() -> bool:
        gauges = fs_of(harness).get_stats().gauges
        assert du(root) <= gauges[manager.LIMIT_BYTES]
        return gauges[manager.USED_BYTES] == du(root)

    wait_until(is_right, f"the gauge says {du(root)}, as du does")
