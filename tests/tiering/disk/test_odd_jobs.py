"""Jobs that name a block twice, and third parties' policies that raise: no slot is lost."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import pytest

from kvtier.base import OffloadKey
from kvtier.testing import TierHarness
from kvtier.tiering.disk.manager import QUEUED, RESIDENT
from tests.tiering.disk.harness import disk_harness, disk_of

NUM_BLOCKS = 4


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "kv.slab"


def store(harness: TierHarness, keys: list[OffloadKey]) -> set[OffloadKey]:
    (report,) = harness.wait_for(harness.store(keys))
    return report.moved


def demand_all_slots(harness: TierHarness) -> None:
    """Check that every slot can still be written and read."""
    for start in (1000, 2000):
        keys = harness.keys(NUM_BLOCKS, start)
        assert store(harness, keys) == set(keys)
        (report,) = harness.wait_for(harness.load(keys))
        assert report.moved == set(keys)
    gauges = harness.call("get_stats").gauges
    assert gauges[RESIDENT] == NUM_BLOCKS
    assert gauges[QUEUED] == 0


# --- twice in one job --------------------------------------------------------------------------


def test_a_store_that_names_a_block_twice_stores_it_once(path: Path) -> None:
    with disk_harness(path, NUM_BLOCKS) as harness:
        first, second = harness.keys(2)
        (report,) = harness.wait_for(harness.store([first, first, second]))
        assert report.moved == {first, second}
        assert harness.call("get_stats").gauges[RESIDENT] == 2
        demand_all_slots(harness)


def test_a_load_that_names_a_block_twice_does_not_let_it_go_early(path: Path) -> None:
    with disk_harness(path, NUM_BLOCKS) as harness:
        keys = harness.keys(NUM_BLOCKS)
        store(harness, keys)
        for _ in range(3):
            (report,) = harness.wait_for(harness.load([keys[0], keys[0]]))
            assert report.moved == {keys[0]}
        block = disk_of(harness)._table.readable[keys[0]]
        assert block.ref_cnt == 0
        demand_all_slots(harness)


# --- policies that raise -----------------------------------------------------------------------


def raising_once(harness: TierHarness, method: str) -> None:
    """Make the policy raise at the next call of this method."""
    policy = disk_of(harness)._table._policy

    def fail(*args: Any) -> NoReturn:
        delattr(policy, method)
        raise RuntimeError("the policy has a bug")

    setattr(policy, method, fail)


def demand_reported_as_failed(
    harness: TierHarness, submit: Callable[[list[OffloadKey]], object], keys: list[OffloadKey]
) -> None:
    num_reports = len(harness.ledger.reports)
    with pytest.raises(AssertionError, match="the policy has a bug"):
        submit(keys)
    harness.step()
    assert not harness.ledger.unreported
    *_, report = harness.ledger.reports.values()
    assert len(harness.ledger.reports) == num_reports + 1
    assert not report.moved


@pytest.mark.parametrize("method", ["insert_run", "evict", "on_store_miss", "touch"])
def test_a_store_at_which_the_policy_raises(path: Path, method: str) -> None:
    with disk_harness(path, NUM_BLOCKS) as harness:
        here = harness.keys(NUM_BLOCKS)
        store(harness, here)
        new = harness.keys(2, start=100)
        raising_once(harness, method)
        demand_reported_as_failed(harness, harness.store, here[:1] + new)
        demand_all_slots(harness)


@pytest.mark.parametrize("method", ["touch", "pinned"])
def test_a_load_at_which_the_policy_raises(path: Path, method: str) -> None:
    with disk_harness(path, NUM_BLOCKS) as harness:
        keys = harness.keys(NUM_BLOCKS)
        store(harness, keys)
        raising_once(harness, method)
        demand_reported_as_failed(harness, harness.load, keys)
        readable = disk_of(harness)._table.readable
        assert {block.ref_cnt for block in readable.values()} == {0}, "someone still reads them"
        demand_all_slots(harness)


def test_who_left_for_a_store_that_failed_is_told_of(path: Path) -> None:
    with disk_harness(path, NUM_BLOCKS) as harness:
        keys = harness.keys(NUM_BLOCKS)
        store(harness, keys)
        harness.step()
        raising_once(harness, "insert_run")
        demand_reported_as_failed(harness, harness.store, harness.keys(2, start=100))
        there: set[OffloadKey] = set()
        for event in harness.events:
            (there.difference_update if event.removed else there.update)(event.keys)
        assert there == harness.hits(keys)
