"""Jobs with a block twice, without blocks, or from another namespace; two engines at once."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from kvtier.base import LookupResult
from kvtier.testing import TierHarness
from kvtier.tiering.fs import manager
from tests.tiering.fs.accounts import (
    Figures,
    load_all,
    load_some,
    store_all,
    store_some,
    wait_until_stored,
    wait_until_the_gauge_is_right,
)
from tests.tiering.fs.harness import block_files, bytes_for, du, fs_harness, silent_files
from tests.tiering.fs.pauses import shorten_pauses
from tests.tiering.patience import wait_until

KEYS = TierHarness.keys(8)
LATER = TierHarness.keys(8, start=100)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "root"


@pytest.fixture(autouse=True)
def _short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    shorten_pauses(monkeypatch)


# --- odd jobs ----------------------------------------------------------------------------------


def test_a_store_that_names_a_block_twice_stores_it_once(root: Path) -> None:
    with fs_harness(root) as harness:
        first, second = harness.keys(2)
        assert store_some(harness, [first, first, second]) == {first, second}
        assert len(block_files(root)) == 2
        load_all(harness, [first, second])
        wait_until_the_gauge_is_right(harness, root)


def test_a_load_that_names_a_block_twice(root: Path) -> None:
    with fs_harness(root) as harness:
        store_all(harness, KEYS)
        assert load_some(harness, [KEYS[0], KEYS[0]]) == {KEYS[0]}


@pytest.mark.parametrize("is_load", [False, True])
def test_a_job_without_blocks(root: Path, is_load: bool) -> None:
    with fs_harness(root) as harness:
        (report,) = harness.wait_for(harness.load([]) if is_load else harness.store([]))
        assert report.result.success


def test_a_load_of_what_was_never_stored(root: Path) -> None:
    with fs_harness(root) as harness:
        assert not load_some(harness, KEYS)
        figures = Figures(harness)
        assert figures.errors("ENOENT") == 0, "a block that is not there is no fault"
        store_all(harness, KEYS)
        assert load_some(harness, KEYS + LATER) == set(KEYS)


def test_the_same_blocks_in_many_jobs_at_once(root: Path) -> None:
    with fs_harness(root, num_rows=96) as harness:
        with silent_files(harness.tier):
            stores = [harness.store(KEYS[n:]) for n in range(8)]
        for report in harness.wait_for(*stores):
            assert report.result.success
        loads = [harness.load(KEYS[n:]) for n in range(8)]
        for report in harness.wait_for(*loads):
            assert report.result.success
        assert len(block_files(root)) == 8


def test_stores_under_way_at_a_reset_stay_in_their_namespace(root: Path) -> None:
    with fs_harness(root) as harness:
        with silent_files(harness.tier):
            job = harness.store(KEYS)
            harness.begin_epoch(b"\1" * 16)
            assert harness.look_up(KEYS[0]) is LookupResult.MISS
        harness.wait_for(job)
        assert not harness.hits(KEYS)
        assert not load_some(harness, KEYS)
        store_all(harness, LATER)
        load_all(harness, LATER)
        harness.begin_epoch(b"\2" * 16)
        assert not harness.hits(KEYS + LATER)
        wait_until_the_gauge_is_right(harness, root)
    with fs_harness(root) as harness:
        assert not harness.hits(LATER)
        wait_until_the_gauge_is_right(harness, root)


# --- two engines -------------------------------------------------------------------------------


def test_the_second_engine_finds_what_the_first_stored(root: Path) -> None:
    with fs_harness(root) as one, fs_harness(root) as two:
        assert not two.hits(KEYS)
        store_all(one, KEYS)
        # Its last lookup found it absent, and that answer is kept for a while.
        wait_until(lambda: two.look_up_batch(KEYS) == [LookupResult.HIT] * 8, "found", 10.0)
        load_all(two, KEYS)
        store_all(two, LATER)
        assert one.look_up_batch(LATER) == [LookupResult.HIT] * 8
        load_all(one, LATER)


def test_both_engines_store_the_same_blocks_at_once(root: Path) -> None:
    with fs_harness(root) as one, fs_harness(root) as two:
        for start in range(0, 200, 20):
            keys = one.keys(20, start)
            jobs = one.store(keys), two.store(keys)
            reports = [*one.wait_for(jobs[0]), *two.wait_for(jobs[1])]
            assert [report.moved for report in reports] == [set(keys)] * 2
        keys = one.keys(20, start=180)
        load_all(one, keys)
        load_all(two, keys)
        assert len(block_files(root)) == 200
        wait_until_the_gauge_is_right(one, root)
        wait_until_the_gauge_is_right(two, root)
        stored = [key for harness in (one, two) for event in harness.events for key in event.keys]
        assert len(stored) == len(set(stored)) == 200, "each is new for one of them"


def test_two_engines_share_a_quota_that_is_too_small_for_both(root: Path) -> None:
    most = bytes_for(60)
    with fs_harness(root, 60) as one, fs_harness(root, 60) as two:
        for start in range(0, 300, 20):
            jobs = one.store(one.keys(20, start)), two.store(two.keys(20, 10_000 + start))
            one.wait_for(jobs[0])
            two.wait_for(jobs[1])
            assert du(root) <= most
        last = one.keys(8, start=20_000)
        wait_until_stored(one, last)
        load_all(two, last)
        wait_until_the_gauge_is_right(one, root)
        wait_until_the_gauge_is_right(two, root)


def test_foreign_blocks_are_never_evicted(root: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A new model finds the root full of another's blocks: it stores nothing, and logs it once."""
    limit = bytes_for(100)
    with fs_harness(root, max_bytes=limit, namespace="other weights") as theirs:
        for start in range(0, 400, 20):
            store_some(theirs, theirs.keys(20, start))
        there = {path: path.stat().st_ino for path in block_files(root)}
    assert len(there) > 50
    with fs_harness(root, max_bytes=limit) as harness:
        figures = Figures(harness)
        for start in range(0, 200, 20):
            store_some(harness, harness.keys(20, start))
        assert figures[manager.REFUSED] > 100
        assert figures[manager.EVICTED] >= 0
        left = {path: path.stat().st_ino for path in block_files(root)}
        assert there.items() <= left.items()
        assert du(root) <= limit
        assert sum("is full" in message for message in caplog.messages) == 1


def test_an_engine_evicts_its_own_blocks_beside_foreign_ones(root: Path) -> None:
    limit = bytes_for(200)
    with fs_harness(root, max_bytes=limit, namespace="other weights") as theirs:
        for start in range(0, 100, 20):
            store_all(theirs, theirs.keys(20, start))
    there = set(block_files(root))
    with fs_harness(root, max_bytes=limit) as harness:
        for start in range(0, 600, 20):
            store_all(harness, harness.keys(20, start))
        load_all(harness, harness.keys(20, start=580))
        assert there <= set(block_files(root))
        wait_until_the_gauge_is_right(harness, root)


def test_loads_and_stores_of_two_engines_from_two_threads(root: Path) -> None:
    """The engines share a process here, so every lock must also exclude threads."""
    problems: list[BaseException] = []

    def live(harness: TierHarness) -> None:
        try:
            for turn in range(10):
                keys = harness.keys(16, start=8 * turn)
                store_some(harness, keys)
                load_some(harness, keys)
        except BaseException as error:
            problems.append(error)

    with fs_harness(root, 60) as one, fs_harness(root, 60) as two:
        threads = [threading.Thread(target=live, args=(harness,)) for harness in (one, two)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not problems
        wait_until_the_gauge_is_right(one, root)
