"""The limit of an object store: kept by one engine at a time, by last use, for all of them."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from pathlib import Path

import obstore
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from obstore.store import LocalStore

from kvtier.base import OffloadKey
from kvtier.tiering.obj import janitor as module
from kvtier.tiering.obj.janitor import ENGINES, Janitor, JanitorTimes
from kvtier.tiering.obj.mover import object_name
from kvtier.tiering.obj.objects import BLOCKS, PRIVATE, Objects
from kvtier.tiering.remote.errors import ServerErrors

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

    def engine(self, name: str, num_blocks: int, **times: float) -> Janitor:
        return Janitor(
            Objects(self.store), num_blocks * BLOCK, name, self.errors, JanitorTimes(**times)
        )

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


def test_the_head_of_a_prompt_is_removed_last(
    bucket: Bucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_BUCKET_MS", 1)
    engine = bucket.engine("a1", num_blocks=10)
    keys = [key(number) for number in range(20)]
    bucket.add(engine, keys, age_s=10_000)
    engine.note_used(keys)
    engine.sweep()
    assert bucket.keys() == set(keys[:9])


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
