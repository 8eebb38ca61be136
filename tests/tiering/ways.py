"""Lets a test choose whether blocks go through buffers or straight between files and rows."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from random import Random

import pytest

from kvtier.base import OffloadKey
from kvtier.testing import TierHarness
from kvtier.testing.job_ledger import payload_of
from kvtier.tiering.io.buffers import Route


@contextmanager
def ways(choose: Callable[[], bool]) -> Iterator[None]:
    """Every unit goes the way that is chosen for it, not the faster one."""
    begin = Route.begin

    def begin_as_chosen(route: Route) -> bool:
        begin(route)
        return choose()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Route, "begin", begin_as_chosen)
        yield


@pytest.fixture(autouse=True, scope="module")
def _both_ways() -> Iterator[None]:
    """Through buffers or straight at random: tests move too few bytes to measure which is
    faster."""
    draw = Random(0)
    with ways(lambda: draw.random() < 0.5):
        yield


def demand_rows_hold_whole_blocks_or_nothing(
    harness: TierHarness, good: OffloadKey, damaged: OffloadKey
) -> None:
    """A damaged block that goes through buffers does not reach its row."""
    rows = {}
    take_back = harness.slots.take_back

    def look_and_take_back(slots: list[int]) -> None:
        rows.update({slot: bytes(harness.tier.rows[slot]) for slot in slots})
        take_back(slots)

    with pytest.MonkeyPatch.context() as patch, ways(lambda: True):
        patch.setattr(harness.slots, "take_back", look_and_take_back)
        job = harness.load([good, damaged])
        [report] = harness.wait_for(job)
    assert report.moved == {good}
    whole, untouched = (rows[slot] for slot in job.block_ids.tolist())
    assert whole == payload_of(good, len(whole))
    assert untouched == harness.slots._poison
