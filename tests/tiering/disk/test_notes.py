"""The next engine finds the note that an engine has left in the slab."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvtier.testing import TierHarness
from kvtier.tiering.disk import flusher
from kvtier.tiering.disk.layout import HOLDER_OFFSET
from kvtier.tiering.io.page import PAGE_BYTES
from tests.tiering.disk.engine import configured_engine
from tests.tiering.disk.harness import bad_sectors, bytes_for, disk_harness, disk_of, du
from tests.tiering.engine import Engine
from tests.tiering.patience import wait_until

PROMPTS = [TierHarness.keys(6, start=10 * number) for number in range(6)]
NOTE = b"a disk of 3 GB/s"


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "kv.slab"


def with_note(path: Path) -> None:
    with disk_harness(path) as harness:
        harness.wait_for(harness.store(PROMPTS[0]))
        disk_of(harness).keep_note(b"another one")
        disk_of(harness).keep_note(NOTE)


def test_a_note_is_kept(path: Path) -> None:
    with disk_harness(path) as harness:
        assert disk_of(harness).kept_note() is None
    with_note(path)
    for _ in range(2):  # an engine that opens the slab keeps the note
        with disk_harness(path) as harness:
            assert disk_of(harness).kept_note() == NOTE
    assert du(path) <= bytes_for(32)


def test_a_killed_engine_has_kept_its_note(path: Path) -> None:
    with disk_harness(path) as harness:
        disk_of(harness).keep_note(NOTE)
        wait_until(lambda: NOTE in path.read_bytes(), "the note is in the file")


def test_a_note_is_written_once_the_disk_lets_it(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(flusher, "_LOOK_EVERY_S", 0.02)
    monkeypatch.setattr(flusher, "_NOTE_AGAIN_S", 0.1)
    with disk_harness(path) as harness:
        with bad_sectors(HOLDER_OFFSET, writing_mends=False):
            disk_of(harness).keep_note(NOTE)
            errors = disk_of(harness)._mover.errors
            wait_until(lambda: errors.take()["EIO"] > 0, "it cannot be written")
        wait_until(lambda: NOTE in path.read_bytes(), "the note is in the file")
        disk_of(harness).keep_note(b"a newer one")
    with disk_harness(path) as harness:
        assert disk_of(harness).kept_note() == b"a newer one"


def test_a_damaged_note_is_none_and_takes_no_block_with_it(path: Path) -> None:
    with_note(path)
    with path.open("r+b") as file:
        file.seek(HOLDER_OFFSET + file.read().index(NOTE) % PAGE_BYTES)
        file.write(b"?")
    with disk_harness(path) as harness:
        assert disk_of(harness).kept_note() is None
        assert harness.hits(PROMPTS[0]) == set(PROMPTS[0])


def test_a_slab_without_a_note_is_as_warm_as_any(path: Path) -> None:
    """A slab of an earlier release."""
    with_note(path)
    with path.open("r+b") as file:
        file.seek(HOLDER_OFFSET)
        file.write(bytes(PAGE_BYTES))
    with disk_harness(path) as harness:
        assert disk_of(harness).kept_note() is None
        assert harness.hits(PROMPTS[0]) == set(PROMPTS[0])


def learning_engine(path: Path) -> Engine:
    return configured_engine(path, num_rows=64, prefill_tokens_per_s=None)


def test_a_restarted_engine_knows_what_was_learnt(path: Path) -> None:
    with learning_engine(path) as engine:
        for prompt in PROMPTS:
            engine.serve(prompt)
            engine.manager.note_prefill(2048, 1024, 0.5)
            engine.manager.note_prefill(2048, 3072, 0.5)
        assert engine.figures()["kvtier_tiering_prefill_tokens_per_s"] > 0
    with learning_engine(path) as engine:
        assert engine.figures()["kvtier_tiering_prefill_tokens_per_s"] > 0


def test_a_warm_disk_is_measured_when_the_engine_starts(path: Path) -> None:
    with learning_engine(path) as engine:
        for prompt in PROMPTS:
            engine.serve(prompt)
    with learning_engine(path) as engine:
        engine.settle()
        assert engine.figures()['kvtier_tier_blocks{tier="0:disk",direction="load"}'] == 9
        assert not any(engine.manager.open_work().values())
        assert [engine.serve(prompt) for prompt in PROMPTS] == [6] * 6
        engine.settle()
    with learning_engine(path) as engine:
        engine.settle()
        loaded = engine.figures().get('kvtier_tier_blocks{tier="0:disk",direction="load"}', 0)
        assert loaded == 0, "it is known by then"
