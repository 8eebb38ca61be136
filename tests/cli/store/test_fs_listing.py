"""`kvtier store ls` and `stat` on the root of an fs tier."""

from __future__ import annotations

import os
import re
import shutil
import signal
import time
from datetime import UTC, datetime
from pathlib import Path

import pytest

from kvtier.base import make_offload_key
from kvtier.cli import main
from kvtier.testing import TierHarness
from kvtier.tiering.fs.layout import DESCRIPTION_FILE
from tests.cli.store.engine_process import FsEngineProcess
from tests.cli.store.roots import age, balance_of, file_of, fill_root
from tests.cli.store.slabs import flip, run_store
from tests.tiering.disk.small_disk import loop_disk
from tests.tiering.fs.harness import ROW_BYTES, du, fs_harness
from tests.tiering.patience import wait_until

KEYS = TierHarness.keys(5)
HASHES = [key[:-4].hex() for key in KEYS]


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "kv"


# --- ls ----------------------------------------------------------------------------------------


def test_blocks_are_listed_by_last_use(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    name = fill_root(root, KEYS)
    later = time.time_ns() + 10**9
    os.utime(file_of(root, name, KEYS[1]), ns=(later, later))
    code, document = run_store(capsys, "ls", root)
    assert code == 0
    assert (document["kind"], document["total"]) == ("fs", 5)
    # The head of a prompt is evicted last.
    recent = [HASHES[n] for n in (1, 0, 2, 3, 4)]
    assert [block["block_hash"] for block in document["blocks"]] == recent
    assert [block["rank"] for block in document["blocks"]] == [1, 2, 3, 4, 5]
    _, oldest = run_store(capsys, "ls", root, "--sort", "oldest", "--limit", "2")
    assert [block["block_hash"] for block in oldest["blocks"]] == [HASHES[4], HASHES[3]]
    assert [block["rank"] for block in oldest["blocks"]] == [5, 4]
    assert oldest["total"] == 5
    _, placed = run_store(capsys, "ls", root, "--sort", "place")
    files = [block["file"] for block in placed["blocks"]]
    assert files == sorted(files)
    assert {root / file for file in files} == {file_of(root, name, key) for key in KEYS}


def test_a_block_is_described_in_full(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = datetime.now(UTC).timestamp()
    for key in (make_offload_key(bytes(range(32)), 7), make_offload_key(b"h" * 124, 3)):
        name = fill_root(root, [key])
        [block] = run_store(capsys, "ls", root, "--limit", "1")[1]["blocks"]
        assert block["block_hash"] == key[:-4].hex()
        assert block["group"] == key[-1]
        assert block["namespace"] == name
        assert block["bytes"] == ROW_BYTES
        assert root / block["file"] == file_of(root, name, key)
        for moment in ("stored_at", "used_at"):
            at = datetime.fromisoformat(block[moment]).timestamp()
            assert before - 1 <= at <= datetime.now(UTC).timestamp() + 1


def test_only_one_namespace(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one = fill_root(root, KEYS[:2], "one")
    two = fill_root(root, KEYS[2:], "two")
    assert run_store(capsys, "ls", root)[1]["total"] == 5
    for name, hashes in ((one, HASHES[:2]), (two, HASHES[2:])):
        document = run_store(capsys, "ls", root, "--namespace", name[:8].upper())[1]
        assert {block["block_hash"] for block in document["blocks"]} == set(hashes)
        assert document["total"] == len(hashes)
    # Ranks count all blocks.
    first = run_store(capsys, "ls", root, "--namespace", one)[1]["blocks"]
    assert [block["rank"] for block in first] == [4, 5]
    assert main(["store", "ls", str(root), "--namespace", "f" * 32]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert one in printed.err
    assert two in printed.err


def test_a_damaged_header_leaves_what_the_name_says(
    root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    name = fill_root(root, KEYS)
    flip(file_of(root, name, KEYS[2]), 300)
    file_of(root, name, KEYS[3]).write_bytes(b"short")
    blocks = {block["block_hash"]: block for block in run_store(capsys, "ls", root)[1]["blocks"]}
    assert len(blocks) == 5
    unknown = {name for name, block in blocks.items() if block["stored_at"] is None}
    assert unknown == {HASHES[2], HASHES[3]}
    assert blocks[HASHES[3]]["bytes"] == 0


def test_what_is_no_block_is_not_listed(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    name = fill_root(root, KEYS)
    file = file_of(root, name, KEYS[0])
    (file.parent / "notes.txt").write_text("mine")
    (file.parent / "ab").mkdir()
    (file.parent / ("c" * 72)).symlink_to("/dev/zero")
    assert run_store(capsys, "ls", root)[1]["total"] == 5
    other = next(
        shard for shard in file.parent.parent.iterdir() if shard.is_dir() and shard != file.parent
    )
    file.rename(other / file.name)  # where no engine looks for it
    assert run_store(capsys, "ls", root)[1]["total"] == 4


def test_the_table(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    name = fill_root(root, KEYS)
    age(root, name, 7200)
    assert main(["store", "ls", str(root), "--limit", "2"]) == 0
    printed = capsys.readouterr()
    head, *rows = printed.out.splitlines()
    assert head.split() == [
        "rank",
        "stored",
        "used",
        "size",
        "group",
        "namespace",
        "block",
        "hash",
        "model",
    ]
    assert len(rows) == 2
    assert re.match(rf"^ +1 +\d+ s +2 h +8 KiB +0 +{name[:8]} +{HASHES[0]} +sample$", rows[0])
    assert "2 of 5 blocks; --limit 0 for all" in printed.err


def test_many_files_are_listed_without_being_read(
    root: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    name = fill_root(root, KEYS)
    donor = file_of(root, name, KEYS[0])
    for key in TierHarness.keys(2000, 1000):
        os.link(donor, file_of(root, name, key))
    opened: list[str] = []
    real_open = os.open

    def counting(path: str, flags: int, *args: int, **kwargs: int) -> int:
        opened.append("directory" if flags & os.O_DIRECTORY else str(path))
        return real_open(path, flags, *args, **kwargs)

    monkeypatch.setattr(os, "open", counting)
    document = run_store(capsys, "ls", root, "--limit", "3")[1]
    assert (document["total"], len(document["blocks"])) == (2005, 3)
    assert len(set(opened) - {"directory", "ledger", DESCRIPTION_FILE}) == 3


# --- stat --------------------------------------------------------------------------------------


def test_the_figures_of_a_root(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one = fill_root(root, KEYS[:2], "one")
    two = fill_root(root, KEYS, "two")
    age(root, one, 7200)
    code, figures = run_store(capsys, "stat", root)
    assert code == 0
    assert figures["kind"] == "fs"
    assert figures["allocated_bytes"] == figures["ledger_bytes"] == du(root)
    assert figures["reserved_bytes"] == 0
    assert figures["remark"] is None
    assert figures["blocks"] == 7
    spaces = figures["namespaces"]
    assert [(space["namespace"], space["blocks"]) for space in spaces] == [(two, 5), (one, 2)]
    assert [space["bytes"] for space in spaces] == [du(root / "blocks" / n) for n in (two, one)]
    assert not any(space["in_use"] or space["private"] for space in spaces)
    newest = max(path.stat().st_mtime for path in (root / "blocks" / one).glob("*/*"))
    used = datetime.fromisoformat(spaces[1]["used_at"]).timestamp()
    assert used == pytest.approx(newest, abs=0.01)
    assert figures["engines"] == []
    assert (figures["stray_files"], figures["stray_bytes"]) == (0, 0)
    assert main(["store", "stat", str(root)]) == 0
    text = capsys.readouterr().out
    assert re.search(
        rf"^  {one}  2 blocks, .* last used 2 h ago, used by no live", text, re.MULTILINE
    )
    assert not re.search(r"[ \t]$", text, re.MULTILINE)


def test_a_ledger_that_is_wrong_is_said(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    name = fill_root(root, KEYS)
    block = file_of(root, name, KEYS[0])
    num_bytes = block.stat().st_blocks * 512
    block.unlink()
    assert f"{num_bytes} bytes more than there are" in run_store(capsys, "stat", root)[1]["remark"]
    (root / "ledger").write_bytes(b"")
    figures = run_store(capsys, "stat", root)[1]
    assert figures["ledger_bytes"] is None
    assert "the ledger cannot be read" in figures["remark"]
    assert main(["store", "stat", str(root)]) == 0
    assert "the ledger cannot be read" in capsys.readouterr().out


def test_strays_are_counted(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    name = fill_root(root, KEYS)
    (root / "notes.txt").write_text("mine")
    (root / "blocks" / "not-a-namespace").mkdir()
    (root / "blocks" / "not-a-namespace" / "a").write_text("a")
    (root / "blocks" / name / "x").write_text("x")
    (root / "engines" / "who").write_text("me")
    (file_of(root, name, KEYS[0]).parent / ".nfs0123").write_text("removed, and still open")
    figures = run_store(capsys, "stat", root)[1]
    assert figures["stray_files"] == 4
    assert figures["stray_bytes"] == 5 * 4096
    assert figures["blocks"] == 5
    assert figures["allocated_bytes"] == du(root)
    assert main(["store", "stat", str(root)]) == 0
    assert "strays      4 files that are no blocks (20 KiB)" in capsys.readouterr().out


def test_engines_are_named_dead_or_alive(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with FsEngineProcess(root, "one") as one, FsEngineProcess(root, "two") as two:
        assert one.ask("store 0 5") == 5
        assert two.ask("store 0 3") == 3
        figures = run_store(capsys, "stat", root)[1]
        engines = {engine["pid"]: engine for engine in figures["engines"]}
        assert engines.keys() == {one.process.pid, two.process.pid}
        assert all(engine["alive"] for engine in engines.values())
        assert {engine["host"] for engine in engines.values()} == {os.uname().nodename}
        by_size = [space["namespace"] for space in figures["namespaces"]]
        assert [engines[p.process.pid]["namespace"] for p in (one, two)] == by_size
        assert [space["in_use"] for space in figures["namespaces"]] == [True, True]
        one.process.send_signal(signal.SIGSTOP)  # so that it does not remove what the other left
        two.kill()
        figures = run_store(capsys, "stat", root)[1]
        [dead] = [engine for engine in figures["engines"] if not engine["alive"]]
        assert dead["pid"] == two.process.pid
        assert [space["in_use"] for space in figures["namespaces"]] == [True, False]
        assert main(["store", "stat", str(root)]) == 0
        text = capsys.readouterr().out
        assert "engines     1\n" in text
        assert re.search(rf"^  dead: .*process {two.process.pid} ", text, re.MULTILINE)
        living = rf"^  (?!dead: ).*process {one.process.pid} .*namespace {by_size[0][:8]}$"
        assert re.search(living, text, re.MULTILINE)
        one.process.send_signal(signal.SIGCONT)
        wait_until(lambda: len(run_store(capsys, "stat", root)[1]["engines"]) == 1, "it is removed")


def test_a_file_with_two_names_is_counted_once(
    root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A block has two names while it is being published."""
    name = fill_root(root, KEYS)
    before = run_store(capsys, "stat", root)[1]["allocated_bytes"]
    seat = root / "engines" / ("a" * 32)
    seat.mkdir()
    os.link(file_of(root, name, KEYS[0]), seat / "w1")
    figures = run_store(capsys, "stat", root)[1]
    assert figures["allocated_bytes"] == du(root) == before + du(seat) - _bytes_of(seat / "w1")
    assert figures["blocks"] == 5


def _bytes_of(path: Path) -> int:
    return path.stat().st_blocks * 512


def test_blocks_of_one_engine_alone_are_shown_as_such(
    root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with fs_harness(root) as harness:
        harness.wait_for(harness.store(KEYS[:2]))
        harness.begin_epoch(b"a new epoch.....")
        harness.wait_for(harness.store(KEYS))
        figures = run_store(capsys, "stat", root)[1]
        assert [(s["blocks"], s["private"], s["in_use"]) for s in figures["namespaces"]] == [
            (5, True, True),
            (2, False, True),
        ]
        listed = run_store(capsys, "ls", root, "--namespace", b"a new epoch.....".hex())[1]
        assert listed["total"] == 5
        assert run_store(capsys, "verify", root)[1]["good"] == 7
    assert run_store(capsys, "stat", root)[1]["blocks"] == 2


def test_looking_changes_nothing(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fill_root(root, KEYS)

    def state() -> list[tuple[str, int, int, int]]:
        paths = [root, *sorted(root.rglob("*"))]
        statuses = [(str(path), path.stat()) for path in paths]
        return [(path, s.st_mtime_ns, s.st_ctime_ns, s.st_size) for path, s in statuses]

    before = state()
    for command in (["ls"], ["stat"], ["verify"], ["gc", "--dry-run"]):
        assert run_store(capsys, command[0], root, *command[1:])[0] == 0
    assert state() == before


def test_no_lock_is_waited_for(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with fs_harness(root) as harness:
        harness.wait_for(harness.store(KEYS))
        session = harness.tier._session  # type: ignore[attr-defined]
        with session.transaction():
            for command in (["ls"], ["stat"], ["verify"], ["gc", "--dry-run"]):
                assert run_store(capsys, command[0], root, *command[1:])[0] == 0


def test_a_file_system_that_is_mounted_for_reading(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    first.mkdir()
    second.mkdir()
    with loop_disk(first, 24 << 20) as disk:
        (disk.root / "lost+found").stat()  # the root may be a whole file system
        fill_root(disk.root, KEYS)
        assert run_store(capsys, "stat", disk.root)[1]["remark"] is None
        image = disk.image
    with loop_disk(second, 0, read_only=True, content=image.read_bytes()) as disk:
        figures = run_store(capsys, "stat", disk.root)[1]
        assert (figures["blocks"], figures["remark"], figures["stray_files"]) == (5, None, 0)
        assert run_store(capsys, "ls", disk.root)[1]["total"] == 5
        assert run_store(capsys, "verify", disk.root)[1]["good"] == 5
        assert run_store(capsys, "gc", disk.root, "--dry-run")[0] == 0
        for command in ("clear", "gc"):
            assert main(["store", command, str(disk.root), "--yes"]) == 2
            printed = capsys.readouterr()
            assert printed.out == ""
            assert "mount its file system for writing" in printed.err


def test_an_empty_root(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fill_root(root, [])
    assert run_store(capsys, "ls", root)[1]["blocks"] == []
    assert run_store(capsys, "verify", root)[0] == 0
    assert run_store(capsys, "clear", root, "--yes")[1]["cleared_blocks"] == 0
    assert run_store(capsys, "gc", root)[0] == 0
    assert run_store(capsys, "stat", root)[1]["remark"] is None


def test_while_blocks_come_and_go(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with FsEngineProcess(root, num_blocks=40) as engine:
        engine.tell("churn")
        wait_until(lambda: run_store(capsys, "stat", root)[1]["blocks"] > 20, "it is full")
        for _ in range(5):
            for command in ("ls", "stat"):
                assert run_store(capsys, command, root)[0] == 0
            code, document = run_store(capsys, "verify", root)
            assert (code, document["blocks"], document["problems"]) == (0, [], [])
    assert run_store(capsys, "stat", root)[1]["allocated_bytes"] == balance_of(root).total


def test_a_root_without_a_ledger_is_one(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fill_root(root, KEYS)
    (root / "ledger").unlink()
    shutil.rmtree(root / "engines")
    assert run_store(capsys, "ls", root)[1]["total"] == 5
    assert run_store(capsys, "gc", root, "--dry-run")[1]["ledger_lost"]
