"""`kvtier store` on a slab that an engine in another process has open."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kvtier.cli import main
from kvtier.testing import TierHarness
from kvtier.tiering.disk import scrub as slab_scrub
from kvtier.tiering.disk.layout import Geometry
from kvtier.tiering.io.page import PAGE_BYTES
from tests.cli.store.engine_process import EngineProcess
from tests.cli.store.slabs import GEOMETRY, engine_on, flip, run_store, slot_of
from tests.test_architecture import SRC

KEYS = TierHarness.keys(20)
PATIENCE_S = 60.0


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "kv.slab"


@pytest.fixture
def engine(path: Path) -> Iterator[EngineProcess]:
    """An idle engine that has stored twenty blocks."""
    with EngineProcess(path) as engine:
        assert engine.ask("store 0 20") == 20
        yield engine


def wait_until(is_so: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not is_so():
        assert time.monotonic() < deadline, "it has not come to pass"
        time.sleep(0.02)


def test_the_holder_is_named(
    path: Path, engine: EngineProcess, capsys: pytest.CaptureFixture[str]
) -> None:
    wait_until(lambda: run_store(capsys, "stat", path)[1]["blocks"] == 20)
    figures = run_store(capsys, "stat", path)[1]
    assert figures["held"]
    assert figures["holder"]["pid"] == engine.process.pid
    assert figures["holder"]["host"] == os.uname().nodename
    listed = run_store(capsys, "ls", path)[1]["blocks"]
    assert {block["block_hash"] for block in listed} == {key[:-4].hex() for key in KEYS}
    assert main(["store", "stat", str(path)]) == 0
    assert f"in use      by {figures['holder']['engine_id']} " in capsys.readouterr().out
    engine.process.kill()
    engine.process.wait()
    figures = run_store(capsys, "stat", path)[1]
    assert not figures["held"]
    assert figures["holder"]["pid"] == engine.process.pid


def test_looking_does_not_keep_an_engine_out(
    path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with engine_on(path) as harness:
        harness.wait_for(harness.store(KEYS))
    for command in ("stat", "ls", "verify"):
        assert run_store(capsys, command, path)[0] == 0
    with engine_on(path) as harness:
        assert len(harness.hits(KEYS)) == 20


@pytest.mark.parametrize("payload_bytes", [8192, 256 << 10])
def test_what_is_being_overwritten_is_no_damage(
    payload_bytes: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Every slot is overwritten many times, faster than the index is written."""
    path = tmp_path / "kv.slab"
    num_looked_at = 0
    with EngineProcess(path, Geometry(payload_bytes, 70)) as engine:
        engine.tell("churn")
        for _ in range(12):
            code, document = run_store(capsys, "verify", path)
            assert (code, document["blocks"], document["problems"]) == (0, [], [])
            num_looked_at += document["good"] + document["gone"]
            code, listed = run_store(capsys, "ls", path)
            assert code == 0
            hashes = [block["block_hash"] for block in listed["blocks"]]
            assert len(set(hashes)) == len(hashes)
    assert num_looked_at > 0
    assert run_store(capsys, "verify", path)[1]["good"] == 70


def test_damage_under_a_running_engine_is_found(
    path: Path,
    engine: EngineProcess,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(slab_scrub, "_PATIENCE_S", 0.5)
    wait_until(lambda: run_store(capsys, "stat", path)[1]["blocks"] == 20)
    slot = slot_of(path, KEYS[3])
    flip(path, GEOMETRY.slot_offset(slot) + PAGE_BYTES + 9)
    code, document = run_store(capsys, "verify", path)
    assert code == 1
    assert [(block["slot"], block["reason"]) for block in document["blocks"]] == [(slot, "digest")]
    assert document["good"] == 19
    assert engine.ask("hits 0 20") == 20  # verify repairs nothing


# --- clear -------------------------------------------------------------------------------------


def test_the_engine_forgets_and_goes_on(
    path: Path, engine: EngineProcess, capsys: pytest.CaptureFixture[str]
) -> None:
    wait_until(lambda: run_store(capsys, "stat", path)[1]["blocks"] == 20)
    code, document = run_store(capsys, "clear", path, "--yes")
    assert code == 0
    assert document["by_engine"]
    assert document["cleared_blocks"] == 20
    assert engine.ask("hits 0 20") == 0
    assert run_store(capsys, "stat", path)[1]["blocks"] == 0
    assert engine.ask("store 5 4") == 4
    wait_until(lambda: run_store(capsys, "stat", path)[1]["blocks"] == 4)
    engine.process.kill()
    engine.process.wait()
    with engine_on(path) as harness:
        assert harness.hits(KEYS) == set(KEYS[5:9])


def test_without_an_engine_it_is_done_here(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with engine_on(path) as harness:
        harness.wait_for(harness.store(KEYS))
    allocated = path.stat().st_blocks
    code, document = run_store(capsys, "clear", path, "--yes")
    assert code == 0
    assert not document["by_engine"]
    assert document["cleared_blocks"] == 20
    figures = run_store(capsys, "stat", path)[1]
    assert (figures["blocks"], figures["dead_blocks"], figures["held"]) == (0, 20, False)
    assert run_store(capsys, "ls", path)[1]["total"] == 0
    assert path.stat().st_blocks == allocated
    # The slots still hold the blocks, but a scan of the slots finds none.
    for page_no in range(GEOMETRY.num_index_pages):
        flip(path, GEOMETRY.index_offset + page_no * PAGE_BYTES + 50)
    assert run_store(capsys, "verify", path)[1]["good"] == 0
    with engine_on(path) as harness:
        assert harness.hits(KEYS) == set()
        harness.wait_for(harness.store(KEYS[:2]))
    with engine_on(path) as harness:
        assert harness.hits(KEYS) == set(KEYS[:2])


def test_blocks_behind_a_damaged_index_are_cleared_and_counted(
    path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with engine_on(path) as harness:
        harness.wait_for(harness.store(KEYS))
    flip(path, GEOMETRY.index_offset + 50)
    assert main(["store", "clear", str(path), "--yes", "--json"]) == 0
    printed = capsys.readouterr()
    assert json.loads(printed.out)["cleared_blocks"] == 20
    assert printed.err.startswith("kvtier store: ")
    assert "pages of the index are damaged" in printed.err
    with engine_on(path) as harness:
        assert harness.hits(KEYS) == set()


def test_an_engine_that_hangs_is_waited_for_only_so_long(
    path: Path, engine: EngineProcess, capsys: pytest.CaptureFixture[str]
) -> None:
    wait_until(lambda: run_store(capsys, "stat", path)[1]["blocks"] == 20)
    engine.process.send_signal(signal.SIGSTOP)
    try:
        assert main(["store", "clear", str(path), "--yes", "--timeout", "0.3"]) == 1
        printed = capsys.readouterr()
        assert printed.out == ""
        assert printed.err.count("\n") == 1
        assert f"process {engine.process.pid}" in printed.err
        assert "0.3 s" in printed.err
        assert run_store(capsys, "stat", path)[1]["clear_pending"]
    finally:
        engine.process.send_signal(signal.SIGCONT)
    wait_until(lambda: not run_store(capsys, "stat", path)[1]["clear_pending"])
    assert engine.ask("hits 0 20") == 0


def start_clear(path: Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "kvtier", "store", "clear", str(path), "--yes", "--json"],
        env=os.environ | {"PYTHONPATH": str(SRC)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def result_of(process: subprocess.Popen[str]) -> dict[str, Any]:
    out, err = process.communicate(timeout=PATIENCE_S)
    assert (process.returncode, err) == (0, "")
    document: dict[str, Any] = json.loads(out)
    return document


def test_an_engine_that_dies_meanwhile_is_not_waited_for(
    path: Path, engine: EngineProcess, capsys: pytest.CaptureFixture[str]
) -> None:
    wait_until(lambda: run_store(capsys, "stat", path)[1]["blocks"] == 20)
    engine.process.send_signal(signal.SIGSTOP)
    process = start_clear(path)
    wait_until(lambda: bool(run_store(capsys, "stat", path)[1]["clear_pending"]))
    engine.process.kill()
    engine.process.wait()
    assert not result_of(process)["by_engine"]
    figures = run_store(capsys, "stat", path)[1]
    assert (figures["blocks"], figures["clear_pending"]) == (0, False)


def test_two_who_clear_at_once_are_both_answered(
    path: Path, engine: EngineProcess, capsys: pytest.CaptureFixture[str]
) -> None:
    engine.process.send_signal(signal.SIGSTOP)
    first = start_clear(path)
    wait_until(lambda: bool(run_store(capsys, "stat", path)[1]["clear_pending"]))
    second = start_clear(path)
    # Both have written a request, and the second has replaced the first.
    wait_until(lambda: _has_written(second, path))
    engine.process.send_signal(signal.SIGCONT)
    assert result_of(first)["by_engine"]
    assert result_of(second)["by_engine"]
    assert engine.ask("hits 0 20") == 0


def _has_written(process: subprocess.Popen[str], path: Path) -> bool:
    """True once a process has the slab open and has written something."""
    try:
        written = Path(f"/proc/{process.pid}/io").read_text()
    except OSError:
        return True
    return int(written.split("\nwrite_bytes: ")[1].split()[0]) >= PAGE_BYTES
