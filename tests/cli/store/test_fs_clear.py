"""`kvtier store clear` on the root of an fs tier."""

from __future__ import annotations

import fcntl
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from kvtier.cli import main
from kvtier.testing import TierHarness
from kvtier.tiering.fs import eviction
from kvtier.tiering.fs.access import NoFollowTree
from kvtier.tiering.fs.layout import count_blocks
from kvtier.tiering.fs.root import RootSession
from kvtier.tiering.fs.transaction import Evicted
from tests.cli.store.engine_process import FsEngineProcess
from tests.cli.store.outcomes import start
from tests.cli.store.roots import balance_of, file_of, fill_root
from tests.cli.store.slabs import NAMESPACE, fill, run_store
from tests.cli.store.test_refusals import Keyboard
from tests.test_architecture import SRC
from tests.tiering.fs.harness import block_files, du, fs_harness
from tests.tiering.patience import wait_until

KEYS = TierHarness.keys(40)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "kv"


def assert_tidy(root: Path) -> None:
    """The ledger says what is there, and nobody has a presence."""
    balance = balance_of(root)
    assert balance.total == du(root)
    assert (balance.blocks, balance.num_blocks) == count_blocks(NoFollowTree(root), root / "blocks")
    assert balance.accounts == {}
    assert os.listdir(root / "engines") == []


def test_every_namespace_is_emptied(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fill_root(root, KEYS, "one")
    fill_root(root, KEYS[:7], "two")
    before = du(root)
    code, document = run_store(capsys, "clear", root, "--yes")
    assert code == 0
    assert document["complete"]
    assert document["cleared_blocks"] == 47
    assert document["freed_bytes"] == before - du(root)
    assert document["left_blocks"] == 0
    assert os.listdir(root / "blocks") == []
    assert_tidy(root)
    assert run_store(capsys, "stat", root)[1]["remark"] is None


def test_one_namespace_is_emptied(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one = fill_root(root, KEYS, "one")
    two = fill_root(root, KEYS[:7], "two")
    assert main(["store", "clear", str(root), "--yes", "--namespace", one[:9]]) == 0
    assert capsys.readouterr().out.startswith(f"{root}: 40 blocks were removed, ")
    assert os.listdir(root / "blocks") == [two]
    assert_tidy(root)
    assert main(["store", "clear", str(root), "--yes", "--namespace", one]) == 2
    assert two in capsys.readouterr().err


def test_a_path_from_the_working_directory(
    root: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    fill_root(root, KEYS)
    monkeypatch.chdir(root.parent)
    code, document = run_store(capsys, "clear", Path("kv"), "--yes")
    assert (code, document["path"], document["cleared_blocks"]) == (0, "kv", len(KEYS))
    assert_tidy(root)


def test_engines_go_on(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with FsEngineProcess(root) as engine:
        assert engine.ask("store 0 20") == 20
        assert run_store(capsys, "clear", root, "--yes")[1]["cleared_blocks"] == 20
        assert block_files(root) == []
        assert engine.ask("store 100 20") == 20
        assert len(block_files(root)) == 20
    assert_tidy(root)


def test_clearing_while_blocks_come(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with FsEngineProcess(root, num_blocks=60) as engine:
        engine.tell("churn")
        wait_until(lambda: len(block_files(root)) > 30, "blocks")
        for _ in range(5):
            assert run_store(capsys, "clear", root, "--yes")[0] == 0
        wait_until(lambda: len(block_files(root)) > 30, "blocks again")
    assert run_store(capsys, "verify", root)[0] == 0
    assert_tidy(root)


def test_a_namespace_with_something_else_in_it_can_be_used_again(
    root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The namespace cannot be removed entirely; engines find the directories they need."""
    name = fill_root(root, KEYS)
    (root / "blocks" / name / "80" / "mine").mkdir()
    assert run_store(capsys, "clear", root, "--yes")[1]["cleared_blocks"] == len(KEYS)
    assert (root / "blocks" / name / "80" / "mine").is_dir()
    fill_root(root, KEYS)
    assert len(block_files(root)) == len(KEYS)


def test_what_one_engine_has_for_itself_is_left_alone(
    root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with fs_harness(root, namespace=NAMESPACE) as harness:
        harness.wait_for(harness.store(KEYS[:20]))
        harness.begin_epoch(b"a new epoch.....")
        harness.wait_for(harness.store(KEYS[:7]))
        assert main(["store", "clear", str(root), "--yes"]) == 0
        text = capsys.readouterr().out
        assert "20 blocks were removed" in text
        assert "7 blocks were left alone" in text
        assert harness.hits(KEYS[:7]) == set(KEYS[:7])
        assert run_store(capsys, "clear", root, "--yes")[1]["left_blocks"] == 7
    assert_tidy(root)


def test_what_a_dead_engine_has_left_goes_too(
    root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with FsEngineProcess(root) as engine:
        assert engine.ask("store 0 20") == 20
        assert engine.ask("reset") == 0
        assert engine.ask("store 0 9") == 9
        engine.kill()
    document = run_store(capsys, "clear", root, "--yes")[1]
    assert (document["cleared_blocks"], document["left_blocks"]) == (20, 0)
    assert_tidy(root)


# --- cut short ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("command", "counted"),
    [(["clear"], "cleared_blocks"), (["gc", "--older-than", "0s"], "removed_blocks")],
    ids=["clear", "gc"],
)
def test_ctrl_c_ends_it_between_two_steps(
    command: list[str],
    counted: str,
    root: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fill_root(root, KEYS)
    remove = eviction.remove_evicted

    def remove_and_interrupt(session: RootSession, gone: list[Evicted]) -> None:
        os.kill(os.getpid(), signal.SIGINT)
        remove(session, gone)

    monkeypatch.setattr(eviction, "remove_evicted", remove_and_interrupt)
    assert main(["store", *command, str(root), "--yes", "--json"]) == 128 + signal.SIGINT
    document = json.loads(capsys.readouterr().out)
    assert not document["complete"]
    assert 0 < document[counted] == len(KEYS) - len(block_files(root)) < len(KEYS)
    assert_tidy(root)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert main(["store", *command, str(root), "--yes"]) == 128 + signal.SIGINT
    assert "ended by Ctrl-C: " in capsys.readouterr().out


def test_ctrl_c_from_outside(root: Path) -> None:
    fill_root(root, TierHarness.keys(600))
    process = start("clear", str(root), "--yes", "--json", output=subprocess.PIPE)
    with process:
        try:
            wait_until(lambda: len(block_files(root)) < 500, "it has begun")
            process.send_signal(signal.SIGINT)
            out, err = process.communicate(timeout=60)
        finally:
            process.kill()
    assert err == ""
    assert process.returncode in (0, 128 + signal.SIGINT)  # it may have finished before
    assert json.loads(out)["cleared_blocks"] == 600 - len(block_files(root))
    assert_tidy(root)


KILLED = """
import os, signal, sys
from kvtier.cli import main

command, path, name, number = sys.argv[1:]
calls_left = int(number)
real = getattr(os, name)

def call(*args, **kwargs):
    global calls_left
    calls_left -= 1
    if not calls_left:
        os.kill(os.getpid(), signal.SIGKILL)
    return real(*args, **kwargs)

setattr(os, name, call)
main(["store", command, path, "--yes", *["--older-than=0s"] * (command == "gc")])
"""
MOMENTS = {
    "clear": [
        ("mkdir", 4),
        *(("pwrite", number) for number in (1, 2, 3, 5, 20)),
        *(("rename", number) for number in (1, 30)),
        *(("unlink", number) for number in (3, 20)),
        ("rmdir", 100),
    ],
    "gc": [("pwrite", 4), ("unlink", 4), ("rename", 2), ("rmdir", 1)],
}


@pytest.mark.parametrize("command", MOMENTS)
def test_whenever_it_is_killed_the_ledger_is_right_again(
    command: str, root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, number in MOMENTS[command]:
        fill_root(root, KEYS)
        killed = subprocess.run(
            [sys.executable, "-c", KILLED, command, str(root), name, str(number)],
            env=os.environ | {"PYTHONPATH": str(SRC)},
            check=False,
        )
        assert killed.returncode == -signal.SIGKILL, (name, number)
        left = block_files(root)
        assert run_store(capsys, "gc", root, "--older-than", "1d")[0] == 0
        assert block_files(root) == left
        assert_tidy(root)


def test_a_ledger_that_someone_has_locked(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fill_root(root, KEYS)
    with open(root / "ledger", "rb") as ledger:
        fcntl.flock(ledger, fcntl.LOCK_EX)
        assert main(["store", "clear", str(root), "--yes", "--timeout", "0.2"]) == 1
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.count("\n") == 1
    assert "holds the lock of its ledger" in printed.err
    assert len(block_files(root)) == len(KEYS)


# --- are you sure? -----------------------------------------------------------------------------


@pytest.mark.parametrize(("answer", "code"), [("y\n", 0), ("n\n", 1), ("", 1)])
def test_the_user_is_asked(
    answer: str,
    code: int,
    root: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    one = fill_root(root, KEYS, "one")
    fill_root(root, KEYS[:7], "two")
    monkeypatch.setattr(sys, "stdin", Keyboard(answer))
    assert main(["store", "clear", str(root), "--namespace", one]) == code
    question = f"{root} holds 40 blocks of namespace {one}. Clear all of them? [y/N]\n"
    assert question in capsys.readouterr().err
    assert len(block_files(root)) == (47 if code else 7)


def test_the_question_says_who_is_there(
    root: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with FsEngineProcess(root) as engine:
        assert engine.ask("store 0 8") == 8
        monkeypatch.setattr(sys, "stdin", Keyboard("n\n"))
        assert main(["store", "clear", str(root)]) == 1
    assert f"{root} holds 8 blocks, and 1 engine uses it. Clear" in capsys.readouterr().err


def test_a_slab_is_cleared_as_a_whole(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "kv.slab"
    name = fill(path, KEYS).hex()
    assert main(["store", "clear", str(path), "--yes", "--namespace", name]) == 2
    assert "is cleared as a whole: leave out --namespace" in capsys.readouterr().err
    assert run_store(capsys, "stat", path)[1]["blocks"] == len(KEYS)


def test_a_file_is_no_longer_there(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    name = fill_root(root, KEYS)
    file_of(root, name, KEYS[0]).unlink()
    assert run_store(capsys, "clear", root, "--yes")[1]["cleared_blocks"] == len(KEYS) - 1
    assert run_store(capsys, "gc", root)[0] == 0
    assert_tidy(root)
