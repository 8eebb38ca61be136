"""Events agree with the blocks in the tier, and metrics add up."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from random import Random

import pytest

from kvtier.base import Locality, Medium, OffloadingEvent, OffloadKey
from kvtier.seal import SealFailure
from kvtier.testing import Damage, TierHarness, inflict
from kvtier.tiering.disk.layout import CONTROL_OFFSET, encode_clear_request
from kvtier.tiering.disk.manager import (
    CAPACITY,
    EVICTED,
    FILE_BYTES,
    FORGOTTEN,
    QUEUED,
    REFUSED,
    RESIDENT,
    DiskSecondaryTierManager,
)
from kvtier.tiering.io.metrics import error_counter
from tests.tiering.disk.backing import DiskBacking
from tests.tiering.disk.harness import ROW_BYTES, bytes_for, disk_harness, disk_of, silent_disk
from tests.tiering.patience import wait_until


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "kv.slab"


def told(events: Iterable[OffloadingEvent]) -> set[OffloadKey]:
    """The blocks in the tier according to its events. No event may contradict an earlier one."""
    there: set[OffloadKey] = set()
    for event in events:
        assert event.medium is Medium.STORAGE
        assert event.locality is Locality.LOCAL
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
    """Events since the last call."""
    return {name: n for name, n in harness.call("get_stats").counters.items() if n}


def gauges(harness: TierHarness) -> dict[str, float]:
    found: dict[str, float] = harness.call("get_stats").gauges
    return found


# --- events ------------------------------------------------------------------------------------


def test_events_agree_with_lookups_whatever_happens(path: Path) -> None:
    chance = Random(3)
    universe = TierHarness.keys(60)
    with disk_harness(path, 20) as harness:
        for number in range(300):
            some = chance.sample(universe, chance.randint(1, 6))
            (harness.load if chance.random() < 0.4 else harness.store)(some)
            if chance.random() < 0.5:
                harness.step()
            if number % 97 == 96:
                harness.begin_epoch(number.to_bytes(16, "big"))
        harness.wait_for(*harness.ledger.unreported.values())
        harness.step()
        assert told(harness.events) == harness.hits(universe)


def test_who_leaves_is_told_before_who_comes(path: Path) -> None:
    with disk_harness(path, 4) as harness:
        store(harness, 4)
        store(harness, 2, start=10)
    changes = [(event.removed, set(event.keys)) for event in harness.events]
    removed = set(harness.keys(4)[2:])
    assert changes == [
        (False, set(harness.keys(4))),
        (True, removed),
        (False, set(harness.keys(2, start=10))),
    ]


def test_a_block_that_was_never_there_is_not_removed(path: Path) -> None:
    """The tier is reset while blocks are being written."""
    with disk_harness(path) as harness:
        with silent_disk(harness.tier):
            harness.store(harness.keys(8))
            harness.begin_epoch(bytes(16))
        harness.wait_for(*harness.ledger.unreported.values())
        harness.step()
        assert harness.events == []
        assert told(harness.events) == harness.hits(harness.keys(8)) == set()


def test_blocks_of_an_earlier_engine_are_announced(path: Path) -> None:
    """A few in each step, so that no step takes long, and each once."""
    with disk_harness(path, 3000, num_rows=256) as harness:
        for start in range(0, 2560, 256):
            store(harness, 256, start)
    with disk_harness(path, 3000) as harness:
        for _ in range(10):
            harness.step()
        assert told(harness.events) == set(harness.keys(2560))
        assert max(len(event.keys) for event in harness.events) < 2560


def test_keys_too_long_for_the_index_are_announced_too(path: Path) -> None:
    """Long keys are only in the slot headers. A block with a damaged header is not found."""
    keys = [OffloadKey(bytes([number]) * 100) for number in range(1, 5)]
    with disk_harness(path) as harness:
        harness.wait_for(harness.store(keys))
        offset = DiskBacking(disk_of(harness)).offset_of(keys[0])
    with path.open("r+b") as file:
        os.pwrite(file.fileno(), b"damage", offset + 100)
    with disk_harness(path) as harness:
        harness.step()
        assert told(harness.events) == set(keys[1:])
        (report,) = harness.wait_for(harness.load(keys))
        assert report.moved == set(keys[1:])


def test_who_leaves_before_it_is_announced_is_never_mentioned(path: Path) -> None:
    with disk_harness(path, 8) as harness:
        store(harness, 8)
    with disk_harness(path, 8) as harness:
        harness.wait_for(harness.store(harness.keys(6, start=20)))
        harness.step()
        assert told(harness.events) == harness.hits(harness.keys(30))
        harness.begin_epoch(bytes(16))
        harness.step()
        assert told(harness.events) == set()


def test_a_damaged_block_is_removed(path: Path) -> None:
    with disk_harness(path) as harness:
        store(harness, 4)
        (bad, *_) = harness.keys(4)
        inflict(DiskBacking(disk_of(harness)), harness.fingerprint, bad, Damage.FLIP, seed=4)
        harness.wait_for(harness.load(harness.keys(4)))
        harness.step()
        assert told(harness.events) == set(harness.keys(4)) - {bad}


def test_events_that_nobody_wants_are_not_recorded(path: Path) -> None:
    with disk_harness(path, 4) as harness:
        harness.tier.enable_kv_events = False
        store(harness, 4)
        store(harness, 4, start=10)
        harness.begin_epoch(bytes(16))
        harness.step()
        assert harness.events == []


# --- a request to clear ------------------------------------------------------------------------


def ask_to_clear(path: Path, request_id: bytes) -> None:
    """As `kvtier store clear` does while an engine runs."""
    with path.open("r+b") as file:
        os.pwrite(file.fileno(), encode_clear_request(request_id), CONTROL_OFFSET)
        os.fsync(file.fileno())


def test_a_request_to_clear_is_obeyed_once(path: Path) -> None:
    with disk_harness(path) as harness:
        store(harness, 8)
        ask_to_clear(path, b"a" * 16)
        wait_until(lambda: not harness.hits(harness.keys(8)), "the tier is empty")
        harness.step()
        assert told(harness.events) == set()
        store(harness, 4, start=20)
        assert harness.hits(harness.keys(30)) == set(harness.keys(4, start=20))
    with disk_harness(path) as harness:
        assert not harness.hits(harness.keys(8))


# --- figures -----------------------------------------------------------------------------------


def test_counters_say_what_has_happened(path: Path) -> None:
    with disk_harness(path, 4) as harness:
        store(harness, 4)
        assert counters(harness) == {}
        store(harness, 3, start=10)
        assert counters(harness) == {EVICTED: 3}
        store(harness, 9, start=20)
        assert counters(harness) == {EVICTED: 4, REFUSED: 5}
        assert counters(harness) == {}


def test_gauges_say_what_is_there(path: Path) -> None:
    with disk_harness(path, 10) as harness:
        assert gauges(harness) == {
            RESIDENT: 0,
            CAPACITY: 10,
            FILE_BYTES: os.stat(path).st_blocks * 512,
            QUEUED: 0,
        }
        with silent_disk(harness.tier):
            job = harness.store(harness.keys(6))
            assert gauges(harness)[QUEUED] == 6
            assert gauges(harness)[RESIDENT] == 6
        harness.wait_for(job)
        assert gauges(harness)[QUEUED] == 0
        assert gauges(harness)[RESIDENT] == 6
        assert gauges(harness)[FILE_BYTES] <= bytes_for(10)
        harness.begin_epoch(bytes(16))
        assert gauges(harness)[RESIDENT] == 0


def test_damaged_blocks_are_counted_by_reason(path: Path) -> None:
    with disk_harness(path) as harness:
        store(harness, 3)
        flipped, foreign, _ = harness.keys(3)
        backing = DiskBacking(disk_of(harness))
        block = bytearray(backing.read(harness.fingerprint, flipped))
        block[-1] ^= 1
        backing.write(harness.fingerprint, flipped, bytes(block))
        inflict(backing, harness.fingerprint, foreign, Damage.FOREIGN)
        harness.wait_for(harness.load(harness.keys(3)))
        assert dict(harness.call("take_seal_failures")) == {
            SealFailure.DIGEST: 1,
            SealFailure.FINGERPRINT: 1,
        }
        assert counters(harness) == {FORGOTTEN: 2}


def test_an_older_block_in_the_same_slot_is_stale(path: Path) -> None:
    """Key, payload and slot match, but the block is an older copy."""
    with disk_harness(path, 1) as harness:
        (key,) = harness.keys(1)
        store(harness, 1)
        offset = DiskBacking(disk_of(harness)).offset_of(key)
        with path.open("r+b") as file:
            earlier = os.pread(file.fileno(), 4096 + ROW_BYTES, offset)
            store(harness, 1, start=10)
            store(harness, 1)
            os.pwrite(file.fileno(), earlier, offset)
            os.fsync(file.fileno())
        (report,) = harness.wait_for(harness.load([key]))
        assert not report.moved
        assert harness.call("take_seal_failures") == {SealFailure.STALE: 1}


def test_every_error_has_a_counter(path: Path) -> None:
    kinds = ("EIO", "ENOSPC", "EROFS", "EMFILE", "EACCES", "EDOM")
    named = {error_counter("kvtier_disk", kind) for kind in kinds}
    assert len(named) == len(kinds)
    assert named <= DiskSecondaryTierManager.build_metric_definitions({}).keys()
    with disk_harness(path, 1) as harness:
        assert named <= harness.call("get_stats").counters.keys()


def test_a_load_that_names_a_block_twice_takes_nothing_away(path: Path) -> None:
    """Callers should not do that, but no slot may be lost by it."""
    with disk_harness(path, 4) as harness:
        store(harness, 2)
        first, second = harness.keys(2)
        (report,) = harness.wait_for(harness.load([first, second, first]))
        assert report.moved == {first, second}
        assert harness.hits([first, second]) == {first, second}
        store(harness, 4, start=10)
        assert harness.hits(harness.keys(4, start=10)) == set(harness.keys(4, start=10))
        assert gauges(harness)[RESIDENT] == 4
