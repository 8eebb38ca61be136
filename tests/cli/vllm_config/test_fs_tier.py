"""Checks of an fs tier's directory, which change nothing there."""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Callable
from pathlib import Path

import pytest

from kvtier.testing import TierHarness
from kvtier.tiering.fs.ledger import _COPY_BYTES
from tests.cli.store.roots import balance_of, fill_root
from tests.cli.store.slabs import overwrite
from tests.cli.vllm_config.running import answer_of, finding
from tests.cli.vllm_config.test_disk_tier import state_of
from tests.tiering.disk.small_disk import loop_disk, small_tmpfs
from tests.tiering.fs.harness import bytes_for, fs_harness
from tests.tiering.fs.mounts import bind_mounted_by_fuse

AT = "secondary_tiers[0]"
MIB = 2**20
KEYS = TierHarness.keys(5)


def test_a_directory_that_is_not_there_yet(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with loop_disk(tmp_path, 32 * MIB) as disk:
        before = state_of(disk.root)
        code, document = answer_of(capsys, "--fs", f"{disk.root}/new:8MiB")
        assert state_of(disk.root) == before
        assert code == 0
        found = finding(document, f"{AT}.root_dir")
        assert (found["status"], found["found"]) == (
            "ok",
            f"the engine makes {disk.root}/new when it starts",
        )
        assert finding(document, f"{AT}.file_system")["found"] == (
            f"ext4, mounted at {disk.root}: engines on this host share it"
        )
        assert finding(document, f"{AT}.room")["status"] == "ok"


def test_a_directory_with_blocks_and_an_engine(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    root = tmp_path / "kv"
    with fs_harness(root, max_bytes=bytes_for(100)) as harness:
        harness.wait_for(harness.store(KEYS))
        code, document = answer_of(capsys, "--fs", f"{root}:{bytes_for(100)}")
        assert code == 0
        assert finding(document, f"{AT}.root_dir")["found"] == (
            f"{root} is there, and 1 engines use it now"
        )
    before = state_of(root)
    code, document = answer_of(capsys, "--fs", f"{root}:{bytes_for(100)}")
    assert "and 0 engines use it now" in finding(document, f"{AT}.root_dir")["found"]
    assert state_of(root) == before


def _with_other_things(root: Path) -> None:
    root.mkdir()
    (root / "photos").mkdir()


def _newer_ledger(root: Path) -> None:
    fill_root(root, [])
    for offset in (0, _COPY_BYTES):
        overwrite(root / "ledger", offset + 8, struct.pack("<H", 2))


NO_ROOTS: dict[str, tuple[Callable[[Path], object], str, str]] = {
    "no directory above": (lambda root: root.parent.rmdir(), "a new name in one", "Make the dir"),
    "a file": (lambda root: root.touch(), "Not a directory", "the path of a directory"),
    "of others": (_with_other_things, "holds other things (photos)", "a directory of its own"),
    "another version": (_newer_ledger, "version 2; this kvtier reads 1", "Use that version"),
    "a link to itself": (lambda root: root.symlink_to(root), "loop", "another path"),
}


@pytest.mark.parametrize("case", NO_ROOTS)
def test_what_cannot_be_a_root(
    case: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make, words, remedy = NO_ROOTS[case]
    root = tmp_path / "above" / "kv"
    root.parent.mkdir()
    make(root)
    code, document = answer_of(capsys, "--fs", f"{root}:8MiB")
    assert (code, document["ok"]) == (1, False)
    found = finding(document, f"{AT}.root_dir")
    assert found["status"] == "problem"
    assert words in found["found"]
    assert remedy in found["remedy"]


def test_a_file_system_that_is_mounted_for_reading(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with loop_disk(tmp_path, 32 * MIB, read_only=True) as disk:
        for root in (disk.root, disk.root / "new"):
            code, document = answer_of(capsys, "--fs", f"{root}:8MiB")
            assert code == 1
            found = finding(document, f"{AT}.root_dir")
            assert found["found"] == f"uid {os.geteuid()} cannot write to {disk.root}"


# --- where it is -------------------------------------------------------------------------------


def test_a_share_that_is_not_mounted(capsys: pytest.CaptureFixture[str]) -> None:
    if os.path.ismount("/srv"):
        pytest.skip("/srv is a file system of its own here")
    _, document = answer_of(capsys, "--fs", "/srv/kv:8MiB")
    found = finding(document, f"{AT}.file_system")
    assert found["status"] == "warning"
    assert "mount the file system first" in found["remedy"]


def test_memory_goes_with_the_machine(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with small_tmpfs(tmp_path, 16 * MIB) as root:
        code, document = answer_of(capsys, "--fs", f"{root}/kv:8MiB")
        assert code == 0
        found = finding(document, f"{AT}.file_system")
        assert (found["status"], "that is memory" in found["found"]) == ("warning", True)


def test_a_file_system_through_a_process(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with bind_mounted_by_fuse(tmp_path) as root:
        _, document = answer_of(capsys, "--fs", f"{root}/kv:8MiB", "--disk", f"{root}/kv.slab:8MiB")
        assert finding(document, "secondary_tiers[0].file_system")["status"] == "ok"
        disk = finding(document, "secondary_tiers[1].file_system")
        assert (disk["status"], "Use an fs tier" in disk["remedy"]) == (
            "warning",
            True,
        )


# --- how much room -----------------------------------------------------------------------------


def test_more_than_the_file_system_has(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with loop_disk(tmp_path, 32 * MIB) as disk:
        code, document = answer_of(capsys, "--fs", f"{disk.root}/kv:1GiB")
        assert code == 0
        found = finding(document, f"{AT}.room")
        assert found["status"] == "warning"
        assert "it fills up before the tier reaches max_bytes" in found["found"]


def test_what_is_there_need_not_be_free(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with loop_disk(tmp_path, 32 * MIB) as disk:
        root = disk.root / "kv"
        fill_root(root, KEYS)
        disk.fill()
        total = balance_of(root).total
        code, document = answer_of(capsys, "--fs", f"{root}:{max(total, 3 * MIB)}")
        expected = "ok" if total >= 3 * MIB else "warning"
        assert (code, finding(document, f"{AT}.room")["status"]) == (0, expected)


def test_more_is_to_stay_free_than_there_is(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with loop_disk(tmp_path, 32 * MIB) as disk:
        tier = {"type": "fs", "root_dir": f"{disk.root}/kv", "max_bytes": "8MiB"}
        code, document = answer_of(capsys, "--tier", json.dumps(tier | {"min_free_bytes": "1GiB"}))
        assert code == 1
        found = finding(document, f"{AT}.room")
        assert (found["status"], "nothing can be stored" in found["found"]) == ("problem", True)
        code, document = answer_of(capsys, "--tier", json.dumps(tier | {"min_free_bytes": "8MiB"}))
        assert (code, finding(document, f"{AT}.room")["status"]) == (0, "ok")
