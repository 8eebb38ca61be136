"""A slab is verified while an engine in the same process changes it."""

from __future__ import annotations

import time
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from kvtier.testing import TierHarness
from kvtier.tiering.disk.inspector import SlabInspector
from kvtier.tiering.disk.reader import Snapshot
from kvtier.tiering.disk.scrub import SlabScrubber
from kvtier.tiering.inspection import Scrub
from kvtier.tiering.io.page import PAGE_BYTES
from kvtier.tiering.scrubber import Verdict
from tests.cli.store.slabs import GEOMETRY, engine_on, flip, slot_of

KEYS = TierHarness.keys(20)


PATIENCE_S = 60.0


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "kv.slab"


def wait_until(is_so: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not is_so():
        assert time.monotonic() < deadline, "it has not come to pass"
        time.sleep(0.02)


def verify_while(path: Path, at_start: Callable[[], Any], at_end: Callable[[], Any]) -> Scrub:
    """Do something before the first slot is read, and something after the last one was, once."""
    pending = [at_start, at_end]

    def on_progress(done: int, total: int) -> None:
        if len(pending) == 2 or (pending and done == total):
            pending.pop(0)()

    with SlabInspector(path) as store:
        scrub = store.verify(None, None, on_progress)
    assert not pending
    return scrub


def test_a_slot_that_was_half_written_is_looked_at_again(path: Path) -> None:
    with engine_on(path) as harness:
        harness.wait_for(harness.store(KEYS))
        wait_until(lambda: _num_listed(path) == 20)
        place = GEOMETRY.slot_offset(slot_of(path, KEYS[3])) + PAGE_BYTES
        scrub = verify_while(path, lambda: flip(path, place), lambda: flip(path, place))
    assert (scrub.num_good, scrub.num_gone, scrub.damaged) == (20, 0, [])


def test_a_slot_that_the_engine_has_given_up_is_gone(path: Path) -> None:
    with engine_on(path) as harness:
        harness.wait_for(harness.store(KEYS))
        wait_until(lambda: _num_listed(path) == 20)
        place = GEOMETRY.slot_offset(slot_of(path, KEYS[3]))
        scrub = verify_while(
            path, lambda: flip(path, place), lambda: harness.wait_for(harness.load([KEYS[3]]))
        )
    assert (scrub.num_good, scrub.num_gone, scrub.damaged) == (19, 1, [])


def test_ctrl_c_in_the_second_look_counts_no_block_twice(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two slots are damaged. One is whole again when they are checked for the second time, and
    Ctrl-C follows before the third time."""
    check_again, num_checks = SlabScrubber._still_damaged, count()

    def until_ctrl_c(scrubber: SlabScrubber, snapshot: Snapshot, slots: list[int]) -> list[Verdict]:
        if next(num_checks):
            raise KeyboardInterrupt
        return check_again(scrubber, snapshot, slots)

    monkeypatch.setattr(SlabScrubber, "_still_damaged", until_ctrl_c)
    with engine_on(path) as harness:
        harness.wait_for(harness.store(KEYS))
        wait_until(lambda: _num_listed(path) == 20)
        places = [GEOMETRY.slot_offset(slot_of(path, key)) + PAGE_BYTES for key in KEYS[3:5]]

        def damage_both() -> None:
            for place in places:
                flip(path, place)

        scrub = verify_while(path, damage_both, lambda: flip(path, places[0]))
    assert (scrub.is_complete, scrub.num_good, len(scrub.damaged)) == (False, 19, 1)


def _num_listed(path: Path) -> int:
    with SlabInspector(path) as store:
        return int(store.figures().document["blocks"])
