"""A root of another user, or one that others may write to, is refused; root acts as its owner."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from kvtier.tiering.fs.access import NoFollowTree, RootRefused
from kvtier.tiering.fs.maintenance import opened_root
from kvtier.tiering.fs.presence import EngineInfo, Presence
from kvtier.tiering.inspection import InspectionRefused, InspectionTimedOut
from tests.test_architecture import SRC
from tests.tiering.fs.accounts import load_all, store_all, wait_until_stored
from tests.tiering.fs.hardship import directory_for_everybody, somebody_else
from tests.tiering.fs.harness import fs_harness
from tests.tiering.fs.pauses import shorten_pauses
from tests.tiering.patience import wait_until

NOBODY = 65534


@pytest.fixture(autouse=True)
def _short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    shorten_pauses(monkeypatch)


@pytest.fixture
def theirs() -> Iterator[Path]:
    """A root with blocks that belongs to another user."""
    with directory_for_everybody() as directory:
        root = directory / "root"
        with fs_harness(root) as harness:
            store_all(harness, harness.keys(8))
        for path in (root, *root.rglob("*")):
            os.chown(path, NOBODY, NOBODY)
        yield root


def owners_in(root: Path) -> set[int]:
    return {path.lstat().st_uid for path in (root, *root.rglob("*"))}


def refusal_of(root: Path) -> str:
    with pytest.raises(RootRefused) as refused:
        fs_harness(root)
    return str(refused.value)


@pytest.mark.parametrize("part", ["", "blocks", "engines"])
@pytest.mark.parametrize("mode", [0o770, 0o702, 0o1777, 0o2775])
def test_what_others_may_write_to_is_refused(tmp_path: Path, part: str, mode: int) -> None:
    root = tmp_path / "root"
    with fs_harness(root) as harness:
        store_all(harness, harness.keys(4))
    (root / part).chmod(mode)
    refusal = refusal_of(root)
    assert f"{root / part} can be written by other users" in refusal
    assert f"(mode {mode:04o})" in refusal
    assert "chmod 700" in refusal
    (root / part).chmod(0o700)
    with fs_harness(root) as harness:
        load_all(harness, harness.keys(4))


def test_an_engine_of_another_user_is_refused(theirs: Path) -> None:
    """Even if it is run by root: other engines could not read what it stores."""
    before = sorted(theirs.rglob("*"))
    refusal = refusal_of(theirs)
    assert f"{theirs} belongs to uid {NOBODY}, and this process runs as uid 0" in refusal
    assert f"chown -R 0 {theirs}" in refusal
    assert sorted(theirs.rglob("*")) == before


def test_a_part_of_another_user_is_refused(tmp_path: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("giving things away needs root")
    with fs_harness(tmp_path / "root"):
        pass
    os.chown(tmp_path / "root" / "blocks", NOBODY, NOBODY)
    refusal = refusal_of(tmp_path / "root")
    assert f"{tmp_path / 'root' / 'blocks'} belongs to uid {NOBODY}" in refusal
    assert f"chown -R 0 {tmp_path / 'root'}" in refusal


def test_a_server_that_maps_users_is_no_reason_to_refuse(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As with root_squash or all_squash: neither existing nor new files belong to our uid. No such
    server is available here, so the test changes our own uid."""
    root = tmp_path / "root"
    with fs_harness(root) as harness:
        store_all(harness, harness.keys(4))
    monkeypatch.setattr(os, "geteuid", lambda: 4321)
    with fs_harness(root) as harness:
        load_all(harness, harness.keys(4))
    assert sorted(os.listdir(root)) == ["blocks", "engines", "ledger"]


def test_a_root_of_someone_else_in_the_place_of_ours_is_left_alone() -> None:
    with directory_for_everybody() as directory:
        root, aside, theirs = directory / "root", directory / "aside", directory / "theirs"
        with fs_harness(root) as harness:
            store_all(harness, harness.keys(4))
            root.rename(aside)
            shutil.copytree(aside, theirs)
            for path in (theirs, *theirs.rglob("*")):
                os.chown(path, NOBODY, NOBODY)
            theirs.rename(root)  # at once: the engine must not find it while it still is ours
            before = sorted(root.rglob("*"))
            starts = iter(range(100, 100_000, 4))
            wait_until(
                lambda: not harness.wait_for(harness.store(harness.keys(4, next(starts))))[0].moved,
                "nothing is stored",
            )
            assert sorted(root.rglob("*")) == before
            shutil.rmtree(root)
            aside.rename(root)
            wait_until_stored(harness, harness.keys(4, start=50))


# --- root runs a command -----------------------------------------------------------------------


@pytest.mark.parametrize(
    "command", [["gc", "--yes", "--older-than", "1d"], ["clear", "--yes"], ["init"]]
)
def test_what_root_makes_in_a_root_belongs_to_its_owner(theirs: Path, command: list[str]) -> None:
    for name in ("engines", "blocks"):
        shutil.rmtree(theirs / name)
    (theirs / "blocks").mkdir(mode=0o700)
    (theirs / "engines").mkdir(mode=0o700)
    os.chown(theirs / "blocks", NOBODY, NOBODY)
    os.chown(theirs / "engines", NOBODY, NOBODY)
    (theirs / "ledger").unlink()
    name, *options = command
    # In another process: that user may not be able to read modules that are not imported yet.
    ran = subprocess.run(
        [sys.executable, "-m", "kvtier", "store", name, str(theirs), *options],
        env=os.environ | {"PYTHONPATH": str(SRC)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    assert owners_in(theirs) == {NOBODY}
    with somebody_else(), fs_harness(theirs) as harness:
        store_all(harness, harness.keys(4))


@contextmanager
def swapped_for_a_link(blocks: Path, victim: Path) -> Iterator[None]:
    """A process of the owner swaps a directory for a link to another, as fast as it can."""
    child = os.fork()
    if not child:
        try:
            os.setgroups([])
            os.setresgid(NOBODY, NOBODY, NOBODY)
            os.setresuid(NOBODY, NOBODY, NOBODY)
            number = 0
            while os.getppid() != 1:
                with suppress(OSError):
                    os.rename(blocks, f"{blocks.parent}/.x{number}")
                    number += 1
                    os.symlink(victim, blocks)
        finally:
            os._exit(0)
    try:
        yield
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def test_a_race_for_what_root_makes_is_not_won(theirs: Path) -> None:
    victim = theirs.parent / "victim"
    victim.mkdir(mode=0o700)
    (victim / "secret").touch()
    shutil.rmtree(theirs / "blocks")
    with swapped_for_a_link(theirs / "blocks", victim):
        for _ in range(150):
            with suppress(InspectionRefused, InspectionTimedOut), opened_root(theirs, 0.2):
                pass  # the swap won the race this time
            status = victim.stat()
            assert (status.st_uid, status.st_gid) == (0, 0)
            with suppress(OSError):
                (theirs / "blocks").unlink()
    assert os.listdir(victim) == ["secret"]


def test_a_dead_engine_behind_a_foreign_name_is_reclaimed(tmp_path: Path) -> None:
    root = tmp_path / "root"
    with fs_harness(root):
        pass
    engines = root / "engines"
    dead = Presence(NoFollowTree(root), engines, EngineInfo.here("dead", ""))
    Path(dead.incoming()).write_bytes(b"half a block")
    dead.abandon()
    os.mkfifo(engines / ("00" * 16 + ".alive"))
    (engines / ("01" * 16 + ".alive")).mkdir()
    (engines / ("02" * 16 + ".alive")).symlink_to("/etc/passwd")
    (engines / ("03" * 16)).write_bytes(b"x")
    (engines / ("04" * 16)).symlink_to("/")
    (engines / "notes").touch()
    foreign = set(os.listdir(engines)) - {dead.engine.hex(), f"{dead.engine.hex()}.alive"}
    with fs_harness(root) as harness:
        wait_until(lambda: not dead.directory.exists(), "it is reclaimed")
        store_all(harness, harness.keys(4))
    assert set(os.listdir(engines)) == foreign
