"""Lookups: the scheduler never waits, and answers were true a short while ago."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from kvtier.base import LookupResult, OffloadKey
from kvtier.tiering.fs.access import NoFollowTree
from kvtier.tiering.fs.layout import LONGEST_KEY, SHARDS, block_path
from kvtier.tiering.fs.uses import NUM_LOOKUP_THREADS, find_files
from kvtier.tiering.io import lookups as module
from kvtier.tiering.io.lookups import LookupCache
from tests.tiering.patience import wait_until

HIT, MISS, RETRY = LookupResult.HIT, LookupResult.MISS, LookupResult.RETRY


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now


class Space:
    """A namespace with blocks, and a lookup cache."""

    def __init__(self, directory: Path) -> None:
        self.path = str(directory)
        for shard in SHARDS:
            (directory / shard).mkdir(parents=True)
        self.errors: list[OSError] = []
        look = partial(find_files, NoFollowTree(directory.parent), self.errors.append)
        self.lookups = LookupCache(
            [look] * NUM_LOOKUP_THREADS,
            self.path,
            name="kvtier-fs-lookup",
            longest_key=LONGEST_KEY,
        )
        self.lookups.start()

    def add(self, *keys: OffloadKey) -> None:
        for each in keys:
            Path(block_path(self.path, each)).touch()

    def remove(self, *keys: OffloadKey) -> None:
        for each in keys:
            os.unlink(block_path(self.path, each))

    def answer(self, keys: list[OffloadKey]) -> list[LookupResult]:
        """Ask as the scheduler does: unknown blocks are looked up at the end of the step."""
        answers = self.lookups.answer(keys)
        self.lookups.ask()
        return answers

    def known(self, keys: list[OffloadKey]) -> list[LookupResult]:
        """Ask until there is no RETRY."""
        answers: list[LookupResult] = []

        def is_known() -> bool:
            nonlocal answers
            answers = self.answer(keys)
            return RETRY not in answers

        wait_until(is_known, "the answers are known")
        return answers


def keys(count: int, start: int = 0) -> list[OffloadKey]:
    return [OffloadKey(b"key %06d" % number) for number in range(start, start + count)]


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(module, "time", clock)
    return clock


@pytest.fixture
def space(tmp_path: Path, clock: Clock) -> Iterator[Space]:
    made = Space(tmp_path / "namespace")
    yield made
    made.lookups.stop()


Look = Callable[..., os.stat_result]


def spy_on(monkeypatch: pytest.MonkeyPatch, before: Callable[[str], None]) -> None:
    """Call a function whenever a thread looks up a file."""

    def spied(real: Look) -> Look:
        def look(path: Any, *args: Any, **kwargs: Any) -> os.stat_result:
            if threading.current_thread().name.startswith("kvtier-fs-lookup"):
                before(os.path.basename(path))
            return real(path, *args, **kwargs)

        return look

    for name in ("stat", "lstat"):
        monkeypatch.setattr(os, name, spied(getattr(os, name)))


@pytest.fixture
def looked_for(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of all files that were looked up."""
    names: list[str] = []
    spy_on(monkeypatch, names.append)
    return names


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], None]]:
    """Hold all lookups of files until the returned function is called."""
    opened = threading.Event()

    def wait(_: str) -> None:
        opened.wait()

    spy_on(monkeypatch, wait)
    yield opened.set
    opened.set()


def test_nothing_is_known_before_it_was_looked_for(space: Space, gate: Callable[[], None]) -> None:
    space.add(*keys(3))
    for _ in range(3):
        assert space.answer(keys(4)) == [RETRY] * 4
    gate()
    assert space.known(keys(4)) == [HIT, HIT, HIT, MISS]


def test_nothing_is_looked_for_before_the_end_of_a_step(
    space: Space, looked_for: list[str]
) -> None:
    """Unless there are many: threads are not woken for each block."""
    space.lookups.answer(keys(3))
    space.lookups.answer(keys(3, start=3))
    assert not space.lookups._questions
    assert looked_for == []
    space.lookups.answer(keys(module._AT_ONCE, start=6))
    wait_until(lambda: bool(looked_for), "so many are looked for at once")


def test_answers_end_with_the_first_miss(space: Space) -> None:
    space.add(*keys(2), *keys(5, start=3))
    assert space.known(keys(8)) == [HIT, HIT, MISS]
    assert space.known(keys(5, start=3)) == [HIT] * 5
    assert space.answer(keys(8)) == [HIT, HIT, MISS]


def test_what_follows_an_absent_block_is_not_looked_for(
    space: Space, looked_for: list[str]
) -> None:
    many = keys(10_000)
    space.add(*many[:5])
    assert space.known(many) == [HIT] * 5 + [MISS]
    wait_until(lambda: not space.lookups._questions, "all is answered")
    # Threads that had begun already may each look up a few.
    assert len(looked_for) < 4 * module._AT_ONCE


def is_missed(space: Space, prompt: list[OffloadKey]) -> bool:
    return space.lookups.answer(prompt) == [MISS]


def test_a_miss_of_one_prompt_says_nothing_of_another(space: Space) -> None:
    """All are asked for in one step, and none is asked for again."""
    space.add(*keys(4, start=1000))
    prompts = [keys(4, start=10 * number) for number in range(30)] + [keys(4, start=1000)]
    for prompt in prompts:
        assert space.lookups.answer(prompt) == [RETRY] * 4
    space.lookups.ask()
    for prompt in prompts[:-1]:
        wait_until(partial(is_missed, space, prompt), "a miss")
    wait_until(lambda: space.lookups.answer(prompts[-1]) == [HIT] * 4, "the last is found")


def test_a_miss_of_one_block_says_nothing_of_others(space: Space) -> None:
    """Blocks that are asked for one by one count as separate prompts."""
    asked = keys(20)
    space.add(asked[-1])
    for each in asked:
        assert space.lookups.answer([each]) == [RETRY]
    space.lookups.ask()
    wait_until(lambda: space.lookups.answer(asked[-1:]) == [HIT], "the last is found")


def test_ten_thousand_blocks_are_found(space: Space) -> None:
    many = keys(10_000)
    space.add(*many)
    assert space.known(many) == [HIT] * 10_000
    space.remove(many[7000])
    space.lookups.note_absent([many[7000]])
    assert space.known(many) == [HIT] * 7000 + [MISS]


def test_a_block_is_looked_for_once_whoever_asks(space: Space, looked_for: list[str]) -> None:
    space.add(*keys(20))
    for _ in range(50):
        space.answer(keys(20))
    space.known(keys(20))
    assert sorted(looked_for) == sorted(key.hex() for key in keys(20))


def test_what_is_absent_is_so_for_a_while_only(space: Space, clock: Clock) -> None:
    """Another engine may store it."""
    (key,) = keys(1)
    assert space.known([key]) == [MISS]
    space.add(key)
    clock.now += module._ABSENT_FOR_S - 0.1
    assert space.answer([key]) == [MISS]
    clock.now += 0.2
    assert space.answer([key]) == [RETRY]
    assert space.known([key]) == [HIT]


def test_what_is_present_is_so_for_a_while_only(space: Space, clock: Clock) -> None:
    """Another engine may evict it."""
    (key,) = keys(1)
    space.add(key)
    assert space.known([key]) == [HIT]
    space.remove(key)
    clock.now += module._PRESENT_FOR_S - 0.1
    assert space.answer([key]) == [HIT]
    clock.now += 0.2
    assert space.known([key]) == [MISS]


def test_what_was_there_lately_need_not_be_stored_again(space: Space, clock: Clock) -> None:
    """For a shorter time than it is a hit: a store that is skipped by mistake is not repeated."""
    (key,) = keys(1)
    space.lookups.note_present([key])
    clock.now += module._SURELY_FOR_S - 0.1
    assert space.lookups.present_of([key]) == [key]
    clock.now += 0.2
    assert space.lookups.present_of([key]) == []
    assert space.answer([key]) == [HIT]


def test_what_we_are_told_needs_no_look(space: Space, looked_for: list[str]) -> None:
    first, second = keys(2)
    space.lookups.note_present([first, second])
    assert space.answer([first, second]) == [HIT, HIT]
    space.lookups.note_absent([second])
    assert space.answer([first, second]) == [HIT, MISS]
    space.lookups.note_present([second])
    assert space.answer([first, second]) == [HIT, HIT]
    assert space.lookups.present_of(keys(3)) == [first, second]
    assert looked_for == []


def test_keys_too_long_for_a_seal_are_never_there(space: Space, looked_for: list[str]) -> None:
    longest = OffloadKey(b"k" * LONGEST_KEY)
    space.add(longest)
    assert space.answer([OffloadKey(longest + b"k"), longest]) == [MISS]
    assert looked_for == []
    assert space.known([longest]) == [HIT]


def test_what_is_remembered_is_bounded(space: Space, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_MAX_PRESENT", 100)
    monkeypatch.setattr(module, "_MAX_ABSENT", 50)
    space.lookups.note_present(keys(1000))
    space.lookups.note_absent(keys(1000, start=2000))
    assert len(space.lookups._present) == 100
    assert len(space.lookups._absent) == 50
    # The newest answers are kept.
    assert space.answer(keys(100, start=900)) == [HIT] * 100
    assert space.answer(keys(1, start=2999)) == [MISS]


def test_what_waits_to_be_looked_for_is_bounded(
    space: Space, gate: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_MAX_ASKED", 300)
    for start in range(0, 5000, 100):
        assert space.answer(keys(100, start)) == [RETRY] * 100
    assert len(space.lookups._asked) <= 400
    gate()
    assert space.known(keys(1, start=4999)) == [MISS]


def test_answers_of_another_namespace_come_too_late(
    space: Space, tmp_path: Path, gate: Callable[[], None]
) -> None:
    space.add(*keys(3))
    assert space.answer(keys(3)) == [RETRY] * 3
    space.lookups.look_into(str(tmp_path / "another"))
    assert space.answer(keys(3)) == [RETRY] * 3
    gate()
    assert space.known(keys(3)) == [MISS]
    space.lookups.look_into(space.path)
    assert space.known(keys(3)) == [HIT] * 3


def test_what_a_thread_saw_before_a_store_ended_is_outdated(
    space: Space, gate: Callable[[], None]
) -> None:
    asked = keys(3)
    space.answer(asked)
    space.lookups.note_present(asked[:2])
    space.lookups.note_absent(asked[2:])
    space.add(asked[2])
    gate()
    wait_until(lambda: bool(space.lookups._answers), "a thread has looked for them")
    assert space.answer(asked) == [HIT, HIT, MISS]


def test_another_namespace_is_not_known(space: Space, tmp_path: Path) -> None:
    space.lookups.note_present(keys(3))
    space.lookups.note_absent(keys(1, start=3))
    space.lookups.look_into(str(tmp_path / "another"))
    assert space.lookups.present_of(keys(3)) == []
    space.add(*keys(4))
    space.lookups.look_into(space.path)
    assert space.known(keys(4)) == [HIT] * 4


def test_an_error_is_a_miss_and_is_told(space: Space, monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine then computes the block; it must not wait for a missing file system."""
    (key,) = keys(1)
    space.add(key)

    def stale(_: str) -> None:
        raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))

    spy_on(monkeypatch, stale)
    assert space.known([key]) == [MISS]
    assert [error.errno for error in space.errors] == [errno.ESTALE]


def test_a_namespace_that_nobody_has_made_is_empty(space: Space, tmp_path: Path) -> None:
    space.lookups.look_into(str(tmp_path / "never made"))
    assert space.known(keys(3)) == [MISS]
    assert space.errors == []


def test_what_is_no_file_is_no_block(space: Space) -> None:
    link, directory = keys(2)
    Path(block_path(space.path, link)).symlink_to("/etc/passwd")
    Path(block_path(space.path, directory)).mkdir()
    assert space.known([link]) == [MISS]
    assert space.known([directory]) == [MISS]


def test_stopping_does_not_wait_for_all_that_was_asked(space: Space) -> None:
    space.answer(keys(50_000))
    space.lookups.stop()
    assert not any(thread.is_alive() for thread in space.lookups._threads)
