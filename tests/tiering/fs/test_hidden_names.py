"""Names that begin with a dot are the file system's: snapshots, and NFS's removed open files."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvtier.tiering.fs.access import RootRefused
from kvtier.tiering.fs.survey import survey
from tests.tiering.fs.harness import du, fs_harness


def hide(place: Path) -> None:
    (place / ".snapshot" / "hourly.0").mkdir(parents=True)
    (place / ".snapshot" / "hourly.0" / "ledger").write_bytes(b"x" * 10_000)
    (place / ".nfs0123").write_bytes(b"removed, and still open")


def test_a_new_root_is_made_among_them(tmp_path: Path) -> None:
    hide(tmp_path)
    with fs_harness(tmp_path) as harness:
        assert harness.wait_for(harness.store(harness.keys(3)))[0].result.success
    assert (tmp_path / ".nfs0123").exists()
    (tmp_path / "blocks").rename(tmp_path / "mine")
    with pytest.raises(RootRefused, match=r"holds other things \(mine\)"):
        fs_harness(tmp_path)


def test_one_in_a_stray_directory_is_counted_once(tmp_path: Path) -> None:
    root = tmp_path / "kv"
    with fs_harness(root) as harness:
        harness.wait_for(harness.store(harness.keys(20)))
    (root / "mine").mkdir()
    for name in (".nfs0123", "thesis.tex"):
        (root / "mine" / name).write_bytes(b"x" * 50_000)
    seen = survey(root)
    assert seen.ledger_error == 0
    [stray] = seen.strays
    assert stray.num_bytes + seen.hidden_bytes == du(root / "mine")


def test_they_are_neither_strays_nor_missing_in_the_ledger(tmp_path: Path) -> None:
    root = tmp_path / "kv"
    with fs_harness(root) as harness:
        harness.wait_for(harness.store(harness.keys(20)))
    before = survey(root)
    assert before.ledger_error == 0
    [shard, *_] = (root / "blocks").glob("*/*")
    places = (root, root / "blocks", root / "engines", shard.parent)
    bytes_before = du(root)
    for place in places:
        (place / ".nfs0123").write_bytes(b"removed, and still open")
    file_bytes = du(root) - bytes_before
    for place in places:
        (place / ".snapshot").mkdir()
        (place / ".snapshot" / "copy").write_bytes(b"x" * 10_000)
    seen = survey(root)
    assert seen.strays == []
    assert seen.num_blocks == 20
    assert seen.hidden_bytes == file_bytes
    assert seen.num_bytes == before.num_bytes + file_bytes
    assert seen.ledger_error == 0
