"""Single pages that the disk cannot read or write any more: the rest is kept, in its order."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from kvtier.testing import TierHarness
from kvtier.tiering.disk import flusher
from kvtier.tiering.disk.layout import CONTROL_OFFSET, HOLDER_OFFSET, Geometry
from kvtier.tiering.io.metrics import error_counter
from kvtier.tiering.io.page import PAGE_BYTES
from tests.tiering.disk.harness import ROW_BYTES, bad_sectors, disk_harness, disk_of
from tests.tiering.patience import wait_until

NUM_BLOCKS = 130  # three pages of the index
GEOMETRY = Geometry(ROW_BYTES, NUM_BLOCKS)
KEYS = TierHarness.keys(NUM_BLOCKS)


def store_all(harness: TierHarness) -> None:
    for start in range(0, NUM_BLOCKS, 10):
        (report,) = harness.wait_for(harness.store(KEYS[start : start + 10]))
        assert report.result.success


def loaded(harness: TierHarness) -> set[bytes]:
    moved: set[bytes] = set()
    for start in range(0, NUM_BLOCKS, 10):
        (report,) = harness.wait_for(harness.load(KEYS[start : start + 10]))
        moved |= report.moved
    return moved


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A full slab."""
    path = tmp_path / "kv.slab"
    with disk_harness(path, NUM_BLOCKS) as harness:
        store_all(harness)
    return path


@pytest.mark.parametrize(
    "page",
    [
        pytest.param(0, id="superblock-0"),
        pytest.param(PAGE_BYTES, id="superblock-1"),
        pytest.param(HOLDER_OFFSET, id="holder"),
        pytest.param(CONTROL_OFFSET, id="control"),
        pytest.param(GEOMETRY.index_offset, id="index-0"),
        pytest.param(GEOMETRY.index_offset + PAGE_BYTES, id="index-1"),
    ],
)
def test_a_page_that_cannot_be_read_costs_no_block(path: Path, page: int) -> None:
    with bad_sectors(page), disk_harness(path, NUM_BLOCKS) as harness:
        assert loaded(harness) == set(KEYS)
    with disk_harness(path, NUM_BLOCKS) as harness:
        assert harness.hits(KEYS) == set(KEYS)


def test_a_block_that_cannot_be_moved_is_the_only_one_to_go(path: Path) -> None:
    """Shrinking moves the blocks behind the new end."""
    stranger = 100
    with bad_sectors(GEOMETRY.slot_offset(stranger)), disk_harness(path, 60) as harness:
        left = loaded(harness)
    assert len(left) == 59
    assert left < set(KEYS[-60:])


def test_index_pages_that_could_not_be_written_for_a_while_are_written_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "kv.slab"
    monkeypatch.setattr(
        flusher, "_LOOK_EVERY_S", 0.05
    )  # or the flusher pauses longer than the test waits
    with disk_harness(path, NUM_BLOCKS) as harness:
        pages = range(GEOMETRY.index_offset, GEOMETRY.file_bytes, PAGE_BYTES)
        with bad_sectors(*pages, writing_mends=False):
            store_all(harness)
            eio = Errors(harness)
            wait_until(lambda: eio.count() > 0, "the index cannot be written")
    with disk_harness(path, NUM_BLOCKS) as harness:
        assert harness.hits(KEYS) == set(KEYS)


def test_the_flusher_does_not_try_again_and_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a disk that keeps failing, the flusher counts one error in each of its longer periods."""
    monkeypatch.setattr(flusher, "_WRITE_EVERY_S", 0.001)
    monkeypatch.setattr(flusher, "_LOOK_EVERY_S", 3600.0)  # the length of its pause, too
    with disk_harness(tmp_path / "kv.slab", NUM_BLOCKS) as harness:
        eio = Errors(harness)
        with bad_sectors(GEOMETRY.index_offset, writing_mends=False):
            rounds = Rounds(disk_of(harness)._flusher)
            harness.wait_for(harness.store(KEYS[:8]))
            wait_until(lambda: eio.count() > 0, "the index cannot be written")
            rounds.wait_for(50)
            assert eio.count() == 1


def test_the_flusher_rests_after_an_unexpected_error_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(flusher, "_WRITE_EVERY_S", 0.001)
    monkeypatch.setattr(flusher, "_LOOK_EVERY_S", 0.1)
    path = tmp_path / "kv.slab"
    fails_at: list[float] = []

    def fail() -> None:
        fails_at.append(time.monotonic())
        raise RuntimeError(f"a mistake, found for the {len(fails_at)}th time")

    with disk_harness(path, NUM_BLOCKS) as harness:
        with monkeypatch.context() as patch:
            patch.setattr(disk_of(harness)._flusher, "_write", fail)
            wait_until(lambda: len(fails_at) >= 4, "it has failed a few times")
        assert fails_at[3] - fails_at[0] >= 0.3
        store_all(harness)
    assert caplog.text.count("Traceback") == 1
    assert f"{path}: unexpected error: the file could not be updated" in caplog.text
    with disk_harness(path, NUM_BLOCKS) as harness:
        assert harness.hits(KEYS) == set(KEYS)


class Errors:
    """Number of EIO errors so far."""

    def __init__(self, harness: TierHarness) -> None:
        self._harness = harness
        self._count = 0.0

    def count(self) -> float:
        self._count += self._harness.call("get_stats").counters[error_counter("kvtier_disk", "EIO")]
        return self._count


class Rounds:
    """Counts the rounds of the flusher's thread."""

    def __init__(self, index_flusher: flusher.IndexFlusher) -> None:
        self._count = 0
        self._wake = index_flusher._wake
        self._wait = self._wake.wait
        self._wake.wait = self._counted  # type: ignore[method-assign]

    def _counted(self, timeout: float | None = None) -> bool:
        self._count += 1
        return self._wait(timeout)

    def wait_for(self, count: int) -> None:
        """Wait for `count` more rounds."""
        wanted = self._count + count
        wait_until(lambda: self._count >= wanted, f"{count} rounds of the flusher")
