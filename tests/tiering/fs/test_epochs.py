"""After a reset an engine uses a private namespace, and leaves the blocks of others alone."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterable
from itertools import chain, groupby
from pathlib import Path

import pytest

from kvtier.base import OffloadingEvent, OffloadKey
from kvtier.testing import TierHarness
from tests.tiering.fs.harness import block_files, du, fs_harness, fs_of, silent_files
from tests.tiering.patience import wait_until

EPOCHS = [bytes([number]) * 16 for number in range(1, 6)]


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "root"


def store(harness: TierHarness, count: int, start: int = 0) -> None:
    (report,) = harness.wait_for(harness.store(harness.keys(count, start)))
    assert report.result.success
    harness.step()


def private_files(root: Path) -> list[Path]:
    """Works while blocks are being removed."""
    return sorted(
        Path(directory, name)
        for blocks in (root / "engines").glob("*/blocks")
        for directory, _, names in os.walk(blocks)
        for name in names
    )


def changes(events: Iterable[OffloadingEvent]) -> list[tuple[bool, set[OffloadKey]]]:
    """Stored and removed blocks in turns. Blocks of one job may be announced in several steps."""
    return [
        (removed, set(chain.from_iterable(event.keys for event in some)))
        for removed, some in groupby(events, lambda event: event.removed)
    ]


def total_of(harness: TierHarness) -> int:
    return fs_of(harness)._session.ledger.read().total


def test_earlier_blocks_cannot_be_found_any_more_but_by_others(root: Path) -> None:
    with fs_harness(root) as one, fs_harness(root) as other:
        store(one, 4)
        one.begin_epoch(EPOCHS[0])
        assert one.hits(one.keys(4)) == set()
        (report,) = one.wait_for(one.load(one.keys(4)))
        assert not report.moved
        assert other.hits(other.keys(4)) == set(other.keys(4))
        (report,) = other.wait_for(other.load(other.keys(4)))
        assert report.result.success


def test_later_blocks_are_its_own(root: Path) -> None:
    with fs_harness(root) as one, fs_harness(root) as other:
        store(one, 2)
        one.begin_epoch(EPOCHS[0])
        store(one, 3, start=10)
        assert one.hits(one.keys(20)) == set(one.keys(3, start=10))
        (report,) = one.wait_for(one.load(one.keys(3, start=10)))
        assert report.result.success
        assert other.hits(other.keys(20)) == set(other.keys(2))
        assert len(block_files(root)) == 2
        assert len(private_files(root)) == 3


def test_a_reset_of_two_engines_does_not_make_them_meet(root: Path) -> None:
    """Two engines with the same fingerprint after a reset may have different weights."""
    with fs_harness(root) as one, fs_harness(root) as other:
        for harness in (one, other):
            harness.begin_epoch(EPOCHS[0])
        store(one, 3)
        assert other.hits(other.keys(3)) == set()
        store(other, 3)
        assert len(private_files(root)) == 6


def test_what_was_announced_is_taken_back_and_nothing_else(root: Path) -> None:
    with fs_harness(root) as other:
        store(other, 2)
    with fs_harness(root) as one:
        store(one, 4)  # two of them are there already
        one.begin_epoch(EPOCHS[0])
        one.step()
        new = set(one.keys(2, start=2))
        assert changes(one.events) == [(False, new), (True, new)]
        store(one, 1)
        one.begin_epoch(EPOCHS[1])
        one.begin_epoch(EPOCHS[2])
        one.step()
        (first,) = one.keys(1)
        assert changes(one.events)[2:] == [(False, {first}), (True, {first})]


def test_blocks_of_an_earlier_epoch_that_come_late_are_not_announced(root: Path) -> None:
    with fs_harness(root) as one:
        with silent_files(one.tier):
            job = one.store(one.keys(3))
            one.begin_epoch(EPOCHS[0])
        one.wait_for(job)
        one.step()
        assert one.events == []
        assert one.hits(one.keys(3)) == set()


def test_private_blocks_of_an_earlier_epoch_are_removed(root: Path) -> None:
    with fs_harness(root) as one:
        one.begin_epoch(EPOCHS[0])
        store(one, 5)
        (earlier,) = root.glob("engines/*/blocks/*")
        one.begin_epoch(EPOCHS[1])
        wait_until(lambda: not earlier.exists(), "they are removed")
        store(one, 2)
        assert len(private_files(root)) == 2


def test_what_comes_late_for_a_namespace_that_is_gone_is_not_kept(root: Path) -> None:
    """No engine would read it or remove it."""
    with fs_harness(root) as one:
        one.begin_epoch(EPOCHS[0])
        store(one, 1)
        (earlier,) = root.glob("engines/*/blocks/*")
        with silent_files(one.tier):
            job = one.store(one.keys(5, start=10))
            one.begin_epoch(EPOCHS[1])
            wait_until(lambda: not earlier.exists(), "the earlier one is removed")
        one.wait_for(job)
        store(one, 1, start=20)
        assert not earlier.exists()
        assert [path.name for path in private_files(root)] == [one.keys(1, start=20)[0].hex()]


def test_private_blocks_end_with_their_engine(root: Path) -> None:
    with fs_harness(root) as other:
        with fs_harness(root) as one:
            store(one, 2)
            one.begin_epoch(EPOCHS[0])
            store(one, 4, start=10)
        assert private_files(root) == []
        assert len(block_files(root)) == 2
        assert fs_of(other)._session.ledger.read().num_blocks == 2
        wait_until(lambda: total_of(other) == du(root), "all is as du says")


ENGINE = """
import sys
from pathlib import Path
from tests.tiering.fs.harness import fs_harness
harness = fs_harness(Path(sys.argv[1]))
harness.wait_for(harness.store(harness.keys(2)))
harness.begin_epoch(b"e" * 16)
harness.wait_for(harness.store(harness.keys(4, start=10)))
print("stored", flush=True)
sys.stdin.read()
"""


def test_private_blocks_of_a_killed_engine_are_removed_by_another(root: Path) -> None:
    command = [sys.executable, "-c", ENGINE, str(root)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as one:
        assert one.stdout is not None
        assert one.stdout.readline() == b"stored\n"
        one.send_signal(signal.SIGKILL)
    assert len(private_files(root)) == 4
    with fs_harness(root) as other:
        wait_until(lambda: not private_files(root), "they are removed")
        wait_until(lambda: total_of(other) == du(root), "all is as du says")
        assert fs_of(other)._session.ledger.read().num_blocks == 2
        assert other.hits(other.keys(20)) == set(other.keys(2))


def test_who_loses_its_seat_has_lost_its_private_blocks_and_says_so(root: Path) -> None:
    with fs_harness(root) as one:
        store(one, 2)
        one.begin_epoch(EPOCHS[0])
        store(one, 3)
        session = fs_of(one)._session
        lost = session.presence.engine
        with session.ledger.lock(lambda: 5.0):  # another engine takes it for dead
            balance = session.ledger.read()
            del balance.accounts[lost]
            session.ledger.save(balance)

        def is_noticed() -> bool:
            one.step()
            return session.has_presence and session.presence.engine != lost

        one.store(one.keys(1, start=30))
        wait_until(is_noticed, "another presence is taken")
        wait_until(lambda: not one.hits(one.keys(3)), "they are gone")
        one.step()
        assert changes(one.events)[-1] == (True, set(one.keys(3)))
        store(one, 3)
        assert one.hits(one.keys(3)) == set(one.keys(3))
