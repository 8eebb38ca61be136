"""Links in a root are not followed, and files that no engine made stay."""

from __future__ import annotations

import logging
import os
import shutil
from pathlib import Path

import pytest

from kvtier.cli import main
from kvtier.tiering.fs.access import NoFollowTree
from tests.tiering.fs.accounts import load_some, store_all, store_some
from tests.tiering.fs.harness import block_files, fs_harness, fs_of
from tests.tiering.fs.pauses import shorten_pauses
from tests.tiering.patience import wait_until

SHARDS = [f"{number:02x}" for number in range(256)]
COMMANDS = {
    "clear": ["clear", "--yes"],
    "gc": ["gc", "--yes", "--older-than", "0s"],
    "stat": ["stat"],
    "verify": ["verify"],
}


@pytest.fixture(autouse=True)
def _short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    shorten_pauses(monkeypatch)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "root"


@pytest.fixture
def outside(tmp_path: Path) -> Path:
    """A foreign directory that looks like a namespace, with old files and a block."""
    directory = tmp_path / "outside"
    for shard in SHARDS:
        (directory / shard).mkdir(parents=True)
        precious = directory / shard / f"precious-{shard}"
        precious.write_bytes(b"x" * 5000)
        os.utime(precious, (1, 1))
    return directory


def files_in(directory: Path) -> set[str]:
    return {str(path) for path in directory.rglob("*") if path.is_file()}


def put_links(namespace: Path, outside: Path, what: str) -> None:
    """In place of a namespace, or of all its directories, whose blocks are now outside."""
    for shard in SHARDS:
        for block in (namespace / shard).iterdir():
            os.utime(block, (1, 1))
            block.rename(outside / shard / block.name)
    if what == "namespace":
        shutil.rmtree(namespace)
        namespace.symlink_to(outside)
    else:
        for shard in SHARDS:
            shutil.rmtree(namespace / shard)
            (namespace / shard).symlink_to(outside / shard)


@pytest.mark.parametrize("what", ["namespace", "shards"])
def test_an_engine_neither_finds_nor_stores_nor_evicts_through_a_link(
    root: Path, outside: Path, what: str, caplog: pytest.LogCaptureFixture
) -> None:
    with fs_harness(root, 60) as harness:
        keys = harness.keys(40)
        store_all(harness, keys)
        namespace = fs_of(harness)._namespace
    put_links(namespace, outside, what)
    before = files_in(outside)
    assert len(before) == 256 + 40
    with fs_harness(root, 60) as harness, caplog.at_level(logging.WARNING):
        assert not harness.hits(keys)
        assert not load_some(harness, keys)
        for start in range(1000, 1200, 40):
            assert not store_some(harness, harness.keys(40, start))
        [told] = [message for message in caplog.messages if "ENOTDIR" in message]
    assert str(namespace) in told
    assert "link" in told
    assert "remove" in told
    assert files_in(outside) == before


@pytest.mark.parametrize("what", ["namespace", "shards"])
@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_follows_no_link(
    root: Path, outside: Path, what: str, command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with fs_harness(root, 60) as harness:
        store_all(harness, harness.keys(10))
        namespace = fs_of(harness)._namespace
    put_links(namespace, outside, what)
    before = files_in(outside)
    name, *options = COMMANDS[command]
    assert main(["store", name, str(root), *options]) == (1 if command == "verify" else 0)
    printed = capsys.readouterr().out
    assert "precious" not in printed
    assert files_in(outside) == before
    assert namespace.is_symlink() or (namespace / "07").is_symlink()


def test_what_has_no_name_of_a_block_neither_leaves_nor_counts(root: Path) -> None:
    """Nor a file whose name is that of a block of another directory."""
    with fs_harness(root, 60) as harness:
        store_all(harness, harness.keys(40))
        namespace = fs_of(harness)._namespace
        block = block_files(root)[0]
        other = next(shard for shard in SHARDS if shard != block.parent.name)
        strangers = [namespace / other / block.name, namespace / "07" / "thesis.tex"]
        for stranger in strangers:
            stranger.write_bytes(b"x" * 5000)
            os.utime(stranger, (1, 1))
        for start in range(1000, 1400, 40):
            store_some(harness, harness.keys(40, start))
        assert fs_of(harness)._publisher.num_evicted > 40
    assert all(stranger.exists() for stranger in strangers)
    assert main(["store", "gc", str(root), "--yes", "--older-than", "0s"]) == 0
    assert all(stranger.exists() for stranger in strangers)


def test_what_is_in_the_place_of_a_block_stays_and_is_named(
    root: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with fs_harness(root) as harness, caplog.at_level(logging.WARNING):
        keys = harness.keys(8)
        store_all(harness, keys)
        block = next(path for path in block_files(root) if path.name == keys[0].hex())
        block.unlink()
        block.symlink_to("/etc/passwd")
        fs_of(harness)._lookups.look_into(fs_of(harness)._directory)
        assert store_some(harness, keys) == set(keys[1:])
        wait_until(lambda: any("EEXIST" in message for message in caplog.messages), "told")
    assert block.is_symlink()
    assert any(str(block) in message for message in caplog.messages)


@pytest.mark.parametrize("name", ["engines", "blocks"])
def test_a_part_of_the_root_that_becomes_a_link_is_not_followed(
    root: Path, tmp_path: Path, name: str
) -> None:
    """While an engine runs: it loses its presence or finds nothing, and writes nothing there."""
    aside, outside = tmp_path / "aside", tmp_path / "elsewhere"
    outside.mkdir()
    with fs_harness(root) as harness:
        store_all(harness, harness.keys(4))
        (root / name).rename(aside)
        (root / name).symlink_to(outside)
        starts = iter(range(100, 100_000, 4))
        wait_until(lambda: not store_some(harness, harness.keys(4, next(starts))), "not stored")
        wait_until(lambda: not harness.hits(harness.keys(4, next(starts))), "not found")
        (root / name).unlink()
        aside.rename(root / name)
        wait_until(lambda: bool(store_some(harness, harness.keys(4, next(starts)))), "it goes on")
    assert os.listdir(outside) == []


# --- one level after the other -----------------------------------------------------------------


def test_no_level_below_a_root_may_be_a_link(tmp_path: Path) -> None:
    root, outside = tmp_path / "root", tmp_path / "outside"
    (outside / "c").mkdir(parents=True)
    (outside / "c" / "file").touch()
    (root / "a").mkdir(parents=True)
    (root / "a" / "b").symlink_to(outside)
    below = NoFollowTree(root)
    path = root / "a" / "b" / "c" / "file"
    assert path.exists()
    for attempt in (
        lambda: below.lstat(path),
        lambda: below.open(path, os.O_RDONLY),
        lambda: below.unlink(path),
        lambda: below.mkdir(path.with_name("new")),
        lambda: below.rename(path, root / "a" / "mine"),
        lambda: below.link(path, root / "a" / "mine"),
        lambda: below.utime(path, 1),
        lambda: below.rmdir(path.parent),
        lambda: below.listdir(path.parent),
        lambda: list(below.scan(path.parent)),
        lambda: below.listdir(root / "a" / "b"),
    ):
        with pytest.raises(NotADirectoryError) as refused:
            attempt()
        assert refused.value.filename == str(root / "a" / "b")
    assert os.listdir(root / "a") == ["b"]


def test_a_root_itself_may_be_reached_through_a_link(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    with fs_harness(tmp_path / "link") as harness:
        store_all(harness, harness.keys(4))
    assert len(block_files(tmp_path / "real")) == 4


@pytest.mark.parametrize("name", [".", "root"])
def test_paths_from_the_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    directory = tmp_path / name
    (directory / "blocks").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    below = NoFollowTree(Path(name))
    assert below.is_directory(Path(name) / "blocks")
    assert below.listdir(Path(name) / "blocks") == []
    assert below.listdir(Path(name)) == ["blocks"]


def test_no_descriptor_is_left_open(tmp_path: Path) -> None:
    (tmp_path / "a" / "00").mkdir(parents=True)
    before = set(os.listdir("/proc/self/fd"))
    below = NoFollowTree(tmp_path)
    for name in ("00", "01"):
        with pytest.raises(FileNotFoundError) as missing:
            below.lstat(tmp_path / "a" / name / "file")
        below.forget()
        assert set(os.listdir("/proc/self/fd")) <= before, missing


def test_a_directory_that_was_replaced_is_noticed_after_forget(tmp_path: Path) -> None:
    (tmp_path / "a" / "old").mkdir(parents=True)
    below = NoFollowTree(tmp_path)
    assert below.is_directory(tmp_path / "a" / "old")
    (tmp_path / "a").rename(tmp_path / "aside")
    (tmp_path / "a" / "new").mkdir(parents=True)
    below.forget()
    assert not below.is_directory(tmp_path / "a" / "old")
    assert below.is_directory(tmp_path / "a" / "new")
