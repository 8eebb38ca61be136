"""`kvtier store verify` on the root of an fs tier finds every kind of damage, and nothing else."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from kvtier.cli import main
from kvtier.testing import TierHarness
from kvtier.tiering.fs.scrub import FsScrubber
from kvtier.tiering.io.page import PAGE_BYTES
from tests.cli.store.outcomes import interrupt, start
from tests.cli.store.roots import file_of, fill_root
from tests.cli.store.slabs import NAMESPACE, flip, run_store
from tests.cli.store.test_refusals import as_nobody, let_others_in
from tests.tiering.fs.harness import ROW_BYTES, fs_harness

KEYS = TierHarness.keys(40)
VICTIM, OTHER = KEYS[11], KEYS[12]
FILE_BYTES = PAGE_BYTES + ROW_BYTES


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "kv"


def test_a_sound_root(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fill_root(root, KEYS)
    code, document = run_store(capsys, "verify", root)
    assert code == 0
    assert document["ok"]
    assert document["good"] == len(KEYS)
    assert document["bytes"] == len(KEYS) * FILE_BYTES
    assert document["damaged"] == document["gone"] == 0
    assert document["blocks"] == document["problems"] == []


def _swap(root: Path, name: str) -> None:
    one, other = (file_of(root, name, key) for key in (VICTIM, OTHER))
    first, second = one.read_bytes(), other.read_bytes()
    one.write_bytes(second)
    other.write_bytes(first)


def _transplant(root: Path, name: str) -> None:
    another = fill_root(root, [VICTIM], "another model")
    donor = file_of(root, another, VICTIM).read_bytes()
    file_of(root, name, VICTIM).write_bytes(donor)


def _append(path: Path) -> None:
    with path.open("ab") as file:
        file.write(b"x")


DAMAGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "payload": (lambda path: flip(path, PAGE_BYTES + 5000), "digest"),
    "last byte": (lambda path: flip(path, FILE_BYTES - 1, 0x80), "digest"),
    "seal": (lambda path: flip(path, 40), "header"),
    "padding": (lambda path: flip(path, 3000), "header"),
    "checksum of the page": (lambda path: flip(path, PAGE_BYTES - 1), "header"),
    "zeros": (lambda path: path.write_bytes(bytes(FILE_BYTES)), "not_sealed"),
    "a page less": (lambda path: os.truncate(path, FILE_BYTES - PAGE_BYTES), "length"),
    "a byte less": (lambda path: os.truncate(path, FILE_BYTES - 1), "length"),
    "a byte more": (_append, "length"),
    "a page more": (lambda path: os.truncate(path, FILE_BYTES + PAGE_BYTES), "length"),
    "header only": (lambda path: os.truncate(path, PAGE_BYTES), "length"),
    "less than a header": (lambda path: os.truncate(path, 100), "length"),
    "nothing": (lambda path: os.truncate(path, 0), "length"),
    "a hole of a terabyte": (lambda path: os.truncate(path, 1 << 40), "length"),
}


@pytest.mark.parametrize("case", DAMAGES)
def test_damage_is_found_and_named(
    case: str, root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    damage, reason = DAMAGES[case]
    name = fill_root(root, KEYS)
    file = file_of(root, name, VICTIM)
    damage(file)
    code, document = run_store(capsys, "verify", root)
    assert code == 1
    assert document["reasons"] == {reason: 1}
    assert document["good"] == len(KEYS) - 1
    where = str(file.relative_to(root))
    assert [(block["file"], block["block_hash"]) for block in document["blocks"]] == [
        (where, VICTIM[:-4].hex())
    ]
    assert main(["store", "verify", str(root)]) == 1
    text = capsys.readouterr().out
    assert f"DAMAGED  file {where}: {reason}, block {VICTIM[:-4].hex()}\n" in text


def test_blocks_in_the_place_of_others(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    name = fill_root(root, KEYS)
    _swap(root, name)
    assert run_store(capsys, "verify", root)[1]["reasons"] == {"key": 2}
    _swap(root, name)
    _transplant(root, name)
    code, document = run_store(capsys, "verify", root, "--namespace", name)
    assert (code, document["reasons"]) == (1, {"fingerprint": 1})


def test_a_file_that_cannot_be_read(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    name = fill_root(root, KEYS)
    file = file_of(root, name, VICTIM)
    reads = os.preadv

    def failing(fd: int, buffers: list[memoryview], offset: int) -> int:
        if os.path.samestat(os.fstat(fd), file.stat()):
            raise OSError(5, os.strerror(5))
        return reads(fd, buffers, offset)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "preadv", failing)
        code, document = run_store(capsys, "verify", root)
    assert (code, document["reasons"], document["good"]) == (1, {"unreadable": 1}, len(KEYS) - 1)


def test_what_we_may_not_read_is_not_damaged(
    root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    name = fill_root(root, KEYS)
    file = file_of(root, name, VICTIM)
    file.chmod(0)
    let_others_in(root)
    for folder in root.rglob("*"):  # the tier excludes other users
        folder.chmod(0o755 if folder.is_dir() else 0o644)
    file.chmod(0)
    with as_nobody():
        code, document = run_store(capsys, "verify", root)
        assert code == 2
        assert (document["ok"], document["no_permission"], document["damaged"]) == (False, 1, 0)
        assert document["good"] == len(KEYS) - 1
        uid = os.geteuid()
        assert main(["store", "verify", str(root)]) == 2
        text = capsys.readouterr().out
        assert f"no permission to read 1 blocks as uid {uid}: run this as root." in text
        assert f"chown -R {uid} {root}" in text
        assert "DAMAGED" not in text
    flip(file_of(root, name, OTHER), PAGE_BYTES)
    with as_nobody():
        assert run_store(capsys, "verify", root)[0] == 1


def test_an_engine_finds_what_verify_calls_good(
    root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    name = fill_root(root, KEYS)
    for key in KEYS[::7]:
        flip(file_of(root, name, key), PAGE_BYTES + 77)
    good = run_store(capsys, "verify", root)[1]["good"]
    with fs_harness(root, namespace=NAMESPACE) as harness:
        reports = harness.wait_for(*(harness.load([key]) for key in KEYS))
    assert sum(report.result.success for report in reports) == good


# --- beside the blocks -------------------------------------------------------------------------


def test_what_does_not_belong_there_is_said(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    name = fill_root(root, KEYS)
    file = file_of(root, name, VICTIM)
    (file.parent / "notes.txt").write_text("mine")
    (file.parent / ".nfs0123").write_text("removed, and still open")
    other = next(
        shard for shard in file.parent.parent.iterdir() if shard.is_dir() and shard != file.parent
    )
    file.rename(other / file.name)
    code, document = run_store(capsys, "verify", root)
    assert code == 1
    assert (document["good"], document["damaged"]) == (len(KEYS) - 1, 0)
    strays = {f"{file.parent.name}/notes.txt", f"{other.name}/{file.name}"}
    said = [problem for problem in document["problems"] if "does not belong there" in problem]
    assert {problem.split(" ")[0] for problem in said} == {f"blocks/{name}/{s}" for s in strays}
    # With --namespace, only blocks are checked.
    assert run_store(capsys, "verify", root, "--namespace", name)[0] == 0


def test_a_ledger_that_is_wrong(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    name = fill_root(root, KEYS)
    with fs_harness(root, namespace=NAMESPACE):
        file_of(root, name, VICTIM).unlink()
        assert run_store(capsys, "verify", root)[1]["problems"] == []  # it may change
    code, document = run_store(capsys, "verify", root)
    assert (code, document["good"]) == (1, len(KEYS) - 1)
    assert ["more than there are" in problem for problem in document["problems"]] == [True]
    os.truncate(root / "ledger", 0)
    [problem] = run_store(capsys, "verify", root)[1]["problems"]
    assert "the ledger cannot be read" in problem


# --- how it ends -------------------------------------------------------------------------------


def test_no_more_than_the_rate(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fill_root(root, KEYS)
    document = run_store(capsys, "verify", root, "--max-rate", "2MB/s")[1]
    assert document["seconds"] >= document["bytes"] / 2e6


def test_ctrl_c_ends_it_with_what_was_found(root: Path) -> None:
    name = fill_root(root, KEYS)
    for file in (root / "blocks" / name).glob("*/*"):
        flip(file, PAGE_BYTES)
    process = start("verify", str(root), "--max-rate", "6000", "--json", output=subprocess.PIPE)
    document = json.loads(interrupt(process, "that takes about"))
    assert (document["ok"], document["complete"], document["good"]) == (False, False, 0)


def test_what_was_found_before_ctrl_c_is_certain(
    root: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    fill_root(root, KEYS)
    for file in (root / "blocks").glob("*/*/*"):
        flip(file, PAGE_BYTES)
    check = FsScrubber._check
    interrupted = min(path.name for path in (root / "blocks").glob("*/*/*"))

    def stop(scrubber: FsScrubber, block: object, fingerprint: bytes) -> object:
        if getattr(block, "name", "") == interrupted:
            raise KeyboardInterrupt
        return check(scrubber, block, fingerprint)  # type: ignore[arg-type]

    monkeypatch.setattr(FsScrubber, "_check", stop)
    assert main(["store", "verify", str(root)]) == 128 + signal.SIGINT
    text = capsys.readouterr().out
    assert "ended by Ctrl-C after" in text
    assert "not checked a second time" not in text
