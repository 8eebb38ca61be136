"""The limit of an object store: kept by one engine at a time, by last use, for all of them."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import obstore
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from obstore.store import LocalStore

from kvtier.base import OffloadKey
from kvtier.tiering.obj import janitor as module
from kvtier.tiering.obj.janitor import ENGINES, Janitor, JanitorTimes
from kvtier.tiering.obj.objects import BLOCKS, PRIVATE, Objects, object_name
from kvtier.tiering.remote.errors import FailureKind, ServerErrors, ServerFailure
from tests.tiering.patience import wait_until

BLOCK = 1000
FOLDER = f"{BLOCKS}/{'ab' * 16}"


def key(number: int) -> OffloadKey:
    return OffloadKey(number.to_bytes(8, "big") + bytes(24))


class Bucket:
    """A directory as a bucket, with engines that share it."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.store = LocalStore(root, mkdir=True)
        self.errors = ServerErrors("file://")

    def engine(self, name: str, num_blocks: int, times: JanitorTimes | None = None) -> Janitor:
        objects = Objects(self.store)
        return Janitor(objects, num_blocks * BLOCK, name, self.errors, times or JanitorTimes())

    def add(self, engine: Janitor | None, keys: Sequence[OffloadKey], age_s: float = 0) -> None:
        """Store blocks, as a mover does."""
        for each in keys:
            name = object_name(FOLDER, each)
            obstore.put(self.store, name, bytes(BLOCK))
            when = time.time() - age_s
            os.utime(self.root / name, (when, when))
            if engine is not None:
                engine.note_written(BLOCK)

    def keys(self) -> set[OffloadKey]:
        pages = obstore.list(self.store, FOLDER)
        names = [item["path"] for page in pages for item in page]
        return {OffloadKey(bytes.fromhex(name.rpartition("/")[2])) for name in names}


@pytest.fixture
def bucket(tmp_path: Path) -> Bucket:
    return Bucket(tmp_path / "bucket")


def test_what_was_unused_for_longest_is_removed(bucket: Bucket) -> None:
    engine = bucket.engine("a1", num_blocks=10)
    for number in range(20):
        bucket.add(engine, [key(number)], age_s=10_000 - 100 * number)
    engine.sweep()
    assert bucket.keys() == {key(number) for number in range(11, 20)}  # nine tenths of the limit
    assert engine.num_removed == 11
    assert engine.num_bytes == 9 * BLOCK


def test_a_use_keeps_a_block_whoever_has_used_it(bucket: Bucket) -> None:
    leader, other = bucket.engine("a1", 10), bucket.engine("b2", 10)
    leader.sweep()
    for number in range(20):
        bucket.add(leader, [key(number)], age_s=10_000 - 100 * number)
    leader.note_used([key(0)])
    other.note_used([key(1)])
    other.sweep()
    leader.sweep()
    assert {key(0), key(1)} <= bucket.keys()
    assert len(bucket.keys()) == 9


def test_the_head_of_a_prompt_is_removed_last(bucket: Bucket) -> None:
    engine = bucket.engine("a1", num_blocks=10, times=JanitorTimes(same_age_ms=1))
    keys = [key(number) for number in range(20)]
    bucket.add(engine, keys, age_s=10_000)
    engine.note_used(keys)
    engine.sweep()
    assert bucket.keys() == set(keys[:9])


def test_blocks_that_others_remove_meanwhile_do_not_keep_the_rest(
    bucket: Bucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = bucket.engine("a1", num_blocks=10)
    bucket.add(engine, [key(number) for number in range(60)], age_s=10_000)
    real = Objects.remove

    def remove(objects: Objects, names: Sequence[str]) -> None:
        if len(names) > 1:
            for name in names[::10]:
                real(objects, [name])
        real(objects, names)

    monkeypatch.setattr(Objects, "remove", remove)
    engine.sweep()
    assert len(bucket.keys()) == 9
    assert engine.num_bytes == 9 * BLOCK


def test_what_nobody_has_reported_is_found_after_some_hours(bucket: Bucket) -> None:
    engine = bucket.engine("a1", 10, JanitorTimes(recount_s=0.0))
    engine.sweep()
    bucket.add(None, [key(number) for number in range(20)])
    engine.sweep()
    assert len(bucket.keys()) == 9


def test_one_engine_leads_and_another_takes_over(bucket: Bucket) -> None:
    first, second = bucket.engine("a1", 5), bucket.engine("b2", 5)
    first.sweep()
    second.sweep()
    assert first.num_bytes == 0
    assert second.num_bytes is None
    # The first engine dies.
    bucket.add(second, [key(number) for number in range(8)])
    second.sweep()
    assert len(bucket.keys()) == 8
    os.utime(bucket.root / f"{BLOCKS}/leader", (1, 1))
    second.sweep()
    assert len(bucket.keys()) == 4
    assert second.num_bytes == 4 * BLOCK


def test_the_bucket_is_listed_only_when_it_may_be_too_full(
    bucket: Bucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = bucket.engine("a1", num_blocks=10)
    engine.sweep()
    bucket.add(None, [key(99)])  # nobody has reported this one
    bucket.add(engine, [key(number) for number in range(10)])
    engine.sweep()
    assert engine.num_bytes == 10 * BLOCK  # counted from reports
    bucket.add(engine, [key(10)])
    engine.sweep()
    assert engine.num_bytes == 9 * BLOCK
    assert len(bucket.keys()) == 9


def test_what_a_dead_engine_left_is_removed(
    bucket: Bucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    dead, engine = bucket.engine("dead", 5), bucket.engine("a1", 5)
    dead.sweep()
    private = f"{PRIVATE}/dead/{'cd' * 16}/{key(1).hex()}"
    obstore.put(bucket.store, private, bytes(BLOCK))
    engine.sweep()
    for path in (bucket.root / ENGINES / "dead", bucket.root / f"{BLOCKS}/leader"):
        os.utime(path, (1, 1))
    engine.sweep()
    assert not (bucket.root / private).exists()
    assert not (bucket.root / ENGINES / "dead").exists()


@pytest.mark.parametrize("content", [b"", b"KVTUSES1", b"x" * 100, b"KVTUSES1" + b"\xff" * 16])
def test_a_damaged_report_is_ignored(bucket: Bucket, content: bytes) -> None:
    engine = bucket.engine("a1", 5)
    obstore.put(bucket.store, f"{ENGINES}/b2", content)
    bucket.add(engine, [key(number) for number in range(8)])
    engine.sweep()
    assert len(bucket.keys()) == 4


def test_foreign_objects_are_neither_counted_nor_removed(bucket: Bucket) -> None:
    engine = bucket.engine("a1", 5)
    names = ["other", f"{BLOCKS}/notes.txt", f"kvtier/2/{'ab' * 16}/{key(1).hex()}"]
    for name in names:
        obstore.put(bucket.store, name, bytes(100 * BLOCK))
    bucket.add(engine, [key(number) for number in range(8)])
    engine.sweep()
    assert all((bucket.root / name).exists() for name in names)
    assert engine.num_bytes == 4 * BLOCK


def test_engines_that_are_killed_again_and_again_do_not_add_up(bucket: Bucket) -> None:
    """Each lives for a moment, and writes a hundredth of the limit that it never reports."""
    limit, unreported = 300, 3
    leader = bucket.engine("a1", limit)
    leader.sweep()
    for life in range(2 * limit // unreported):
        dying = bucket.engine(f"b{life}", limit)
        dying.sweep()
        bucket.add(None, [key(unreported * life + number) for number in range(unreported)])
        leader.sweep()
        assert len(bucket.keys()) <= limit + unreported


def test_an_engine_reports_at_once_and_when_it_has_written_much_and_at_the_end(
    bucket: Bucket,
) -> None:
    times = JanitorTimes(sweep_s=1000.0, early_s=0.01)
    engine = bucket.engine("a1", 1000, times)
    report = bucket.root / ENGINES / "a1"

    def reported() -> int | None:
        return module._written_in(report.read_bytes()) if report.exists() else None

    engine.start()
    try:
        wait_until(lambda: reported() == 0, "the first report")
        for _ in range(10):
            engine.note_written(BLOCK)
        wait_until(lambda: reported() == 10 * BLOCK, "an early report")
        engine.note_written(BLOCK)
    finally:
        engine.stop()
    assert reported() == 11 * BLOCK
    assert not (bucket.root / f"{BLOCKS}/leader").exists()


def test_an_engine_ends_without_a_word_to_a_service_that_has_failed(
    bucket: Bucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = bucket.engine("a1", 1000, JanitorTimes(sweep_s=1000.0, early_s=0.01))
    calls: list[str] = []

    def write(objects: Objects, name: str, content: bytes) -> None:
        calls.append(name)
        raise ServerFailure(FailureKind.SILENT, "the service says nothing")

    monkeypatch.setattr(Objects, "write", write)
    engine.start()
    wait_until(lambda: bool(calls), "the first report")
    engine.stop()
    assert len(calls) == 1


def test_clocks_that_differ_do_not_matter(bucket: Bucket, monkeypatch: pytest.MonkeyPatch) -> None:
    """One engine's clock is days ahead, another's is days behind."""
    clock, day_s = module._now_ms, 86_400
    ahead, behind = bucket.engine("a1", 30), bucket.engine("b2", 30)
    bucket.add(None, [key(number) for number in range(40)], age_s=10_000)
    monkeypatch.setattr(time, "time", lambda: 0.0)

    def set_clock(offset_s: int) -> None:
        monkeypatch.setattr(module, "_now_ms", lambda: clock() + 1000 * offset_s)

    set_clock(3 * day_s - 100)
    ahead.note_used([key(number) for number in range(10)])
    set_clock(3 * day_s)  # 100 s later
    ahead._report()
    set_clock(-3 * day_s)
    behind.note_used([key(number) for number in range(10, 37)])
    behind.sweep()
    # Nine tenths of the limit are 27 blocks: those that were used last.
    assert bucket.keys() == {key(number) for number in range(10, 37)}


def test_a_leader_that_has_lost_the_lead_removes_nothing_more(
    bucket: Bucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A listing may take longer than another engine waits for the leader."""
    engine = bucket.engine("a1", 100, JanitorTimes(sweep_s=0.0))
    bucket.add(engine, [key(number) for number in range(300)], age_s=100)
    real = Objects.below
    pages: list[int] = []

    def below(objects: Objects, prefix: str) -> Iterator[list[dict[str, Any]]]:
        for page in real(objects, prefix):
            if prefix == BLOCKS:
                pages.append(len(page))
                if len(pages) == 3:
                    (bucket.root / f"{BLOCKS}/leader").write_bytes(b"b2")
            yield page

    monkeypatch.setattr(Objects, "below", below)
    engine.sweep()
    assert engine.num_bytes is None
    assert len(pages) == 3, "it goes on listing"
    assert len(bucket.keys()) == 300


def test_a_long_listing_does_not_cost_the_lead(
    bucket: Bucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    leader = bucket.engine("a1", 100, JanitorTimes(sweep_s=0.0))
    other = bucket.engine("b2", 100)
    bucket.add(leader, [key(number) for number in range(300)], age_s=100)
    real = Objects.below

    def below(objects: Objects, prefix: str) -> Iterator[list[dict[str, Any]]]:
        for page in real(objects, prefix):
            if prefix == BLOCKS:  # each page takes very long
                os.utime(bucket.root / f"{BLOCKS}/leader", (1, 1))
            yield page
            if prefix == BLOCKS:
                other.sweep()
                assert other.num_bytes is None, "another engine has taken over"

    monkeypatch.setattr(Objects, "below", below)
    leader.sweep()
    assert len(bucket.keys()) == 90


@settings(max_examples=40, deadline=None)
@given(
    writes=st.lists(st.tuples(st.integers(0, 2), st.integers(0, 6)), max_size=12),
    limit=st.integers(1, 12),
)
def test_after_a_sweep_of_the_leader_the_limit_is_kept(
    tmp_path_factory: pytest.TempPathFactory, writes: list[tuple[int, int]], limit: int
) -> None:
    bucket = Bucket(tmp_path_factory.mktemp("bucket") / "b")
    engines = [bucket.engine(f"e{number}", limit) for number in range(3)]
    engines[0].sweep()
    number = 0
    for which, count in writes:
        bucket.add(engines[which], [key(number + extra) for extra in range(count)])
        number += count
        engines[which].sweep()
        engines[0].sweep()
        assert len(bucket.keys()) <= limit
