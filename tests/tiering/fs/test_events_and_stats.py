"""Events agree with the blocks in the root, and metrics add up."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from random import Random

import pytest

from kvtier.base import Locality, Medium, MetricKind, OffloadingEvent, OffloadKey
from kvtier.testing import Damage, TierHarness, inflict
from kvtier.tiering.fs import manager
from kvtier.tiering.fs.layout import LONGEST_KEY
from kvtier.tiering.io.metrics import error_counter
from tests.tiering.fs.backing import FsBacking
from tests.tiering.fs.harness import block_files, bytes_for, du, fs_harness, fs_of, silent_files
from tests.tiering.patience import wait_until


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "root"


def told(events: Iterable[OffloadingEvent]) -> set[OffloadKey]:
    """The blocks that are present according to all events. No event may contradict another."""
    there: set[OffloadKey] = set()
    for event in events:
        assert event.medium is Medium.STORAGE
        assert event.locality is Locality.REMOTE
        keys = set(event.keys)
        assert len(keys) == len(event.keys) > 0
        if event.removed:
            assert keys <= there, "removed, and nobody was told that it was there"
            there -= keys
        else:
            assert not keys & there, "stored twice"
            there |= keys
    return there


def store(harness: TierHarness, count: int, start: int = 0) -> None:
    harness.wait_for(harness.store(harness.keys(count, start)))
    harness.step()


def counters(harness: TierHarness) -> dict[str, float]:
    """The counters since the last call."""
    return {name: n for name, n in harness.call("get_stats").counters.items() if n}


def gauges(harness: TierHarness) -> dict[str, float]:
    found: dict[str, float] = harness.call("get_stats").gauges
    return found


# --- events ------------------------------------------------------------------------------------


def test_events_agree_with_what_is_there_whatever_happens(root: Path) -> None:
    """The root is full, so blocks are evicted."""
    chance = Random(3)
    universe = TierHarness.keys(300)
    with fs_harness(root, 20, row_bytes=65_536) as harness:
        for number in range(200):
            some = chance.sample(universe, chance.randint(1, 6))
            (harness.load if chance.random() < 0.3 else harness.store)(some)
            if chance.random() < 0.5:
                harness.step()
            if number == 120:
                harness.begin_epoch(bytes(16))
        harness.wait_for(*harness.ledger.unreported.values())
        harness.step()
        private = root.glob("engines/*/blocks/*/*/*")
        # Remaining blocks of the first epoch are still there, and were reported as removed.
        assert {key.hex() for key in told(harness.events)} == {path.name for path in private}
        assert counters(harness)[manager.EVICTED] > 0


def test_blocks_that_others_have_stored_are_theirs_to_tell_of(root: Path) -> None:
    with fs_harness(root) as one, fs_harness(root) as other:
        store(one, 4)
        store(other, 6)
        assert told(one.events) == set(one.keys(4))
        assert told(other.events) == set(one.keys(2, start=4))


def test_a_damaged_block_is_removed(root: Path) -> None:
    with fs_harness(root) as harness:
        store(harness, 4)
        (bad, *_) = harness.keys(4)
        inflict(FsBacking(fs_of(harness)), harness.fingerprint, bad, Damage.FLIP, seed=4)
        harness.wait_for(harness.load(harness.keys(4)))

        def is_told() -> bool:
            harness.step()
            return told(harness.events) == set(harness.keys(4)) - {bad}

        wait_until(is_told, "it is removed")
        assert len(block_files(root)) == 3
        assert harness.hits(harness.keys(4)) == set(harness.keys(4)) - {bad}


def test_events_that_nobody_wants_are_not_recorded(root: Path) -> None:
    with fs_harness(root) as harness:
        harness.tier.enable_kv_events = False
        store(harness, 4)
        harness.begin_epoch(bytes(16))
        store(harness, 4)
        assert harness.events == []


# --- figures -----------------------------------------------------------------------------------


def test_nothing_special_is_not_counted(root: Path) -> None:
    with fs_harness(root) as harness:
        store(harness, 4)
        store(harness, 6)
        harness.wait_for(harness.load(harness.keys(6)))
        assert counters(harness) == {}


def test_blocks_that_left_are_counted_once(root: Path) -> None:
    with fs_harness(root, 20, row_bytes=65_536) as harness:
        for start in range(0, 240, 8):
            store(harness, 8, start)
        harness.step()
        removed = sum(len(event.keys) for event in harness.events if event.removed)
        stored = sum(len(event.keys) for event in harness.events if not event.removed)
        found = counters(harness)
        assert found[manager.EVICTED] == removed > 0
        assert stored + found.get(manager.REFUSED, 0) == 240
        assert len(block_files(root)) == stored - removed
        assert counters(harness) == {}


def test_keys_that_cannot_be_stored_are_refused(root: Path) -> None:
    long = [OffloadKey(bytes([number]) * (LONGEST_KEY + 1)) for number in (1, 2)]
    with fs_harness(root) as harness:
        (report,) = harness.wait_for(harness.store([*harness.keys(1), *long]))
        assert report.moved == set(harness.keys(1))
        assert counters(harness) == {manager.REFUSED: 2}
        (report,) = harness.wait_for(harness.load(long))
        assert not report.moved


def test_blocks_that_could_not_be_loaded_are_counted(root: Path) -> None:
    with fs_harness(root) as harness:
        store(harness, 3)
        gone, bad, _ = harness.keys(3)
        backing = FsBacking(fs_of(harness))
        backing.path_of(harness.fingerprint, gone).unlink()
        inflict(backing, harness.fingerprint, bad, Damage.FLIP, seed=1)
        harness.wait_for(harness.load(harness.keys(3)))
        assert counters(harness) == {manager.FORGOTTEN: 2}
        assert harness.hits(harness.keys(3)) == set(harness.keys(3)[2:])


def test_gauges_say_what_is_there(root: Path) -> None:
    with fs_harness(root) as harness, fs_harness(root, namespace="other weights") as other:
        store(harness, 7)
        store(other, 5)

        def is_quiet() -> bool:
            return all(
                gauges(each)[manager.USED_BYTES] == du(root)
                and gauges(each)[manager.BLOCKS] == len(block_files(root)) == 12
                for each in (harness, other)
            )

        wait_until(is_quiet, "the gauges say what du says")
        assert gauges(harness)[manager.LIMIT_BYTES] == bytes_for(256)
        assert gauges(harness)[manager.QUEUED] == 0


def test_files_that_were_written_in_vain_are_counted_as_what_they_are(root: Path) -> None:
    """Two engines write the same blocks at once; the slower one's files hold its next blocks."""
    with fs_harness(root) as one, fs_harness(root) as other:
        with silent_files(other.tier):
            job = other.store(other.keys(8))
            wait_until(lambda: len(list(root.glob("engines/*/w*"))) >= 8, "they are being written")
            store(one, 8)
        other.wait_for(job)
        store(other, 8, start=20)

        def is_quiet() -> bool:
            found = gauges(other)
            return found[manager.USED_BYTES] == du(root) and found[manager.BLOCKS] == 16

        wait_until(is_quiet, "the gauge says what du says", patience_s=10.0)


def test_what_waits_to_be_written_is_shown(root: Path) -> None:
    with fs_harness(root) as harness:
        with silent_files(harness.tier):
            job = harness.store(harness.keys(9))
            assert gauges(harness)[manager.QUEUED] == 9
        harness.wait_for(job)
        assert gauges(harness)[manager.QUEUED] == 0


def test_every_figure_is_described(root: Path) -> None:
    with fs_harness(root) as harness:
        stats = harness.call("get_stats")
        described = harness.tier.build_metric_definitions({})
        assert stats.counters.keys() | stats.gauges.keys() <= described.keys()
        counters = {name for name, each in described.items() if each.kind is MetricKind.COUNTER}
        assert counters == stats.counters.keys()
    kinds = ("EIO", "ENOSPC", "EROFS", "EMFILE", "EACCES", "ESTALE", "ETIMEDOUT", "EDOM")
    named = {error_counter(manager.PREFIX, kind) for kind in kinds}
    assert len(named) == len(kinds)
    assert named <= counters
