"""A reset or a clear request makes the tier forget everything: at once, once, for good, and without
a pause."""

from __future__ import annotations

import os
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn

import pytest

from kvtier.base import OffloadKey
from kvtier.testing import TierHarness
from kvtier.tiering.disk import flusher, slab
from kvtier.tiering.disk.events import EventLog
from kvtier.tiering.disk.file import SlabFile, read_clear_request
from kvtier.tiering.disk.layout import (
    CONTROL_OFFSET,
    HOLDER_OFFSET,
    SUPERBLOCK_OFFSETS,
    encode_clear_request,
)
from kvtier.tiering.disk.slots import SlabBlock
from tests.tiering.disk.harness import bad_sectors, disk_harness, disk_of
from tests.tiering.patience import wait_until

MANY = 200_000
REQUEST = b"forget everything"[:16]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "kv.slab"


@pytest.fixture
def looks(monkeypatch: pytest.MonkeyPatch) -> Looks:
    return Looks(monkeypatch)


class Looks:
    """Counts how often flushers look for a clear request, which they do often here."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.count = 0
        monkeypatch.setattr(flusher, "read_clear_request", self._counted)
        monkeypatch.setattr(flusher, "_LOOK_EVERY_S", 0.02)
        monkeypatch.setattr(flusher, "_WRITE_EVERY_S", 0.01)

    def _counted(self, file: SlabFile) -> bytes | None:
        self.count += 1
        return read_clear_request(file)

    def wait_for_some(self) -> None:
        wanted = self.count + 4
        wait_until(lambda: self.count >= wanted, "the flusher has looked a few times")


class Unlisted(dict[OffloadKey, Any]):
    """A dict that must not be iterated, and that records the keys removed one by one."""

    def __init__(self, content: dict[OffloadKey, Any]) -> None:
        super().__init__(content)
        self.taken_by: Counter[threading.Thread] = Counter()

    def popitem(self) -> tuple[OffloadKey, Any]:
        self.taken_by[threading.current_thread()] += 1
        return super().popitem()

    def __iter__(self) -> Iterator[OffloadKey]:
        _refuse()

    def keys(self) -> NoReturn:
        _refuse()

    def values(self) -> NoReturn:
        _refuse()

    def items(self) -> NoReturn:
        _refuse()

    def clear(self) -> None:
        _refuse()


def _refuse() -> NoReturn:
    raise AssertionError("something is done with all blocks in one go")


def store(harness: TierHarness, count: int, start: int = 0) -> list[OffloadKey]:
    keys = harness.keys(count, start)
    (report,) = harness.wait_for(harness.store(keys))
    assert report.result.success
    return keys


def ask_to_clear(path: Path, request_id: bytes = REQUEST) -> None:
    """As `kvtier store clear` does while an engine runs."""
    with path.open("r+b") as file:
        os.pwrite(file.fileno(), encode_clear_request(request_id), CONTROL_OFFSET)
        os.fsync(file.fileno())


# --- without a pause ---------------------------------------------------------------------------


def test_many_blocks_are_destroyed_little_by_little_by_the_flusher(path: Path) -> None:
    with disk_harness(path) as harness:
        tier = disk_of(harness)
        tier.enable_kv_events = False
        keys = harness.keys(MANY)
        tier._table.adopt(keys, range(MANY), range(MANY))
        blocks = tier._table.readable = Unlisted(tier._table.readable)
        policy = tier._table._policy
        harness.begin_epoch(b"another".ljust(16))
        assert not harness.hits(keys[:8])
        wait_until(lambda: not tier._flusher._to_destroy, "the flusher has destroyed them")
        assert len(blocks) == 0
        assert blocks.taken_by == {tier._flusher._thread: MANY}
        assert policy.get(keys[0]) is policy.get(keys[-1]) is None
        new = store(harness, 8)
        assert harness.hits(new) == set(new)


def test_blocks_of_an_earlier_engine_are_announced_once_and_in_small_steps(path: Path) -> None:
    with disk_harness(path) as harness:
        tier = disk_of(harness)
        keys = harness.keys(20_000)
        blocks = {key: SlabBlock(slot, key, slot) for slot, key in enumerate(keys)}
        tier._events = EventLog(tier, tier._slab, blocks)
        tier._events._unannounced = Unlisted(tier._events._unannounced)
        num_steps = 0
        while tier._events._unannounced:
            harness.step()
            num_steps += 1
        told = [key for event in harness.events for key in event.keys]
        assert told == keys, "the most recently used first"
        assert max(len(event.keys) for event in harness.events) <= 256
        assert num_steps < 100


def test_what_nobody_is_told_is_not_kept_for_it(path: Path) -> None:
    with disk_harness(path) as harness:
        store(harness, 8)
    with disk_harness(path) as harness:
        harness.tier.enable_kv_events = False
        assert disk_of(harness)._events._unannounced
        harness.step()
        assert not disk_of(harness)._events._unannounced


# --- by request --------------------------------------------------------------------------------


def test_a_request_that_waits_is_obeyed_before_the_first_lookup(path: Path, looks: Looks) -> None:
    with disk_harness(path) as harness:
        old = store(harness, 8)
    ask_to_clear(path)
    with disk_harness(path) as harness:
        assert not harness.hits(old)
        new = store(harness, 8, start=20)
        looks.wait_for_some()
        assert harness.hits(new) == set(new)
    with disk_harness(path) as harness:
        looks.wait_for_some()
        assert harness.hits(old + new) == set(new)


@pytest.mark.parametrize("is_damaged", [False, True])
def test_an_old_request_means_nothing_to_a_slab_made_anew(
    path: Path, looks: Looks, is_damaged: bool
) -> None:
    with disk_harness(path) as harness:
        ask_to_clear(path)
        slab = disk_of(harness)._slab
        wait_until(lambda: slab.superblock.last_clear == REQUEST, "it is obeyed")
    if is_damaged:
        with path.open("r+b") as file:
            for offset in SUPERBLOCK_OFFSETS:
                os.pwrite(file.fileno(), b"?", offset + 100)
    with disk_harness(path, row_bytes=8192 if is_damaged else 4096) as harness:
        keys = store(harness, 8)
        looks.wait_for_some()
        assert harness.hits(keys) == set(keys)


class _Died(Exception):
    """Raised where the engine would be killed."""


def test_a_request_outlives_an_engine_that_died_while_it_made_the_slab_anew(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with disk_harness(path) as harness:
        old = store(harness, 8)
    ask_to_clear(path)

    def die(*_: object) -> NoReturn:
        raise _Died

    with monkeypatch.context() as dying:
        dying.setattr(slab, "write_superblock", die)
        with pytest.raises(_Died):
            disk_harness(path, 8, row_bytes=16384)
    with disk_harness(path) as harness:
        assert not harness.hits(old)


def test_a_request_that_cannot_be_written_down_is_obeyed_once(path: Path, looks: Looks) -> None:
    with disk_harness(path) as harness:
        old = store(harness, 8)
        with bad_sectors(*SUPERBLOCK_OFFSETS, writing_mends=False):
            ask_to_clear(path)
            wait_until(lambda: not harness.hits(old), "it is obeyed")
            new = store(harness, 8, start=20)
            looks.wait_for_some()
            assert harness.hits(new) == set(new)
        slab = disk_of(harness)._slab
        wait_until(lambda: slab.superblock.last_clear == REQUEST, "it is written down later")
        assert harness.hits(new) == set(new)
    with disk_harness(path) as harness:
        assert harness.hits(old + new) == set(new)


def test_a_note_that_cannot_be_written_keeps_no_request_waiting(path: Path, looks: Looks) -> None:
    with disk_harness(path) as harness:
        old = store(harness, 8)
        with bad_sectors(HOLDER_OFFSET, writing_mends=False):
            disk_of(harness).keep_note(b"a note")
            looks.wait_for_some()
            ask_to_clear(path)
            wait_until(lambda: not harness.hits(old), "it is obeyed")
