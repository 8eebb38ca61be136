"""One broken file or directory does not affect anything else."""

from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path

import pytest

from kvtier.testing import TierHarness
from kvtier.tiering.fs.layout import SHARDS
from kvtier.tiering.fs.presence import EngineInfo
from kvtier.tiering.fs.root import RootSession
from tests.tiering.fs.accounts import store_some, wait_until_stored, wait_until_the_gauge_is_right
from tests.tiering.fs.hardship import failing_calls
from tests.tiering.fs.harness import block_files, fs_harness, fs_of
from tests.tiering.fs.pauses import shorten_pauses
from tests.tiering.patience import PATIENCE_S

EPOCHS = [bytes([number]) * 16 for number in (1, 2)]


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "root"


@pytest.fixture(autouse=True)
def _short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    shorten_pauses(monkeypatch)


def fill(harness: TierHarness) -> None:
    """Store until blocks are evicted."""
    start = 0
    while not fs_of(harness)._publisher.num_evicted:
        store_some(harness, harness.keys(8, start))
        start += 8


def turn_over(harness: TierHarness, start: int) -> int:
    """Store twice as many blocks as there is space for. Returns how many were stored."""
    starts = range(start, start + 256, 32)
    return sum(len(store_some(harness, harness.keys(32, each))) for each in starts)


def put_a_file_in_place_of_a_shard(namespace: Path) -> None:
    """Stands for a directory that fails with an error."""
    bad = next(namespace / shard for shard in SHARDS if not any((namespace / shard).iterdir()))
    bad.rmdir()
    bad.touch()


@pytest.mark.parametrize("is_reset", [False, True], ids=["public", "after a reset"])
def test_who_was_taken_for_dead_goes_on_while_stores_keep_coming(
    root: Path, is_reset: bool
) -> None:
    with fs_harness(root) as harness:
        if is_reset:
            harness.begin_epoch(EPOCHS[0])
        wait_until_stored(harness, harness.keys(4))
        lost = fs_of(harness)._session.presence
        (root / "engines" / f"{lost.engine.hex()}.alive").unlink()
        other = RootSession(root, EngineInfo.here("other", ""), PATIENCE_S)
        other.reclaim()
        wait_until_stored(harness, harness.keys(4, start=100))
        presence = fs_of(harness)._session.presence
        assert presence is not lost
        for start in range(1000, 1100, 4):
            store_some(harness, harness.keys(4, start))
        assert fs_of(harness)._session.presence is presence, "one was enough"
        other.reclaim()
        other.close()
        wait_until_the_gauge_is_right(harness, root)


@pytest.mark.parametrize("is_reset", [False, True], ids=["public", "after a reset"])
def test_who_is_alone_and_has_its_seat_removed_by_hand_takes_another(
    root: Path, is_reset: bool
) -> None:
    """No other engine is there to reclaim it, and the ledger does not mention it."""
    with fs_harness(root) as harness:
        if is_reset:
            harness.begin_epoch(EPOCHS[0])
        wait_until_stored(harness, harness.keys(4))
        # In one step, since the engine goes on and would write into a directory that is being
        # removed.
        (root / "engines").rename(root.parent / "aside")
        (root / "engines").mkdir(mode=0o700)
        wait_until_stored(harness, harness.keys(4, start=100))
        if not is_reset:  # private blocks stay counted until all are counted again
            wait_until_the_gauge_is_right(harness, root)


def test_blocks_leave_though_one_directory_cannot_be_read(root: Path) -> None:
    with fs_harness(root, 20) as harness:
        fill(harness)
        put_a_file_in_place_of_a_shard(fs_of(harness)._namespace)
        assert turn_over(harness, 5000) > 192


def test_blocks_leave_though_an_earlier_namespace_cannot_be_removed(root: Path) -> None:
    with fs_harness(root, 20 + 256) as harness:
        harness.begin_epoch(EPOCHS[0])
        store_some(harness, harness.keys(4))
        put_a_file_in_place_of_a_shard(fs_of(harness)._namespace)
        harness.begin_epoch(EPOCHS[1])
        fill(harness)
        assert turn_over(harness, 5000) > 192


def test_blocks_leave_though_the_oldest_one_cannot(root: Path) -> None:
    with fs_harness(root, 20) as harness:
        fill(harness)
        oldest = min(block_files(root), key=lambda path: path.stat().st_mtime_ns)
        presence = fs_of(harness)._session.presence
        with failing_calls(errno.EPERM, lambda path: str(path) == str(oldest), "rename"):
            assert turn_over(harness, 5000) > 192
        assert fs_of(harness)._session.presence is presence
        assert oldest.exists()
        wait_until_the_gauge_is_right(harness, root)


def test_a_directory_that_someone_has_removed_is_made_again(root: Path) -> None:
    with fs_harness(root) as harness:
        keys = harness.keys(4)
        wait_until_stored(harness, keys)
        lost = fs_of(harness)._namespace / os.path.relpath(
            next(path for path in block_files(root) if path.name == keys[0].hex()).parent,
            fs_of(harness)._namespace,
        )
        shutil.rmtree(lost)
        fs_of(harness)._lookups.look_into(fs_of(harness)._directory)
        wait_until_stored(harness, keys[:1])
