"""The times of uses are written into the files' mtimes, where every engine sees them."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvtier.base import OffloadKey
from kvtier.tiering.fs import uses as module
from kvtier.tiering.fs.access import NoFollowTree
from kvtier.tiering.fs.layout import LONGEST_KEY, SHARDS, block_path
from kvtier.tiering.fs.uses import UseStamps
from kvtier.tiering.io import lookups
from tests.tiering.patience import PATIENCE_S, wait_until

LONG_AGO_NS = 10**18
SAME_USE_S = module._SAME_USE_NS / 1e9


class Clock:
    """Two clocks that only the test advances."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.now_ns = 17 * 10**17

    def monotonic(self) -> float:
        return self.now

    def time_ns(self) -> int:
        return self.now_ns

    def pass_s(self, seconds: float) -> None:
        self.now += seconds
        self.now_ns += int(seconds * 1e9)


class Noted:
    """A namespace with blocks, and a thread that writes their uses."""

    def __init__(self, directory: Path) -> None:
        self.path = str(directory)
        for shard in SHARDS:
            (directory / shard).mkdir(parents=True)
        self.num_marks = 0
        self.errors: list[OSError] = []
        self.coming: set[OffloadKey] = set()
        self.below = NoFollowTree(directory.parent)
        self.uses = UseStamps(self.below, self.errors.append, self.coming.__contains__)
        self.uses.start()

    def add(self, *keys: OffloadKey) -> None:
        for each in keys:
            Path(block_path(self.path, each)).touch()
            os.utime(block_path(self.path, each), ns=(LONG_AGO_NS, LONG_AGO_NS))

    def stamp(self, key: OffloadKey) -> int:
        return os.stat(block_path(self.path, key)).st_mtime_ns

    def note(self, *keys: OffloadKey) -> None:
        self.uses.note(self.path, keys)

    def wait(self) -> None:
        """Wait until all uses are written."""
        self.num_marks += 1
        mark = OffloadKey(b"mark %d" % self.num_marks)
        wait_until(lambda: not self.uses._waiting, "nothing waits")
        self.add(mark)
        self.note(mark)
        wait_until(lambda: self.stamp(mark) != LONG_AGO_NS, "the last is written")


def keys(count: int) -> list[OffloadKey]:
    return [OffloadKey(b"key %06d" % number) for number in range(count)]


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(module, "time", clock)
    monkeypatch.setattr(module, "_WRITE_EVERY_S", 0.002)
    return clock


@pytest.fixture
def noted(tmp_path: Path, clock: Clock) -> Iterator[Noted]:
    made = Noted(tmp_path / "namespace")
    yield made
    made.uses.stop()


def test_of_one_prompt_the_head_is_the_newest(noted: Noted, clock: Clock) -> None:
    some = keys(5)
    noted.add(*some)
    noted.note(*some)
    noted.wait()
    stamps = [noted.stamp(key) for key in some]
    assert stamps == sorted(stamps, reverse=True)
    assert len(set(stamps)) == 5
    assert stamps[0] == clock.now_ns


def test_what_was_used_later_is_newer_than_all_before(noted: Noted, clock: Clock) -> None:
    first, *others = keys(100)
    noted.add(first, *others)
    noted.note(*others)
    clock.pass_s(0.001)
    noted.note(first)
    noted.wait()
    assert noted.stamp(first) > max(noted.stamp(key) for key in others)


def test_a_fresh_use_beats_an_older_one(noted: Noted, clock: Clock) -> None:
    """The same block at the end of one prompt, and later at the head of another."""
    first, second = keys(2)
    noted.add(first, second)
    noted.note(first, second)
    noted.wait()
    clock.pass_s(SAME_USE_S + 1)
    noted.note(second)
    noted.wait()
    assert noted.stamp(second) == clock.now_ns > noted.stamp(first)


def test_a_block_that_is_used_all_the_time_is_written_rarely(noted: Noted, clock: Clock) -> None:
    (key,) = keys(1)
    noted.add(key)
    noted.note(key)
    noted.wait()
    before = noted.stamp(key)
    clock.pass_s(SAME_USE_S - 1)
    noted.note(key)
    noted.wait()
    assert noted.stamp(key) == before
    clock.pass_s(2)
    noted.note(key)
    noted.wait()
    assert noted.stamp(key) == clock.now_ns


def test_what_has_left_is_passed_over(noted: Noted, clock: Clock) -> None:
    first, gone, last = keys(3)
    noted.add(first, last)
    noted.note(first, gone, OffloadKey(b"k" * (LONGEST_KEY + 1)), last)
    noted.uses.note(noted.path + "-that-nobody-made", (first,))
    noted.wait()
    assert noted.errors == []
    assert noted.stamp(last) == clock.now_ns - 3
    assert not os.path.exists(block_path(noted.path, gone))


def test_a_block_that_comes_back_is_noted(noted: Noted, clock: Clock) -> None:
    """A missing file is not remembered as a use."""
    (key,) = keys(1)
    noted.note(key)
    noted.wait()
    noted.add(key)
    noted.note(key)
    noted.wait()
    assert noted.stamp(key) == clock.now_ns


def test_a_block_without_a_file_is_named_once(noted: Noted) -> None:
    """The next use looks again."""
    here, gone, other = keys(3)
    noted.add(here)
    for _ in range(2):
        noted.note(here, gone)
        noted.wait()
        assert noted.uses.absent.take(noted.path, keys(3)) == [gone]
        assert noted.uses.absent.take(noted.path, keys(3)) == []
    noted.add(gone)
    noted.note(gone)
    noted.wait()
    assert noted.uses.absent.take(noted.path, [gone, other]) == []


def test_a_block_without_a_file_in_another_namespace_is_not_named(noted: Noted) -> None:
    (key,) = keys(1)
    noted.add(key)
    noted.uses.note(noted.path + "-that-nobody-made", (key,))
    noted.wait()
    assert noted.uses.absent.take(noted.path, [key]) == []


def test_an_error_is_told_and_the_next_prompt_tried(
    noted: Noted, monkeypatch: pytest.MonkeyPatch
) -> None:
    some = keys(4)
    noted.add(*some)
    real = os.utime
    is_read_only = True

    def utime(path: Any, *args: Any, **kwargs: Any) -> None:
        if (
            is_read_only
            and os.path.basename(path) == some[0].hex()
            and kwargs["ns"][0] != LONG_AGO_NS
        ):
            raise OSError(errno.EROFS, "read-only")
        real(path, *args, **kwargs)

    monkeypatch.setattr(os, "utime", utime)
    noted.note(*some[:2])
    noted.note(*some[2:])
    noted.wait()
    assert [error.errno for error in noted.errors] == [errno.EROFS]
    assert [noted.stamp(key) > LONG_AGO_NS for key in some] == [False, False, True, True]
    is_read_only = False
    noted.note(some[0])
    noted.wait()
    assert noted.stamp(some[0]) > LONG_AGO_NS


def test_a_link_is_not_followed(noted: Noted, tmp_path: Path) -> None:
    """Nothing outside the root is touched."""
    (key,) = keys(1)
    target = tmp_path / "outside"
    target.touch()
    os.utime(target, ns=(LONG_AGO_NS, LONG_AGO_NS))
    os.symlink(target, block_path(noted.path, key))
    noted.note(key)
    noted.wait()
    assert target.stat().st_mtime_ns == LONG_AGO_NS


def test_what_another_engine_has_noted_later_stays(noted: Noted, clock: Clock) -> None:
    (key,) = keys(1)
    noted.add(key)
    later = clock.now_ns + 10**10
    os.utime(block_path(noted.path, key), ns=(later, later))
    noted.note(key)
    noted.wait()
    assert noted.stamp(key) == later


def test_an_absent_block_is_named_however_many_were_found_absent_before(
    noted: Noted, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The oldest of them is forgotten."""
    monkeypatch.setattr(module, "_MAX_KNOWN", 8)
    monkeypatch.setattr(lookups, "_MAX_KNOWN_ABSENT", 8)
    *once, hot = keys(20)
    noted.note(*once)
    noted.wait()
    noted.note(hot)
    noted.wait()
    assert noted.uses.absent.take(noted.path, [*once, hot]) == [*once[-7:], hot]


def test_a_block_that_is_being_written_is_not_absent(noted: Noted) -> None:
    first, second = keys(2)
    noted.coming.add(first)
    noted.note(first, second)
    noted.wait()
    assert noted.uses.absent.take(noted.path, keys(2)) == [second]


@pytest.mark.parametrize("batch", [1, 5, 64])
def test_what_waits_is_bounded_in_blocks_and_the_newest_is_kept(
    batch: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_WRITE_EVERY_S", 3600.0)
    monkeypatch.setattr(module, "_LONGEST_END_S", PATIENCE_S)
    monkeypatch.setattr(module, "_MAX_WAITING", 64)
    noted = Noted(tmp_path / "namespace")
    first, *others = keys(1 + 64 * batch)
    noted.add(first, *others)
    noted.note(first)
    for start in range(0, len(others), batch):
        noted.note(*others[start : start + batch])
    noted.uses.stop()
    is_noted = [noted.stamp(key) > LONG_AGO_NS for key in (first, *others)]
    num_noted = 64 // batch * batch
    assert is_noted == [False] * (len(is_noted) - num_noted) + [True] * num_noted


def test_of_a_prompt_that_is_too_long_the_head_is_noted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_WRITE_EVERY_S", 3600.0)
    monkeypatch.setattr(module, "_LONGEST_END_S", PATIENCE_S)
    monkeypatch.setattr(module, "_MAX_WAITING", 4)
    noted = Noted(tmp_path / "namespace")
    noted.add(*keys(6))
    noted.note(*keys(6))
    noted.uses.stop()
    assert [noted.stamp(key) > LONG_AGO_NS for key in keys(6)] == [True] * 4 + [False] * 2


def test_the_end_does_not_wait_for_a_slow_file_server(
    tmp_path: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Uses that cannot be written within the time limit are dropped."""
    monkeypatch.setattr(module, "_WRITE_EVERY_S", 3600.0)
    noted = Noted(tmp_path / "namespace")
    noted.add(*keys(100))
    real = noted.below.lstat

    def lstat(path: Any) -> os.stat_result:
        clock.pass_s(module._LONGEST_END_S * 0.4)
        return real(path)

    monkeypatch.setattr(noted.below, "lstat", lstat)
    for key in keys(50):
        noted.note(key)
    noted.note(*keys(100)[50:])
    noted.uses.stop()
    is_noted = [noted.stamp(key) > LONG_AGO_NS for key in keys(100)]
    assert is_noted == [True] * 3 + [False] * 97


def test_the_last_uses_are_written_before_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_WRITE_EVERY_S", 3600.0)
    monkeypatch.setattr(module, "_LONGEST_END_S", PATIENCE_S)
    noted = Noted(tmp_path / "namespace")
    noted.add(*keys(3))
    noted.note(*keys(3))
    noted.uses.stop()
    assert all(noted.stamp(key) > LONG_AGO_NS for key in keys(3))
