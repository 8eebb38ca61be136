"""`kvtier store gc`: dead engines, a wrong ledger, and namespaces without a user."""

from __future__ import annotations

import io
import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import pytest

from kvtier.cli import main
from kvtier.cli.store import commands
from kvtier.cli.store.app import DurationError, parse_duration
from kvtier.cli.store.terminal import is_confirmed
from kvtier.testing import TierHarness
from kvtier.tiering.fs.root import RootSession
from kvtier.tiering.fs.transaction import Transaction
from tests.cli.store.engine_process import FsEngineProcess
from tests.cli.store.roots import age, balance_of, file_of, fill_root
from tests.cli.store.slabs import fill, run_store
from tests.cli.store.test_fs_clear import assert_tidy
from tests.cli.store.test_refusals import Keyboard
from tests.tiering.fs.harness import block_files, du
from tests.tiering.patience import wait_until

KEYS = TierHarness.keys(40)
DAY = 86_400.0
ANY_AGE = ("--older-than", "0s")


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "kv"


def kept(root: Path) -> set[str]:
    return set(os.listdir(root / "blocks"))


# --- dead engines, and the count ---------------------------------------------------------------


def test_what_dead_engines_have_left_is_taken_back(
    root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with FsEngineProcess(root) as idle, FsEngineProcess(root) as busy:
        assert idle.ask("store 0 20") == 20
        busy.tell("churn")
        wait_until(lambda: len(block_files(root)) > 40, "blocks")
        busy.kill()
        idle.kill()
    assert run_store(capsys, "gc", root, "--dry-run")[1]["dead_engines"] == 2
    left = block_files(root)
    assert main(["store", "gc", str(root), "--older-than", "1d"]) == 0
    assert "dead, and reclaimed: 2" in capsys.readouterr().out
    assert_tidy(root)
    assert block_files(root) == left
    assert run_store(capsys, "gc", root, "--older-than", "1d")[1]["dead_engines"] == 0


def test_engines_that_live_are_left_in_peace(
    root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with FsEngineProcess(root) as engine:
        assert engine.ask("store 0 20") == 20
        code, document = run_store(capsys, "gc", root, "--yes", *ANY_AGE)
        assert (code, document["dead_engines"], document["orphaned"]) == (0, 0, [])
        assert engine.ask("hits 0 20") == 20
        assert engine.ask("store 20 20") == 20
    assert_tidy(root)


def test_a_wrong_ledger_is_corrected(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    name = fill_root(root, KEYS)
    file = file_of(root, name, KEYS[0])
    num_bytes = file.stat().st_blocks * 512
    file.unlink()
    code, document = run_store(capsys, "gc", root, "--older-than", "1d")
    assert code == 0
    assert (document["corrected_blocks"], document["corrected_bytes"]) == (-1, -num_bytes)
    assert_tidy(root)
    file_of(root, name, KEYS[1]).unlink()
    assert main(["store", "gc", str(root), "--older-than", "1d"]) == 0
    assert f"corrected by -1 blocks and -{num_bytes} bytes" in capsys.readouterr().out
    assert main(["store", "gc", str(root), "--older-than", "1d"]) == 0
    assert "counted again: no error found" in capsys.readouterr().out


@pytest.mark.parametrize("content", [b"", b"junk" * 20_000])
def test_a_lost_ledger_is_made_again(
    content: bytes, root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fill_root(root, KEYS)
    (root / "ledger").write_bytes(content)
    assert run_store(capsys, "gc", root, "--dry-run")[1]["ledger_lost"]
    assert run_store(capsys, "gc", root, "--older-than", "1d")[1]["ledger_lost"]
    assert balance_of(root).num_blocks == len(KEYS)
    assert run_store(capsys, "stat", root)[1]["remark"] is None


# --- orphans -----------------------------------------------------------------------------------


def test_only_what_no_live_engine_uses(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one = fill_root(root, KEYS, "one")
    two = fill_root(root, KEYS[:7], "two")
    with FsEngineProcess(root, "one") as engine:
        assert engine.ask("hits 0 40") == 40
        code, document = run_store(capsys, "gc", root, "--yes", *ANY_AGE)
        assert code == 0
        [orphan] = document["orphaned"]
        assert (orphan["namespace"], orphan["blocks"]) == (two, 7)
        assert (orphan["chosen"], orphan["removed"]) == (True, True)
        assert document["removed_blocks"] == 7
        assert kept(root) == {one}
        assert engine.ask("hits 0 40") == 40
        assert main(["store", "gc", str(root), "--yes", "--namespace", one]) == 2
        printed = capsys.readouterr()
        assert f"{one} is used by a live engine, " in printed.err
        assert f"process {engine.process.pid}" in printed.err
        engine.kill()
    assert run_store(capsys, "gc", root, "--yes", *ANY_AGE)[1]["removed_blocks"] == 40
    assert kept(root) == set()
    assert_tidy(root)


def test_a_path_from_the_working_directory(
    root: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    fill_root(root, KEYS)
    monkeypatch.chdir(root.parent)
    code, document = run_store(capsys, "gc", Path(root.name), "--yes", *ANY_AGE)
    assert (code, document["path"]) == (0, root.name)
    assert block_files(root) == []
    assert_tidy(root)


def test_it_says_why_a_namespace_was_kept(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    used, new = fill_root(root, KEYS, "used"), fill_root(root, KEYS[:7], "new")
    old, other = fill_root(root, KEYS[:3], "old"), fill_root(root, KEYS[:2], "other")
    for name in (old, other):
        age(root, name, 2 * DAY)
    with FsEngineProcess(root, "used") as engine:
        assert engine.ask("hits 0 40") == 40
        for options in (["--dry-run"], ["--yes"]):
            wanted = ["--older-than", "1d", "--namespace", old, "--namespace", new]
            assert main(["store", "gc", str(root), *wanted, *options]) == 0
            lines = capsys.readouterr().out.splitlines()
            reasons = {line.split()[1]: line for line in lines if line.startswith("  keep ")}
            assert reasons.keys() == {used, new, other}
            assert f"process {engine.process.pid} on" in reasons[used]
            assert "ago, and --older-than is 24 h" in reasons[new]
            assert "not among those given with --namespace" in reasons[other]
        assert kept(root) == {used, new, other}
        document = run_store(capsys, "gc", root, "--dry-run", "--older-than", "1d")[1]
        assert {row["namespace"] for row in document["kept"]} == {used, new}


def test_it_says_that_other_things_keep_a_namespace(
    root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    name = fill_root(root, KEYS)
    (root / "blocks" / name / "07" / "thesis.tex").touch()
    code, document = run_store(capsys, "gc", root, "--yes", *ANY_AGE)
    assert (code, document["removed_blocks"]) == (0, len(KEYS))
    [reason] = document["kept"]
    assert reason["namespace"] == name
    assert "foreign files" in reason["reason"]
    assert document["strays"] == [f"blocks/{name}/07/thesis.tex"]


def test_of_what_it_keeps_it_shows_what_is_left(
    root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    name = fill_root(root, KEYS)
    (root / "blocks" / name / "07" / "thesis.tex").touch()
    assert main(["store", "gc", str(root), "--yes", *ANY_AGE]) == 0
    shown = capsys.readouterr().out
    assert f"removed     0 of 1 orphaned namespaces: {len(KEYS)} blocks" in shown
    assert f"  keep    {name}  0 blocks, " in shown


def test_only_what_was_not_used_for_so_long(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    old = fill_root(root, KEYS[:10], "old")
    older = fill_root(root, KEYS[:7], "older")
    new = fill_root(root, KEYS, "new")
    age(root, old, 2 * DAY)
    age(root, older, 9 * DAY)
    # One block in use keeps the whole namespace.
    os.utime(file_of(root, old, KEYS[3]))
    before = du(root)
    document = run_store(capsys, "gc", root, "--older-than", "1d", "--yes")[1]
    states = {o["namespace"]: (o["chosen"], o["removed"]) for o in document["orphaned"]}
    assert states == {new: (False, False), old: (False, False), older: (True, True)}
    assert [o["namespace"] for o in document["orphaned"]][-1] == older  # by last use
    assert document["freed_bytes"] == before - du(root)
    assert kept(root) == {old, new}
    assert_tidy(root)


def test_only_what_is_named(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    names = [fill_root(root, KEYS[:3], word) for word in ("a", "b", "c")]
    options = ("--namespace", names[0][:9].upper(), "--namespace", names[2])
    assert run_store(capsys, "gc", root, "--yes", *options)[1]["removed_blocks"] == 6
    assert kept(root) == {names[1]}
    assert main(["store", "gc", str(root), "--yes", "--namespace", names[0]]) == 2
    assert names[1] in capsys.readouterr().err
    # Both conditions have to hold.
    options = ("--namespace", names[1], "--older-than", "1h")
    assert run_store(capsys, "gc", root, "--yes", *options)[1]["removed_blocks"] == 0


def test_what_was_used_within_the_hour_is_kept_unless_it_is_asked_for(
    root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """An engine that is about to take a presence again is not seen as a live one."""
    name = fill_root(root, KEYS)
    document = run_store(capsys, "gc", root, "--yes")[1]
    assert [orphan["chosen"] for orphan in document["orphaned"]] == [False]
    assert len(block_files(root)) == len(KEYS)
    assert run_store(capsys, "gc", root, "--yes", "--namespace", name)[1]["removed_blocks"] == 40
    assert block_files(root) == []


def test_an_empty_namespace_is_an_orphan_too(
    root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    name = fill_root(root, KEYS[:2])
    for path in block_files(root):
        path.unlink()
    [orphan] = run_store(capsys, "gc", root, "--yes", *ANY_AGE)[1]["orphaned"]
    assert (orphan["blocks"], orphan["removed"]) == (0, True)
    assert orphan["bytes"] > 0
    assert name not in kept(root)
    assert_tidy(root)


def test_an_engine_that_has_started_meanwhile_keeps_its_blocks(
    root: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    fill_root(root, KEYS, "one")
    engines: list[FsEngineProcess] = []

    def start_an_engine(question: str) -> bool:
        engines.append(FsEngineProcess(root, "one"))
        return is_confirmed(question)

    monkeypatch.setattr(sys, "stdin", Keyboard("y\n"))
    monkeypatch.setattr(commands, "is_confirmed", start_an_engine)
    assert main(["store", "gc", str(root), *ANY_AGE]) == 0
    with engines[0] as engine:
        assert engine.ask("hits 0 40") == 40
    assert "removed     none of 1 orphaned namespaces" in capsys.readouterr().out


# --- shown before ------------------------------------------------------------------------------


def test_a_dry_run_only_shows(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    old = fill_root(root, KEYS, "old")
    new = fill_root(root, KEYS[:7], "new")
    age(root, old, 9 * DAY)
    before = sorted((str(path), path.lstat().st_ctime_ns) for path in root.rglob("*"))
    for options in ([], ["--yes"]):
        arguments = ["store", "gc", str(root), "--dry-run", "--older-than", "1w", *options]
        assert main(arguments) == 0
        text = capsys.readouterr().out
        assert f"  remove  {old}  40 blocks, " in text
        assert "last used 9 d ago" in text
        assert f"  keep    {new}  7 blocks, " in text
        document = run_store(capsys, "gc", root, *arguments[3:])[1]
        assert document["dry_run"]
        assert document["corrected_blocks"] is None
        assert document["removed_blocks"] == 0
    assert sorted((str(path), path.lstat().st_ctime_ns) for path in root.rglob("*")) == before


@pytest.mark.parametrize(("answer", "code"), [("yes\n", 0), ("n\n", 1), ("", 1)])
def test_the_user_is_shown_what_is_going_to_be_removed_and_asked(
    answer: str,
    code: int,
    root: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    name = fill_root(root, KEYS)
    monkeypatch.setattr(sys, "stdin", Keyboard(answer))
    assert main(["store", "gc", str(root), "--json", *ANY_AGE]) == code
    printed = capsys.readouterr()
    shown, asked = printed.err.index(f"remove  {name}"), printed.err.index("Remove 1 of them")
    assert shown < asked
    assert "with 40 blocks" in printed.err
    assert ("no namespace was removed" in printed.err) == (code == 1)
    document = json.loads(printed.out)
    assert document["removed_blocks"] == (40 if code == 0 else 0)
    assert kept(root) == (set() if code == 0 else {name})
    assert_tidy(root)


def test_without_a_terminal_nothing_is_done(
    root: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    name = fill_root(root, KEYS)
    monkeypatch.setattr(sys, "stdin", io.StringIO("y\n"))
    assert main(["store", "gc", str(root), *ANY_AGE]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert "--yes" in printed.err
    assert "--dry-run" in printed.err
    assert kept(root) == {name}
    # No terminal is needed if there is nothing to ask.
    assert main(["store", "gc", str(root), "--older-than", "1d"]) == 0


def test_strays_are_named_and_left(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    name = fill_root(root, KEYS)
    strays = [f"blocks/{name}/80/{number}.txt" for number in range(25)]
    for stray in strays:
        (root / stray).write_text("mine")
    (root / "blocks" / name / "80" / ".nfs0123").write_text("removed, and still open")
    document = run_store(capsys, "gc", root, "--older-than", "1d")[1]
    assert sorted(document["strays"]) == sorted(strays)
    assert (document["stray_files"], document["stray_bytes"]) == (25, 25 * 4096)
    assert main(["store", "gc", str(root), "--dry-run"]) == 0
    text = capsys.readouterr().out
    assert "strays      25 files that are no blocks (100 KiB)" in text
    assert "and 5 more; --json has all of them" in text
    assert all((root / stray).exists() for stray in strays)


# --- cut short ---------------------------------------------------------------------------------


def test_ctrl_c_while_it_counts(
    root: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    fill_root(root, KEYS)
    count = RootSession.count_again

    def count_and_interrupt(session: RootSession) -> tuple[int, int]:
        os.kill(os.getpid(), signal.SIGINT)
        return count(session)

    monkeypatch.setattr(RootSession, "count_again", count_and_interrupt)
    assert main(["store", "gc", str(root), "--yes", *ANY_AGE]) == 128 + signal.SIGINT
    assert "ended by Ctrl-C" in capsys.readouterr().out
    assert len(block_files(root)) == len(KEYS)
    assert_tidy(root)


def test_twice_ctrl_c_ends_it_at_once(
    root: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    fill_root(root, KEYS)
    count = Transaction.count_again

    def interrupt(txn: Transaction) -> object:
        monkeypatch.setattr(Transaction, "count_again", count)
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)
        raise AssertionError("it goes on")

    monkeypatch.setattr(Transaction, "count_again", interrupt)
    assert main(["store", "gc", str(root), "--yes", *ANY_AGE]) == 128 + signal.SIGINT
    assert capsys.readouterr().out == ""
    assert run_store(capsys, "gc", root, "--older-than", "1d")[1]["dead_engines"] == 1
    assert_tidy(root)


def test_ctrl_c_at_the_question(
    root: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def press(_question: str) -> bool:
        raise KeyboardInterrupt

    name = fill_root(root, KEYS)
    monkeypatch.setattr(sys, "stdin", Keyboard())
    monkeypatch.setattr(commands, "is_confirmed", press)
    assert main(["store", "gc", str(root), *ANY_AGE]) == 128 + signal.SIGINT
    text = capsys.readouterr().out
    assert "ledger      counted again" in text
    assert "ended by Ctrl-C" in text
    assert kept(root) == {name}


def test_what_is_removed_in_part_is_not_called_removed(
    root: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    fill_root(root, KEYS)
    evict = Transaction.evict

    def evict_and_interrupt(txn: Transaction, *args: Any, **kwargs: Any) -> Any:
        gone = evict(txn, *args, **kwargs)
        os.kill(os.getpid(), signal.SIGINT)
        monkeypatch.setattr(Transaction, "evict", evict)
        return gone

    monkeypatch.setattr(Transaction, "evict", evict_and_interrupt)
    code, document = run_store(capsys, "gc", root, "--yes", *ANY_AGE)
    assert code == 128 + signal.SIGINT
    assert 0 < document["removed_blocks"] < len(KEYS)
    assert len(block_files(root)) == len(KEYS) - document["removed_blocks"]
    [orphan] = document["orphaned"]
    assert (orphan["chosen"], orphan["removed"]) == (True, False)
    assert_tidy(root)
    [orphan] = run_store(capsys, "gc", root, "--yes", *ANY_AGE)[1]["orphaned"]
    assert orphan["removed"]


# --- what is refused ---------------------------------------------------------------------------


def test_a_slab_needs_no_gc(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "kv.slab"
    fill(path, KEYS)
    assert main(["store", "gc", str(path), "--yes"]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert f"{path} is a slab, which needs no gc" in printed.err


def test_a_file_that_is_no_slab_either(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "notes.txt"
    path.write_text("mine")
    assert main(["store", "gc", str(path), "--yes"]) == 2
    assert "the `root_dir` of an fs tier" in capsys.readouterr().err
    assert path.read_text() == "mine"


def test_lengths_of_time() -> None:
    given = {"90m": 5400, "12h": 43_200, "7d": 604_800, " 2 W": 1_209_600, "0s": 0}
    assert {text: parse_duration(text) for text in given} == given
    for wrong in ("", "7", "d", "-1d", "1.5h", "7 days", "1y", "1e3s", "٣d", "9" * 10 + "d"):
        with pytest.raises(DurationError, match="90m, 12h or 7d"):
            parse_duration(wrong)
