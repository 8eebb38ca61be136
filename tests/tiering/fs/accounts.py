"""What tests ask of an fs tier: to keep blocks, to have counted, and to agree with `du`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from kvtier.base import OffloadKey
from kvtier.testing import TierHarness
from kvtier.tiering.fs import metrics
from kvtier.tiering.io.errors import error_counter
from tests.tiering.fs.rig import du, fs_of
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
        return self[error_counter(metrics.PREFIX, kind)]


def store_some(harness: TierHarness, keys: Sequence[OffloadKey]) -> set[OffloadKey]:
    """Those that the tier says it has stored."""
    (report,) = harness.wait_for(harness.store(keys))
    return report.moved


def load_some(harness: TierHarness, keys: Sequence[OffloadKey]) -> set[OffloadKey]:
    """Those that came back; the harness has compared their bytes."""
    (report,) = harness.wait_for(harness.load(keys))
    return report.moved


def store_all(harness: TierHarness, keys: Sequence[OffloadKey]) -> None:
    assert store_some(harness, keys) == set(keys)


def load_all(harness: TierHarness, keys: Sequence[OffloadKey]) -> None:
    assert load_some(harness, keys) == set(keys)


def wait_until_stored(harness: TierHarness, keys: Sequence[OffloadKey]) -> None:
    """Offer blocks again and again, as an engine does, until the tier takes them all; they are
    read back."""
    wait_until(lambda: store_some(harness, keys) == set(keys), "the tier stores again")
    load_all(harness, keys)


def wait_until_the_gauge_is_right(harness: TierHarness, root: Path) -> None:
    """When all is quiet, what the tier says is in the root is what `du` says, and within bounds."""

    def is_right() -> bool:
        gauges = fs_of(harness).get_stats().gauges
        assert du(root) <= gauges[metrics.LIMIT_BYTES]
        return gauges[metrics.USED_BYTES] == du(root)

    wait_until(is_right, f"the gauge says {du(root)}, as du does")
